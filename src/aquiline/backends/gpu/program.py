"""A decode step as one program: every launch over addresses that do not change, for a bucket of decodes and trees.

What varies between steps lies in device tensors: which slots decode and how many nodes each has arrive in the message,
roots, tokens and pages stand in the slots' state. A program is built once. It runs launch by launch, by the interpreter
or on a device, or as the CUDA graph that captured those launches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from aquiline.backends.gpu.forward import DraftForward, TargetForward, Workspace, fuse
from aquiline.backends.gpu.mailbox import DEPTH, HostBuffer, MailedState
from aquiline.backends.gpu.pages import GpuPages, RowBuffers
from aquiline.backends.gpu.weights import DeviceDraft, DeviceModel
from aquiline.ops.triton.accept import KeptPaths, accept_paths, copy_rows, keep_paths, move_keys
from aquiline.ops.triton.head_draw import DrawRows, TileBest, VocabularyHead, best_by_tile, pick_children, pick_draws
from aquiline.ops.triton.launch import Launch
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
from aquiline.ops.triton.tree_rows import DeviceSlots, lag_rows, level_rows, tree_rows
from aquiline.spec.drafting import Chain, Drafting, Dynamic, NoDraft, Static
from aquiline.spec.tree import static_shape


class Runnable(Protocol):
    """What a program is made of: a kernel's launch, or a call of torch over the same addresses."""

    name: str

    def run(self) -> None:
        """Issue it on the current stream."""
        ...


@dataclass(frozen=True, eq=False)
class Call:
    """A call of torch, which copies between buffers."""

    name: str
    function: Callable[[], object]

    def run(self) -> None:
        """Issue it on the current stream."""
        self.function()


@dataclass(frozen=True)
class Bucket:
    """What a program is for. way: how its trees grow, NoDraft for plain decoding; num_decodes: a power of two; spans: of
    keys that a row may see; keeps_features: whether any of its slots may ever ask for the draft."""

    way: Drafting
    num_decodes: int
    spans: int
    keeps_features: bool


@dataclass(frozen=True, eq=False)
class Machine:
    """What all programs of a backend share: models, storage, the slots' state and scratch. decodes int32 [3, B]: the
    slots that decode, those of them whose trees grow, -1 for none, and the nodes of each tree, all told by the message."""

    target: DeviceModel
    draft: DeviceDraft | None
    pages: GpuPages
    draft_pages: GpuPages | None
    fused: Tensor | None
    state: MailedState
    workspace: Workspace

    @property
    def slots(self) -> DeviceSlots:
        """The slots' state as kernels read it."""
        s = self.state
        return DeviceSlots(s.root, s.draft_end, s.first_draft_key, s.history, s.table, s.sizes.page_size)

    def decodes(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """The words of the state that say which slots decode, whose trees grow, and how many nodes each has."""
        active, growing, sizes = self.state.more.view(3, -1)[:, :count]
        return active, growing, sizes


class Program:
    """The launches of a bucket. outcome int32 [B, 3 + 2 (D + 1) + 3 N]: the root before the step, the number of accepted
    drafts, draft_end; the kept nodes and tokens by level; the tree's tokens, parents and depths."""

    def __init__(self, machine: Machine, bucket: Bucket) -> None:
        self.machine, self.bucket, B = machine, bucket, bucket.num_decodes
        self.device, self.graph = machine.state.device, None
        self.active, self.growing, sizes = machine.decodes(B)
        self.nodes = replace(new_nodes(bucket.way, B, self.device), counts=sizes)
        self.kept = KeptPaths.new(B, self.nodes.paths.shape[2], self.device)
        self.limits = torch.full_like(machine.state.root, bucket.way.max_depth)
        self.launches: list[Runnable] = [machine.state.applying]
        if bucket.way.is_speculative:
            self._draft()
        self._verify()
        self.outcome = self._outcome()
        self.launches.append(Call("EAGLE_TAIL_COMMIT", self._tell))
        self._buffers = [HostBuffer.new(tuple(self.outcome.shape), self.device) for _ in range(DEPTH)]
        self._number = 0

    def run(self) -> None:
        """One step: the state's message must have been posted."""
        for launch in self.launches:
            launch.run()

    def told(self) -> HostBuffer:
        """Copy the outcome to the host when the step is through; the buffer's event says when."""
        buffer = self._buffers[self._number % DEPTH]
        self._number += 1
        buffer.memory.copy_(self.outcome, non_blocking=True)
        buffer.record()
        return buffer

    # Draft

    def _draft(self) -> None:
        """Bring the draft's keys up to the roots, then grow the trees."""
        machine, way, B = self.machine, self.bucket.way, self.bucket.num_decodes
        assert machine.draft is not None and machine.fused is not None, "a draft model was asked for and none is loaded"
        width = way.max_depth + 1
        at = RowBuffers.new(machine.state, B * width, 0, width)
        places, last = torch.zeros_like(at.tokens), torch.zeros_like(self.active)
        known = self._forward(at)
        self.launches += [
            lag_rows(self.growing, machine.slots, at.tokens, places, last, at.rows),
            copy_rows(machine.fused, known.given, from_rows=places), *known.launches(),
        ]  # fmt: skip
        # The roots' own rows: the last of each slot, which stand at the roots' positions as the target's rows do.
        roots = RowBuffers.new(machine.state, B, 0, 1)
        nodes = TreeNodes.of((0,), B, self.device)
        output, normed = torch.zeros_like(known.hidden[:B]), torch.zeros_like(known.normed[:B])
        self.launches += [
            tree_rows(self.growing, machine.slots, nodes, roots.rows),
            copy_rows(known.hidden, output, from_rows=last), copy_rows(known.normed, normed, from_rows=last),
        ]  # fmt: skip
        rows = self._drawing(roots, 1)
        if isinstance(way, Chain):
            self._chain(way, output, normed, rows)
        elif isinstance(way, Dynamic):
            self._dynamic(way, output, normed, rows)
        else:
            assert isinstance(way, Static), way
            self._static(way, output, normed, rows)

    def _forward(self, at: RowBuffers) -> DraftForward:
        machine = self.machine
        assert machine.draft is not None and machine.draft_pages is not None
        return DraftForward(machine.draft, machine.draft_pages, at, self.bucket.spans, machine.workspace)

    def _drawing(self, at: RowBuffers, ahead: int) -> DrawRows:
        state = self.machine.state
        return DrawRows(at.rows.slots, at.rows.positions, state.temperature, state.seed, ahead)

    @property
    def _draft_head(self) -> VocabularyHead:
        assert self.machine.draft is not None
        return VocabularyHead(self.machine.draft.model.head, self.machine.draft.target_ids)

    def _chain(self, way: Chain, output: Tensor, normed: Tensor, rows: DrawRows) -> None:
        """Draw each token from the draft's logits with the noise that the target's draw will use."""
        B, head, machine, tokens = self.bucket.num_decodes, self._draft_head, self.machine, self.nodes.tokens
        at = RowBuffers.new(machine.state, B, 0, 1)
        forward, best = self._forward(at), TileBest.new(B, len(head.weight), 1, self.device)
        first = int(head.ids[0])  # any token will do where logits are not numbers
        for level in range(1, way.num_spec_tokens + 1):
            self.launches += [
                best_by_tile(normed, head, rows, best),
                pick_draws(best, rows.slots, tokens[:, level], otherwise=first),
            ]  # fmt: skip
            if level < way.num_spec_tokens:
                own = tokens[:, level]
                self.launches += [
                    level_rows(self.growing, machine.slots, level, level, at.rows),
                    Call("EAGLE_DRAFT", lambda own=own: at.tokens.copy_(own)),
                    *self._go_on(output, forward, None), *forward.launches(),
                ]  # fmt: skip
                output, normed, rows = forward.hidden, forward.normed, self._drawing(at, 2)

    def _go_on(self, output: Tensor, forward: DraftForward, sources: Tensor | None) -> list[Runnable]:
        """Give a pass the outputs of its rows' parents: rows `sources` of those of the pass before, or the same rows."""
        machine, slots = self.machine, forward.slots
        if sources is not None:
            copied = copy_rows(output, forward.given, from_rows=sources)
        elif output is not forward.given:
            copied = copy_rows(output, forward.given)
        else:
            copied = None
        found: list[Runnable] = [] if copied is None else [copied]
        assert machine.draft is not None
        if machine.draft.config.norm_feedback:
            model, x = machine.draft.model, forward.given
            found.append(norm("EAGLE_DRAFT", x, model.final_norm, x, slots, eps=model.config.rms_norm_eps))
        return found

    def _dynamic(self, way: Dynamic, output: Tensor, normed: Tensor, rows: DrawRows) -> None:
        """The best children of the roots, then of a beam, level by level; the best of all are the nodes."""
        B, k, machine = self.bucket.num_decodes, way.top_k, self.machine
        candidates = Candidates.new(B, num_candidates(k, way.depth), self.device)
        self._children(candidates, normed, rows, 0, k, None)
        before = None
        for level in range(1, way.depth + 1):
            beam = Beam.new(B, way.depth + 1, k, self.device)
            at = self._level_buffers(beam.tokens, beam.paths)
            forward = self._forward(at)
            self.launches += [
                grow_beam(self.growing, candidates, level, beam, before),
                level_rows(self.growing, machine.slots, level, 1 + (level - 1) * k, at.rows),
                *self._go_on(output, forward, beam.sources.view(-1)), *forward.launches(),
            ]  # fmt: skip
            output, before = forward.hidden, beam
            above = beam.scores.view(-1)
            self._children(candidates, forward.normed, self._drawing(at, 2), first_of(k, level), k, above)
        self.launches.append(choose_nodes(self.growing, candidates, k, self.nodes))

    def _children(
        self, candidates: Candidates, normed: Tensor, rows: DrawRows, first: int, k: int, above: Tensor | None
    ) -> None:  # fmt: skip
        """Enter the k best children of rows as candidates from `first` on."""
        B, head, num = self.bucket.num_decodes, self._draft_head, len(normed)
        best, end = TileBest.new(num, len(head.weight), k, self.device), first + num // B * k
        tokens, scores = candidates.tokens[:, first:end], candidates.scores[:, first:end]
        self.launches += [
            best_by_tile(normed, head, rows, best), pick_children(best, rows.slots, tokens, scores, above=above)
        ]  # fmt: skip

    def _level_buffers(self, tokens: Tensor, paths: Tensor) -> RowBuffers:
        """The rows of a level, m of each tree, whose tokens [B, m] and paths [B, m, W] others fill."""
        B, m, _ = paths.shape
        at = RowBuffers.new(self.machine.state, B * m, 0, m)
        return replace(at, rows=replace(at.rows, path=paths[..., 1:].flatten(0, 1)), tokens=tokens.view(-1))

    def _static(self, way: Static, output: Tensor, normed: Tensor, rows: DrawRows) -> None:
        """The children of every inner node, level by level; the nodes are known places among them."""
        B, machine, shape = self.bucket.num_decodes, self.machine, static_shape(way.static_paths)
        plan = StaticPlan.of(shape.parents, shape.ranks)
        candidates, above = Candidates.new(B, plan.num_candidates, self.device), 1
        self._children(candidates, normed, rows, 0, way.width, None)
        for number, level in enumerate(plan.levels, 1):
            tokens = torch.zeros(B, len(level.places), dtype=torch.int32, device=self.device)
            paths, places = self._integers(level.paths).expand(B, -1, -1).contiguous(), self._integers(level.places)
            sources = (self._integers(level.parents) + above * torch.arange(B, device=self.device)[:, None]).int()
            at = self._level_buffers(tokens, paths)
            forward = self._forward(at)
            self.launches += [
                take_candidates(self.growing, candidates.tokens, places, tokens),
                level_rows(self.growing, machine.slots, number, level.paths[0][number], at.rows),
                *self._go_on(output, forward, sources.flatten()), *forward.launches(),
            ]  # fmt: skip
            output, above = forward.hidden, len(level.places)
            self._children(candidates, forward.normed, self._drawing(at, 2), level.first, way.width, None)
        nodes = take_candidates(self.growing, candidates.tokens, self._integers(plan.places), self.nodes.tokens[:, 1:])
        self.launches.append(nodes)

    def _integers(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    # Verify

    def _verify(self) -> None:
        """The target over the trees: its own token at every node, the kept paths, the slots' next roots."""
        machine, (B, N) = self.machine, self.nodes.tokens.shape
        is_chain = not isinstance(self.bucket.way, Static | Dynamic)
        at = RowBuffers.new(machine.state, B * N, 0, N)
        path = None if is_chain else self.nodes.paths[..., 1:].flatten(0, 1)
        at = replace(at, rows=replace(at.rows, path=path), tokens=self.nodes.tokens.view(-1))
        forward = TargetForward(machine.target, machine.pages, at, self.bucket.spans, machine.workspace)
        head, drawn = VocabularyHead(machine.target.head), torch.zeros_like(at.tokens)
        best = TileBest.new(B * N, len(head.weight), 1, self.device)
        self.launches += [
            tree_rows(self.active, machine.slots, self.nodes, at.rows), *forward.launches(),
            best_by_tile(forward.normed, head, self._drawing(at, 1), best), pick_draws(best, forward.slots, drawn),
            accept_paths(self.active, self.nodes, drawn.view(B, N), self.limits, self.kept),
            keep_paths(self.active, machine.slots, N, self.kept),
        ]  # fmt: skip
        if not is_chain:
            self.launches.append(move_keys(machine.pages.k, machine.pages.v, self.kept))
        if self.bucket.keeps_features:
            assert machine.draft is not None and machine.fused is not None
            g = torch.zeros(B * N, machine.fused.shape[1], device=self.device)
            kept = self.kept.rows.view(-1), self.kept.targets.view(-1)
            self.launches += [
                *fuse(machine.draft, forward.features, forward.slots, g, machine.workspace),
                copy_rows(g, machine.fused, from_rows=kept[0], to_rows=kept[1]),
            ]  # fmt: skip

    # Outcome

    def _columns(self) -> list[Tensor]:
        """What is told of each decode, [B, n] each."""
        kept, nodes, state = self.kept, self.nodes, self.machine.state
        draft_end = state.draft_end[self.active.clamp(min=0)]
        first = torch.stack((kept.roots, kept.num_accepted, draft_end), 1)
        return [first, kept.path, kept.tokens, nodes.tokens, nodes.parents, nodes.depths]

    def _outcome(self) -> Tensor:
        return torch.cat(self._columns(), 1)

    def _tell(self) -> None:
        torch.cat(self._columns(), 1, out=self.outcome)


def new_nodes(way: Drafting, count: int, device: torch.device) -> TreeNodes:
    """Trees of a way to draft whose topology is known, or has room for what will be chosen."""
    if isinstance(way, Static):
        return TreeNodes.of(static_shape(way.static_paths).parents, count, device)
    chain = TreeNodes.of((0, *range(way.max_nodes - 1)), count, device)
    if not isinstance(way, Dynamic):
        return chain
    paths = torch.zeros(count, way.num_nodes, way.max_depth + 1, dtype=torch.int32, device=device)
    empty = (torch.zeros_like(chain.tokens) for _ in range(2))
    return TreeNodes(chain.tokens, *empty, paths, chain.counts)
