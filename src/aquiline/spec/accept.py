"""Sample and match: keep the drafted path that equals what the target itself draws. Exact at any temperature.

At every node the target's own token is drawn from that node's distribution, with noise keyed by (seed, position), so
the token drawn after a given prefix is the same whether the prefix was drafted or not. In symbols, for row i with
parent p(i): ok(i) = token(i) == drawn(p(i)); i is accepted iff ok holds on its whole path; the deepest accepted row's
drawn token is the bonus. Source: EAGLE3.md §4.
"""

from __future__ import annotations

import numpy as np

from aquiline.ops import cpu
from aquiline.spec.tree import DraftTree
from aquiline.types import AcceptResult, Int32


def accept(tree: DraftTree, drawn: Int32) -> AcceptResult:
    """Select each slot's path given the token drawn [R] at every row."""
    shape = tree.topology
    firsts = shape.offsets[:-1]
    ok = tree.tokens == drawn[shape.parent_rows]
    ok[firsts] = True
    ok_bits = np.bitwise_or.reduceat(shape.bits * ok[:, None], firsts, axis=0)
    accepted = (shape.ancestors & ~ok_bits[shape.owner] == 0).all(axis=1)

    # Siblings carry different tokens, so one path is accepted; were two equal, the first is as good as any.
    num_rows = len(ok)
    best = np.maximum.reduceat(shape.rank * accepted, firsts)
    num_accepted = best // (num_rows + 1)
    leaf = num_rows - best % (num_rows + 1)

    path = shape.paths[leaf]
    tokens = np.full((len(leaf), shape.max_depth + 1), -1, np.int32)
    if shape.max_depth:
        tokens[:, :-1] = tree.tokens[firsts[:, None] + path[:, 1:]]
        tokens[np.arange(shape.max_depth + 1) >= num_accepted[:, None]] = -1
    tokens[np.arange(len(leaf)), num_accepted] = drawn[leaf]
    return AcceptResult(path=path, tokens=tokens, num_accepted=num_accepted)


def accept_native(tree: DraftTree, drawn: Int32) -> AcceptResult:
    """The same by one pass of the native library over each slot's rows. `accept` is its twin and the torch path's."""
    shape = tree.topology
    return cpu.accept(tree.tokens, drawn, shape.parents, shape.offsets, shape.max_depth)
