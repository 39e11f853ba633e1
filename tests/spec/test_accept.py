"""The library's acceptance of a tree and a vectorised twin: one answer for every tree and every draw."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.conftest import needs_native
from tests.ops.native_calls import accept
from tests.spec.test_tree import forests, topology_of
from tests.spec.topologies import bits, chain_topology, paths, rank

from aquiline.config import MAX_DEPTH
from aquiline.errors import NativeError
from aquiline.spec.tree import DraftTree, Topology
from aquiline.types import AcceptResult, Int32

pytestmark = needs_native


def twin(tree: DraftTree, drawn: Int32) -> AcceptResult:
    """All trees at once by ancestor masks: a node is accepted iff every node on its path was drawn at its parent."""
    shape = tree.topology
    firsts = shape.offsets[:-1]
    ok = tree.tokens == drawn[shape.parent_rows]
    ok[firsts] = True
    ok_bits = np.bitwise_or.reduceat(bits(shape) * ok[:, None], firsts, axis=0)
    accepted = (shape.ancestors & ~ok_bits[shape.owner] == 0).all(axis=1)
    num_rows = len(ok)
    best = np.maximum.reduceat(rank(shape) * accepted, firsts)
    num_accepted = best // (num_rows + 1)
    leaf = num_rows - best % (num_rows + 1)
    path = paths(shape)[leaf]
    tokens = np.full((len(leaf), shape.max_depth + 1), -1, np.int32)
    if shape.max_depth:
        tokens[:, :-1] = tree.tokens[firsts[:, None] + path[:, 1:]]
        tokens[np.arange(shape.max_depth + 1) >= num_accepted[:, None]] = -1
    tokens[np.arange(len(leaf)), num_accepted] = drawn[leaf]
    return AcceptResult(path=path, tokens=tokens, num_accepted=num_accepted)


@given(forests(), st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_the_law_equals_its_twin(forest: list[list[int]], seed: int, agreement: float) -> None:
    """Siblings carry different tokens; draws follow some child of their row with probability `agreement`."""
    rng = np.random.default_rng(seed)
    topology = topology_of(forest)
    assume(topology.max_depth <= MAX_DEPTH)
    tokens = rng.integers(0, 1000, len(topology.parents)).astype(np.int32)
    drawn = rng.integers(-1, 1000, len(tokens)).astype(np.int32)
    for row, parent in enumerate(topology.parent_rows.tolist()):
        tokens[row] = tokens[row] % 10 + 10 * row
        if row != parent and rng.random() < agreement:
            drawn[parent] = tokens[row]
    tree = DraftTree(topology, tokens)
    expected, got = twin(tree, drawn), accept(tree, drawn)
    for name in ("num_accepted", "path", "tokens"):
        ours, theirs = getattr(got, name), getattr(expected, name)
        assert ours.dtype == np.int32 and np.array_equal(ours, theirs), name


def test_nobody_drafts() -> None:
    tree = DraftTree(chain_topology(2, 1), np.array([5, 6], np.int32))
    result = accept(tree, np.array([7, -1], np.int32))
    assert result.num_accepted.tolist() == [0, 0] and result.tokens.tolist() == [[7], [-1]]


@pytest.mark.parametrize(("parents", "named"), [([0, 1, 0], r"parents\[1\]=1"), ([0, -1, 0], r"parents\[1\]=-1")])
def test_what_is_no_tree_is_refused(parents: list[int], named: str) -> None:
    rows = np.zeros(3, np.int32)
    shape = Topology(np.array(parents, np.int32), np.array([0, 1, 1], np.int32), np.array([0, 3], np.int32))
    with pytest.raises(NativeError, match=named):
        accept(DraftTree(shape, rows), rows)
