"""The embedding of the rows' tokens."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from aquiline.ops.triton.launch import Launch, check_floats, check_integers

COLUMNS = 1024
"""Values that one program copies at most."""


@triton.jit
def embedding_kernel(tokens, slots, weight, out, scale, weight_stride, out_stride, H, BLOCK: tl.constexpr):
    """One block of one row. Grid: rows, blocks of H."""
    row = tl.program_id(0)
    if tl.load(slots + row) < 0:
        return
    token = tl.load(tokens + row).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(weight + token * weight_stride + columns, mask=columns < H, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * out_stride + columns, values * scale, mask=columns < H)


def embedding(
    name: str, tokens: Tensor, weight: Tensor, out: Tensor, slots: Tensor, *, scale: float = 1.0
) -> Launch:  # fmt: skip
    """out [M, H] = rows tokens [M] int32 of weight [V, H] times scale, for rows whose slots [M] are not negative.

    Tokens of live rows are within [0, V). Raises ValueError for buffers that do not fit."""
    M, (V, H) = len(tokens), weight.shape
    check_floats(f"{name}'s weight", weight, V, H)
    check_floats(f"{name}'s out", out, M, H, like=weight)
    check_integers(f"{name}'s tokens", tokens, M, like=weight)
    check_integers(f"{name}'s slots", slots, M, like=weight)
    block = min(COLUMNS, triton.next_power_of_2(H))
    return Launch(
        name, embedding_kernel, (M, triton.cdiv(H, block)),
        (tokens, slots, weight, out, float(scale), weight.stride(0), out.stride(0), H), {"BLOCK": block},
        bytes=M * H * (weight.element_size() + out.element_size()), flops=M * H,
    )  # fmt: skip
