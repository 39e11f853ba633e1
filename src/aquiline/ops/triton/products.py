"""The matrix product that all kernels share, with the same bits for a row wherever in its tile the row stands."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from aquiline.ops.triton.launch import IS_INTERPRETED

TILE_ROWS = 16
"""Rows of a product's tile, whatever the number of rows: one instruction shape, one order of sums."""


@triton.jit
def multiply_add(a, b, total, OPERAND: tl.constexpr):
    """total [M, N] float32 plus a [M, K] times b [K, N].

    OPERAND None: element by element, as the interpreter has to. Its `tl.dot` asks a BLAS, where a row's bits depend on
    the row's place in the tile, and takes bfloat16 for whole numbers."""
    if OPERAND is None:
        products = a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :]
        return total + tl.sum(products, 1)
    return tl.dot(a.to(OPERAND), b.to(OPERAND), total, input_precision="ieee")


def operand_dtype(*dtypes: torch.dtype) -> Any:
    """The OPERAND of values stored in these dtypes: the one that holds both, None in the interpreter."""
    if IS_INTERPRETED:
        return None
    widest = dtypes[0]
    for dtype in dtypes[1:]:
        widest = torch.promote_types(widest, dtype)
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[widest]
