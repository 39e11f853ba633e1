"""How trees grow, tree by tree: the kernels behind tree_growth.py, which says what candidates and beams are."""

from __future__ import annotations

import triton
import triton.language as tl

from aquiline.ops.triton.merging import MISSING


@triton.jit(do_not_specialize=["first", "end", "own_first"])
def beam_kernel(
    slots, cand_tokens, cand_scores, cand_parents, old_paths, tokens, sources, scores, paths, first, end, own_first,
    C: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, LEVEL: tl.constexpr, BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """One tree: the K best of the candidates [first, end), and their rows, which find candidates from `end` on. Grid:
    trees."""
    tree = tl.program_id(0)
    if tl.load(slots + tree) < 0:
        return
    place = first + tl.arange(0, BLOCK)
    own = tree * C
    score = tl.load(cand_scores + own + place, mask=place < end, other=float("-inf"))
    left = tl.where(place < end, place, MISSING)
    level = tl.arange(0, LEVELS)
    child = tl.arange(0, BLOCK)
    for m in tl.static_range(K):
        best = tl.max(score, 0)
        chosen = tl.min(tl.where(score == best, left, MISSING), 0)
        score = tl.where(left == chosen, float("-inf"), score)
        left = tl.where(left == chosen, MISSING, left)
        member = tree * K + m
        source = tree
        path = tl.zeros((LEVELS,), tl.int32)
        if LEVEL > 1:
            source = tree * K + (chosen - first) // K
            path = tl.load(old_paths + source * WIDTH + level, mask=level < LEVEL, other=0)
        path = tl.where(level == LEVEL, own_first + m, path)
        tl.store(tokens + member, tl.load(cand_tokens + own + chosen))
        tl.store(sources + member, source)
        tl.store(scores + member, best)
        tl.store(paths + member * WIDTH + level, path, mask=level < WIDTH)
        tl.store(cand_parents + own + end + m * K + child, chosen, mask=child < K)


@triton.jit
def choose_kernel(
    slots, cand_tokens, cand_scores, cand_parents, tokens, parents, depths, paths, num_nodes,
    C: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """One tree: of its C candidates the num_nodes - 1 best, in the order of their places. Grid: trees."""
    tree = tl.program_id(0)
    if tl.load(slots + tree) < 0:
        return
    place = tl.arange(0, BLOCK)
    own = tree * C
    is_there = place < C
    score = tl.load(cand_scores + own + place, mask=is_there, other=float("-inf"))
    rank = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, C, PART):
        other = start + tl.arange(0, PART)
        found = tl.load(cand_scores + own + other, mask=other < C, other=float("-inf"))
        is_first = (found[None, :] == score[:, None]) & (other[None, :] < place[:, None])
        is_before = (other < C)[None, :] & ((found[None, :] > score[:, None]) | is_first)
        rank += tl.sum(tl.where(is_before, 1, 0), 1)
    is_chosen = is_there & (rank < num_nodes - 1)
    number = tl.where(is_chosen, tl.cumsum(tl.where(is_chosen, 1, 0), 0), 0)
    above = tl.load(cand_parents + own + place, mask=is_there, other=-1)
    depth = tl.where(place < K, 1, 2 + (place - K) // (K * K))
    node = tree * num_nodes + number
    tl.store(tokens + node, tl.load(cand_tokens + own + place, mask=is_there, other=0), mask=is_chosen)
    tl.store(depths + node, depth, mask=is_chosen)
    parent = tl.where(above < 0, 0, tl.gather(number, tl.maximum(above, 0), 0))
    tl.store(parents + node, parent, mask=is_chosen)
    at, on = place, depth
    for level in tl.static_range(WIDTH - 1, 0, -1):
        is_on = on == level
        tl.store(paths + node * WIDTH + level, tl.where(is_on, tl.gather(number, at, 0), 0), mask=is_chosen)
        at = tl.where(is_on, tl.maximum(tl.gather(above, at, 0), 0), at)
        on = tl.where(is_on, on - 1, on)


@triton.jit
def take_kernel(slots, source, places, target, source_stride, target_stride, count, BLOCK: tl.constexpr):
    """One tree: target [tree, i] = source [tree, places[i]]. Grid: trees."""
    tree = tl.program_id(0)
    if tl.load(slots + tree) < 0:
        return
    i = tl.arange(0, BLOCK)
    place = tl.load(places + i, mask=i < count, other=0)
    tl.store(target + tree * target_stride + i, tl.load(source + tree * source_stride + place), mask=i < count)
