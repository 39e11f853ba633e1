"""Products with weights that stay packed in MXFP4: blocks of 32 inputs, half a byte each, and a scale of a byte."""

from __future__ import annotations

import triton
import triton.language as tl

from aquiline.ops.triton.products import multiply_add

BLOCK_INPUTS, BLOCK_BYTES = tl.constexpr(32), tl.constexpr(16)  # of a block of MXFP4, without its scale


@triton.jit
def unpacked(nibble, scale):
    """Values float32 of codes of four bits, int32, in blocks with scales of eight bits, int32."""
    code = nibble & 7
    twice = tl.where(code < 5, code, tl.where(code < 7, 2 * code - 4, 12))
    twice = tl.where(nibble >= 8, -twice, twice)
    half = tl.where(scale >= 2, (scale - 1) << 23, 0x200000 << tl.minimum(scale, 1))
    return twice.to(tl.float32) * half.to(tl.float32, bitcast=True)


@triton.jit
def packed_product(
    total, x_rows, is_pair, nibbles, scales, rows, is_row, first, K: tl.constexpr, BYTES: tl.constexpr,
    OPERAND: tl.constexpr,
):  # fmt: skip
    """total plus BYTES bytes, from byte `first` of a row on, of rows of a packed weight times x: the low nibbles'
    inputs, then the high ones'."""
    byte = first + tl.arange(0, BYTES)
    is_byte = byte < K // 2
    inner = byte // BLOCK_BYTES * BLOCK_INPUTS + byte % BLOCK_BYTES
    is_weight = is_row[:, None] & is_byte[None, :]
    own = tl.load(nibbles + rows[:, None] * (K // 2) + byte[None, :], mask=is_weight, other=0).to(tl.int32)
    scale = tl.load(
        scales + rows[:, None] * (K // BLOCK_INPUTS) + (byte // BLOCK_BYTES)[None, :], mask=is_weight, other=0
    ).to(tl.int32)
    is_input = is_pair[:, None] & is_byte[None, :]
    x_low = tl.load(x_rows + inner[None, :], mask=is_input, other=0.0)
    x_high = tl.load(x_rows + inner[None, :] + BLOCK_BYTES, mask=is_input, other=0.0)
    total = multiply_add(x_low, tl.trans(unpacked(own & 15, scale)), total, OPERAND)
    return multiply_add(x_high, tl.trans(unpacked(own >> 4, scale)), total, OPERAND)
