"""The vocabulary's head: logits, the token that each row draws, and the best children of a draft's rows.

The vocabulary is cut into tiles. `best_by_tile` computes a tile's logits, adds the noise of each row and keeps the best
few scores; `pick_draws` and `pick_children` merge the tiles of a row. So no row's logits have to exist as a whole.
Where rules or filters change logits on the way, `head_logits` writes them and `best_of_logits` reads them: both compute
the same scores, to the bit.

A row is dead if its slot is -1: nothing is read for it. A tile always has TILE_ROWS rows, so a row's logits do not
depend on how many rows run beside it. Twins: `draw`, `guess` and `children` in backends/torch/draw.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from aquiline.ops.triton.launch import Launch, check_float32, check_floats, check_integers, size_of
from aquiline.ops.triton.linear import LinearTiles
from aquiline.ops.triton.merging import IS_FINITE, IS_NAN, LOWEST, MISSING, pick_kernel
from aquiline.ops.triton.noise import gumbel, noise_words
from aquiline.ops.triton.products import TILE_ROWS, multiply_add, operand_dtype

HEAD_TILES = LinearTiles(block_n=128, block_k=64)
"""Tiles of a vocabulary's head. Not measured."""

MOST_BEST = 16
"""The most children of a row that one launch finds."""


@dataclass(frozen=True, eq=False)
class VocabularyHead:
    """weight [V, H], contiguous. ids int32 [V]: the token of each row of the weight, ascending, where that is not its
    number: a draft's vocabulary as target ids."""

    weight: Tensor
    ids: Tensor | None = None


@dataclass(frozen=True, eq=False)
class DrawRows:
    """How R rows draw. slots int32 [R]: -1 for a dead row; positions int32 [R]: the rows' rotary positions; ahead: how
    far the drawn token stands after them, 1 in a target and 2 in a draft. By slot: temperature float32 [S], seed int32
    [S, 2] with the words of a seed, the low one first."""

    slots: Tensor
    positions: Tensor
    temperature: Tensor
    seed: Tensor
    ahead: int = 1


@dataclass(frozen=True, eq=False)
class TileBest:
    """The `count` best of each tile for R rows, as scratch between two launches. scores float32 and ids int32
    [R, T, count], descending, ties to the lowest id, where T tiles make a vocabulary; sums float32 [R, T]: of
    exp(score - best score of the tile); flags int32 [R, T]: IS_NAN if a logit is NaN, IS_FINITE if one is finite."""

    scores: Tensor
    ids: Tensor
    sums: Tensor
    flags: Tensor

    @classmethod
    def new(
        cls, num_rows: int, vocabulary: int, count: int, device: torch.device, tiles: LinearTiles = HEAD_TILES
    ) -> TileBest:
        """Room for what `best_by_tile` and `best_of_logits` find. Raises ValueError for a count that is too large."""
        if not 1 <= count <= min(MOST_BEST, vocabulary):
            raise ValueError(
                f"count={count}: a row of {vocabulary} logits has 1 to {min(MOST_BEST, vocabulary)} best tokens in one "
                "launch; ask for fewer children (draft_top_k)"
            )
        each = num_rows, triton.cdiv(vocabulary, tiles.block_n)
        integers: dict[str, Any] = {"dtype": torch.int32, "device": device}
        return cls(
            torch.empty(*each, count, device=device), torch.empty(*each, count, **integers),
            torch.empty(each, device=device), torch.empty(each, **integers),
        )  # fmt: skip


@triton.jit
def tile_logits(
    x, weight, rows, is_row, columns, is_column, x_stride, weight_stride,
    H: tl.constexpr, BLOCK_H: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Logits float32 [rows, columns] of x [.., H] for rows of weight [V, H]."""
    inner = tl.arange(0, BLOCK_H)
    x_rows = x + rows[:, None].to(tl.int64) * x_stride
    weight_rows = weight + columns[:, None].to(tl.int64) * weight_stride
    total = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    for first in range(0, H, BLOCK_H):
        h = first + inner[None, :]
        values = tl.load(x_rows + h, mask=is_row[:, None] & (h < H), other=0.0)
        weights = tl.load(weight_rows + h, mask=is_column[:, None] & (h < H), other=0.0)
        total = multiply_add(values, tl.trans(weights), total, OPERAND)
    return total


@triton.jit
def row_scores(logits, tokens, slot, position, temperature, seed):
    """What each row draws by: its logits at temperature 0, else over temperature, plus noise."""
    own = tl.load(temperature + slot, mask=slot >= 0, other=0.0)
    scores = logits
    if tl.max(own, 0) > 0.0:
        low = tl.load(seed + 2 * slot, mask=slot >= 0, other=0)
        high = tl.load(seed + 2 * slot + 1, mask=slot >= 0, other=0)
        first, second = noise_words(low, high, position)
        scaled = logits / tl.where(own > 0.0, own, 1.0)[:, None]
        noisy = scaled + gumbel(tokens[None, :], first[:, None], second[:, None])
        scores = tl.where((own > 0.0)[:, None], noisy, logits)
    return scores


@triton.jit(do_not_specialize=["num_rows", "ahead"])
def head_kernel(
    x, weight, logits, ids, slots, positions, temperature, seed, best, best_ids, sums, flags, num_rows, ahead, x_stride,
    weight_stride, V: tl.constexpr, H: tl.constexpr, COUNT: tl.constexpr, TILE: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """A tile of rows and a tile of the vocabulary. Without x the logits are read; with COUNT 0 they are written.
    Grid: row tiles, vocabulary tiles."""
    tile = tl.program_id(1)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    slot = tl.load(slots + row, mask=row < num_rows, other=-1)
    if tl.max(slot, 0) < 0:
        return
    is_row = slot >= 0
    column = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    is_column = column < V
    is_there = is_row[:, None] & is_column[None, :]
    at = row.to(tl.int64)[:, None] * V + column[None, :]
    if x is not None:
        found = tile_logits(x, weight, row, is_row, column, is_column, x_stride, weight_stride, H, BLOCK_H, OPERAND)
    else:
        found = tl.load(logits + at, mask=is_there, other=0.0)
    if COUNT == 0:
        tl.store(logits + at, found, mask=is_there)
    else:
        tokens = column
        if ids is not None:
            tokens = tl.load(ids + column, mask=is_column, other=0)
        position = tl.load(positions + row, mask=is_row, other=0) + ahead
        scores = row_scores(found, tokens, slot, position, temperature, seed)
        scores = tl.where(is_there & (found == found), scores, float("-inf"))
        left = tl.where(is_there, tokens[None, :], MISSING)
        own = row * tl.num_programs(1) + tile
        is_nan = tl.max(tl.where(is_there & (found != found), IS_NAN, 0), 1)
        is_finite = tl.max(tl.where(is_there & (tl.abs(found) < float("inf")), IS_FINITE, 0), 1)
        tl.store(flags + own, is_nan + is_finite, mask=is_row)
        for j in tl.static_range(COUNT):
            top = tl.max(scores, 1)
            token = tl.min(tl.where(scores == top[:, None], left, MISSING), 1)
            if j == 0:
                share = tl.exp(scores - tl.maximum(top, LOWEST)[:, None])
                tl.store(sums + own, tl.sum(share, 1), mask=is_row)
            tl.store(best + own * COUNT + j, top, mask=is_row)
            tl.store(best_ids + own * COUNT + j, token, mask=is_row)
            is_taken = left == token[:, None]
            scores = tl.where(is_taken, float("-inf"), scores)
            left = tl.where(is_taken, MISSING, left)


def head_logits(
    x: Tensor, head: VocabularyHead, slots: Tensor, logits: Tensor, tiles: LinearTiles = HEAD_TILES
) -> Launch:
    """Logits float32 [R, V] of normed rows x [R, H]. slots int32 [R] as in DrawRows; the logits of dead rows are not
    written. Raises ValueError for tensors that do not fit."""
    check_float32("logits", logits, x.shape[0], head.weight.shape[0], like=x)
    return _head("LM_HEAD_LOGITS", x, head, (logits, None, slots, *(None,) * 7, x.shape[0], 0), 0, tiles)


def best_by_tile(
    x: Tensor, head: VocabularyHead, rows: DrawRows, best: TileBest, tiles: LinearTiles = HEAD_TILES
) -> Launch:
    """Compute the logits of normed rows x [R, H] and keep the best of each tile of the vocabulary.

    Raises ValueError for tensors that do not fit."""
    R, V = x.shape[0], head.weight.shape[0]
    _check_draw(R, V, rows, best, tiles, x)
    if head.ids is not None:
        check_integers("the head's ids", head.ids, V, like=x)
    buffers = None, head.ids, *_buffers(rows, best), R, rows.ahead
    return _head("LM_HEAD_DRAW", x, head, buffers, best.scores.shape[2], tiles)


def best_of_logits(logits: Tensor, rows: DrawRows, best: TileBest, tiles: LinearTiles = HEAD_TILES) -> Launch:
    """Keep the best of each tile of given logits float32 [R, V]: what `best_by_tile` keeps where `head_logits` found
    them. Raises ValueError for tensors that do not fit."""
    R, V = logits.shape
    check_float32("logits", logits, R, V)
    _check_draw(R, V, rows, best, tiles, logits)
    constants = {"V": V, "H": 1, "COUNT": best.scores.shape[2], "TILE": TILE_ROWS, "BLOCK_V": tiles.block_n}
    return Launch(
        "LM_HEAD_DRAW", head_kernel, (triton.cdiv(R, TILE_ROWS), best.scores.shape[1]),
        (None, None, logits, None, *_buffers(rows, best), R, rows.ahead, 0, 0),
        constants | {"BLOCK_H": 1, "OPERAND": None}, tiles.num_warps, bytes=size_of(logits),
    )  # fmt: skip


def pick_draws(
    best: TileBest, slots: Tensor, tokens: Tensor, *, otherwise: int = -1, margins: Tensor | None = None
) -> Launch:
    """The token that each row draws: the best of its tiles, `otherwise` where a logit is NaN or none is finite.

    tokens int32 [R], which may be a column of a tree's tokens; -1 for a dead row. With count 2 tokens are [R, 2]: the
    second column is the runner-up, -1 if no other token was possible; and margins float32 [R] is by how much the best
    score exceeds it, 0 where the logits are not numbers. Raises ValueError for tensors that do not fit."""
    R, T, count = best.scores.shape
    if count > 2 or (count == 2) != (margins is not None):
        raise ValueError(f"best has count {count} and margins is {margins}; a draw keeps 1, and 2 beside margins")
    check_integers("slots", slots, R, like=best.scores)
    check_integers("tokens", tokens.view(R, count) if count == 1 else tokens, R, count, like=best.scores)
    if margins is not None:
        check_float32("margins", margins, R, like=best.scores)
    return _pick("DRAW", best, slots, (tokens, margins, None), (tokens.stride(0), 1, T, otherwise), is_draw=True)


def pick_children(
    best: TileBest, slots: Tensor, tokens: Tensor, logprobs: Tensor, *, above: Tensor | None = None
) -> Launch:
    """The `count` best tokens of each row and their log-probabilities, descending, ties to the lowest id.

    tokens int32 and logprobs float32 [B, m * count] for R = B m rows, m of each tree; both may be columns of wider
    buffers. Log-probabilities are the log-softmax of the scores that a draw compares, -inf where logits are NaN. above
    float32 [R]: the cumulative log-probability of each row's own node, to which those of its children, at most 0, are
    added. Raises ValueError for tensors that do not fit."""
    R, T, count = best.scores.shape
    B, width = tokens.shape
    check_integers("slots", slots, R, like=best.scores)
    if width * B != R * count:
        raise ValueError(f"tokens has the shape {tuple(tokens.shape)}; {R} rows have {R * count} children")
    check_integers("tokens", tokens, B, width, like=best.scores)
    if logprobs.shape != tokens.shape or logprobs.stride() != tokens.stride() or logprobs.dtype != torch.float32:
        raise ValueError(
            f"logprobs is {logprobs.dtype} {tuple(logprobs.shape)} with the strides {logprobs.stride()}; make it "
            f"float32 with the shape and strides of tokens, {tuple(tokens.shape)} and {tokens.stride()}"
        )
    if above is not None:
        check_float32("above", above, R, like=best.scores)
    layout = tokens.stride(0), R // B, T, -1
    return _pick("CHILDREN", best, slots, (tokens, logprobs, above), layout, is_draw=False)


def _buffers(rows: DrawRows, best: TileBest) -> tuple[Tensor, ...]:
    own = rows.slots, rows.positions, rows.temperature, rows.seed
    return *own, best.scores, best.ids, best.sums, best.flags


def _check_draw(R: int, V: int, rows: DrawRows, best: TileBest, tiles: LinearTiles, like: Tensor) -> None:
    S, count = rows.temperature.shape[0], best.scores.shape[-1]
    check_integers("slots", rows.slots, R, like=like)
    check_integers("positions", rows.positions, R, like=like)
    check_float32("temperature", rows.temperature, S, like=like)
    check_integers("seed", rows.seed, S, 2, like=like)
    each = R, triton.cdiv(V, tiles.block_n)
    check_float32("best.scores", best.scores, *each, count, like=like)
    check_integers("best.ids", best.ids, *each, count, like=like)
    check_float32("best.sums", best.sums, *each, like=like)
    check_integers("best.flags", best.flags, *each, like=like)


def _head(
    name: str, x: Tensor, head: VocabularyHead, buffers: tuple[Tensor | int | None, ...], count: int, tiles: LinearTiles
) -> Launch:
    (R, H), V = x.shape, head.weight.shape[0]
    check_floats("x", x, R, H)
    check_floats("the head's weight", head.weight, V, H, like=x)
    constants = {"V": V, "H": H, "COUNT": count, "TILE": TILE_ROWS, "BLOCK_V": tiles.block_n}
    constants |= {"BLOCK_H": tiles.block_k, "OPERAND": operand_dtype(x.dtype, head.weight.dtype)}
    return Launch(
        name, head_kernel, (triton.cdiv(R, TILE_ROWS), triton.cdiv(V, tiles.block_n)),
        (x, head.weight, *buffers, x.stride(0), head.weight.stride(0)), constants, tiles.num_warps, tiles.num_stages,
        bytes=size_of(x, head.weight) + (4 * R * V if count == 0 else 0), flops=2 * R * V * H,
    )  # fmt: skip


def _pick(
    name: str,
    best: TileBest,
    slots: Tensor,
    outputs: tuple[Tensor | None, ...],
    layout: tuple[int, int, int, int],
    is_draw: bool,
) -> Launch:
    R, T, count = best.scores.shape
    constants = {"COUNT": count, "IS_DRAW": is_draw, "TILES": triton.next_power_of_2(T)}
    buffers = best.scores, best.ids, best.sums, best.flags, slots, *outputs
    return Launch(name, pick_kernel, (R,), (*buffers, *layout), constants, bytes=size_of(*buffers))
