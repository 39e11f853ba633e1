"""What slots hold on the device, and the rows of trees and of the draft's passes as `DeviceRows`.

Node i of a target's tree has its key at KV index root + i and stands at position root + depth. The draft's row of a
node has the position before: draft row j pairs the feature of token j with token j + 1, and its key is at KV index
j + 1. So a draft's row at level l, which reads a token of depth l, has position root + l - 1 and a key behind the root.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from aquiline.ops.triton.launch import Launch, check_integers, size_of
from aquiline.ops.triton.rows import DeviceRows
from aquiline.ops.triton.tree_growth import TreeNodes


@dataclass(frozen=True, eq=False)
class DeviceSlots:
    """The state of S slots, int32. roots, draft_ends, first_draft_keys [S]: as in backends/base.py; history [S, C]: a
    slot's tokens by index; page_table [S, pages per slot]."""

    roots: Tensor
    draft_ends: Tensor
    first_draft_keys: Tensor
    history: Tensor
    page_table: Tensor
    page_size: int

    def __post_init__(self) -> None:
        S = len(self.roots)
        for name in ("roots", "draft_ends", "first_draft_keys"):
            check_integers(name, getattr(self, name), S, like=self.roots)
        check_integers("history", self.history, S, self.history.shape[-1], like=self.roots)
        check_integers("page_table", self.page_table, S, self.page_table.shape[-1], like=self.roots)


@triton.jit(do_not_specialize=["num_rows", "level", "first", "shift"])
def rows_kernel(
    trees, roots, key_starts, depths, counts, history, tokens, slots, positions, write, key_start, context_len,
    tail_len, num_rows, history_stride, level, first, shift, IS_CHAIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The rows of one tree. Grid: trees."""
    tree = tl.program_id(0)
    slot = tl.load(trees + tree)
    i = tl.arange(0, BLOCK)
    row = tree * num_rows + i
    is_row = i < num_rows
    if slot < 0:
        tl.store(slots + row, -1, mask=is_row)
        return
    root = tl.load(roots + slot)
    own_slot = tl.zeros((BLOCK,), tl.int32) + slot
    if counts is not None:
        own_slot = tl.where(i < tl.load(counts + tree), own_slot, -1)
    if tokens is not None:
        tl.store(tokens + tree * num_rows, tl.load(history + slot.to(tl.int64) * history_stride + root))
    depth = tl.zeros((BLOCK,), tl.int32) + level
    if depths is not None:
        depth = tl.load(depths + row, mask=is_row, other=0)
    start = 0
    if key_starts is not None:
        start = tl.load(key_starts + slot)
    index = root + first + i
    tl.store(slots + row, own_slot, mask=is_row)
    tl.store(positions + row, root + depth + shift, mask=is_row)
    tl.store(write + row, index, mask=is_row)
    tl.store(key_start + row, start, mask=is_row)
    tl.store(context_len + row, index + 1 if IS_CHAIN else root + 1 + tl.zeros((BLOCK,), tl.int32), mask=is_row)
    tl.store(tail_len + row, tl.zeros((BLOCK,), tl.int32) if IS_CHAIN else depth, mask=is_row)


@triton.jit(do_not_specialize=["num_rows"])
def lag_kernel(
    trees, roots, draft_ends, key_starts, history, page_table, tokens, places, last, slots, positions, write, key_start,
    context_len, tail_len, num_rows, history_stride, table_stride, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The rows that bring one slot's draft keys up to its root. Grid: trees."""
    tree = tl.program_id(0)
    slot = tl.load(trees + tree)
    i = tl.arange(0, BLOCK)
    row = tree * num_rows + i
    is_row = i < num_rows
    if slot < 0:
        tl.store(slots + row, -1, mask=is_row)
        tl.store(places + row, -1, mask=is_row)
        tl.store(last + tree, -1)
        return
    root = tl.load(roots + slot)
    end = tl.load(draft_ends + slot)
    begin = tl.minimum(end, root) - 1  # the last row runs even if its key is there
    index = begin + i
    is_needed = is_row & (index < root)
    own_history = history + slot.to(tl.int64) * history_stride
    own_table = page_table + slot.to(tl.int64) * table_stride
    page = tl.load(own_table + tl.maximum(index, 0) // PAGE, mask=is_needed, other=0)
    tl.store(tokens + row, tl.load(own_history + index + 1, mask=is_needed, other=0), mask=is_row)
    tl.store(places + row, tl.where(is_needed, page * PAGE + tl.maximum(index, 0) % PAGE, -1), mask=is_row)
    tl.store(last + tree, tree * num_rows + root - 1 - begin)
    tl.store(slots + row, tl.where(is_needed, slot, -1), mask=is_row)
    tl.store(positions + row, index, mask=is_row)
    tl.store(write + row, tl.where(index + 1 >= end, index + 1, -1), mask=is_row)
    tl.store(key_start + row, tl.load(key_starts + slot) + tl.zeros((BLOCK,), tl.int32), mask=is_row)
    tl.store(context_len + row, index + 2, mask=is_row)
    tl.store(tail_len + row, tl.zeros((BLOCK,), tl.int32), mask=is_row)
    tl.debug_barrier()  # all have read the old end
    tl.store(draft_ends + slot, tl.maximum(end, root + 1))


def tree_rows(trees: Tensor, state: DeviceSlots, nodes: TreeNodes, rows: DeviceRows) -> Launch:
    """Fill `rows` [B * N] with the nodes of trees below the roots of slots `trees` [B] int32, -1 for a dead tree; and
    enter the roots' tokens. Without rows.path the trees have to be chains. rows.path is nodes.paths without the root:
    `nodes.paths[..., 1:].flatten(0, 1)`. Raises ValueError for tensors that do not fit."""
    B, N = nodes.tokens.shape
    check_integers("nodes.tokens", nodes.tokens.view(B * N), B * N, like=rows.slots)
    given = None, nodes.depths, nodes.counts, state.history, nodes.tokens
    return _rows("TREE_ROWS", trees, state, given, rows, (0, 0, 0))


def level_rows(trees: Tensor, state: DeviceSlots, level: int, first: int, rows: DeviceRows) -> Launch:
    """Fill `rows` [B * m] with the draft's rows of a level, 1 and so on: row i of a tree has its key at KV index root +
    first + i. Without rows.path they continue a chain, and first is the level. Raises ValueError for tensors that do
    not fit."""
    if level < 1 or first < level:
        raise ValueError(f"level={level}, first={first}: levels begin at 1, and each has a row at least")
    return _rows("LEVEL_ROWS", trees, state, (state.first_draft_keys, None, None, None, None), rows, (level, first, -1))


def lag_rows(
    trees: Tensor, state: DeviceSlots, tokens: Tensor, places: Tensor, last: Tensor, rows: DeviceRows
) -> Launch:
    """Fill `rows` [B * m] with the draft's rows whose keys are missing up to the root of each slot in `trees` [B], the
    first ones first, dead rows behind them. A slot may lack m keys at most; its last row runs even if no key is
    missing.

    Also written, int32: tokens [B * m], those that the rows read; places [B * m], of the features that they read, -1
    for a dead row; last [B], the number of each slot's last row, -1 for a dead tree; and the slots' draft_ends. Raises
    ValueError for tensors that do not fit."""
    B, M = len(trees), rows.num
    _check_rows(trees, rows)
    check_integers("tokens", tokens, M, like=rows.slots)
    check_integers("places", places, M, like=rows.slots)
    check_integers("last", last, B, like=rows.slots)
    return Launch(
        "LAG_ROWS", lag_kernel, (B,),
        (trees, state.roots, state.draft_ends, state.first_draft_keys, state.history, state.page_table, tokens, places,
         last, *_columns(rows), M // B, state.history.stride(0), state.page_table.stride(0)),
        {"PAGE": state.page_size, "BLOCK": triton.next_power_of_2(M // B)},
        bytes=size_of(tokens, places, last, *_columns(rows)),
    )  # fmt: skip


def _rows(
    name: str,
    trees: Tensor,
    state: DeviceSlots,
    given: tuple[Tensor | None, ...],
    rows: DeviceRows,
    offsets: tuple[int, int, int],
) -> Launch:
    B, M = len(trees), rows.num
    _check_rows(trees, rows)
    return Launch(
        name, rows_kernel, (B,),
        (trees, state.roots, *given, *_columns(rows), M // B, state.history.stride(0), *offsets),
        {"IS_CHAIN": rows.path is None, "BLOCK": triton.next_power_of_2(M // B)}, bytes=size_of(*_columns(rows)),
    )  # fmt: skip


def _columns(rows: DeviceRows) -> tuple[Tensor, ...]:
    return rows.slots, rows.positions, rows.write, rows.key_start, rows.context_len, rows.tail_len


def _check_rows(trees: Tensor, rows: DeviceRows) -> None:
    B = len(trees)
    check_integers("trees", trees, B, like=rows.slots)
    if rows.num % B or rows.group != rows.num // B:
        raise ValueError(f"{rows.num} rows in groups of {rows.group} for {B} trees; give a group for each tree")
