"""A step that a program runs: what the host tells it, and its outcome, which is read when it is asked for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aquiline.backends.base import Decode, Pending, StepOutput
from aquiline.backends.gpu.program import Program
from aquiline.backends.torch.handles import IssuedStep
from aquiline.backends.torch.slot_state import HostSlot
from aquiline.backends.torch.trees import Kept, Trees
from aquiline.ops.host_buffer import HostBuffer
from aquiline.ops.perf_watch import PerfWatch
from aquiline.spec.drafting import Chain, Drafting, NoDraft


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
