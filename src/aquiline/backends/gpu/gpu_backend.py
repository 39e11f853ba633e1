"""Steps on a GPU. What a program holds runs as one; the rest takes the torch backend's way over the same kernels."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import cast

import torch
from torch import Tensor

from aquiline.backends.base import Decode, Pending, Sizes, StepInput
from aquiline.backends.gpu.eager import EagerDraft, EagerTarget, draw
from aquiline.backends.gpu.forward import Bucket, DraftParts, ProgramParts, Workspace
from aquiline.backends.gpu.mailbox import ROOM, MailedState
from aquiline.backends.gpu.pages import GpuPages, bucket, most_rows
from aquiline.backends.gpu.program import Program, ProgramStep, fit, numbers_of
from aquiline.backends.gpu.weights import DeviceDraft, DeviceModel
from aquiline.backends.torch.draw import filtered
from aquiline.backends.torch.slot_state import HostSlot, RowSampling
from aquiline.backends.torch.torch_backend import TorchBackend
from aquiline.ops.host_buffer import HostBuffer
from aquiline.ops.perf_watch import PerfWatch
from aquiline.ops.triton.tile_table import TileTable
from aquiline.spec.drafting import Drafting

logger = logging.getLogger(__name__)


class GpuBackend(TorchBackend):
    """Steps over storage on one device. See backends/base.py for what each method promises."""

    pages = GpuPages

    def __init__(
        self, target: DeviceModel, draft: DeviceDraft | None, kv_dtype: torch.dtype, sizes: Sizes, table: TileTable
    ) -> None:  # fmt: skip
        device = target.embed.device
        state = MailedState(sizes, device, 3 * bucket(sizes.num_slots))
        workspace = Workspace(torch.empty(0, device=device), table)
        head = None if draft is None else EagerDraft(draft, workspace)
        super().__init__(EagerTarget(target, workspace), head, kv_dtype, state)
        parts = None
        if draft is not None and self._draft is not None:
            parts = DraftParts(draft, cast(GpuPages, self._draft.storage), self._draft.fused)
        self._machine = ProgramParts(target, cast(GpuPages, self.storage), state, workspace, parts)
        self.programs: dict[Bucket, Program] = {}
        self.perf: PerfWatch | None = None
        self.checks_masks = False  # whether programs that are built from now on check what their rows see
        self.is_traced = False  # whether programs run launch by launch, under the names of a trace's ranges (NVTX)
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None  # of all graphs

    @torch.inference_mode()
    def step(self, step: StepInput) -> Pending:  # noqa: D102
        if self._draft is None and any(d.drafting.needs_draft_model for d in step.decodes):
            return super().step(step)  # which says what is missing
        for extend in step.extends:
            self._extend(extend)
        self._tell(step)
        hosts = [self.state.hosts[decode.slot] for decode in step.decodes]
        way, reason = fit(step.decodes, hosts)
        experts = self.decoder.config.experts
        if experts is not None and bucket(len(step.decodes)) * way.max_nodes > most_rows(experts):
            reason = f"{len(step.decodes)} trees of {way.max_nodes} nodes, more rows than experts are grouped for"
        if self.perf is not None:
            self._watch_choice(self.perf, step.decodes, hosts, reason)
        if not step.decodes or reason:
            return super().step(step._replace(extends=(), admits=(), pages=()))
        program, buffer = self._run(step.decodes, hosts, way)
        chunks = super().step(StepInput(chunks=step.chunks)) if step.chunks else None
        return ProgramStep(program, step.decodes, hosts, buffer, step.with_trees, self.perf, chunks)

    def _run(self, decodes: tuple[Decode, ...], hosts: list[HostSlot], way: Drafting) -> tuple[Program, HostBuffer]:
        """Issue decodes as a program, and the copy of its outcome."""
        state = self._machine.state
        growing = [
            (decode.slot, host) for decode, host in zip(decodes, hosts, strict=True) if decode.drafting.max_depth
        ]
        behind = [pair for pair in growing if pair[1].max_lag > way.max_depth + 1]
        if behind:
            self._catch_up(behind)
        program = self._program(way, hosts)
        numbers = numbers_of(decodes, state.more.numel() // 3)
        if state.num_changes + numbers.size > ROOM:
            state.write_changes()
        state.assign_words(int(state.more.storage_offset()), numbers)
        with self.perf or nullcontext():
            state.post_changes()
        with nullcontext() if self.perf is None else self.perf.device_part():
            program.trace() if self.is_traced else program.run()
        with self.perf or nullcontext():
            buffer = program.told()
        for decode, host in zip(decodes, hosts, strict=True):
            num_tokens = decode.drafting.max_depth + 1
            host.max_lag = num_tokens + (0 if decode.drafting.is_speculative else host.max_lag)
            host.grow(num_tokens)
        return program, buffer

    def time_parts(self, is_wanted: bool) -> None:
        """Parts are not timed. On a CUDA device programs run from now on so that a profiler sees their ranges."""
        self.is_traced = is_wanted and self.device.type == "cuda"

    def _draw(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        return draw(filtered(logits, sampling) if sampling.filters else logits, sampling)

    def _catch_up(self, behind: list[tuple[int, HostSlot]]) -> None:
        """Write the draft keys of slots that lack more than a program's pass writes."""
        assert self._draft is not None
        if self.perf is not None:
            self.perf.note("fallback", f"draft keys that slots {[slot for slot, _ in behind]} lack")
        slots = torch.tensor([slot for slot, _ in behind], device=self.device)
        longest = 1 + max(host.max_root for _, host in behind)
        self.state.write_changes()
        until = self.state.root[slots] + 1
        self._draft.catch_up(slots, until, max(host.max_lag for _, host in behind), longest)
        for _, host in behind:
            host.max_lag = 0

    def watch(self, is_strict: bool = False) -> PerfWatch:
        """The warm-up is over: from now on watch the rules of PERF mode. is_strict: the first breach raises."""
        self.perf, table = PerfWatch(self.device, is_strict), self._machine.workspace.table
        logger.info(table.describe())
        for key in table.misses:
            self.perf.note("untuned", f"{key} on {table.device}")
        return self.perf

    def watch_perf(self) -> list[str]:  # noqa: D102
        return self.watch().violations

    def _watch_choice(
        self, perf: PerfWatch, decodes: tuple[Decode, ...], hosts: list[HostSlot], reason: str
    ) -> None:  # fmt: skip
        """Note decodes that no program holds, for this reason, and slots that may draft and do not."""
        if decodes and reason:
            perf.note("fallback", reason)
        for decode, host in zip(decodes, hosts, strict=True):
            left = host.admit.num_prompt + host.admit.sampling.max_tokens - host.max_root - 1
            if host.admit.drafts and not decode.drafting.is_speculative and left > 1:
                perf.note("multi-token off", f"slot {decode.slot} with {left} tokens left")

    def _program(self, way: Drafting, hosts: list[HostSlot]) -> Program:
        """The program for a way to draft and so many slots with so long texts, built when it is first needed."""
        longest, c = max(host.max_root for host in hosts) + way.lookahead + 1, self.decoder.config
        least = self._machine.workspace.table.attention(c.num_heads, c.num_kv_heads, c.head_dim, self.storage.k.dtype)
        context = bucket(max(longest, least.span))
        key = Bucket(way, bucket(len(hosts)), context, any(host.admit.drafts for host in hosts), self.checks_masks)
        if key not in self.programs:
            if self.perf is not None:
                self.perf.note("compile", f"{key} after the warm-up")
            self.programs[key] = program = Program(self._machine, key)
            if self.device.type == "cuda":
                state = self._machine.state
                state.assign_words(int(state.more.storage_offset()), numbers_of((), state.more.numel() // 3))
                state.write_changes()
                program.capture(self._pool)
        return self.programs[key]
