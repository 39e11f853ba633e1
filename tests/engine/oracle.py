"""Drafters that know the answer, or are sure not to: the two ends every acceptance lies between."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from aquiline.spec.drafters import Drafter, DraftSession, Pending, Roots

from aquiline.spec.tree import DraftTree, StaticShape, chain_topology, static_shape, static_topology


class Oracle:
    """Drafts the true continuation of every sequence; `truth[slot]` holds prompt and output by position.

    With static paths the truth hangs on the path of last choices, so that every accepted node has to be moved."""

    def __init__(self, num_spec_tokens: int, truth: dict[int, list[int]], vocab_size: int, wrong: bool = False) -> None:
        self.K, self.truth, self.vocab_size, self.wrong = num_spec_tokens, truth, vocab_size, wrong

    def next_tokens(self, roots: Roots) -> np.ndarray:
        rows = []
        for slot, position in zip(roots.slots.tolist(), roots.positions.tolist(), strict=True):
            ahead = (self.truth[slot] + [0] * (self.K + 1))[position + 1 : position + 1 + self.K]
            rows.append([(t + self.wrong) % self.vocab_size for t in ahead])
        return np.array(rows, np.int32)

    def propose(self, session: DraftSession, pending: Pending, roots: Roots) -> DraftTree:
        session.extend(pending, roots)
        tokens = np.concatenate((roots.tokens[:, None], self.next_tokens(roots)), axis=1)
        return DraftTree(chain_topology(len(roots.slots), self.K + 1), tokens.astype(np.int32).ravel())


class TreeOracle(Oracle):
    """The truth below decoys: each level's first node is wrong and childless, its second is true."""

    def propose(self, session: DraftSession, pending: Pending, roots: Roots) -> DraftTree:
        session.extend(pending, roots)
        shape = comb(self.K)
        true = self.next_tokens(roots)
        depths, ranks = np.array(shape.depths), np.array(shape.ranks)
        tokens = np.empty((len(roots.slots), len(depths)), np.int32)
        tokens[:, 0] = roots.tokens
        tokens[:, 1:] = (true[:, depths[1:] - 1] + (ranks[1:] == 0)) % self.vocab_size
        return DraftTree(static_topology(len(roots.slots), shape), tokens.ravel())


def comb(depth: int) -> StaticShape:
    """Two children per level, the second carrying on."""
    return static_shape(tuple((*(1,) * level, rank) for level in range(depth) for rank in (0, 1)))


class Taught:
    """A drafter whose trees have the truth written over the path to one of their nodes, another with every root: in
    trees of any shape, paths of any length are accepted and dropped, and all of the drafter's own rows run."""

    def __init__(self, drafter: Drafter, truth: Callable[[int], list[int]]) -> None:
        self.drafter, self.truth = drafter, truth  # truth(slot): prompt and output of the sequence there

    def propose(self, session: DraftSession, pending: Pending, roots: Roots) -> DraftTree:
        tree = self.drafter.propose(session, pending, roots)
        shape, tokens = tree.topology, tree.tokens.copy()
        for b, (slot, position) in enumerate(zip(roots.slots.tolist(), roots.positions.tolist(), strict=True)):
            first, end = shape.offsets[b], shape.offsets[b + 1]
            row = first + position * 7 // 3 % (end - first)
            path = shape.paths[row, : shape.depths[row] + 1]
            ahead = self.truth(slot)[position + 1 : position + 1 + shape.depths[row]]
            for parent, node, token in zip(path, path[1:], ahead, strict=False):
                siblings = first + np.flatnonzero(shape.parents[first:end] == parent)
                twin = siblings[(tokens[siblings] == token) & (siblings > first)]
                tokens[twin] = tokens[first + node]
                tokens[first + node] = token
        return DraftTree(shape, tokens)
