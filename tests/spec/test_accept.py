"""The native accept scan and its vectorised twin: one answer for every tree and every draw."""

from __future__ import annotations

import numpy as np
import pytest
from aquiline.spec.accept import accept, accept_native
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import needs_native
from tests.spec.test_tree import forests, topology_of

from aquiline.errors import NativeError
from aquiline.ops import cpu
from aquiline.spec.tree import DraftTree, chain_topology

pytestmark = needs_native


@given(forests(), st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_native_equals_its_twin(forest: list[list[int]], seed: int, agreement: float) -> None:
    """Siblings carry different tokens; draws follow some child of their row with probability `agreement`."""
    rng = np.random.default_rng(seed)
    topology = topology_of(forest)
    tokens = rng.integers(0, 1000, len(topology.parents)).astype(np.int32)
    drawn = rng.integers(-1, 1000, len(tokens)).astype(np.int32)
    for row, parent in enumerate(topology.parent_rows.tolist()):
        tokens[row] = tokens[row] % 10 + 10 * row
        if row != parent and rng.random() < agreement:
            drawn[parent] = tokens[row]
    tree = DraftTree(topology, tokens)
    expected, got = accept(tree, drawn), accept_native(tree, drawn)
    for name in ("num_accepted", "path", "tokens"):
        ours, theirs = getattr(got, name), getattr(expected, name)
        assert ours.dtype == np.int32 and np.array_equal(ours, theirs), name


def test_nobody_drafts() -> None:
    tree = DraftTree(chain_topology(2, 1), np.array([5, 6], np.int32))
    result = accept_native(tree, np.array([7, -1], np.int32))
    assert result.num_accepted.tolist() == [0, 0] and result.tokens.tolist() == [[7], [-1]]


@pytest.mark.parametrize(
    ("parents", "offsets", "named"),
    [
        ([0, 1, 0], [0, 3], r"parents\[1\]=1"),
        ([0, -1, 0], [0, 3], r"parents\[1\]=-1"),
        ([0, 0, 0], [0, 0, 3], r"offsets\[1\]=0"),
        ([0, 0, 0], [1, 3], r"offsets\[0\]=1"),
    ],
)
def test_what_is_no_forest_is_refused(parents: list[int], offsets: list[int], named: str) -> None:
    rows = np.zeros(3, np.int32)
    with pytest.raises(NativeError, match=named):
        cpu.accept(rows, rows, np.array(parents, np.int32), np.array(offsets, np.int32), 2)
