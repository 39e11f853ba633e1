"""Rows of a forward: the nodes of trees, and pieces of prompts. What a row sees is said by numbers, not by a mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aquiline.backends.torch.slot_state import SlotState
from aquiline.backends.torch.trees import Trees


@dataclass(frozen=True)
class RowBlock:
    """n rows of each of b slots.

    slots [b]; tokens [b, n]; positions [b, n]: of the rotation; keys [b, n]: the KV indices at which the rows' own keys
    are written, -1 for those that are not. order [b, n]: how many keys stand before the row on its path. A row sees key
    number j for first <= j <= order, first [b], and in a layer with a window only j > order - window. Key number j
    stands at KV index j up to base [b, n], and behind it at base + path[j - base], path [b, n, D + 1]. longest: every
    KV index that is seen is below it."""

    slots: Tensor
    tokens: Tensor
    positions: Tensor
    keys: Tensor
    order: Tensor
    base: Tensor
    path: Tensor
    first: Tensor
    longest: int


def tree_block(state: SlotState, numbers: list[int], base: Tensor, trees: Trees, on_path: Tensor) -> RowBlock:
    """The rows of trees. Node i of a slot stands at position root + depth; its key is written at KV index root + i. It
    sees the keys before its root and those of its own path. numbers: the slots; base [B]: their roots."""
    N, slots = trees.num_nodes, torch.tensor(numbers, device=state.device)
    longest = max(state.hosts[slot].max_root for slot in numbers) + N
    keys = torch.where(trees.is_node(), base[:, None] + torch.arange(N, device=state.device), -1)
    positions, first = base[:, None] + trees.depths, torch.zeros_like(base)
    return RowBlock(
        slots,
        trees.tokens,
        positions,
        keys,
        positions,
        base[:, None].expand(-1, N),
        trees.levels(on_path),
        first,
        longest,
    )


def prompt_block(state: SlotState, slot: int, start: int, end: int) -> RowBlock:
    """The rows of tokens [start, end) of a slot; each sees the keys up to its own. Keys in cached pages are read and
    not written."""
    slots = torch.tensor([slot], device=state.device)
    own = torch.arange(start, end, device=state.device)[None]
    num_hit = state.hosts[slot].admit.num_hit if slot in state.hosts else 0
    keys, path = torch.where(own >= num_hit, own, -1), torch.zeros_like(own)[..., None]
    longest = max(2, end)  # a product with one key is added up otherwise
    tokens = state.history[slot, start:end][None]
    return RowBlock(slots, tokens, own, keys, own, own, path, torch.zeros_like(slots), longest)
