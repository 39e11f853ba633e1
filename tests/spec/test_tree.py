from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import needs_native
from tests.ops.native_calls import select
from tests.spec.topologies import chain_topology, paths

from aquiline.spec.drafting import DEFAULT_STATIC_PATHS
from aquiline.spec.registry import drafting_named
from aquiline.spec.tree import Topology, ancestor_masks, static_shape


@st.composite
def forests(draw: st.DrawFn) -> list[list[int]]:
    """Up to four trees as slot-local parent lists, parents before children."""
    sizes = draw(st.lists(st.integers(1, 90), min_size=1, max_size=4))
    return [[0] + [draw(st.integers(0, i - 1)) for i in range(1, n)] for n in sizes]


def topology_of(forest: list[list[int]]) -> Topology:
    offsets = np.cumsum([0] + [len(t) for t in forest]).astype(np.int32)
    parents = np.array([p for tree in forest for p in tree], np.int32)
    depths = [len(walk(tree, node)) - 1 for tree in forest for node in range(len(tree))]
    return Topology(parents, np.array(depths, np.int32), offsets)


def walk(parents: list[int], node: int) -> list[int]:
    """Root to node, one parent at a time."""
    path = [node]
    while path[0] != 0:
        path.insert(0, parents[path[0]])
    return path


@given(forests())
def test_masks_depths_and_paths_equal_a_walk_up_the_parents(forest: list[list[int]]) -> None:
    shape = topology_of(forest)
    found = paths(shape)
    for b, parents in enumerate(forest):
        for node in range(len(parents)):
            row, path = int(shape.offsets[b]) + node, walk(parents, node)
            bits = sum(int(np.uint64(word)) << 64 * i for i, word in enumerate(shape.ancestors[row].view(np.uint64)))
            assert bits == sum(1 << i for i in path)
            assert shape.depths[row] == len(path) - 1
            assert found[row, : len(path)].tolist() == path
            assert not found[row, len(path) :].any()
            assert shape.local[row] == node and shape.owner[row] == b


def slow_tree(tokens: list[int], scores: list[float], parents: list[int], count: int) -> list[tuple[int, ...]]:
    """The best candidates as token paths, built one by one: highest score first, ties to the earlier candidate."""
    order = sorted(range(len(tokens)), key=lambda i: (-scores[i], i))[:count]

    def path(i: int) -> tuple[int, ...]:
        return (*(path(parents[i]) if parents[i] >= 0 else ()), tokens[i])

    return [path(i) for i in sorted(order)]


def best(scores: list[float], count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: -scores[i])[:count]


@needs_native
def test_selection_equals_a_slow_construction_on_1000_trees_with_ties() -> None:
    rng = np.random.default_rng(0)
    for _ in range(1000):
        k, depth = int(rng.integers(1, 6)), int(rng.integers(0, 5))
        parents, scores = [-1] * k, [-float(n) for n in rng.integers(0, 4, k)]
        first, level = 0, list(scores)
        for _level in range(depth):
            beam = best(level, k)
            # log-probabilities of 0 are common: a child then ties with its parent
            level, above = [level[i] - float(n) for i in beam for n in rng.integers(0, 3, k)], len(level)
            parents += [first + i for i in beam for _ in range(k)]
            scores, first = scores + level, first + above
        tokens = [int(token) for token in rng.integers(0, 1000, len(scores))]
        num_nodes = int(rng.integers(2, min(len(scores), 255) + 2))
        chosen, above_nodes = select(np.array(scores, np.float32), np.array(parents, np.int32), num_nodes)
        named = [()]
        for candidate, parent in zip(chosen.tolist(), above_nodes[1:].tolist(), strict=True):
            assert parent < len(named), "parents stand first"
            named.append((*named[parent], tokens[candidate]))
        assert named[1:] == slow_tree(tokens, scores, parents, num_nodes - 1)


@needs_native
def test_scores_that_are_not_numbers_come_last() -> None:
    scores = np.array([np.nan, -2.0, np.nan, -1.0, -np.inf], np.float32)
    chosen = [select(scores, np.full(5, -1, np.int32), n)[0].tolist() for n in (2, 4, 5, 6)]
    assert chosen == [[3], [1, 3, 4], [0, 1, 3, 4], [0, 1, 2, 3, 4]]


def test_chain_is_a_chain_and_static_follows_its_paths() -> None:
    chain = chain_topology(3, 5)
    assert chain.is_chain and chain.depths.tolist() == [0, 1, 2, 3, 4] * 3
    shape = static_shape(DEFAULT_STATIC_PATHS)
    one = Topology(*(np.array(a, np.int32) for a in (shape.parents, shape.depths, (0, len(shape.parents)))))
    assert not one.is_chain
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
        ({"name": "tree"}, "drafter='tree'"),
        ({"name": "chain", "num_spec_tokens": 0}, "num_spec_tokens=0"),
        ({"name": "chain", "num_spec_tokens": 17}, "num_spec_tokens=17"),
        ({"name": "dynamic", "top_k": 2, "depth": 1, "num_nodes": 8}, "num_nodes=8"),
        ({"name": "dynamic", "top_k": 0}, "draft_top_k=0"),
        ({"name": "static", "static_paths": ((0, 1),)}, "parent (0,) is missing"),
        ({"name": "static", "static_paths": ((0,), (0,))}, "twice"),
    ],
)
def test_impossible_settings_are_refused_by_name(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match="=") as error:
        drafting_named(**settings)  # type: ignore[arg-type]
    assert named in str(error.value)
