"""Draft trees as flat arrays: topology, ancestor masks, paths. Topology is data; nothing here runs a model.

A tree's rows stand slot after slot; a slot's first row is its root, and a parent always precedes its children.
Masks are ancestor bit sets packed in int64 words, built by pointer doubling: after round i a node's word holds its
nearest 2^i ancestors, so ceil(log2(D + 1)) rounds suffice. Source: EAGLE3.md §3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from aquiline.types import Int32, Int64

WORD = 64


@dataclass(frozen=True, eq=False)
class Topology:
    """Shape of the trees of all active slots, tokens apart.

    parents and depths int32 [R]: parents are slot-local node numbers (a root's is itself, 0); offsets int32 [B + 1]:
    rows offsets[b] .. offsets[b + 1] - 1 belong to the b-th slot."""

    parents: Int32
    depths: Int32
    offsets: Int32

    @cached_property
    def owner(self) -> Int32:
        """int32 [R]: which of the B slots a row belongs to."""
        return np.repeat(np.arange(len(self.offsets) - 1, dtype=np.int32), np.diff(self.offsets))

    @cached_property
    def local(self) -> Int32:
        """int32 [R]: slot-local node number of each row; the root is 0."""
        places = np.arange(len(self.parents), dtype=np.int32)
        return places - self.offsets[self.owner]

    @cached_property
    def parent_rows(self) -> Int32:
        """int32 [R]: flat row of each row's parent."""
        return self.parents + self.offsets[self.owner]

    @cached_property
    def bits(self) -> Int64:
        """int64 [R, W]: each row's own bit, as `ancestors` numbers them."""
        return own_bits(self.local)

    @cached_property
    def rank(self) -> Int32:
        """int32 [R]: depth * (R + 1) + R - row: orders rows by depth, then by place, and gives both back."""
        num_rows = np.int32(len(self.parents))
        places = np.arange(len(self.parents), dtype=np.int32)
        return self.depths * (num_rows + np.int32(1)) + (num_rows - places)

    @cached_property
    def ancestors(self) -> Int64:
        """int64 [R, W]: bit i of word i // 64 is set for node i on the row's path, itself and the root included."""
        return ancestor_masks(self.parent_rows, self.local, self.max_depth)

    @cached_property
    def paths(self) -> Int32:
        """int32 [R, D + 1]: slot-local nodes of each row's path by level, the row itself at its depth, then 0."""
        return paths(self.parent_rows, self.local, self.depths, self.max_depth)

    @cached_property
    def max_depth(self) -> int:
        """Deepest level present."""
        return int(self.depths.max(initial=0))

    @cached_property
    def is_chain(self) -> bool:
        """Whether every node hangs below the one before it, so that KV index and position coincide."""
        return bool((self.local == self.depths).all())


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A topology and the token of every row; a slot's first row carries its root token."""

    topology: Topology
    tokens: Int32


def join(trees: list[DraftTree]) -> DraftTree:
    """The trees of several groups of slots as one, in order."""
    if len(trees) == 1:
        return trees[0]
    ends = np.cumsum([0, *(len(tree.tokens) for tree in trees)])
    empty = np.zeros(0, np.int32)
    topology = Topology(
        parents=np.concatenate([empty, *(tree.topology.parents for tree in trees)]),
        depths=np.concatenate([empty, *(tree.topology.depths for tree in trees)]),
        offsets=np.concatenate(
            [[0], *(tree.topology.offsets[1:] + end for tree, end in zip(trees, ends[:-1], strict=True))]
        ).astype(np.int32),
    )
    return DraftTree(topology, np.concatenate([empty, *(tree.tokens for tree in trees)]))


def own_bits(local: Int32) -> Int64:
    """int64 [R, W]: one bit per row; W covers the largest slot-local node number."""
    bits = np.zeros((len(local), int(local.max(initial=0)) // WORD + 1), np.uint64)
    bits[np.arange(len(local)), local // WORD] = np.uint64(1) << (local % WORD).astype(np.uint64)
    return bits.view(np.int64)


def ancestor_masks(parent_rows: Int32, local: Int32, max_depth: int) -> Int64:
    """int64 [R, W]: ancestor bit sets of flat rows, themselves and their roots included."""
    masks, jump = own_bits(local), parent_rows
    for _ in range(max_depth.bit_length()):
        masks |= masks[jump]
        jump = jump[jump]
    return masks


def paths(parent_rows: Int32, local: Int32, depths: Int32, max_depth: int) -> Int32:
    """int32 [R, max_depth + 1]: slot-local node at each level of each row's path; 0 past the row's own level."""
    result = np.zeros((len(local), max_depth + 1), np.int32)
    node = np.arange(len(local), dtype=np.int32)
    for level in range(max_depth, 0, -1):
        reached = depths >= level
        result[reached, level] = local[node[reached]]
        node = np.where(reached, parent_rows[node], node)
    return result


def chain_topology(num_slots: int, num_nodes: int) -> Topology:
    """num_slots chains of num_nodes rows each, the root included; one node is plain autoregressive decoding."""
    return _uniform(num_slots, (0, *range(num_nodes - 1)), tuple(range(num_nodes)))


@dataclass(frozen=True)
class StaticShape:
    """A fixed tree in level order, lexicographic within a level: parent and child rank of every node (root: 0, 0)."""

    parents: tuple[int, ...]
    depths: tuple[int, ...]
    ranks: tuple[int, ...]


@lru_cache
def static_shape(static_paths: tuple[tuple[int, ...], ...]) -> StaticShape:
    """Topology of a list of paths of child ranks (config.Drafting validates it)."""
    ordered = sorted(static_paths, key=lambda path: (len(path), path))
    number = {(): 0} | {path: i + 1 for i, path in enumerate(ordered)}
    return StaticShape(
        parents=(0, *(number[path[:-1]] for path in ordered)),
        depths=(0, *(len(path) for path in ordered)),
        ranks=(0, *(path[-1] for path in ordered)),
    )


def static_topology(num_slots: int, shape: StaticShape) -> Topology:
    """The same fixed tree for every slot."""
    return _uniform(num_slots, shape.parents, shape.depths)


@lru_cache(maxsize=64)
def _uniform(num_slots: int, parents: tuple[int, ...], depths: tuple[int, ...]) -> Topology:
    num_nodes = len(parents)
    return Topology(
        parents=np.tile(np.array(parents, np.int32), num_slots),
        depths=np.tile(np.array(depths, np.int32), num_slots),
        offsets=np.arange(0, (num_slots + 1) * num_nodes, num_nodes, dtype=np.int32),
    )
