"""Trees grow on the device: candidates by level, the beam that is drafted next, and the nodes that are verified.

A *candidate* is a child that the draft found. The children of the root are the first k candidates; each of the `depth`
levels below adds k * k, child j of beam member m at place m * k + j of the level. The *beam* of a level is the k best
candidates of the level before; its members are the rows of the draft's pass. Member m of level l has its draft key at
KV index base + 1 + (l - 1) * k + m, where base is the root's index, so `paths` holds these numbers after base.

A static tree has fixed topology: its rows and nodes are candidates at known places, which `take_candidates` copies.
Twins: `_static` and `_dynamic` in backends/torch/draft.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import triton
from torch import Tensor

from aquiline.ops.triton.growth_kernels import beam_kernel, choose_kernel, take_kernel
from aquiline.ops.triton.head_draw import MOST_BEST
from aquiline.ops.triton.launch import Launch, check_float32, check_integers, size_of

COMPARED = 8192
"""Pairs of candidates that one program compares at once: more do not fit in its registers."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """The candidates of B trees, C of each. tokens int32 and scores float32 [B, C]: cumulative log-probabilities;
    parents int32 [B, C]: numbers of candidates, -1 for the root."""

    tokens: Tensor
    scores: Tensor
    parents: Tensor

    @classmethod
    def new(cls, num_trees: int, count: int, device: torch.device) -> Candidates:
        """Room for `count` candidates of each tree; all are children of the root until a beam says otherwise."""
        shape = num_trees, count
        return cls(
            torch.zeros(shape, dtype=torch.int32, device=device), torch.zeros(shape, device=device),
            torch.full(shape, -1, dtype=torch.int32, device=device),
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Beam:
    """The k rows of a draft's pass in each of B trees. tokens and sources int32 [B, k]: source is the row, among those
    of the pass before, whose output the member continues; scores float32 [B, k]; paths int32 [B, k, W]: by level, 0 for
    the root, how far behind base the draft keys of the member's path stand, its own last; 0 past its level."""

    tokens: Tensor
    sources: Tensor
    scores: Tensor
    paths: Tensor

    @classmethod
    def new(cls, num_trees: int, width: int, top_k: int, device: torch.device) -> Beam:
        """Room for a beam of top_k members whose paths have `width` levels."""
        tokens, sources = torch.zeros(2, num_trees, top_k, dtype=torch.int32, device=device)
        paths = torch.zeros(num_trees, top_k, width, dtype=torch.int32, device=device)
        return cls(tokens, sources, torch.zeros(num_trees, top_k, device=device), paths)


@dataclass(frozen=True, eq=False)
class TreeNodes:
    """B trees of N nodes, the root first, a parent before its children. tokens, parents, depths int32 [B, N]; paths
    int32 [B, N, D + 1]: the node at each level of each node's path, 0 past its own level; counts int32 [B]: how many of
    the N are nodes."""

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    paths: Tensor
    counts: Tensor

    @classmethod
    def empty(cls, num_trees: int, num_nodes: int, max_depth: int, device: torch.device) -> TreeNodes:
        """Room for trees whose topology `choose_nodes` finds; roots that are alone until then."""
        integers: dict[str, Any] = {"dtype": torch.int32, "device": device}
        tokens, parents, depths = torch.zeros(3, num_trees, num_nodes, **integers)
        paths = torch.zeros(num_trees, num_nodes, max_depth + 1, **integers)
        return cls(tokens, parents, depths, paths, torch.full((num_trees,), num_nodes, **integers))

    @classmethod
    def of(cls, parents: Sequence[int], num_trees: int, device: torch.device) -> TreeNodes:
        """Trees of one fixed topology, whose tokens are still missing. parents: the node above each, 0 for the root."""
        paths = [[0]]
        for node, parent in enumerate(parents[1:], 1):
            paths.append([*paths[parent], node])
        depths = [len(path) - 1 for path in paths]
        padded = [path + [0] * (max(depths) + 1 - len(path)) for path in paths]
        integers: dict[str, Any] = {"dtype": torch.int32, "device": device}
        N, shape = len(parents), torch.tensor((tuple(parents), depths), **integers)
        above, depth = shape[:, None].repeat(1, num_trees, 1)
        path = torch.tensor(padded, **integers).repeat(num_trees, 1, 1)
        return cls(torch.zeros_like(above), above, depth, path, torch.full((num_trees,), N, **integers))


def num_candidates(top_k: int, depth: int) -> int:
    """C of a dynamic tree."""
    return top_k + depth * top_k**2


def grow_beam(slots: Tensor, candidates: Candidates, level: int, beam: Beam, before: Beam | None) -> Launch:
    """Choose the beam of a level, 1 and so on, from the candidates of the level before, ties to the lowest place; and
    enter the parents of the candidates that its rows will find, which stand from `first_of(k, level)` on.

    slots int32 [B]: -1 for a dead tree; before: the beam of the level before, None at level 1. Raises ValueError for
    tensors that do not fit."""
    (B, C), (_, k, width) = candidates.tokens.shape, beam.paths.shape
    if not 1 <= k <= MOST_BEST:
        raise ValueError(f"the beam has {k} members; 1 to {MOST_BEST} are chosen (draft_top_k)")
    if not 1 <= level < width or first_of(k, level + 1) > C or (before is None) != (level == 1):
        raise ValueError(
            f"level={level} of a beam of {k}: paths of {width} levels and {C} candidates must reach there, and every "
            "level but the first has a beam before"
        )
    _check_candidates(slots, candidates)
    _check_beam("beam", beam, B, k, width)
    if before is not None:
        _check_beam("before", before, B, k, width)
    first = first_of(k, level - 1)
    block = triton.next_power_of_2(max(first_of(k, level) - first, k))
    written = beam.tokens, beam.sources, beam.scores, beam.paths
    return Launch(
        "TREE_BEAM", beam_kernel, (B,),
        (slots, candidates.tokens, candidates.scores, candidates.parents, None if before is None else before.paths,
         *written, first, first_of(k, level), 1 + (level - 1) * k),
        {"C": C, "K": k, "WIDTH": width, "LEVEL": level, "BLOCK": block, "LEVELS": triton.next_power_of_2(width)},
        bytes=size_of(*written) + 4 * B * (2 * block + k * k),
    )  # fmt: skip


def first_of(top_k: int, level: int) -> int:
    """The first candidate that the rows of a level find; level 0 is the root's row."""
    return 0 if level == 0 else top_k + (level - 1) * top_k**2


def choose_nodes(slots: Tensor, candidates: Candidates, top_k: int, nodes: TreeNodes) -> Launch:
    """Of all candidates keep the N - 1 with the best cumulative log-probabilities, ties to the lowest place, in the
    order of their places: node 1 and so on of `nodes`. A child's score is at most its parent's and its place is behind
    it, so a parent is chosen whenever its child is. Raises ValueError for tensors that do not fit."""
    (B, C), (_, N, width) = candidates.tokens.shape, nodes.paths.shape
    _check_candidates(slots, candidates)
    _check_nodes(nodes, B, N, width)
    deepest = 1 + (C - top_k) // top_k**2
    if N - 1 > C or width != min(deepest, N - 1) + 1:
        raise ValueError(
            f"nodes: {N} nodes with paths of {width} levels; {C} candidates make at most {C + 1} nodes, with paths of "
            f"{min(deepest, N - 1) + 1} levels"
        )
    written = nodes.tokens, nodes.parents, nodes.depths, nodes.paths
    block = triton.next_power_of_2(C)
    return Launch(
        "TREE_NODES", choose_kernel, (B,),
        (slots, candidates.tokens, candidates.scores, candidates.parents, *written, N),
        {"C": C, "K": top_k, "WIDTH": width, "BLOCK": block, "PART": max(1, min(block, COMPARED // block))},
        num_warps=8 if block <= 1024 else 16,
        bytes=size_of(candidates.tokens, candidates.scores, candidates.parents, *written),
    )  # fmt: skip


def take_candidates(slots: Tensor, candidates: Tensor, places: Tensor, tokens: Tensor) -> Launch:
    """tokens [B, n] = the candidates [B, C] at places [n], all int32; tokens may be columns of a wider buffer. Raises
    ValueError for tensors that do not fit."""
    (B, C), (n,) = candidates.shape, places.shape
    check_integers("slots", slots, B, like=candidates)
    check_integers("candidates", candidates, B, C)
    check_integers("places", places, n, like=candidates)
    check_integers("tokens", tokens, B, n, like=candidates)
    return Launch(
        "TREE_NODES", take_kernel, (B,),
        (slots, candidates, places, tokens, candidates.stride(0), tokens.stride(0), n),
        {"BLOCK": triton.next_power_of_2(n)}, bytes=2 * size_of(tokens),
    )  # fmt: skip


@dataclass(frozen=True)
class StaticLevel:
    """The rows of one pass of a static tree. places: of their tokens among the candidates; parents: the rows of the
    pass before that they continue; paths: as in Beam; first: the first candidate that these rows find."""

    places: tuple[int, ...]
    parents: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...]
    first: int


@dataclass(frozen=True)
class StaticPlan:
    """How a static tree grows. levels: its passes after the root's; places: of the tokens of nodes 1 and so on among
    the candidates; num_candidates: of all passes."""

    levels: tuple[StaticLevel, ...]
    places: tuple[int, ...]
    num_candidates: int

    @classmethod
    def of(cls, parents: Sequence[int], ranks: Sequence[int]) -> StaticPlan:
        """From the parent and the child rank of every node, in level order, the root first (spec/tree.py,
        `static_shape`). Every row finds as many children as the highest rank asks for."""
        width, inner = 1 + max(ranks), sorted({*parents[1:]})
        paths: dict[int, tuple[int, ...]] = {0: (0,)}  # of inner nodes, by the numbers of draft rows
        first = {0: 0}  # the first candidate below an inner node
        for number, node in enumerate(inner):
            first[node] = number * width
            if node:
                paths[node] = (*paths[parents[node]], number)
        places = tuple(first[parents[node]] + ranks[node] for node in range(1, len(parents)))
        deepest = max(len(path) for path in paths.values())
        by_level = [[node for node in inner if len(paths[node]) == length] for length in range(1, deepest + 1)]
        levels = tuple(
            StaticLevel(
                tuple(places[node - 1] for node in level), tuple(above.index(parents[node]) for node in level),
                tuple(paths[node] + (0,) * (deepest - len(paths[node])) for node in level), first[level[0]],
            )
            for above, level in pairwise(by_level)
        )  # fmt: skip
        return cls(levels, places, len(inner) * width)


def _check_candidates(slots: Tensor, candidates: Candidates) -> None:
    B, C = candidates.tokens.shape
    check_integers("slots", slots, B, like=candidates.tokens)
    check_integers("candidates.tokens", candidates.tokens, B, C)
    check_float32("candidates.scores", candidates.scores, B, C, like=candidates.tokens)
    check_integers("candidates.parents", candidates.parents, B, C, like=candidates.tokens)


def _check_beam(name: str, beam: Beam, B: int, k: int, width: int) -> None:
    check_integers(f"{name}.tokens", beam.tokens, B, k)
    check_integers(f"{name}.sources", beam.sources, B, k, like=beam.tokens)
    check_float32(f"{name}.scores", beam.scores, B, k, like=beam.tokens)
    check_integers(f"{name}.paths", beam.paths, B, k, width, like=beam.tokens)


def _check_nodes(nodes: TreeNodes, B: int, N: int, width: int) -> None:
    for name in ("tokens", "parents", "depths"):
        check_integers(f"nodes.{name}", getattr(nodes, name), B, N, like=nodes.tokens)
    check_integers("nodes.paths", nodes.paths, B, N, width, like=nodes.tokens)
    check_integers("nodes.counts", nodes.counts, B, like=nodes.tokens)
