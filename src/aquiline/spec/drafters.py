"""Drafters: how a tree is grown below each root. None, chain, static and dynamic differ only in which rows they run.

A drafter sees a DraftSession: one extend pass over the rows whose target features arrived with the last step, then as
many passes as its tree is deep. Draft row j stands at KV index j + 1. Rows beyond the extend rows are written
behind it one after the other and forgotten; the next extend overwrites them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from aquiline.config import SpecConfig
from aquiline.models.runner import DraftRunner
from aquiline.spec.tree import DraftTree, Topology, chain_topology, static_shape, static_topology
from aquiline.types import Bool, Float32, Int32, KVGroup, Rows, RowSampling, TopK

RowsSampling = Callable[[Int32, Int32], RowSampling]


@dataclass(frozen=True, eq=False)
class Pending:
    """Draft rows to extend: row j of its slot pairs the target's feature of token j with token j + 1."""

    slots: Int32
    positions: Int32  # j, which is also the rotary position
    tokens: Int32  # token j + 1
    features: Float32  # [n, 3 Ht]

    def select(self, mask: Bool) -> Pending:
        """The rows that mask [n] names."""
        return Pending(self.slots[mask], self.positions[mask], self.tokens[mask], self.features[mask])

    @staticmethod
    def join(parts: list[Pending]) -> Pending:
        """All rows of several, in order."""
        if len(parts) == 1:
            return parts[0]
        return Pending(
            np.concatenate([p.slots for p in parts]), np.concatenate([p.positions for p in parts]),
            np.concatenate([p.tokens for p in parts]), np.concatenate([p.features for p in parts]),
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Roots:
    """The B slots that draft in this step: root token and its position; their last pending row is position - 1."""

    slots: Int32
    tokens: Int32
    positions: Int32

    def part(self, first: int, end: int) -> Roots:
        """Those from first to end - 1."""
        return Roots(self.slots[first:end], self.tokens[first:end], self.positions[first:end])


class DraftSession:
    """Runs draft passes for one step: fills the flat rows, keeps what the next pass needs.

    Children are chosen by the draft's logits as the target will draw by its own: over the temperature, plus the same
    noise. The nearer the two distributions, the more often both prefer the same token, at least (1 - TV) / (1 + TV) of
    the time, where the draft's best guess is right only as often as the target happens to draw it. Source: Daliri,
    Musco and Suresh, arXiv 2408.07978.

    first_key [S]: the first KV index of each slot that holds a key; at least 1, since row j lives at j + 1.
    sampling(slots, positions): how the target draws the token behind each. num_rows counts rows run."""

    def __init__(self, runner: DraftRunner, kv: KVGroup, rows: Rows, first_key: Int32, sampling: RowsSampling) -> None:
        self.runner, self.kv, self.rows, self.first_key, self.sampling = runner, kv, rows, first_key, sampling
        self.num_rows = 0
        self.places = np.arange(rows.max_rows, dtype=np.int32)
        self.roots: Roots
        self.num_scratch = 0  # rows written behind each root so far

    def feed(self, pending: Pending) -> None:
        """Write the pending rows, proposing nothing: a prompt's chunk."""
        rows, n = self.rows, len(pending.slots)
        rows.num = n
        rows.tokens[:n] = pending.tokens
        rows.positions[:n] = pending.positions
        rows.slots[:n] = pending.slots
        rows.write[:n] = pending.positions + 1
        rows.key_start[:n] = self.first_key[pending.slots]
        rows.context_len[:n] = pending.positions + 2
        rows.tail_len[:n] = 0
        self._forward(self.runner.fuse(pending.features))

    def extend(self, pending: Pending, roots: Roots) -> None:
        """Write the pending rows, the last of which stand right before the roots."""
        self.feed(pending)
        self.roots, self.num_scratch = roots, 0
        last = np.searchsorted(pending.slots, roots.slots, side="right") - 1
        self.last_rows = last.astype(np.int32)

    def children(self, k: int) -> TopK:
        """The best k children of each root."""
        return self.runner.top_k(self.last_rows, k, self.sampling(self.roots.slots, self.roots.positions))

    def chain(self, depth: int) -> Int32:
        """A child of each root, a child of that and so on, [B, depth]. A chain's KV index and position coincide, so
        there are no tails."""
        rows, roots, n = self.rows, self.roots, len(self.roots.slots)
        tokens = np.empty((n, depth), np.int32)
        source = self.last_rows
        for level in range(depth):
            tokens[:, level] = self.runner.draw(source, self.sampling(roots.slots, roots.positions + level))
            if level + 1 == depth:
                break
            rows.num = n
            rows.tokens[:n] = tokens[:, level]
            rows.positions[:n] = roots.positions + level
            rows.slots[:n] = roots.slots
            rows.write[:n] = rows.positions[:n] + 1
            rows.key_start[:n] = self.first_key[roots.slots]
            rows.context_len[:n] = rows.positions[:n] + 2
            rows.tail_len[:n] = 0
            self._forward(self.runner.hidden[source])
            source = self.places[:n]
        return tokens

    def expand(self, tokens: Int32, source: Int32, tails: Int32, k: int) -> TopK:
        """Run m rows per root, all of one level: tokens [B, m], the pass rows their states come from [B, m], and the
        scratch rows of their paths [B, m, level], themselves last. Returns the best k children, [B * m, k]."""
        rows, roots = self.rows, self.roots
        B, m, level = tails.shape
        n = B * m
        base = np.repeat(roots.positions + 1, m)  # KV index of the first scratch row; also where tails begin
        rows.num = n
        rows.tokens[:n] = tokens.ravel()
        rows.positions[:n] = base + (level - 2)
        rows.slots[:n] = np.repeat(roots.slots, m)
        rows.key_start[:n] = self.first_key[rows.slots[:n]]
        rows.context_len[:n] = base
        np.add(tails.reshape(n, level), base[:, None], out=rows.tail[:n, :level])
        rows.tail_len[:n] = level
        rows.write[:n] = rows.tail[:n, level - 1]
        self.num_scratch += m
        self._forward(self.runner.hidden[source.ravel()])
        return self.runner.top_k(self.places[:n], k, self.sampling(rows.slots[:n], base + (level - 1)))

    def _forward(self, g: Float32) -> None:
        self.num_rows += self.rows.num
        self.runner.forward(self.rows, self.kv, g)


class Drafter(Protocol):
    """A drafting strategy: a value the engine step calls, never a loop of its own."""

    def propose(self, session: DraftSession, pending: Pending, roots: Roots) -> DraftTree:
        """Extend, then grow a tree below every root."""


class Chain:
    """num_spec_tokens rows deep, one child each: KV index and position coincide, so nothing is ever moved."""

    def __init__(self, config: SpecConfig) -> None:
        self.num_spec_tokens = config.num_spec_tokens

    def propose(self, session: DraftSession, pending: Pending, roots: Roots) -> DraftTree:  # noqa: D102
        session.extend(pending, roots)
        B, K = len(roots.slots), self.num_spec_tokens
        tokens = np.empty((B, K + 1), np.int32)
        tokens[:, 0] = roots.tokens
        tokens[:, 1:] = session.chain(K)
        return DraftTree(chain_topology(B, K + 1), tokens.ravel())


class Static:
    """A fixed list of paths of child ranks."""

    def __init__(self, config: SpecConfig) -> None:
        self.shape = static_shape(config.static_paths)
        self.parents, self.depths, self.ranks = (
            np.array(a, np.int32) for a in (self.shape.parents, self.shape.depths, self.shape.ranks)
        )
        self.width = int(self.ranks.max()) + 1
        self.is_inner = np.isin(np.arange(len(self.parents)), self.parents[1:])

    def propose(self, session: DraftSession, pending: Pending, roots: Roots) -> DraftTree:  # noqa: D102
        session.extend(pending, roots)
        best = session.children(self.width)
        B, N = len(roots.slots), len(self.parents)
        tokens = np.empty((B, N), np.int32)
        tokens[:, 0] = roots.tokens
        row_of = np.zeros(N, np.int32)  # place of a node among its level's expanded rows
        scratch_paths: dict[int, tuple[int, ...]] = {0: ()}
        source = session.last_rows[:, None]  # pass rows of the level's parents, [B, number of parents]
        for level in range(1, int(self.depths.max()) + 1):
            nodes = np.flatnonzero(self.depths == level)
            ids = best.ids.reshape(B, -1, best.ids.shape[1])
            tokens[:, nodes] = ids[:, row_of[self.parents[nodes]], self.ranks[nodes]]
            inner = nodes[self.is_inner[nodes]]
            if not len(inner):
                break
            for i, node in enumerate(inner.tolist()):  # constant per shape and short: the tree's inner nodes
                scratch_paths[node] = (*scratch_paths[int(self.parents[node])], session.num_scratch + i)
            tails = np.array([scratch_paths[node] for node in inner.tolist()], np.int32)
            state = source[:, row_of[self.parents[inner]]]
            best = session.expand(tokens[:, inner], state, np.broadcast_to(tails, (B, *tails.shape)), self.width)
            row_of[inner] = np.arange(len(inner))
            source = np.arange(B * len(inner), dtype=np.int32).reshape(B, -1)
        return DraftTree(static_topology(B, self.shape), tokens.ravel())


class Dynamic:
    """EAGLE-2's tree: expand the best beam `depth` times, keep the num_nodes - 1 best candidates of all levels.

    Scores are cumulative float32 log-probabilities; order is stable and descending, so a child that ties with its
    parent never displaces it and parents precede children."""

    def __init__(self, config: SpecConfig) -> None:
        self.depth, self.width, self.num_nodes = config.depth, config.top_k, config.num_nodes

    def propose(self, session: DraftSession, pending: Pending, roots: Roots) -> DraftTree:  # noqa: D102
        k = self.width
        session.extend(pending, roots)
        best = session.children(k)
        B = len(roots.slots)
        every = np.arange(B)[:, None]
        tokens, scores = [best.ids], [best.logprobs]  # per level, [B, candidates]
        parents = [np.full((B, k), -1, np.int32)]  # candidate number of the parent; -1 is the root
        source = np.repeat(session.last_rows[:, None], k, axis=1)
        beam = np.tile(np.arange(k, dtype=np.int32), (B, 1))  # places in the last level
        beam_paths = np.empty((B, k, 0), np.int32)
        first = 0  # candidate number of the last level's first candidate
        for _ in range(self.depth):
            beam_scores = scores[-1][every, beam]
            own = np.broadcast_to(session.num_scratch + np.arange(k, dtype=np.int32), (B, k))
            tails = np.concatenate((beam_paths, own[:, :, None]), axis=2)
            best = session.expand(tokens[-1][every, beam], source, tails, k)
            children = beam_scores[:, :, None] + np.minimum(best.logprobs, 0).reshape(B, k, k)
            tokens.append(best.ids.reshape(B, k * k))
            scores.append(children.reshape(B, k * k))
            parents.append(np.repeat(first + beam, k, axis=1).astype(np.int32))
            first += tokens[-2].shape[1]
            beam = best_first(scores[-1], k)
            beam_paths = tails[every, beam // k]
            source = (np.arange(B)[:, None] * k + beam // k).astype(np.int32)
        return select(
            roots, np.concatenate(tokens, 1), np.concatenate(scores, 1), np.concatenate(parents, 1), self.num_nodes
        )


def best_first(scores: Float32, count: int) -> Int32:
    """int32 [B, count]: places of the best scores in stable descending order, ties to the lowest place."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :count].astype(np.int32)


def select(roots: Roots, tokens: Int32, scores: Float32, parents: Int32, num_nodes: int) -> DraftTree:
    """The best num_nodes - 1 candidates of each slot and its root as a tree.

    tokens, scores, parents [B, M]: a candidate's parent is a lower candidate number, or -1 for the root. A parent
    scores no less than its child and stands before it, so it is chosen whenever the child is."""
    B = len(roots.slots)
    chosen = np.sort(best_first(scores, num_nodes - 1), axis=1)
    M = tokens.shape[1]
    every = np.arange(B)[:, None]
    number = np.zeros((B, M + 1), np.int32)  # node number by candidate; the last column stands for the root
    number[every, chosen] = np.arange(1, num_nodes, dtype=np.int32)
    node_parents = np.zeros((B, num_nodes), np.int32)
    node_parents[:, 1:] = number[every, parents[every, chosen]]
    node_tokens = np.empty((B, num_nodes), np.int32)
    node_tokens[:, 0] = roots.tokens
    node_tokens[:, 1:] = tokens[every, chosen]
    assert (node_parents[:, 1:] < np.arange(1, num_nodes)).all(), "a node precedes its parent"
    offsets = np.arange(0, (B + 1) * num_nodes, num_nodes, dtype=np.int32)
    flat_parents = node_parents.ravel()
    depths = depths_of(flat_parents + np.repeat(offsets[:-1], num_nodes))
    return DraftTree(Topology(flat_parents, depths, offsets), node_tokens.ravel())


def depths_of(parent_rows: Int32) -> Int32:
    """int32 [R]: levels above each row, by pointer doubling; roots point to themselves."""
    depths: Int32 = (parent_rows != np.arange(len(parent_rows))).astype(np.int32)
    jump = parent_rows
    while (step := depths[jump]).any():
        depths = depths + step
        jump = jump[jump]
    return depths


def drafter(config: SpecConfig) -> Drafter | None:
    """The drafter a SpecConfig names; None for drafter 'none'."""
    kinds: dict[str, Callable[[SpecConfig], Drafter]] = {"chain": Chain, "static": Static, "dynamic": Dynamic}
    return kinds[config.drafter](config) if config.drafter != "none" else None
