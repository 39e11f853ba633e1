"""The backends on which tests of the seam run: one on a GPU where there is a GPU (-m gpu)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.conftest import needs_native

from aquiline.backends.base import Pair
from aquiline.backends.cpu.native_pair import CpuPair
from aquiline.backends.torch.torch_pair import TorchPair

NATIVE = pytest.param("native", marks=needs_native)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
BACKENDS = [NATIVE, "torch", pytest.param("gpu", marks=[pytest.mark.gpu, needs_cuda])]


def pair_on(name: str, *weights: Any, dtype: str = "float32") -> Pair:
    """A pair of weights on a backend."""
    if name != "gpu":
        return CpuPair(*weights, dtype) if name == "native" else TorchPair(*weights, dtype)
    from aquiline.backends.gpu.gpu_pair import GpuPair

    return GpuPair(*weights, dtype)
