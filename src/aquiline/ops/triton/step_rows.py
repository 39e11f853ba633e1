"""The rows of a step's forwards, made on the device from the state of the slots: what a step decides for itself.

Three kernels fill `DeviceRows` and the tokens beside them: the rows of the pass that brings the draft's keys up to the
roots, of one level of a chain, and of the trees that the target verifies. `write_words` applies the host's message.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from aquiline.ops.triton.launch import Launch, check_floats, check_integers
from aquiline.ops.triton.rows import DeviceRows

MESSAGE_BLOCK = 1024
"""Words that one program of `write_words` writes."""
COPY_BLOCK = 1024
"""Numbers of a row that one program of `gather_rows` copies."""


@dataclass(frozen=True, eq=False)
class StepSlots:
    """Which slots a step's B decodes are. active int32 [B]: -1 for a decode that is none; sizes int32 [B]: the nodes of
    each tree, at least 1. By slot: root, draft_end, first_draft_key int32 [S]; history int32 [S, C + 1]."""

    active: Tensor
    sizes: Tensor
    root: Tensor
    draft_end: Tensor
    first_draft_key: Tensor
    history: Tensor

    @property
    def count(self) -> int:
        """B."""
        return self.active.shape[0]


@triton.jit
def message_kernel(words, message, BLOCK: tl.constexpr):
    """message: the number n of words, then n places, each followed by what the word there becomes."""
    count = tl.load(message)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(message + 1 + 2 * i, mask=i < count, other=0)
    value = tl.load(message + 2 + 2 * i, mask=i < count, other=0)
    tl.store(words + place, value, mask=i < count)


def write_words(words: Tensor, message: Tensor) -> Launch:
    """Write what a message of int32 says into the words of the state. Raises ValueError for buffers that do not fit."""
    check_integers("words", words, words.numel())
    check_integers("message", message, message.numel(), like=words)
    room = (message.numel() - 1) // 2
    grid = (triton.cdiv(room, MESSAGE_BLOCK),)
    return Launch("MESSAGE", message_kernel, grid, (words, message), {"BLOCK": MESSAGE_BLOCK}, bytes=16 * room)


@triton.jit
def known_rows_kernel(
    active, sizes, root, draft_end, first, history, tokens, slots, positions, write, key_start, context_len, tail_len,
    history_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One decode: its rows of the pass that writes the draft keys up to its root."""
    b = tl.program_id(0)
    w = tl.arange(0, BLOCK)
    row = b * WIDTH + w
    slot = tl.load(active + b)
    if (slot < 0) | (tl.load(sizes + b) < 2):
        tl.store(slots + row, -1, mask=w < WIDTH)
        return
    last = tl.load(root + slot)
    own = last - (WIDTH - 1) + w  # the KV indices of the rows' keys
    end = tl.load(draft_end + slot)
    is_missing = own >= end
    is_row = w < WIDTH
    # The last row's output is what the tree grows from, even where its key is written already.
    tl.store(slots + row, tl.where(is_missing | (w == WIDTH - 1), slot, -1), mask=is_row)
    at = history + slot.to(tl.int64) * history_stride + own
    tl.store(tokens + row, tl.load(at, mask=is_row & (own >= 0), other=0), mask=is_row)
    tl.store(positions + row, own - 1, mask=is_row)
    tl.store(write + row, tl.where(is_missing, own, -1), mask=is_row)
    tl.store(key_start + row, tl.load(first + slot), mask=is_row)
    tl.store(context_len + row, own + 1, mask=is_row)
    tl.store(tail_len + row, 0, mask=is_row)
    tl.debug_barrier()  # all threads have read it
    tl.store(draft_end + slot, tl.maximum(end, last + 1))


def known_rows(step: StepSlots, tokens: Tensor, rows: DeviceRows, width: int) -> Launch:
    """Make rows [B * width] and their tokens that write the draft keys which decodes with more than a root lack, at most `width` each,
    and move draft_end behind the roots. A slot's last row is always there. Raises ValueError for buffers that do not
    fit."""
    check_rows(step.count * width, step, tokens, rows)
    constants = {"WIDTH": width, "BLOCK": triton.next_power_of_2(width)}
    return Launch(
        "DRAFT_ROWS", known_rows_kernel, (step.count,),
        (*_columns(step, tokens, rows), step.history.stride(0)), constants, num_warps=1, bytes=40 * step.count * width,
    )  # fmt: skip


@triton.jit
def chain_rows_kernel(
    active, sizes, root, draft_end, first, history, tokens, slots, positions, write, key_start, context_len, tail_len,
    drawn, tree_tokens, num_decodes, tree_stride, LEVEL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All decodes: the rows of a chain's level, whose tokens were drawn from the level above."""
    b = tl.arange(0, BLOCK)
    is_decode = b < num_decodes
    slot = tl.load(active + b, mask=is_decode, other=-1)
    size = tl.load(sizes + b, mask=slot >= 0, other=0)
    own = tl.load(root + slot, mask=slot >= 0, other=0) + LEVEL
    if LEVEL > 0:
        # Where logits are not numbers any token will do.
        token = tl.maximum(tl.load(drawn + b, mask=is_decode, other=0), 0)
        tl.store(tree_tokens + b * tree_stride + LEVEL, token, mask=size > LEVEL)
        tl.store(tokens + b, token, mask=is_decode)
    tl.store(slots + b, tl.where(size > LEVEL + 1, slot, -1), mask=is_decode)
    tl.store(positions + b, own - 1, mask=is_decode)
    tl.store(write + b, own, mask=is_decode)
    tl.store(key_start + b, tl.load(first + slot, mask=slot >= 0, other=0), mask=is_decode)
    tl.store(context_len + b, own + 1, mask=is_decode)
    tl.store(tail_len + b, 0, mask=is_decode)


def chain_rows(
    step: StepSlots, tokens: Tensor, rows: DeviceRows, level: int, drawn: Tensor, tree_tokens: Tensor
) -> Launch:  # fmt: skip
    """Make rows [B] of the chains' nodes of a level, below which another follows, and enter these nodes' tokens, which
    `drawn` [B] holds, into the trees' tokens [B, N]. Level 0: the roots, whose tokens are known. Raises ValueError for
    buffers that do not fit."""
    check_rows(step.count, step, tokens, rows)
    check_integers("drawn", drawn, step.count, like=step.active)
    check_integers("tree_tokens", tree_tokens, step.count, tree_tokens.shape[1], like=step.active)
    constants = {"LEVEL": level, "BLOCK": triton.next_power_of_2(step.count)}
    return Launch(
        "DRAFT_ROWS", chain_rows_kernel, (1,),
        (*_columns(step, tokens, rows), drawn, tree_tokens, step.count, tree_tokens.stride(0)), constants, num_warps=1,
        bytes=40 * step.count,
    )  # fmt: skip


@triton.jit
def tree_rows_kernel(
    active, sizes, root, draft_end, first, history, tokens, slots, positions, write, key_start, context_len, tail_len,
    path, tree_tokens, depths, tree_path, old_root, history_stride, N: tl.constexpr, LEVELS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_LEVELS: tl.constexpr,
):  # fmt: skip
    """One decode: the rows of its tree's nodes, the root's token among them."""
    b = tl.program_id(0)
    node = tl.arange(0, BLOCK)
    row = b * N + node
    slot = tl.load(active + b)
    if slot < 0:
        tl.store(slots + row, -1, mask=node < N)
        return
    is_node = node < tl.load(sizes + b)
    own = tl.load(root + slot)
    tl.store(old_root + b, own)
    first = tl.load(history + slot.to(tl.int64) * history_stride + own)
    token = tl.where(node == 0, first, tl.load(tree_tokens + row, mask=is_node & (node > 0), other=0))
    tl.store(tree_tokens + row, token, mask=node < N)
    depth = tl.load(depths + row, mask=is_node, other=0)
    tl.store(slots + row, tl.where(is_node, slot, -1), mask=node < N)
    tl.store(tokens + row, token, mask=node < N)
    tl.store(positions + row, own + depth, mask=node < N)
    tl.store(write + row, own + node, mask=node < N)
    tl.store(key_start + row, 0, mask=node < N)
    tl.store(context_len + row, own + 1, mask=node < N)
    tl.store(tail_len + row, depth, mask=node < N)
    level = tl.arange(0, BLOCK_LEVELS)[None, :]
    is_there = (node < N)[:, None] & (level < LEVELS)
    nodes = tl.load(tree_path + row[:, None] * (LEVELS + 1) + 1 + level, mask=is_there, other=0)
    tl.store(path + row[:, None] * LEVELS + level, nodes, mask=is_there)


def tree_rows(
    step: StepSlots, tokens: Tensor, rows: DeviceRows, tree_tokens: Tensor, depths: Tensor, path: Tensor, old_root: Tensor
) -> Launch:  # fmt: skip
    """Make rows [B * N] of trees' nodes for the target, from tree_tokens and depths [B, N] and path [B, N, D + 1]: the
    node at each level. The roots' tokens are entered into tree_tokens, the roots into old_root [B]. Raises ValueError
    for buffers that do not fit."""
    B, N, levels = path.shape
    check_rows(B * N, step, tokens, rows)
    check_integers("tree_tokens", tree_tokens, B, N, like=step.active)
    check_integers("depths", depths, B, N, like=step.active)
    if rows.levels != levels - 1:
        raise ValueError(f"rows.path has {rows.levels} levels; make it {levels - 1}, those of the trees below the root")
    constants = {"N": N, "LEVELS": rows.levels, "BLOCK": triton.next_power_of_2(N)}
    constants["BLOCK_LEVELS"] = triton.next_power_of_2(max(1, rows.levels))
    places = step.active if rows.path is None else rows.path
    return Launch(
        "EAGLE_TREE_MASKS", tree_rows_kernel, (B,),
        (*_columns(step, tokens, rows), places, tree_tokens, depths, path, old_root, step.history.stride(0)), constants,
        bytes=4 * B * N * (9 + 2 * levels),
    )  # fmt: skip


@triton.jit
def gather_kernel(
    source, table, slots, indices, out, table_stride, H, BLOCK: tl.constexpr, PAGE: tl.constexpr
):  # fmt: skip
    """One row: its numbers from the place of a KV index."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    index = tl.load(indices + row)
    page = tl.load(table + slot.to(tl.int64) * table_stride + index // PAGE)
    place = page.to(tl.int64) * PAGE + index % PAGE
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + place * H + column, mask=column < H, other=0.0)
    tl.store(out + row.to(tl.int64) * H + column, values, mask=column < H)


def gather_rows(
    source: Tensor, table: Tensor, slots: Tensor, indices: Tensor, out: Tensor, page_size: int
) -> Launch:  # fmt: skip
    """Copy rows of source [places, H] into out [R, H]: those at the places of KV indices [R] of slots [R], both int32.
    Raises ValueError for buffers that do not fit."""
    (R, H), block = out.shape, min(COPY_BLOCK, triton.next_power_of_2(out.shape[1]))
    check_floats("source", source, source.shape[0], H)
    check_floats("out", out, R, H, like=source)
    check_integers("slots", slots, R, like=source)
    check_integers("indices", indices, R, like=source)
    return Launch(
        "DRAFT_FEATURES", gather_kernel, (R, triton.cdiv(H, block)),
        (source, table, slots, indices, out, table.stride(0), H), {"BLOCK": block, "PAGE": page_size},
        bytes=2 * R * H * out.element_size(),
    )  # fmt: skip


def check_rows(num_rows: int, step: StepSlots, tokens: Tensor, rows: DeviceRows) -> None:
    """Raise ValueError unless there are num_rows rows with as many tokens, on one device."""
    check_integers("slots", rows.slots, num_rows, like=step.active)
    check_integers("tokens", tokens, num_rows, like=step.active)


def _columns(step: StepSlots, tokens: Tensor, rows: DeviceRows) -> tuple[Tensor, ...]:
    slots = step.active, step.sizes, step.root, step.draft_end, step.first_draft_key, step.history
    return *slots, tokens, rows.slots, rows.positions, rows.write, rows.key_start, rows.context_len, rows.tail_len
