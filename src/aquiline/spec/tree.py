"""Draft trees as flat arrays: topology and ancestor masks. Topology is data; nothing here runs a model.

A tree's rows stand slot after slot; a slot's first row is its root, and a parent always precedes its children.
Masks are ancestor bit sets packed in int64 words, built by pointer doubling: after round i a node's word holds its
nearest 2^i ancestors, so ceil(log2(D + 1)) rounds suffice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from aquiline.types import Int32, Int64

WORD_BITS = 64


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
    def ancestors(self) -> Int64:
        """int64 [R, W]: bit i of word i // 64 is set for node i on the row's path, itself and the root included."""
        return ancestor_masks(self.parent_rows, self.local, self.max_depth)

    @cached_property
    def max_depth(self) -> int:
        """Deepest level present."""
        return int(self.depths.max(initial=0))

    @cached_property
    def is_chain(self) -> bool:
        """Whether every node is the child of the node before it, so that KV index and position coincide."""
        return bool((self.local == self.depths).all())


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A topology and the token of every row; a slot's first row carries its root token."""

    topology: Topology
    tokens: Int32


def own_bits(local: Int32) -> Int64:
    """int64 [R, W]: one bit per row; W covers the largest slot-local node number."""
    bits = np.zeros((len(local), int(local.max(initial=0)) // WORD_BITS + 1), np.uint64)
    bits[np.arange(len(local)), local // WORD_BITS] = np.uint64(1) << (local % WORD_BITS).astype(np.uint64)
    return bits.view(np.int64)


def ancestor_masks(parent_rows: Int32, local: Int32, max_depth: int) -> Int64:
    """int64 [R, W]: ancestor bit sets of flat rows, themselves and their roots included."""
    masks, jump = own_bits(local), parent_rows
    for _ in range(max_depth.bit_length()):
        masks |= masks[jump]
        jump = jump[jump]
    return masks


@dataclass(frozen=True)
class StaticShape:
    """A fixed tree in level order, lexicographic within a level: parent and child rank of every node (root: 0, 0)."""

    parents: tuple[int, ...]
    depths: tuple[int, ...]
    ranks: tuple[int, ...]


@lru_cache
def static_shape(static_paths: tuple[tuple[int, ...], ...]) -> StaticShape:
    """The tree of a list of paths of child ranks, each from the root down. Static checks the paths."""
    ordered = sorted(static_paths, key=lambda path: (len(path), path))
    number = {(): 0} | {path: i + 1 for i, path in enumerate(ordered)}
    return StaticShape(
        parents=(0, *(number[path[:-1]] for path in ordered)),
        depths=(0, *(len(path) for path in ordered)),
        ranks=(0, *(path[-1] for path in ordered)),
    )
