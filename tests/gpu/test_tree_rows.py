"""Rows that kernels lay out for trees and drafts: what they read, where their keys go and which keys they see."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from tests.backends.playing import Player, words
from tests.conftest import tiny_pair, weights_of
from tests.gpu.running import DEVICE, int32
from torch import Tensor

from aquiline.backends.torch.torch_backend import TorchBackend
from aquiline.backends.torch.torch_pair import TorchPair
from aquiline.backends.torch.torch_rows import tree_block
from aquiline.backends.torch.trees import Trees
from aquiline.config import SamplingParams
from aquiline.ops.triton.rows import DeviceRows
from aquiline.ops.triton.tree_growth import TreeNodes
from aquiline.ops.triton.tree_rows import DeviceSlots, lag_rows, level_rows, tree_rows
from aquiline.spec.drafting import Chain

PARENTS = {"plain": [0], "chain": [0, 0, 1, 2], "tree": [0, 0, 0, 0, 1, 1, 3, 4, 6]}


@lru_cache
def played() -> TorchBackend:
    """A backend whose slots stand at other roots."""
    player = Player(TorchPair(*weights_of(*tiny_pair(3)), "float32"), num_slots=3)
    for i in range(3):
        player.add(words(20 + 5 * i, i), Chain(2), SamplingParams(max_tokens=64, seed=i))
    player.run(4)
    assert isinstance(player.backend, TorchBackend)
    return player.backend


def slots_of(backend: TorchBackend) -> DeviceSlots:
    own = backend.state
    columns = (x.clone().to(DEVICE) for x in (own.root, own.draft_end, own.first_draft_key, own.history, own.table))
    return DeviceSlots(*columns, own.sizes.page_size)


def new_rows(state: DeviceSlots, num_trees: int, each: int, path: Tensor | None = None) -> DeviceRows:
    columns = int32([[-99] * (num_trees * each)] * 6)
    return DeviceRows(*columns, path, state.page_table, state.page_size, each)


def seen(rows: DeviceRows, row: int) -> list[int]:
    """The KV indices that a row sees, in order."""
    start, end, tail = (int(column[row]) for column in (rows.key_start, rows.context_len, rows.tail_len))
    path = [] if rows.path is None else rows.path[row, :tail].tolist()
    assert len(path) == tail
    return [*range(start, end), *(end - 1 + node for node in path)]


@pytest.mark.parametrize("parents", PARENTS.values(), ids=PARENTS)
def test_rows_of_trees_are_the_twins(parents: list[int]) -> None:
    backend = played()
    state, own = slots_of(backend), backend.state
    trees, numbers, N = int32([2, -1, 0]), [2, 0], len(parents)
    nodes = TreeNodes.of(parents, 3, trees.device)
    nodes.tokens[:] = int32(range(3 * N)).view(3, N)
    nodes.counts[2] = max(1, N - 1)
    is_chain = parents != PARENTS["tree"]
    rows = new_rows(state, 3, N, None if is_chain else nodes.paths[..., 1:].flatten(0, 1))
    tree_rows(trees, state, nodes, rows).run()

    live = [0, 2]
    columns = (x[live].long().cpu() for x in (nodes.tokens, nodes.parents, nodes.depths))
    twin = Trees(*columns, tuple(nodes.counts[live].tolist()), int(nodes.depths.max()))
    base = own.root[torch.tensor(numbers)].tolist()
    assert torch.equal(nodes.tokens[live, 0].cpu(), own.history[torch.tensor(numbers), torch.tensor(base)])
    block = tree_block(own, numbers, torch.tensor(base), twin, twin.ancestors())
    for b, tree in enumerate(live):
        for i in range(twin.sizes[b]):
            row = tree * N + i
            assert int(rows.slots[row]) == numbers[b] and int(rows.positions[row]) == int(block.positions[b, i])
            assert int(rows.write[row]) == int(block.keys[b, i])
            path = block.path[b, i, : int(twin.depths[b, i]) + 1].tolist()
            assert seen(rows, row) == [*range(base[b]), *(base[b] + node for node in path)]
    assert rows.slots[N : 2 * N].tolist() == [-1] * N
    assert rows.slots[2 * N + twin.sizes[1] :].tolist() == [-1] * (N - twin.sizes[1])


def test_rows_of_a_draft_stand_one_position_before_and_see_their_paths() -> None:
    state = slots_of(played())
    state.first_draft_keys[1] = 5
    trees = int32([1, -1, 2])
    path = int32([[1, 4], [3, 5], [2, 6]]).repeat(3, 1)
    rows = new_rows(state, 3, 3, path)
    level_rows(trees, state, 2, 4, rows).run()
    for tree, slot, start in ((0, 1, 5), (2, 2, 1)):
        root = int(state.roots[slot])
        for m in range(3):
            row = 3 * tree + m
            assert (int(rows.slots[row]), int(rows.positions[row]), int(rows.write[row])) == (
                slot,
                root + 1,
                root + 4 + m,
            )
            assert seen(rows, row) == [*range(start, root + 1), *(root + step for step in path[m].tolist())]
    assert rows.slots[3:6].tolist() == [-1] * 3


def test_rows_of_a_drafted_chain_see_all_before_them() -> None:
    state = slots_of(played())
    rows = new_rows(state, 1, 1)
    level_rows(int32([1]), state, 3, 3, rows).run()
    root = int(state.roots[1])
    assert (int(rows.positions[0]), int(rows.write[0])) == (root + 2, root + 3)
    assert seen(rows, 0) == list(range(1, root + 4))


@pytest.mark.parametrize("lag", [0, 1, 3, 4])
def test_missing_draft_keys_get_their_rows(lag: int) -> None:
    backend = played()
    state, slot, width = slots_of(backend), 1, 4
    root = int(state.roots[slot])
    state.draft_ends[slot] = end = root + 1 - lag
    trees = int32([-1, slot])
    rows = new_rows(state, 2, width)
    tokens, places, last = int32([-9] * 2 * width), int32([-9] * 2 * width), int32([0, 0])
    lag_rows(trees, state, tokens, places, last, rows).run()
    needed = list(range(min(end, root) - 1, root))
    for i, index in enumerate(needed):
        row = width + i
        assert (int(rows.slots[row]), int(rows.positions[row])) == (slot, index)
        assert int(tokens[row]) == int(state.history[slot, index + 1])
        assert int(places[row]) == int(backend.state.places(torch.tensor([slot]), torch.tensor([[index]])))
        assert int(rows.write[row]) == (index + 1 if index + 1 >= end else -1)
        assert seen(rows, row) == list(range(1, index + 2))
    assert (
        rows.slots[width + len(needed) :].tolist()
        == [-1] * (width - len(needed))
        == places[width + len(needed) :].tolist()
    )
    assert rows.slots[:width].tolist() == [-1] * width and last.tolist() == [-1, width + len(needed) - 1]
    assert int(state.draft_ends[slot]) == root + 1
