"""Trees that kernels grow are the torch twin's, when both grow them over the same draft model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import pytest
import torch
from tests.backends.playing import Player, words
from tests.conftest import tiny_pair, weights_of
from tests.gpu.running import DEVICE, int32, run, zeros
from torch import Tensor

from aquiline.backends.torch.draft import Draft, Roots
from aquiline.backends.torch.torch_backend import TorchBackend
from aquiline.backends.torch.torch_pair import TorchPair
from aquiline.backends.torch.trees import Trees
from aquiline.config import SamplingParams
from aquiline.ops.triton.head_draw import (
    DrawRows,
    TileBest,
    VocabularyHead,
    best_by_tile,
    pick_children,
)
from aquiline.ops.triton.linear import LinearTiles
from aquiline.ops.triton.tree_growth import (
    Beam,
    Candidates,
    StaticPlan,
    TreeNodes,
    choose_nodes,
    first_of,
    grow_beam,
    num_candidates,
    take_candidates,
)
from aquiline.spec.drafting import Chain, Drafting, Dynamic, Static
from aquiline.spec.tree import static_shape

TILES = LinearTiles(block_n=16, block_k=32)
GREEDY, SAMPLED = SamplingParams(max_tokens=64, seed=5), SamplingParams(max_tokens=64, temperature=0.8, seed=2**40 + 9)


@dataclass(frozen=True, eq=False)
class Growing:
    """Roots of a real batch, and what drafts below them. trees [4]: its slots, with a dead tree between them."""

    draft: Draft
    roots: Roots
    longest: int
    trees: Tensor
    live: Tensor

    def rows_of(self, count: int, level: int) -> DrawRows:
        """How `count` rows of each tree draw at a level."""
        own = self.draft.state
        at = torch.zeros(len(self.trees), dtype=torch.int64)
        at[self.live] = self.roots.root.long() + level - 1
        slots, positions = self.trees.repeat_interleave(count), at.int().repeat_interleave(count)
        columns = (x.to(DEVICE, copy=True) for x in (positions, own.temperature, own.seed))
        return DrawRows(slots, *columns, ahead=2)

    def find(self, outputs: Tensor, level: int, into: Candidates, first: int, k: int, above: Tensor | None) -> None:
        """The children of rows with outputs [4 m, H] of a level, entered from candidate `first` on."""
        rows = self.rows_of(len(outputs) // len(self.trees), level)
        own, ids = self.draft.head, self.draft.target_ids.int().to(DEVICE)
        best = TileBest.new(len(outputs), len(ids), k, ids.device, TILES)
        normed = own.layer.norm(outputs, own.norm).to(DEVICE)
        end = first + len(outputs) // len(self.trees) * k
        columns = into.tokens[:, first:end], into.scores[:, first:end]
        run(best_by_tile(normed, VocabularyHead(own.head.to(DEVICE), ids), rows, best, TILES))
        run(pick_children(best, rows.slots, *columns, above=above))

    def expand(self, tokens: Tensor, sources: Tensor, outputs: Tensor, paths: Tensor, level: int) -> Tensor:
        """The draft's outputs [4 m, H] at the rows of a level."""
        m = tokens.shape[1]
        tokens, sources, paths = tokens.cpu(), sources.cpu(), paths.cpu()  # where the twin runs
        found = torch.full((len(self.trees), m, outputs.shape[1]), torch.nan)
        tails = paths[self.live][..., 1 : level + 1].long() - 1
        source = outputs[sources[self.live].long().flatten()].view(len(tails), m, -1)
        found[self.live] = self.draft._expand(self.roots, tokens[self.live].long(), source, tails, self.longest)
        return found.flatten(0, 1)

    @property
    def first_outputs(self) -> Tensor:
        """The outputs [4, H] of the rows that read the roots."""
        found = torch.full((len(self.trees), self.roots.output.shape[1]), torch.nan)
        found[self.live] = self.roots.output
        return found


@lru_cache
def growing() -> Growing:
    player = Player(TorchPair(*weights_of(*tiny_pair(3)), "float32"), num_slots=3)
    for i, sampling in enumerate((GREEDY, SAMPLED, SAMPLED)):
        player.add(words(20 + 5 * i, i), Chain(2), sampling)
    player.run(4)
    backend = player.backend
    assert isinstance(backend, TorchBackend) and backend._draft is not None
    state, draft = backend.state, backend._draft
    slots = torch.arange(3)
    root = state.root[slots]
    longest = int(root.max()) + 64
    with torch.inference_mode():
        output = draft.catch_up(slots, root + 1, 16, longest)
    roots = Roots([0, 1, 2], slots, root, state.history[slots, root], output)
    return Growing(draft, roots, longest, int32([0, -1, 1, 2]), torch.tensor([0, 2, 3]))


def grow_dynamic(own: Growing, drafting: Dynamic) -> TreeNodes:
    B, k, device = len(own.trees), drafting.top_k, own.trees.device
    candidates = Candidates.new(B, num_candidates(k, drafting.depth), device)
    outputs, before = own.first_outputs, None
    own.find(outputs, 0, candidates, 0, k, None)
    for level in range(1, drafting.depth + 1):
        beam = Beam.new(B, drafting.depth + 1, k, device)
        run(grow_beam(own.trees, candidates, level, beam, before))
        outputs = own.expand(beam.tokens, beam.sources, outputs, beam.paths, level)
        own.find(outputs, level, candidates, first_of(k, level), k, beam.scores.flatten())
        before = beam
    nodes = TreeNodes.empty(B, drafting.num_nodes, drafting.max_depth, device)
    run(choose_nodes(own.trees, candidates, k, nodes))
    return nodes


def grow_static(own: Growing, drafting: Static) -> TreeNodes:
    B, shape = len(own.trees), static_shape(drafting.static_paths)
    plan, nodes = StaticPlan.of(shape.parents, shape.ranks), TreeNodes.of(shape.parents, B, own.trees.device)
    candidates = Candidates.new(B, plan.num_candidates, own.trees.device)
    outputs = own.first_outputs
    own.find(outputs, 0, candidates, 0, drafting.width, None)
    for number, level in enumerate(plan.levels, 1):
        tokens = zeros(B, len(level.places), dtype=torch.int32)
        run(take_candidates(own.trees, candidates.tokens, int32(level.places), tokens))
        width = len(outputs) // B
        sources = torch.tensor(level.parents)[None] + width * torch.arange(B)[:, None]
        outputs = own.expand(tokens, sources, outputs, torch.tensor(level.paths).expand(B, -1, -1), number)
        own.find(outputs, number, candidates, level.first, drafting.width, None)
    places = int32(plan.places)
    run(take_candidates(own.trees, candidates.tokens, places, nodes.tokens[:, 1:]))
    return nodes


def twin_of(own: Growing, drafting: Drafting) -> Trees:
    return own.draft.grow(drafting, own.roots, own.longest)


WAYS: dict[str, Drafting] = {
    "flat": Dynamic(0, 3, 3), "dynamic": Dynamic(), "deep": Dynamic(4, 3, 17), "whole": Dynamic(1, 4, 21),
    "beam5": Dynamic(2, 5, 30), "static": Static(), "wide": Static(((0,), (1,), (2,), (3,), (1, 0), (3, 1), (1, 0, 2))),
}  # fmt: skip


@pytest.mark.parametrize("drafting", WAYS.values(), ids=WAYS)
@torch.inference_mode()
def test_trees_are_the_twins(drafting: Drafting) -> None:
    own = growing()
    nodes = grow_dynamic(own, drafting) if isinstance(drafting, Dynamic) else grow_static(own, drafting)
    twin = twin_of(own, drafting)
    assert torch.equal(nodes.tokens[own.live, 1:].long().cpu(), twin.tokens[:, 1:])
    assert torch.equal(nodes.parents[own.live].long().cpu(), twin.parents)
    assert torch.equal(nodes.depths[own.live].long().cpu(), twin.depths)
    assert torch.equal(nodes.paths[own.live].long().cpu(), twin.levels(twin.ancestors()))
    assert not nodes.tokens[1].any(), "a dead tree is not written"


def test_candidates_that_tie_are_chosen_the_first_first() -> None:
    """Log-probabilities that round to 0 tie a child with its parent: the parent, which stands before it, is a node."""
    candidates, trees = Candidates.new(1, num_candidates(2, 2), DEVICE), int32([0])
    candidates.tokens[0] = int32(range(10))
    candidates.parents[0, 2:] = int32([0, 0, 1, 1, 2, 2, 3, 3])
    candidates.scores[0] = torch.tensor([0.0, -2.0, 0.0, -3.0, -9.0, -9.0, 0.0, -9.0, -9.0, -9.0])
    nodes = TreeNodes.empty(1, 5, 3, candidates.tokens.device)
    choose_nodes(trees, candidates, 2, nodes).run()
    assert nodes.tokens[0, 1:].tolist() == [0, 1, 2, 6] and nodes.parents[0].tolist() == [0, 0, 0, 1, 3]
    assert nodes.paths[0].tolist() == [[0, 0, 0, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 1, 3, 0], [0, 1, 3, 4]]
    nodes = TreeNodes.empty(1, 3, 2, candidates.tokens.device)
    choose_nodes(trees, candidates, 2, nodes).run()
    assert nodes.tokens[0, 1:].tolist() == [0, 2], "of three candidates that tie the last is left out"
