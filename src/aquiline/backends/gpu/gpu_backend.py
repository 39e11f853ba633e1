"""Steps on a GPU. What a program holds runs as one; the rest takes the torch backend's way over the same kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from aquiline.backends.base import Pending, Sizes, StepInput
from aquiline.backends.gpu.eager import EagerDraft, EagerTarget, bucket, draw
from aquiline.backends.gpu.forward import Workspace
from aquiline.backends.gpu.mailbox import ROOM, MailedState
from aquiline.backends.gpu.pages import GpuPages
from aquiline.backends.gpu.program import Bucket, Machine, Program
from aquiline.backends.gpu.program_step import Fit, JoinedStep, ProgramStep, fit, numbers_of, without_decodes
from aquiline.backends.gpu.weights import DeviceDraft, DeviceModel
from aquiline.backends.torch.draw import filtered
from aquiline.backends.torch.slot_state import HostSlot, RowSampling
from aquiline.backends.torch.torch_backend import TorchBackend
from aquiline.ops.triton.attention import AttentionTiles
from aquiline.spec.drafting import Drafting


class GpuBackend(TorchBackend):
    """Steps over storage on one device. See backends/base.py for what each method promises."""

    pages = GpuPages

    def __init__(
        self, target: DeviceModel, draft: DeviceDraft | None, kv_dtype: torch.dtype, sizes: Sizes, tiles: AttentionTiles
    ) -> None:  # fmt: skip
        device = target.embed.device
        state = MailedState(sizes, device, 3 * bucket(sizes.num_slots))
        workspace = Workspace(torch.empty(0, device=device), tiles)
        head = None if draft is None else EagerDraft(draft, workspace)
        super().__init__(EagerTarget(target, workspace), head, kv_dtype, state)
        own = self._draft
        storage = (None, None) if own is None else (own.storage, own.fused)
        self._machine = Machine(target, draft, self.storage, *storage, state, workspace)
        self._programs: dict[Bucket, Program] = {}

    @torch.inference_mode()
    def step(self, step: StepInput) -> Pending:  # noqa: D102
        if self._draft is None and any(d.drafting.needs_draft_model for d in step.decodes):
            return super().step(step)  # which says what is missing
        for extend in step.extends:
            self._extend(extend)
        self._tell(step)
        hosts = [self.state.hosts[decode.slot] for decode in step.decodes]
        found = fit(step.decodes, hosts)
        if not step.decodes or found.reason:
            return super().step(step._replace(extends=(), admits=(), pages=()))
        decoded = self._run(step, hosts, found)
        return JoinedStep(decoded, super().step(without_decodes(step))) if step.chunks else decoded

    def _run(self, step: StepInput, hosts: list[HostSlot], found: Fit) -> ProgramStep:
        """Issue the step's decodes as a program."""
        state, way, decodes = self._machine.state, found.way, step.decodes
        growing = [(decode.slot, host) for decode, host in zip(decodes, hosts, strict=True) if decode.drafting.max_depth]
        behind = [pair for pair in growing if pair[1].max_lag > way.max_depth + 1]
        if behind:
            self._catch_up(behind)
        program = self._program(way, hosts)
        numbers = numbers_of(decodes, state.more.numel() // 3)
        if state.num_changes + numbers.size > ROOM:
            state.write_changes()
        state.assign_words(state.more.storage_offset(), numbers)
        state.post_changes()
        program.run()
        for decode, host in zip(decodes, hosts, strict=True):
            num_tokens = decode.drafting.max_depth + 1
            host.max_lag = num_tokens + (0 if decode.drafting.is_speculative else host.max_lag)
            host.grow(num_tokens)
        return ProgramStep(program, decodes, hosts, program.told(), step.with_trees)

    def _catch_up(self, behind: list[tuple[int, HostSlot]]) -> None:
        """Write the draft keys of slots that lack more than a program's pass writes."""
        assert self._draft is not None
        slots = torch.tensor([slot for slot, _ in behind], device=self.device)
        longest = 1 + max(host.max_root for _, host in behind)
        self.state.write_changes()
        until = self.state.root[slots] + 1
        self._draft.catch_up(slots, until, max(host.max_lag for _, host in behind), longest)
        for _, host in behind:
            host.max_lag = 0

    def _program(self, way: Drafting, hosts: list[HostSlot]) -> Program:
        """The program for a way to draft and so many slots with so long texts, built when it is first needed."""
        longest = max(host.max_root for host in hosts) + way.lookahead + 1
        spans = bucket(-(-longest // self._machine.workspace.tiles.span))
        key = Bucket(way, bucket(len(hosts)), spans, any(host.admit.drafts for host in hosts))
        if key not in self._programs:
            self._programs[key] = Program(self._machine, key)
        return self._programs[key]
