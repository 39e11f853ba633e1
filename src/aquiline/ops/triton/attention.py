"""Attention over pages: spans of keys side by side, and a fold of the spans in order.

Exact: a row's result does not depend on the rows beside it, on the number of spans that the buffers have room for, or
on whether the row is plain, in a chain or in a tree.
- Spans and the blocks in them stand at fixed places of the context. A block of which a row sees nothing changes none
  of its bits.
- A tile is TILE_ROWS queries: the heads of a group that share keys, of as many rows as fit. Each query's scores and
  sums are its own.
- Up to its context_len a row's keys stand in the pages in order. The tail is gathered along the row's own path, one
  row of the tile after the other, as if it stood in the pages in order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from aquiline.ops.triton.heads import check_cache, check_head_size
from aquiline.ops.triton.launch import (
    Launch,
    check_contiguous,
    check_float32,
    check_floats,
    check_integers,
    size_of,
)
from aquiline.ops.triton.products import TILE_ROWS, multiply_add, operand_dtype
from aquiline.ops.triton.rows import DeviceRows

FOLDED = tl.constexpr(16)
"""Spans that are folded at once."""
NOWHERE = tl.constexpr(2**31 - 1)
"""A place behind every context."""


@dataclass(frozen=True)
class AttentionTiles:
    """How attention is cut: spans of keys, a program each, in blocks. Not measured."""

    span: int = 512
    block: int = 64
    num_warps: int = 4
    num_stages: int = 5  # page numbers are read three blocks ahead, keys and values two

    @classmethod
    def of(cls, D: int) -> AttentionTiles:
        """The tiles of heads of a size: one block less ahead where two would not fit a small card's shared memory."""
        return cls(num_stages=5 if D <= 128 else 3)

    def __post_init__(self) -> None:
        if self.span % self.block or self.block < 16 or self.block & (self.block - 1):
            raise ValueError(f"block={self.block}; make it a power of two from 16 on that divides span={self.span}")


@triton.jit
def places_seen(key_start, context_len, tail_len, row, is_live, WINDOW: tl.constexpr):
    """The first place that a row sees, the place where its tail begins, and the end of its places; zeros for dead rows.
    For one row, or a vector of rows."""
    context = tl.load(context_len + row, mask=is_live, other=0)
    end = context + tl.load(tail_len + row, mask=is_live, other=0)
    start = tl.load(key_start + row, mask=is_live, other=0)
    if WINDOW > 0:
        start = tl.maximum(start, end - WINDOW)
    return start, context, end


@triton.jit
def attend_block(
    q, k_cache, v_cache, table, index, is_read, visible, top, total, weighted, scale, column, head,
    HKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Fold the keys of KV indices [BLOCK], where is_read, into a tile's state, for the queries that see them.

    q [TILE, D padded]; visible [TILE, BLOCK]; state: top [TILE] the highest score so far, in powers of two, total
    [TILE] the sum of weights, weighted [TILE, D padded] the weighted sum of values."""
    page = tl.load(table + index // PAGE, mask=is_read, other=0).to(tl.int64)
    place = (page * PAGE + index % PAGE) * (HKV * D) + head * D
    is_loaded = is_read[:, None] & (column < D)[None, :]
    keys = tl.load(k_cache + place[:, None] + column[None, :], mask=is_loaded, other=0.0)
    values = tl.load(v_cache + place[:, None] + column[None, :], mask=is_loaded, other=0.0)
    scores = multiply_add(q, tl.trans(keys), tl.zeros(visible.shape, tl.float32), OPERAND)
    scores = tl.where(visible, scores * scale, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    reference = tl.where(new_top == float("-inf"), 0.0, new_top)
    shrunk = tl.exp2(top - reference)
    weights = tl.exp2(scores - reference[:, None])
    total = total * shrunk + tl.sum(weights, 1)
    if OPERAND is not None:
        weights = weights.to(OPERAND)
    weighted = multiply_add(weights, values, weighted * shrunk[:, None], OPERAND)
    return new_top, total, weighted


@triton.jit(do_not_specialize=["num_spans", "group", "tiles_per_group"])
def spans_kernel(
    q, k_cache, v_cache, page_table, slots, key_start, context_len, tail_len, path, sums, stats,
    scale, table_stride, path_stride, num_spans, group, tiles_per_group,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, HEADS: tl.constexpr,
    HEAD_TILES: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
    TAIL_BLOCKS: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """One tile of queries over one span of keys: ROWS rows by HEADS heads of one KV head.

    Grid: tiles of rows, KV heads by HEAD_TILES, spans."""
    lane = tl.arange(0, TILE)
    own = tl.program_id(0) % tiles_per_group * ROWS
    first_row = tl.program_id(0) // tiles_per_group * group + own
    in_group = tl.program_id(1) % HEAD_TILES * HEADS + lane % HEADS  # which of the heads that share a KV head
    kv_head = tl.program_id(1) // HEAD_TILES
    lane_row = lane // HEADS
    is_lane = (lane_row < ROWS) & (own + lane_row < group) & (in_group < HQ // HKV)
    row = first_row + lane_row
    slot_of_lane = tl.load(slots + row, mask=is_lane, other=-1)
    is_live = slot_of_lane >= 0
    start, context, end = places_seen(key_start, context_len, tail_len, row, is_live, WINDOW)
    lowest = tl.min(tl.where(is_live, start, NOWHERE), 0)
    highest = tl.max(end, 0)
    first = tl.program_id(2) * SPAN
    if (first >= highest) | (first + SPAN <= lowest):
        return
    table = page_table + tl.max(slot_of_lane, 0) * table_stride
    column = tl.arange(0, D_PADDED)
    query = row.to(tl.int64) * HQ + kv_head * (HQ // HKV) + in_group
    is_query = is_live[:, None] & (column < D)[None, :]
    queries = tl.load(q + query[:, None] * D + column[None, :], mask=is_query, other=0.0)
    top = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    weighted = tl.zeros((TILE, D_PADDED), tl.float32)
    # The block in which the first tail begins, and all behind it, are gathered row by row.
    tails = tl.min(tl.where(end > context, context, NOWHERE), 0) // BLOCK * BLOCK
    for block in range(0, SPAN, BLOCK):
        index = first + block + tl.arange(0, BLOCK)
        is_read = (index >= lowest) & (index < highest) & (index < tails)
        visible = (index[None, :] >= start[:, None]) & (index[None, :] < end[:, None]) & is_read[None, :]
        top, total, weighted = attend_block(
            queries, k_cache, v_cache, table, index, is_read, visible, top, total, weighted, scale, column, kv_head,
            HKV, D, PAGE, OPERAND,
        )  # fmt: skip
    if TAIL_BLOCKS > 0:  # noqa: SIM102  known to the compiler, what follows is not
        if tails < first + SPAN:
            for step in tl.range(0, TAIL_BLOCKS * ROWS, num_stages=2):
                node = step % ROWS
                is_node = is_live & (lane_row == node)
                node_start = tl.max(tl.where(is_node, start, 0), 0)
                node_context = tl.max(tl.where(is_node, context, 0), 0)
                node_end = tl.max(tl.where(is_node, end, 0), 0)
                place = tails + step // ROWS * BLOCK + tl.arange(0, BLOCK)
                is_read = (place >= first) & (place < first + SPAN) & (place >= node_start) & (place < node_end)
                is_tail = is_read & (place >= node_context)
                own_path = path + (first_row + node).to(tl.int64) * path_stride
                gathered = tl.load(own_path + place - node_context, mask=is_tail, other=0)
                index = tl.where(is_tail, node_context - 1 + gathered, place)
                visible = is_read[None, :] & is_node[:, None]
                top, total, weighted = attend_block(
                    queries, k_cache, v_cache, table, index, is_read, visible, top, total, weighted, scale, column,
                    kv_head, HKV, D, PAGE, OPERAND,
                )  # fmt: skip
    partial = query * num_spans + tl.program_id(2)
    tl.store(sums + partial[:, None] * D + column[None, :], weighted, mask=is_query)
    tl.store(stats + partial * 2, top, mask=is_live)
    tl.store(stats + partial * 2 + 1, total, mask=is_live)


@triton.jit
def fold_spans_kernel(
    sums, stats, slots, key_start, context_len, tail_len, sinks, out, out_stride,
    NUM_SPANS: tl.constexpr, HQ: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, SPAN: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Fold the spans of one row and head. Grid: rows, heads."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    if tl.load(slots + row) < 0:
        return
    start, _, end = places_seen(key_start, context_len, tail_len, row, True, WINDOW)
    first = (row.to(tl.int64) * HQ + head) * NUM_SPANS
    top = tl.full((1,), float("-inf"), tl.float32)
    if sinks is not None:  # a logit in powers of two, as scores are
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    for begin in range(0, NUM_SPANS, FOLDED):
        span = begin + tl.arange(0, FOLDED)
        is_seen = (span >= start // SPAN) & (span * SPAN < end) & (span < NUM_SPANS)
        top = tl.maximum(top, tl.max(tl.load(stats + (first + span) * 2, mask=is_seen, other=float("-inf")), 0))
    column = tl.arange(0, D_PADDED)
    total = tl.zeros((1,), tl.float32)
    if sinks is not None:
        total += tl.exp2(sink - top)
    weighted = tl.zeros((D_PADDED,), tl.float32)
    for begin in range(0, NUM_SPANS, FOLDED):
        span = begin + tl.arange(0, FOLDED)
        is_seen = (span >= start // SPAN) & (span * SPAN < end) & (span < NUM_SPANS)
        weights = tl.exp2(tl.load(stats + (first + span) * 2, mask=is_seen, other=float("-inf")) - top)
        total += tl.sum(weights * tl.load(stats + (first + span) * 2 + 1, mask=is_seen, other=0.0), 0)
        own = sums + (first + span)[:, None] * D + column[None, :]
        values = tl.load(own, mask=is_seen[:, None] & (column < D)[None, :], other=0.0)
        weighted += tl.sum(weights[:, None] * values, 0)
    tl.store(out + row.to(tl.int64) * out_stride + head * D + column, weighted / total, mask=column < D)


@dataclass(frozen=True, eq=False)
class SpanBuffers:
    """Float32 scratch between the spans and their fold: sums [M, Hq, spans, D] and stats [M, Hq, spans, 2], the highest
    score and the sum of weights. The number of spans bounds the context. Layers share it."""

    sums: Tensor
    stats: Tensor


def attention(
    name: str,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: DeviceRows,
    out: Tensor,
    scratch: SpanBuffers,
    *,
    scale: float,
    window: int = 0,
    sinks: Tensor | None = None,
    tiles: AttentionTiles | None = None,
) -> tuple[Launch, Launch]:
    """out [M, Hq * D] = the attention of q [M, Hq, D] over the keys that `rows` lets each row see.

    k_cache and v_cache [places, Hkv, D] as `heads` writes them. scale: what scores are multiplied with; window: keys
    that a row sees at most, its own included, 0 for all; sinks [Hq]: a logit per head that joins the softmax's
    denominator; tiles: by default those of the head's size. Every live row sees a key, and no more than the spans of
    scratch hold. Keys between those that rows of a group see may be read too. Dead rows are neither read nor written.
    Raises ValueError for buffers that do not fit."""
    M, Hq, D = q.shape
    Hkv, num_spans = k_cache.shape[1], scratch.sums.shape[2]
    tiles = tiles or AttentionTiles.of(D)
    _check(name, q, k_cache, v_cache, rows, out, scratch, sinks)
    group, padded = Hq // Hkv, triton.next_power_of_2(D)
    per_tile = min(group, TILE_ROWS)
    num_rows, head_tiles = max(1, TILE_ROWS // per_tile), triton.cdiv(group, per_tile)
    tiles_per_group = triton.cdiv(rows.group, num_rows)
    tail_blocks = 0 if rows.path is None else (rows.levels + tiles.block - 2) // tiles.block + 1
    span = tiles.span
    context = num_spans * span
    seen = min(context, window + rows.levels) if window else context
    read = M // rows.group * seen * Hkv * D * 2 * k_cache.element_size()
    spans = Launch(
        name, spans_kernel, (M // rows.group * tiles_per_group, Hkv * head_tiles, num_spans),
        (q, k_cache, v_cache, rows.page_table, rows.slots, rows.key_start, rows.context_len, rows.tail_len, rows.path,
         scratch.sums, scratch.stats, scale * math.log2(math.e), rows.page_table.stride(0),
         0 if rows.path is None else rows.path.stride(0), num_spans, rows.group, tiles_per_group),
        {"HQ": Hq, "HKV": Hkv, "D": D, "D_PADDED": padded, "HEADS": per_tile, "HEAD_TILES": head_tiles,
         "ROWS": num_rows, "PAGE": rows.page_size, "SPAN": span, "BLOCK": tiles.block,
         "TAIL_BLOCKS": tail_blocks, "WINDOW": window, "TILE": TILE_ROWS,
         "OPERAND": operand_dtype(q.dtype, k_cache.dtype)},
        tiles.num_warps, tiles.num_stages,
        bytes=read + size_of(q), flops=4 * M * Hq * D * seen,
    )  # fmt: skip
    fold = Launch(
        f"{name}.fold", fold_spans_kernel, (M, Hq),
        (scratch.sums, scratch.stats, rows.slots, rows.key_start, rows.context_len, rows.tail_len, sinks, out,
         out.stride(0)),
        {"NUM_SPANS": num_spans, "HQ": Hq, "D": D, "D_PADDED": padded, "SPAN": span, "WINDOW": window},
        bytes=size_of(scratch.sums, scratch.stats, out), flops=2 * M * Hq * D * num_spans,
    )  # fmt: skip
    return spans, fold


def _check(
    name: str, q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: DeviceRows, out: Tensor, scratch: SpanBuffers,
    sinks: Tensor | None,
) -> None:  # fmt: skip
    """Raise ValueError for buffers of `attention` that do not fit."""
    M, Hq, D = q.shape
    Hkv, num_spans = k_cache.shape[1], scratch.sums.shape[2]
    check_head_size(name, D)
    if Hq % Hkv:
        raise ValueError(f"{name}: {Hq} heads do not share {Hkv} KV heads evenly; give a multiple")
    check_floats(f"{name}'s q", q, M, Hq, D)
    check_contiguous(f"{name}'s q", q)
    check_cache(name, k_cache, v_cache, Hkv, D, q)
    check_integers(f"{name}'s slots", rows.slots, M, like=q)
    check_floats(f"{name}'s out", out, M, Hq * D, like=q)
    check_float32(f"{name}'s sums", scratch.sums, M, Hq, num_spans, D, like=q)
    check_float32(f"{name}'s stats", scratch.stats, M, Hq, num_spans, 2, like=q)
    if sinks is not None:
        check_floats(f"{name}'s sinks", sinks, Hq, like=q)
