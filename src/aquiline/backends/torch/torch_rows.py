"""Rows of the target's forward: the nodes of trees, and pieces of prompts."""

from __future__ import annotations

import torch
from torch import Tensor

from aquiline.backends.torch.slot_state import SlotState
from aquiline.backends.torch.torch_pages import RowBlock
from aquiline.backends.torch.trees import Trees


def tree_block(state: SlotState, numbers: list[int], base: Tensor, trees: Trees, on_path: Tensor) -> RowBlock:
    """The rows of trees. Node i of a slot stands at position root + depth; its key is written at KV index root + i. It
    sees the keys before its root and those of its own path. numbers: the slots; base [B]: their roots."""
    N, slots = trees.num_nodes, torch.tensor(numbers, device=state.device)
    longest = max(state.hosts[slot].max_root for slot in numbers) + N
    index = torch.arange(longest, device=state.device).expand(len(numbers), -1)
    nodes = base[:, None] + torch.arange(N, device=state.device)
    visible = (index < base[:, None])[:, None].expand(-1, N, -1).clone()
    visible.scatter_(2, nodes[:, None].expand(-1, N, -1), on_path)
    positions = base[:, None] + trees.depths
    key_order = index.clone().scatter_(1, nodes, positions)
    write = state.places(slots, nodes, trees.is_node())
    return RowBlock(trees.tokens, positions, write, state.places(slots, index), visible, positions, key_order)


def prompt_block(state: SlotState, slot: int, start: int, end: int) -> RowBlock:
    """The rows of tokens [start, end) of a slot; each sees the keys up to its own. Keys in cached pages are read and
    not written."""
    slots = torch.tensor([slot], device=state.device)
    index = torch.arange(max(2, end), device=state.device)[None]  # a product with one key is added up otherwise
    own = index[:, start:end]
    num_hit = state.hosts[slot].admit.num_hit if slot in state.hosts else 0
    visible = index[:, None] <= own[..., None]
    write = state.places(slots, own, own >= num_hit)
    return RowBlock(state.history[slot, start:end][None], own, write, state.places(slots, index), visible, own, index)
