"""A linear of few rows, exact: 16-row tiles, one block shape, and a split of the sum that the weight's shape decides.

Every row count runs the same instructions in the same order; more rows are more tiles, which find the weight in the
cache. Each program adds up its span of the inputs block by block; where there are several spans, `fold_kernel` adds
them up in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from aquiline.ops.triton.launch import Launch, check_float32, check_floats, check_integers, size_of
from aquiline.ops.triton.products import TILE_ROWS, multiply_add, operand_dtype

FOLD_COLUMNS = 1024
"""Outputs that one program folds."""


@dataclass(frozen=True)
class LinearTiles:
    """How a linear is cut: block_n outputs by block_k inputs at a time, the inputs in num_splits spans."""

    block_n: int = 32
    block_k: int = 128
    num_splits: int = 1
    num_warps: int = 4
    num_stages: int = 4

    @classmethod
    def of(cls, N: int, K: int) -> LinearTiles:
        """The tiles of a weight [N, K]: enough programs to fill a card where N alone does not, spans of at least 512
        inputs. Not measured."""
        own, splits = cls(block_k=128 if K % 128 == 0 else 64), 1
        while triton.cdiv(N, own.block_n) * splits < 128 and K // (2 * splits) >= 512:
            splits *= 2
        return cls(block_k=own.block_k, num_splits=splits)

    def span(self, K: int) -> int:
        """Inputs that one program adds up, whole blocks."""
        return int(triton.cdiv(triton.cdiv(K, self.num_splits), self.block_k) * self.block_k)


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x, weight, bias, slots, out, num_rows, N, x_stride, weight_stride, out_stride, split_stride,
    K: tl.constexpr, SPAN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TILE: tl.constexpr,
    OPERAND: tl.constexpr,
):  # fmt: skip
    """A tile of rows times a block of outputs over one span of the inputs. Grid: row tiles, output blocks, spans."""
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_live = tl.load(slots + rows, mask=rows < num_rows, other=-1) >= 0
    if tl.max(is_live.to(tl.int32), 0) == 0:
        return
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(2) * SPAN
    inner = tl.arange(0, BLOCK_K)
    x_rows = x + rows[:, None].to(tl.int64) * x_stride
    weight_rows = weight + columns[:, None].to(tl.int64) * weight_stride
    total = tl.zeros((TILE, BLOCK_N), tl.float32)
    for start in range(0, SPAN, BLOCK_K):
        k = first + start + inner[None, :]
        values = tl.load(x_rows + k, mask=is_live[:, None] & (k < K), other=0.0)
        weights = tl.load(weight_rows + k, mask=(columns[:, None] < N) & (k < K), other=0.0)
        total = multiply_add(values, tl.trans(weights), total, OPERAND)
    if bias is not None:
        total += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    target = out + tl.program_id(2).to(tl.int64) * split_stride + rows[:, None].to(tl.int64) * out_stride
    tl.store(target + columns[None, :], total, mask=is_live[:, None] & (columns[None, :] < N))


@triton.jit
def fold_kernel(
    partials, bias, slots, out, N, out_stride, split_stride, NUM_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Add the spans of one row up, in order. Grid: rows, blocks of outputs."""
    row = tl.program_id(0)
    if tl.load(slots + row) < 0:
        return
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    own = partials + row.to(tl.int64) * N + columns
    total = tl.zeros((BLOCK_N,), tl.float32)
    for split in range(NUM_SPLITS):
        total += tl.load(own + split * split_stride, mask=columns < N, other=0.0)
    if bias is not None:
        total += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * out_stride + columns, total, mask=columns < N)


def partials_shape(num_rows: int, N: int, K: int, tiles: LinearTiles | None = None) -> tuple[int, int, int]:
    """The shape of the float32 scratch that `linear` needs; its first number is 0 where it needs none."""
    splits = (tiles or LinearTiles.of(N, K)).num_splits
    return (splits if splits > 1 else 0), num_rows, N


def linear(
    name: str,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    slots: Tensor,
    *,
    bias: Tensor | None = None,
    partials: Tensor | None = None,
    tiles: LinearTiles | None = None,
) -> tuple[Launch, ...]:
    """out [M, N] = x [M, K] times weight [N, K], plus bias [N], for rows whose slots [M] int32 are not negative.

    One launch, or two where the sum is split: then partials is float32 scratch of `partials_shape`, free again
    afterwards. x and out may be slices of wider buffers. Dead rows are neither read nor written. tiles: by default
    those of the weight's shape; other tiles may give other bits. Raises ValueError for buffers that do not fit."""
    (M, K), N = x.shape, weight.shape[0]
    tiles = tiles or LinearTiles.of(N, K)
    check_floats(f"{name}'s x", x, M, K)
    check_floats(f"{name}'s weight", weight, N, K, like=x)
    check_floats(f"{name}'s out", out, M, N, like=x)
    check_integers(f"{name}'s slots", slots, M, like=x)
    if bias is not None:
        check_floats(f"{name}'s bias", bias, N, like=x)
    is_split = tiles.num_splits > 1
    if is_split and partials is None:
        raise ValueError(f"{name} adds {K} inputs up in {tiles.num_splits} spans and has no partials; give scratch of "
                         f"the shape {partials_shape(M, N, K, tiles)}")  # fmt: skip
    target = out
    if is_split and partials is not None:
        check_float32(f"{name}'s partials", partials, *partials_shape(M, N, K, tiles), like=x)
        target = partials[0]
    first = Launch(
        name, linear_kernel,
        (triton.cdiv(M, TILE_ROWS), triton.cdiv(N, tiles.block_n), tiles.num_splits),
        (x, weight, None if is_split else bias, slots, target, M, N, x.stride(0), weight.stride(0), target.stride(0),
         M * N),
        {"K": K, "SPAN": tiles.span(K), "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k, "TILE": TILE_ROWS,
         "OPERAND": operand_dtype(x.dtype, weight.dtype)},
        tiles.num_warps, tiles.num_stages,
        bytes=size_of(x, weight, bias, out), flops=2 * M * N * K,
    )  # fmt: skip
    if not is_split:
        return (first,)
    block = min(FOLD_COLUMNS, triton.next_power_of_2(N))
    fold = Launch(
        f"{name}.fold", fold_kernel, (M, triton.cdiv(N, block)),
        (partials, bias, slots, out, N, out.stride(0), M * N), {"NUM_SPLITS": tiles.num_splits, "BLOCK_N": block},
        bytes=size_of(partials, bias, out), flops=tiles.num_splits * M * N,
    )  # fmt: skip
    return first, fold
