"""The best of a row's tiles: the kernel behind `pick_draws` and `pick_children` of head_draw.py."""

from __future__ import annotations

import triton
import triton.language as tl

MISSING = tl.constexpr(2**31 - 1)  # stands behind every token id
LOWEST = tl.constexpr(-3.0e38)  # instead of -inf in differences, which would not be numbers
IS_NAN, IS_FINITE = tl.constexpr(1), tl.constexpr(2)


@triton.jit(do_not_specialize=["otherwise"])
def pick_kernel(
    best, best_ids, sums, flags, slots, tokens, values, above, stride, tree_rows, num_tiles, otherwise,
    COUNT: tl.constexpr, IS_DRAW: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One row: the COUNT best of all its tiles, by merging the tiles' own lists."""
    row = tl.program_id(0)
    out = (row // tree_rows) * stride + (row % tree_rows) * COUNT
    if tl.load(slots + row) < 0:
        for j in tl.static_range(COUNT):
            tl.store(tokens + out + j, -1)
        return
    tile = tl.arange(0, TILES)
    is_tile = tile < num_tiles
    flag = tl.load(flags + row * num_tiles + tile, mask=is_tile, other=0)
    is_odd = (tl.max(flag & IS_NAN, 0) > 0) | (tl.max(flag & IS_FINITE, 0) == 0)
    at = (row * num_tiles + tile) * COUNT
    score = tl.load(best + at, mask=is_tile, other=float("-inf"))
    token = tl.load(best_ids + at, mask=is_tile, other=MISSING)
    highest = tl.max(score, 0)
    if not IS_DRAW:
        own = tl.load(sums + row * num_tiles + tile, mask=is_tile, other=0.0)
        highest = tl.maximum(highest, LOWEST)
        base = highest + tl.log(tl.maximum(tl.sum(own * tl.exp(score - highest), 0), 1.0))
    for j in tl.static_range(COUNT):
        top = tl.max(score, 0)
        chosen = tl.min(tl.where(score == top, token, MISSING), 0)
        is_chosen = token == chosen
        at += tl.where(is_chosen, 1, 0)
        is_left = is_chosen & is_tile & (at < (row * num_tiles + tile + 1) * COUNT)
        score = tl.where(is_chosen, tl.load(best + at, mask=is_left, other=float("-inf")), score)
        token = tl.where(is_chosen, tl.load(best_ids + at, mask=is_left, other=MISSING), token)
        if IS_DRAW:
            if j == 0:
                chosen = tl.where(is_odd, otherwise, chosen)
            else:
                chosen = tl.where(is_odd | (top == float("-inf")), -1, chosen)
                tl.store(values + row, tl.where(is_odd, 0.0, highest - top))
        else:
            reached = top - base
            reached = tl.where(is_odd | (reached != reached), float("-inf"), reached)
            if above is not None:
                reached = tl.load(above + row) + tl.minimum(reached, 0.0)
            tl.store(values + out + j, reached)
        tl.store(tokens + out + j, chosen)
