"""Which experts compute which rows: the kernels behind `route` of experts.py, which says what pairs and groups are."""

from __future__ import annotations

import triton
import triton.language as tl

from aquiline.ops.triton.merging import MISSING


@triton.jit
def route_kernel(
    logits, slots, experts, weights, E: tl.constexpr, PER_ROW: tl.constexpr, OVER_ALL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row. Grid: rows."""
    row = tl.program_id(0)
    out = row * PER_ROW
    if tl.load(slots + row) < 0:
        for j in tl.static_range(PER_ROW):
            tl.store(experts + out + j, -1)
        return
    expert = tl.arange(0, BLOCK)
    score = tl.load(logits + row * E + expert, mask=expert < E, other=float("-inf"))
    is_odd = tl.max(tl.where(score != score, 1, 0), 0) > 0
    score = tl.where(score == score, score, float("-inf"))
    highest = tl.max(score, 0)
    left = tl.where(expert < E, expert, MISSING)
    total = tl.sum(tl.exp(score - highest), 0)
    rank = tl.arange(0, BLOCK)
    shares = tl.zeros((BLOCK,), tl.float32)
    chosen_total = total * 0.0
    for j in tl.static_range(PER_ROW):
        best = tl.max(score, 0)
        chosen = tl.min(tl.where(score == best, left, MISSING), 0)
        score = tl.where(left == chosen, float("-inf"), score)
        left = tl.where(left == chosen, MISSING, left)
        share = tl.exp(best - highest)
        chosen_total += share
        shares = tl.where(rank == j, share, shares)
        tl.store(experts + out + j, chosen)
    if not OVER_ALL:
        total = chosen_total
    shares = tl.where(is_odd, float("nan"), shares / total)
    tl.store(weights + out + rank, shares, mask=rank < PER_ROW)


@triton.jit
def group_kernel(
    experts, group_experts, counts, pairs, num_pairs, num_rows, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """All pairs. Groups are numbered in the order of their first pairs. Grid: one."""
    pair = tl.arange(0, BLOCK)
    expert = tl.load(experts + pair, mask=pair < num_pairs, other=-1)
    first = tl.zeros((BLOCK,), tl.int32) + MISSING
    rank = tl.zeros((BLOCK,), tl.int32)
    count = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, BLOCK, PART):
        other = start + tl.arange(0, PART)
        found = tl.load(experts + other, mask=other < num_pairs, other=-1)
        is_same = (found[None, :] == expert[:, None]) & (expert >= 0)[:, None]
        first = tl.minimum(first, tl.min(tl.where(is_same, other[None, :], MISSING), 1))
        rank += tl.sum(tl.where(is_same & (other[None, :] < pair[:, None]), 1, 0), 1)
        count += tl.sum(tl.where(is_same, 1, 0), 1)
    is_first = first == pair
    number = tl.cumsum(tl.where(is_first, 1, 0), 0) - 1
    group = tl.gather(number, tl.where(expert >= 0, first, 0), 0)
    tl.store(group_experts + group, expert, mask=is_first)
    tl.store(counts + group, count, mask=is_first)
    tl.store(pairs + group * num_rows + rank, pair, mask=expert >= 0)
    num_groups = tl.sum(tl.where(is_first, 1, 0), 0)
    tl.store(group_experts + pair, -1, mask=(pair >= num_groups) & (pair < GROUPS))
