from __future__ import annotations

import numpy as np
import pytest
from aquiline.spec.drafters import Roots, best_first, depths_of, select
from hypothesis import given
from hypothesis import strategies as st

from aquiline.config import DEFAULT_STATIC_PATHS
from aquiline.spec.drafting import drafting
from aquiline.spec.tree import Topology, ancestor_masks, chain_topology, static_shape, static_topology


@st.composite
def forests(draw: st.DrawFn) -> list[list[int]]:
    """Up to four trees as slot-local parent lists, parents before children."""
    sizes = draw(st.lists(st.integers(1, 90), min_size=1, max_size=4))
    return [[0] + [draw(st.integers(0, i - 1)) for i in range(1, n)] for n in sizes]


def topology_of(forest: list[list[int]]) -> Topology:
    offsets = np.cumsum([0] + [len(t) for t in forest]).astype(np.int32)
    parents = np.array([p for tree in forest for p in tree], np.int32)
    depths = depths_of(parents + np.repeat(offsets[:-1], [len(t) for t in forest]))
    return Topology(parents, depths.astype(np.int32), offsets)


def walk(parents: list[int], node: int) -> list[int]:
    """Root to node, one parent at a time."""
    path = [node]
    while path[0] != 0:
        path.insert(0, parents[path[0]])
    return path


@given(forests())
def test_masks_depths_and_paths_equal_a_walk_up_the_parents(forest: list[list[int]]) -> None:
    shape = topology_of(forest)
    for b, parents in enumerate(forest):
        for node in range(len(parents)):
            row, path = int(shape.offsets[b]) + node, walk(parents, node)
            bits = sum(int(np.uint64(word)) << 64 * i for i, word in enumerate(shape.ancestors[row].view(np.uint64)))
            assert bits == sum(1 << i for i in path)
            assert shape.depths[row] == len(path) - 1
            assert shape.paths[row, : len(path)].tolist() == path
            assert not shape.paths[row, len(path) :].any()
            assert shape.local[row] == node and shape.owner[row] == b


def slow_tree(tokens: list[int], scores: list[float], parents: list[int], count: int) -> list[tuple[int, ...]]:
    """The best candidates as token paths, built one by one: highest score first, ties to the earlier candidate."""
    order = sorted(range(len(tokens)), key=lambda i: (-scores[i], i))[:count]

    def path(i: int) -> tuple[int, ...]:
        return (*(path(parents[i]) if parents[i] >= 0 else ()), tokens[i])

    return [path(i) for i in sorted(order)]


def test_selection_equals_a_slow_construction_on_1000_trees_with_ties() -> None:
    rng = np.random.default_rng(0)
    for _ in range(1000):
        B, k, depth = int(rng.integers(1, 4)), int(rng.integers(1, 6)), int(rng.integers(0, 5))
        total = k + depth * k * k
        num_nodes = int(rng.integers(2, min(total, 255) + 2))
        parents, scores = np.full((B, k), -1), -rng.integers(0, 4, (B, k)).astype(np.float32)
        level_scores, first = scores, 0
        for _level in range(depth):
            beam = best_first(level_scores, k)
            parent_scores = np.take_along_axis(level_scores, beam, 1)
            # log-probabilities of 0 are common: a child then ties with its parent
            children = parent_scores[:, :, None] - rng.integers(0, 3, (B, k, k)).astype(np.float32)
            parents = np.concatenate((parents, np.repeat(first + beam, k, 1)), 1)
            first += level_scores.shape[1]
            level_scores = children.reshape(B, -1)
            scores = np.concatenate((scores, level_scores), 1)
        tokens = rng.integers(0, 1000, (B, total)).astype(np.int32)
        zeros = np.zeros(B, np.int32)
        tree = select(Roots(zeros, zeros, zeros), tokens, scores, parents.astype(np.int32), num_nodes)
        shape = tree.topology
        for b in range(B):
            rows = range(int(shape.offsets[b]) + 1, int(shape.offsets[b + 1]))
            base = int(shape.offsets[b])
            got = [tuple(tree.tokens[base + shape.paths[r, 1 : shape.depths[r] + 1]].tolist()) for r in rows]
            assert got == slow_tree(tokens[b].tolist(), scores[b].tolist(), parents[b].tolist(), num_nodes - 1)
            assert (shape.parents[list(rows)] < shape.local[list(rows)]).all()


def test_chain_is_a_chain_and_static_follows_its_paths() -> None:
    chain = chain_topology(3, 5)
    assert chain.is_chain and chain.depths.tolist() == [0, 1, 2, 3, 4] * 3
    shape = static_shape(DEFAULT_STATIC_PATHS)
    topology = static_topology(2, shape)
    assert not topology.is_chain
    named = {()} | set(DEFAULT_STATIC_PATHS)
    for node in range(len(shape.parents)):
        path = tuple(shape.ranks[n] for n in walk(list(shape.parents), node)[1:])
        assert path in named


def test_masks_span_several_words() -> None:
    parents = np.maximum(np.arange(256, dtype=np.int32) - 1, 0)
    masks = ancestor_masks(parents, np.arange(256, dtype=np.int32), 255)
    assert masks.shape == (256, 4)
    assert (masks[255] == -1).all() and masks[64].tolist() == [-1, 1, 0, 0]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"drafter": "tree"}, "drafter='tree'"),
        ({"drafter": "chain", "num_spec_tokens": 0}, "num_spec_tokens=0"),
        ({"drafter": "chain", "num_spec_tokens": 17}, "num_spec_tokens=17"),
        ({"drafter": "dynamic", "top_k": 2, "depth": 1, "num_nodes": 8}, "num_nodes=8"),
        ({"drafter": "dynamic", "top_k": 0}, "draft_top_k=0"),
        ({"drafter": "static", "static_paths": ((0, 1),)}, "parent (0,) is missing"),
        ({"drafter": "static", "static_paths": ((0,), (0,))}, "twice"),
    ],
)
def test_impossible_settings_are_refused_by_name(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match="=") as error:
        drafting(**settings)  # type: ignore[arg-type]
    assert named in str(error.value)
