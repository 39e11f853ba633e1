"""How a program grows trees below the roots: the twin of backends/torch/draft.py as launches.

One pass brings the draft's keys up to the roots, then one pass a level. The rows of a level are known to be as many as
the way to draft says, so all addresses are.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aquiline.backends.gpu.forward import Bucket, DraftForward, DraftParts, ProgramParts
from aquiline.backends.gpu.pages import RowBuffers
from aquiline.ops.triton.accept import copy_rows
from aquiline.ops.triton.head_draw import DrawRows, VocabularyHead, pick_children, pick_draws
from aquiline.ops.triton.launch import Launch
from aquiline.ops.triton.launches import Launches, TorchCall
from aquiline.ops.triton.norm import norm
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
from aquiline.ops.triton.tree_rows import lag_rows, level_rows, tree_rows
from aquiline.spec.drafting import Chain, Dynamic, Static
from aquiline.spec.tree import static_shape

LAYER = "EAGLE_DRAFT"
HEAD = "EAGLE_DRAFT_LM_HEAD"


class Growth:
    """Adds the launches that grow a bucket's trees into `nodes`. growing int32 [B]: the slots whose trees grow."""

    def __init__(
        self, machine: ProgramParts, parts: DraftParts, bucket: Bucket, nodes: TreeNodes, growing: Tensor,
        launches: Launches,
    ) -> None:  # fmt: skip
        self.machine, self.parts, self.bucket, self.launches = machine, parts, bucket, launches
        self.nodes, self.growing, self.count, self.device = nodes, growing, bucket.num_decodes, growing.device
        self.head = VocabularyHead(parts.draft.model.head, parts.draft.target_ids)

    def add(self) -> None:
        """Add them all."""
        way = self.bucket.way
        output, normed, rows = self._roots(way.max_depth + 1)
        if isinstance(way, Chain):
            self._chain(way.num_spec_tokens, output, normed, rows)
        elif isinstance(way, Dynamic):
            self._dynamic(way, output, normed, rows)
        else:
            assert isinstance(way, Static), way
            self._static(way, output, normed, rows)

    def _forward(self, at: RowBuffers) -> DraftForward:
        return DraftForward(self.parts.draft, self.parts.pages, at, self.bucket.context, self.machine.workspace)

    def _roots(self, width: int) -> tuple[Tensor, Tensor, DrawRows]:
        """Write the draft keys that slots lack up to their roots, `width` at most. Returns the output of each slot's
        last row, its norm, and how a token is drawn from it."""
        machine, B = self.machine, self.count
        at = RowBuffers.new(machine.state, B * width, 0, width)
        places, last = torch.zeros_like(at.tokens), torch.zeros_like(self.growing)
        forward, roots = self._forward(at), RowBuffers.new(machine.state, B, 0, 1)
        output, normed = torch.zeros_like(forward.hidden[:B]), torch.zeros_like(forward.normed[:B])
        self.launches.add(
            LAYER, lag_rows(self.growing, machine.slots, at.tokens, places, last, at.rows),
            copy_rows(self.parts.fused, forward.given, from_rows=places), *forward.launches(),
            # The last rows pair with the roots: what the target's rows of the roots would draw at.
            tree_rows(self.growing, machine.slots, TreeNodes.of((0,), B, self.device), roots.rows),
            copy_rows(forward.hidden, output, from_rows=last), copy_rows(forward.normed, normed, from_rows=last),
        )  # fmt: skip
        return output, normed, machine.drawing(roots.rows, 1)

    def _chain(self, length: int, output: Tensor, normed: Tensor, rows: DrawRows) -> None:
        """Draw each token from the draft's logits with the noise that the target's draw will use."""
        at, tokens = RowBuffers.new(self.machine.state, self.count, 0, 1), self.nodes.tokens
        forward = self._forward(at)
        any_token = int(self.parts.draft.target_ids[0])  # where logits are not numbers
        for level in range(1, length + 1):
            own = tokens[:, level]
            best, found = self.machine.workspace.best(normed, self.head, rows, 1)
            self.launches.add(HEAD, found, pick_draws(best, rows.slots, own, otherwise=any_token))
            if level < length:
                self.launches.add(LAYER, TorchCall("tokens", partial(at.tokens.copy_, own)))
                self._level(forward, level, level, output, None)
                output, normed, rows = forward.hidden, forward.normed, self.machine.drawing(at.rows, 2)

    def _level(self, forward: DraftForward, level: int, first: int, output: Tensor, sources: Tensor | None) -> None:
        """One pass over the rows of a level, whose keys stand from `first` on behind the roots. They continue rows
        `sources` of the pass before, whose outputs are given; None: the same rows."""
        found = list[Launch]()
        if output is not forward.given:
            found.append(copy_rows(output, forward.given, from_rows=sources))
        draft, x = self.parts.draft, forward.given
        if draft.config.norm_feedback:
            eps = draft.model.config.rms_norm_eps
            found.append(norm("feedback", x, draft.model.final_norm, x, forward.slots, eps=eps))
        rows = level_rows(self.growing, self.machine.slots, level, first, forward.at.rows)
        self.launches.add(LAYER, rows, *found, *forward.launches())

    def _wide_level(self, tokens: Tensor, paths: Tensor) -> DraftForward:
        """A pass over m rows of each tree, whose tokens [B, m] and paths [B, m, W] others fill."""
        B, m, _ = paths.shape
        at = RowBuffers.new(self.machine.state, B * m, 0, m)
        rows = replace(at.rows, path=paths[..., 1:].flatten(0, 1))
        return self._forward(replace(at, rows=rows, tokens=tokens.view(-1)))

    def _children(
        self, candidates: Candidates, normed: Tensor, rows: DrawRows, first: int, k: int, above: Tensor | None = None
    ) -> None:  # fmt: skip
        """Enter the k best children of rows as candidates from `first` on."""
        end = first + len(normed) // self.count * k
        best, found = self.machine.workspace.best(normed, self.head, rows, k)
        tokens, scores = candidates.tokens[:, first:end], candidates.scores[:, first:end]
        self.launches.add(HEAD, found, pick_children(best, rows.slots, tokens, scores, above=above))

    def _dynamic(self, way: Dynamic, output: Tensor, normed: Tensor, rows: DrawRows) -> None:
        """The best children of the roots, then of a beam, level by level; the best of all are the nodes."""
        k, before = way.top_k, None
        candidates = Candidates.new(self.count, num_candidates(k, way.depth), self.device)
        self._children(candidates, normed, rows, 0, k)
        for level in range(1, way.depth + 1):
            beam = Beam.new(self.count, way.depth + 1, k, self.device)
            forward = self._wide_level(beam.tokens, beam.paths)
            self.launches.add(LAYER, grow_beam(self.growing, candidates, level, beam, before))
            self._level(forward, level, 1 + (level - 1) * k, output, beam.sources.view(-1))
            drawing, above = self.machine.drawing(forward.at.rows, 2), beam.scores.view(-1)
            self._children(candidates, forward.normed, drawing, first_of(k, level), k, above)
            output, before = forward.hidden, beam
        self.launches.add(LAYER, choose_nodes(self.growing, candidates, k, self.nodes))

    def _static(self, way: Static, output: Tensor, normed: Tensor, rows: DrawRows) -> None:
        """The children of every inner node, level by level; the nodes are known places among them."""
        shape, num_before, tree = static_shape(way.static_paths), 1, torch.arange(self.count, device=self.device)
        plan = StaticPlan.of(shape.parents, shape.ranks)
        candidates = Candidates.new(self.count, plan.num_candidates, self.device)
        self._children(candidates, normed, rows, 0, way.width)
        for number, level in enumerate(plan.levels, 1):
            tokens = torch.zeros(self.count, len(level.places), dtype=torch.int32, device=self.device)
            paths = self._integers(level.paths).expand(self.count, -1, -1).contiguous()
            sources = (self._integers(level.parents) + num_before * tree[:, None]).int().flatten()
            forward = self._wide_level(tokens, paths)
            taken = take_candidates(self.growing, candidates.tokens, self._integers(level.places), tokens)
            self.launches.add(LAYER, taken)
            self._level(forward, number, level.paths[0][number], output, sources)
            self._children(candidates, forward.normed, self.machine.drawing(forward.at.rows, 2), level.first, way.width)
            output, num_before = forward.hidden, len(level.places)
        nodes, places = self.nodes.tokens[:, 1:], self._integers(plan.places)
        self.launches.add(LAYER, take_candidates(self.growing, candidates.tokens, places, nodes))

    def _integers(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)
