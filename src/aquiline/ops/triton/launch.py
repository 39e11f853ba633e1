"""Launches as values, and the checks that every wrapper of a kernel makes.

A step is a list of launches over buffers whose addresses do not change: built once, run as often as there are steps,
one by one, captured in a CUDA graph, or by Triton's interpreter on a CPU (TRITON_INTERPRET=1). So a wrapper checks its
buffers and returns a `Launch`; it launches and allocates nothing, and reads nothing of what the buffers hold.

Kernels add up in float32 and in an order that follows from the position in the context and the model's shape alone.
Nothing is fused into a multiply-add behind their back: a sum's bits depend on neither the batch nor Triton's version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""What weights, activations and keys may be stored in."""
ALIGNMENT = 16
"""Elements by which the strides of float buffers are divisible, and bytes by which their addresses are: without it
Triton's loads are not asynchronous."""
IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter; decided when they are defined."""


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel over buffers whose addresses do not change.

    name: of its range in a trace. arguments: in the kernel's order, without its constants. bytes and flops: the least
    that it moves and computes with all rows alive, the context that its buffers hold included."""

    name: str
    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Tensor | int | float | None, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 1
    bytes: int = 0
    flops: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """What the compiler is told beside the kernel's own constants."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": False}

    def run(self) -> None:
        """Issue the kernel on the current stream."""
        self.kernel[self.grid](*self.arguments, **self.constants, **self.options)


def check_floats(name: str, tensor: Tensor, *shape: int, like: Tensor | None = None) -> None:
    """Raise ValueError, naming the tensor, its value and the fix, unless it holds floats of this shape on the device of
    `like`, the last dimension contiguous, the other strides and the address divisible by ALIGNMENT."""
    _check(name, tensor, shape, FLOATS, like)
    strides = [s for s, size in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if size > 1]
    if any(stride % ALIGNMENT for stride in strides) or tensor.data_ptr() % ALIGNMENT:
        raise ValueError(
            f"{name} has the strides {tensor.stride()} and begins at byte {tensor.data_ptr() % ALIGNMENT} of "
            f"{ALIGNMENT}; make the strides before the last multiples of {ALIGNMENT} and begin at a multiple"
        )


def check_integers(name: str, tensor: Tensor, *shape: int, like: Tensor | None = None) -> None:
    """The same for int32, the last dimension contiguous."""
    _check(name, tensor, shape, (torch.int32,), like)


def check_float32(name: str, tensor: Tensor, *shape: int, like: Tensor | None = None) -> None:
    """The same for float32 of which all is contiguous: scratch and tables."""
    _check(name, tensor, shape, (torch.float32,), like)
    check_contiguous(name, tensor)


def check_contiguous(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless the whole tensor is contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has the strides {tensor.stride()}; make it contiguous")


def _check(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], like: Tensor | None
) -> None:  # fmt: skip
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has the shape {tuple(tensor.shape)}; make it {shape}")
    if tensor.dtype not in dtypes:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} is {tensor.dtype}; convert it to {known}")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}; move it to {like.device}")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has the strides {tensor.stride()}; make its last dimension contiguous")


def size_of(*tensors: Tensor | None) -> int:
    """Bytes of tensors, each once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
