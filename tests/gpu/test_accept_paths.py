"""Which paths kernels keep, against the torch twin, and what they move."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.gpu.running import DEVICE, int32, poison, randn
from torch import Tensor

from aquiline.backends.torch.trees import Trees, accept
from aquiline.ops.triton.accept import KeptPaths, accept_paths, copy_rows, keep_paths, move_keys
from aquiline.ops.triton.tree_growth import TreeNodes
from aquiline.ops.triton.tree_rows import DeviceSlots

PAGE, NUM_SLOTS = 8, 5


def random_nodes(N: int, num_trees: int, seed: int, choices: int) -> tuple[TreeNodes, Tensor]:
    """A random tree, its tokens, siblings apart, and what the target draws at its nodes: often a child's token."""
    random = np.random.default_rng(seed)
    parents = [0, *(int(random.integers(max(0, i - 5), i)) for i in range(1, N))]
    nodes = TreeNodes.of(parents, num_trees, DEVICE)
    drawn = int32(random.integers(0, choices, (num_trees, N)))
    for tree in range(num_trees):
        for parent in range(N):
            children = [i for i in range(1, N) if parents[i] == parent]
            nodes.tokens[tree, children] = int32(random.permutation(choices)[: len(children)])
    return nodes, drawn


def slots_of(num: int, seed: int) -> DeviceSlots:
    random = np.random.default_rng(seed)
    pages = int32(random.permutation(num * 12).reshape(num, 12))
    history = int32(random.integers(0, 99, (num, 97)))
    columns = (int32(random.integers(5, 40, num)) for _ in range(3))
    return DeviceSlots(*columns, history, pages, PAGE)


def twin_of(nodes: TreeNodes, live: Tensor) -> Trees:
    """The live trees on the CPU, where the twin runs."""
    columns = (x.cpu()[live].long() for x in (nodes.tokens, nodes.parents, nodes.depths))
    return Trees(*columns, tuple(nodes.counts[live].tolist()), nodes.paths.shape[2] - 1)


@pytest.mark.parametrize(("N", "choices"), [(1, 9), (2, 2), (6, 5), (17, 5), (64, 5), (65, 6)])
def test_kept_paths_are_the_twins(N: int, choices: int) -> None:
    lengths = set()
    for seed in range(8):
        nodes, drawn = random_nodes(N, 4, seed, choices)
        nodes.counts[3] = max(1, N - 3)
        trees, live = int32([3, -1, 0, 1]), torch.tensor([0, 2, 3])
        kept = KeptPaths.new(4, nodes.paths.shape[2], drawn.device)
        accept_paths(trees, nodes, drawn, int32([99] * NUM_SLOTS), kept).run()
        twin = twin_of(nodes, live)
        expected = accept(twin, twin.ancestors(), drawn.cpu()[live].long())
        assert torch.equal(kept.num_accepted.cpu()[live].long(), expected.num_accepted)
        assert torch.equal(kept.tokens.cpu()[live].long(), expected.tokens)
        assert torch.equal(kept.path.cpu()[live].long(), torch.where(expected.is_kept, expected.path, 0))
        assert int(kept.num_accepted[1]) == 0 and set(kept.tokens[1].tolist()) == {-1}, "a dead tree keeps nothing"
        lengths.update(expected.num_accepted.tolist())
    assert N < 6 or max(lengths) > 1 > min(lengths), "nothing and more than a token is kept here"


def test_a_limit_ends_the_path_and_the_token_drawn_there_follows() -> None:
    nodes = TreeNodes.of([0, 0, 1, 2], 1, DEVICE)
    nodes.tokens[0] = int32([7, 11, 12, 13])
    drawn, trees = int32([[11, 12, 13, 14]]), int32([2])
    for limit in range(5):
        kept = KeptPaths.new(1, 4, drawn.device)
        accept_paths(trees, nodes, drawn, int32([9, 9, limit]), kept).run()
        count = min(limit, 3)
        assert int(kept.num_accepted[0]) == count
        assert kept.tokens[0].tolist() == [11, 12, 13, 14][: count + 1] + [-1] * (3 - count)
        assert kept.path[0].tolist() == [*range(count + 1), *[0] * (3 - count)]


def test_logits_that_are_no_numbers_end_a_path() -> None:
    nodes = TreeNodes.of([0, 0, 1], 1, DEVICE)
    nodes.tokens[0] = int32([7, 11, 12])
    kept = KeptPaths.new(1, 3, nodes.tokens.device)
    trees, limits = int32([0]), int32([9])
    accept_paths(trees, nodes, int32([[11, -1, 12]]), limits, kept).run()
    assert kept.tokens[0].tolist() == [11, -1, -1] and int(kept.num_accepted[0]) == 1
    state = slots_of(1, 0)
    root = int(state.roots[0])
    keep_paths(trees, state, 3, kept).run()
    assert state.history[0, root + 1 : root + 3].tolist() == [11, 0] and int(state.roots[0]) == root + 2


def places(state: DeviceSlots, slot: int, index: int) -> int:
    return int(state.page_table[slot, index // PAGE]) * PAGE + index % PAGE


@pytest.mark.parametrize("seed", range(4))
def test_kept_keys_stand_in_order_behind_the_root_and_nothing_else_moves(seed: int) -> None:
    nodes, drawn = random_nodes(17, 3, seed, 4)
    state, trees = slots_of(NUM_SLOTS, seed), int32([4, -1, 2])
    width = nodes.paths.shape[2]
    for node in nodes.paths[0, 16, 1:].tolist():  # the first tree keeps the path of its last node
        drawn[0, nodes.parents[0, node]] = nodes.tokens[0, node] if node else drawn[0, 0]
    kept = KeptPaths.new(3, width, drawn.device)
    accept_paths(trees, nodes, drawn, int32([99] * NUM_SLOTS), kept).run()
    roots, history = state.roots.clone(), state.history.clone()
    keep_paths(trees, state, 17, kept).run()
    k_cache = torch.arange(2 * NUM_SLOTS * 12 * PAGE * 2 * 16, dtype=torch.float32, device=DEVICE).view(2, -1, 2, 16)
    v_cache, k_before = -k_cache, k_cache.clone()
    move_keys(k_cache, v_cache, kept).run()

    expected = k_before.clone()
    for tree, slot in ((0, 4), (2, 2)):
        root, count = int(roots[slot]), int(kept.num_accepted[tree])
        path = kept.path[tree, : count + 1].tolist()
        assert kept.rows[tree].tolist() == [17 * tree + node for node in path] + [-1] * (width - 1 - count)
        for level, node in enumerate(path):
            expected[:, places(state, slot, root + level)] = k_before[:, places(state, slot, root + node)]
            assert int(kept.targets[tree, level]) == places(state, slot, root + level)
        history[slot, root + 1 : root + 2 + count] = kept.tokens[tree, : count + 1]
        roots[slot] = root + count + 1
        assert int(kept.roots[tree]) == root
    assert torch.equal(k_cache, expected) and torch.equal(v_cache, -expected)
    assert torch.equal(state.roots, roots) and torch.equal(state.history, history)
    assert kept.rows[1].tolist() == [-1] * width and int(kept.roots[1]) == -1
    assert int(kept.num_accepted[0]) >= int(nodes.depths[0, 16]) > 1 and not torch.equal(k_cache, k_before)


def test_rows_are_gathered_and_scattered_and_dead_ones_left_alone() -> None:
    source = randn(6, 32)
    target = poison(9, 32, dtype=torch.float16)
    old, new = int32([4, 0, -1, 5]), int32([8, -1, 1, 2])
    copy_rows(source, target, from_rows=old, to_rows=new).run()
    assert torch.equal(target[[8, 2]], source[[4, 5]].half())
    assert target[[0, 1, 3, 4, 5, 6, 7]].isnan().all()
    copy_rows(source, target, from_rows=old).run()
    assert torch.equal(target[[0, 1, 3]], source[[4, 0, 5]].half())
