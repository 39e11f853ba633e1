"""A decode step as one program: every launch over addresses that do not change, for a bucket of decodes and trees.

What varies between steps lies in device tensors: which slots decode and how many nodes each has arrive in the message,
roots, tokens and pages stand in the slots' state. A program is built once. It runs launch by launch, by the interpreter
or on a device, or as the CUDA graph that captured those launches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aquiline.backends.base import Decode, Pending, StepOutput
from aquiline.backends.gpu.forward import Bucket, ProgramParts, TargetForward, fuse
from aquiline.backends.gpu.growth import Growth
from aquiline.backends.gpu.mailbox import DEPTH
from aquiline.backends.gpu.pages import RowBuffers
from aquiline.backends.torch.handles import IssuedStep
from aquiline.backends.torch.slot_state import HostSlot
from aquiline.backends.torch.trees import Kept, Trees
from aquiline.ops.host_buffer import HostBuffer
from aquiline.ops.perf_watch import PerfWatch
from aquiline.ops.triton.accept import KeptPaths, accept_paths, copy_rows, keep_paths, move_keys
from aquiline.ops.triton.check_rows import check_rows
from aquiline.ops.triton.head_draw import VocabularyHead, pick_draws
from aquiline.ops.triton.launches import Launches, TorchCall
from aquiline.ops.triton.tree_growth import TreeNodes
from aquiline.ops.triton.tree_rows import tree_rows
from aquiline.spec.drafting import Chain, Drafting, Dynamic, NoDraft, Static
from aquiline.spec.tree import static_shape


class Program:
    """The launches of a bucket. outcome int32 [B, 4 + 2 (D + 1) + 3 N]: the root before the step, the number of
    accepted drafts, draft_end, broken rows; the kept nodes and tokens by level; the tree's tokens, parents and
    depths."""

    def __init__(self, machine: ProgramParts, bucket: Bucket) -> None:
        self.machine, self.bucket, self.device = machine, bucket, machine.state.device
        self.launches, self.graph = Launches(), None
        self.active, growing, sizes = machine.decodes(bucket.num_decodes)
        self.nodes = replace(new_nodes(bucket.way, bucket.num_decodes, self.device), counts=sizes)
        self.kept = KeptPaths.new(bucket.num_decodes, self.nodes.paths.shape[2], self.device)
        self.broken = torch.zeros_like(self.active)
        self.launches.add("HOST", machine.state.applying)
        if bucket.way.is_speculative:
            assert machine.parts is not None, "a draft model was asked for and none is loaded"
            Growth(machine, machine.parts, bucket, self.nodes, growing, self.launches).add()
        forward = self._verify()
        self._keep(forward)
        self.outcome = torch.cat(self._columns(), 1)
        self.launches.add("EAGLE_TAIL_COMMIT", TorchCall("outcome", self._tell))
        self._buffers = [HostBuffer.new(tuple(self.outcome.shape), self.device) for _ in range(DEPTH)]
        self._number = 0

    graph: torch.cuda.CUDAGraph | None

    def run(self) -> None:
        """One step: the state's message must have been posted."""
        if self.graph is not None:
            self.graph.replay()
        else:
            self.launches.run()

    def trace(self) -> None:
        """One step on a CUDA device, launch by launch under the names of `aquiline profile`'s ranges."""
        for name, launches in groupby(self.launches, lambda launch: launch.name.partition(".")[0]):
            with torch.cuda.nvtx.range(name):
                for launch in launches:
                    launch.run()

    def capture(self, pool: Any) -> None:
        """Compile the kernels, then capture the launches in a CUDA graph. No slot may be alive."""
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self.launches.run()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self.launches.run()
        self.graph = graph

    def told(self) -> HostBuffer:
        """Copy the outcome to the host once the step is through; the buffer's event says when."""
        buffer = self._buffers[self._number % DEPTH]
        self._number += 1
        buffer.memory.copy_(self.outcome, non_blocking=True)
        buffer.record()
        return buffer

    def _verify(self) -> TargetForward:
        """The target over the trees: its own token at every node, the kept paths."""
        machine, (B, N) = self.machine, self.nodes.tokens.shape
        at = RowBuffers.new(machine.state, B * N, 0, N)
        path = self.nodes.paths[..., 1:].flatten(0, 1) if self.has_branches else None
        at = replace(at, rows=replace(at.rows, path=path), tokens=self.nodes.tokens.view(-1))
        forward = TargetForward(machine.target, machine.pages, at, self.bucket.context, machine.workspace)
        head, drawn = VocabularyHead(machine.target.head), torch.zeros_like(at.tokens)
        self.launches.add("EAGLE_TREE_MASKS", tree_rows(self.active, machine.slots, self.nodes, at.rows))
        if self.bucket.is_checked:
            checked = check_rows(at.rows, machine.state.sizes.num_pages, self.bucket.context, self.broken)
            self.launches.add("EAGLE_TREE_MASKS", checked)
        best, drawing = machine.workspace.best(forward.normed, head, machine.drawing(at.rows, 1), 1)
        self.launches.add("BASE_", *forward.launches())
        self.launches.add("BASE_LM_HEAD", drawing, pick_draws(best, forward.slots, drawn))
        limits = torch.full_like(machine.state.root, self.bucket.way.max_depth)
        accepted = accept_paths(self.active, self.nodes, drawn.view(B, N), limits, self.kept)
        self.launches.add("EAGLE_ACCEPT", accepted)
        return forward

    def _keep(self, forward: TargetForward) -> None:
        """The kept paths' tokens, keys and features in place, and the slots' next roots."""
        machine, parts, (B, N) = self.machine, self.machine.parts, self.nodes.tokens.shape
        self.launches.add("EAGLE_TAIL_COMMIT", keep_paths(self.active, machine.slots, N, self.kept))
        if self.has_branches:
            self.launches.add("EAGLE_TAIL_COMMIT", move_keys(machine.pages.k, machine.pages.v, self.kept))
        if self.bucket.keeps_features and parts is not None:
            g = torch.zeros(B * N, parts.fused.shape[1], device=self.device)
            rows, places = self.kept.rows.view(-1), self.kept.targets.view(-1)
            self.launches.add(
                "EAGLE_DRAFT_FUSE", *fuse(parts.draft, forward.features, forward.slots, g, machine.workspace),
                copy_rows(g, parts.fused, from_rows=rows, to_rows=places),
            )  # fmt: skip

    @property
    def has_branches(self) -> bool:
        """Whether a node may have several children, so that kept keys have to be moved."""
        return isinstance(self.bucket.way, Static | Dynamic)

    def _columns(self) -> list[Tensor]:
        """What is told of each decode, [B, n] each."""
        kept, nodes = self.kept, self.nodes
        draft_end = self.machine.state.draft_end[self.active.clamp(min=0)]
        first = torch.stack((kept.roots, kept.num_accepted, draft_end, self.broken), 1)
        return [first, kept.path, kept.tokens, nodes.tokens, nodes.parents, nodes.depths]

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
    return replace(chain, parents=torch.zeros_like(chain.parents), depths=torch.zeros_like(chain.depths), paths=paths)


def fit(decodes: tuple[Decode, ...], hosts: list[HostSlot]) -> tuple[Drafting, str]:
    """The way to draft of a program that holds these decodes, and why none does, "" if one does. Chains run in the
    longest one's program, and plain decoding in any."""
    ways = {decode.drafting for decode in decodes if decode.drafting.is_speculative}
    chains = {way for way in ways if isinstance(way, Chain)}
    way: Drafting = NoDraft()
    if ways:
        way = max(chains, key=lambda own: own.num_spec_tokens) if ways == chains else next(iter(ways - chains))
    if len(ways) > 1 and ways != chains:
        return way, "several kinds of trees in one step"
    for decode, host in zip(decodes, hosts, strict=True):
        s = host.admit.sampling
        reasons = {
            "a cut": decode.cut is not None, "a proposal": decode.proposal is not None,
            "rules on logits": host.rules is not None, "log-probabilities": s.logprobs is not None,
            "a filter on logits": bool(s.temperature and (s.top_k or s.top_p < 1 or s.min_p)),
        }  # fmt: skip
        for reason, is_there in reasons.items():
            if is_there:
                return way, f"{reason} of slot {decode.slot}"
    return way, ""


@dataclass(frozen=True, eq=False)
class ProgramStep:
    """A step's decodes that were issued as a program. buffer: where the outcome is copied to; hosts: the slots; chunks:
    those of the step, which ran beside."""

    program: Program
    decodes: tuple[Decode, ...]
    hosts: list[HostSlot]
    buffer: HostBuffer
    with_trees: bool
    perf: PerfWatch | None
    chunks: Pending | None

    def read(self) -> StepOutput:
        """Wait for the outcome. Raises PerfViolation where PERF mode is strict and rows were broken."""
        self.buffer.wait()
        told = self.buffer.memory[: len(self.decodes)].long()
        N, levels = self.program.nodes.tokens.shape[1], self.program.nodes.paths.shape[2]
        first, path, tokens, *nodes = told.split_with_sizes([4, levels, levels, N, N, N], 1)
        root, num_accepted, draft_end, broken = first.unbind(1)
        if self.perf is not None and bool(broken.any()):
            self.perf.note("broken mask", f"{int(broken.sum())} rows of a step from roots {root.tolist()}")
        sizes = tuple(decode.drafting.max_nodes for decode in self.decodes)
        depth = self.program.bucket.way.max_depth
        trees = Trees(nodes[0], nodes[1], nodes[2], sizes, depth)
        kept = Kept(num_accepted, path, tokens, tokens >= 0)
        nothing = [None] * len(self.decodes)
        num_rows = sum(d.drafting.max_depth + 1 + d.drafting.draft_rows for d in self.decodes if d.drafting.max_depth)
        step = IssuedStep(trees, kept, root, draft_end, [*nothing], [], num_rows, self.hosts, [], self.with_trees)
        return step.read()._replace(chunks=[] if self.chunks is None else self.chunks.read().chunks)


def numbers_of(decodes: tuple[Decode, ...], count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """int32 [3, count]: the slots that decode, those whose trees grow, and their nodes; -1, -1 and 0 for the rest."""
    numbers = np.full((3, count), -1, np.int32)
    numbers[2] = 0
    for b, decode in enumerate(decodes):
        is_growing = decode.drafting.is_speculative
        numbers[:, b] = decode.slot, decode.slot if is_growing else -1, decode.drafting.max_nodes
    return numbers
