"""Where kernels run, and what all tests of kernels do with launches."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="not installed: triton")

from aquiline.ops.triton.launch import IS_INTERPRETED, Launch

DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")


def run(*launches: Launch | Iterable[Launch]) -> None:
    """Run launches, and tuples of launches, in order."""
    for launch in launches:
        if isinstance(launch, Launch):
            launch.run()
        else:
            run(*launch)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal values, the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def poison(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a kernel has to overwrite, or must not read or touch."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a kernel writes, in part or whole."""
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def int32(values: object) -> Tensor:
    """Integers as kernels take them."""
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def error(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative to the largest value wanted; infinite where a number is not finite."""
    found, wanted = found.double(), wanted.double()
    if not torch.isfinite(found).all():
        return float("inf")
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))
