"""The engine: one step that drafts, verifies, accepts and commits, for every running sequence at once.

Decoding one token at a time is speculation with a one-node tree, so the baseline, the chain and the trees are values
of SpecConfig in the same step, never code paths beside it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import psutil

from aquiline.config import MAX_DEPTH, MAX_NODES, EngineConfig, SamplingParams, SpecConfig
from aquiline.engine import slots as binding
from aquiline.engine.detokenizer import Detokenizer
from aquiline.engine.model import LoadedModels
from aquiline.engine.scheduler import Chunk, Scheduler, StepPlan
from aquiline.engine.sequence import LogitAdjustments, Request, Sequence, TokenDelta
from aquiline.engine.slots import Slots
from aquiline.errors import NumericalError
from aquiline.kv.pool import PagePool
from aquiline.metrics import Meter
from aquiline.spec.drafters import DraftSession, Pending, Roots, drafter
from aquiline.spec.tree import DraftTree, chain_topology
from aquiline.types import AcceptResult, Int32, Rows


class Engine:
    """Runs sequences over loaded models; owns slots, pages and the step's static buffers."""

    def __init__(self, models: LoadedModels, config: EngineConfig) -> None:
        self.models, self.config = models, config
        per_slot = -(-(context_limit(models, config) + MAX_NODES + 1) // config.page_size)
        num_pages = config.num_pages or min(per_slot * config.max_batch, affordable_pages(models, config))
        self.pool = PagePool(num_pages, config.page_size, config.max_batch, per_slot)
        self.kv = models.new_target_kv(num_pages, config.page_size)
        self.scheduler = Scheduler(self.pool, config.max_batch, config.row_budget)
        self.rows = Rows(models.max_rows, MAX_DEPTH + 1, self.pool.table)
        self.slots = Slots(config.max_batch, MAX_DEPTH + 1, models.target.features.shape[1])
        self.session: DraftSession | None = None
        if models.draft is not None:
            draft_rows = Rows(models.max_rows, MAX_DEPTH + 1, self.pool.table)
            self.session = DraftSession(models.draft, models.new_draft_kv(num_pages, config.page_size), draft_rows)
        self.meter = Meter()
        self.configure(SpecConfig(drafter="none"))

    def configure(self, spec: SpecConfig) -> None:
        """Choose how the following requests are drafted. Raises ValueError while requests run or if it cannot work."""
        if self.is_busy:
            raise ValueError(f"spec={spec}: cannot change while requests run")
        if spec.drafter != "none" and self.session is None:
            raise ValueError(f"drafter={spec.drafter!r}: no draft model is loaded; pass one or use drafter='none'")
        if spec.drafter != "none":
            self.models.check_width(spec)
        self.spec, self.drafter = spec, drafter(spec)
        self.scheduler.lookahead = max(spec.max_nodes, spec.draft_rows + 1)

    @property
    def is_busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.scheduler.waiting) or any(s is not None for s in self.scheduler.running)

    def add(self, request: Request) -> Sequence:
        """Queue a request. Raises ValueError naming what cannot work, OutOfPages if it could never fit."""
        self._check(request)
        sampling = request.sampling
        eos = () if sampling.ignore_eos else self.models.eos_token_ids
        sequence = Sequence(
            request=request,
            detokenizer=Detokenizer(self.models.tokenizer, request.prompt_ids, sampling.stop),
            eos_token_ids=frozenset(eos) | frozenset(sampling.stop_token_ids),
            tokens=list(request.prompt_ids),
        )
        if sampling.changes_logits:
            sequence.adjustments = LogitAdjustments(sampling, request.prompt_ids, self.models.vocab_size)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[TokenDelta]:
        """Run one step; what it added to each sequence. An empty list once nothing is left to do."""
        plan = self.scheduler.next_plan()
        if plan is None:
            return []
        with self.meter.step(plan.is_decode):
            deltas = self._decode(plan) if plan.is_decode else self._prefill(plan.chunks)
        if self.config.check:
            self.pool.check()
        return deltas

    def reset(self) -> None:
        """Drop every request, waiting or running, and free its pages."""
        self.scheduler.waiting.clear()
        for sequence in [s for s in self.scheduler.running if s is not None]:
            self.scheduler.finish(sequence)

    def _decode(self, plan: StepPlan) -> list[TokenDelta]:
        meter, sequences = self.meter, plan.decoding
        roots = self.slots.roots(sequences)
        with meter.stage("draft"):
            tree = self._propose(sequences, roots)
        with meter.stage("verify"):
            binding.bind_tree(self.rows, tree, roots)
            self._forward()
        with meter.stage("accept"):
            result = self.models.accept(tree, self._draw(tree, sequences))
        with meter.stage("commit"):
            self._keep(tree, roots, result)
            if self.drafter is not None:
                self.slots.carry(roots.slots, tree, result, self.models.target.features)
        return self._commit(sequences, tree, result)

    def _propose(self, sequences: tuple[Sequence, ...], roots: Roots) -> DraftTree:
        if self.drafter is None or self.session is None:
            return DraftTree(chain_topology(len(sequences), 1), roots.tokens)
        return self.drafter.propose(self.session, self.slots.pending(sequences, roots), roots)

    def _forward(self) -> None:
        self.models.target.forward(self.rows, self.kv)
        self.meter.num_target_forwards += 1

    def _draw(self, tree: DraftTree, sequences: tuple[Sequence, ...]) -> Int32:
        """The target's own token at every row of the tree."""
        every = np.arange(self.rows.num, dtype=np.int32)
        if all(s.adjustments is None for s in sequences):
            return self._draw_rows(every)
        shape = tree.topology
        drawn = np.empty(self.rows.num, np.int32)
        for b, sequence in enumerate(sequences):
            rows = every[shape.offsets[b] : shape.offsets[b + 1]]
            first = int(shape.offsets[b])
            paths = [tree.tokens[first + shape.paths[r, 1 : shape.depths[r] + 1]] for r in rows.tolist()]
            drawn[rows] = self._draw_rows(rows, sequence.adjustments, paths)
        return drawn

    def _draw_rows(
        self, rows: Int32, adjustments: LogitAdjustments | None = None, paths: list[Int32] | None = None
    ) -> Int32:
        target = self.models.target
        sampling = self.slots.sampling(self.rows.slots[rows], self.rows.positions[rows])
        if adjustments is None or paths is None:
            return target.draw(rows, sampling)
        return target.draw_from(adjustments.apply(target.logits(rows), paths), sampling)

    def _keep(self, tree: DraftTree, roots: Roots, result: AcceptResult) -> None:
        """Make the winning paths contiguous: node i of level d moves from KV index root + i to root + d, d <= i."""
        if tree.topology.is_chain:
            return
        levels = np.arange(result.path.shape[1], dtype=np.int32)
        moved = (levels <= result.num_accepted[:, None]) & (result.path != levels)
        slot, level = np.nonzero(moved)
        base = roots.positions[slot]
        self.models.move_kv(
            self.kv, self.pool.table, roots.slots[slot], base + result.path[slot, level], base + levels[level]
        )

    def _commit(self, sequences: tuple[Sequence, ...], tree: DraftTree, result: AcceptResult) -> list[TokenDelta]:
        deltas = []
        proposed = (np.diff(tree.topology.offsets) - 1).tolist()
        for b, (sequence, accepted) in enumerate(zip(sequences, result.num_accepted.tolist(), strict=True)):
            tokens = result.tokens[b, : accepted + 1].tolist()
            delta = self._append(sequence, tokens, accepted)
            num_kept = len(delta.token_ids)
            sequence.counters.add(proposed[b], accepted, num_kept, len(tokens) - num_kept)
            sequence.num_cached += num_kept
            deltas.append(delta)
        self._finish(sequences)
        return deltas

    def _append(self, sequence: Sequence, tokens: list[int], num_accepted: int) -> TokenDelta:
        if tokens[-1] < 0:
            raise NumericalError(
                f"request {sequence.request.id}: the target's logits at position {len(sequence.tokens)} are NaN or "
                "have no finite value; check the checkpoint's weights and dtype"
            )
        return sequence.append(tokens, num_accepted)

    def _finish(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            if sequence.finish_reason is not None:
                self.meter.counters.merge(sequence.counters)
                self.scheduler.finish(sequence)

    def _prefill(self, chunks: tuple[Chunk, ...]) -> list[TokenDelta]:
        for chunk in chunks:
            if chunk.start == 0:
                self.slots.admit(chunk.sequence.slot, chunk.sequence.request.sampling)
        last_rows = binding.bind_chunks(self.rows, chunks)
        self._forward()
        self.meter.num_prefill_tokens += self.rows.num
        if self.drafter is not None:
            self._feed_draft(chunks, last_rows)
        deltas = []
        for chunk, row in zip(chunks, last_rows.tolist(), strict=True):
            sequence = chunk.sequence
            sequence.num_cached = chunk.end
            if chunk.is_last:
                paths = [np.zeros(0, np.int32)]
                drawn = self._draw_rows(np.array([row], np.int32), sequence.adjustments, paths)
                sequence.counters.num_prefilled += 1
                deltas.append(self._append(sequence, drawn.tolist(), 0))
        self._finish(chunk.sequence for chunk in chunks)
        return deltas

    def _feed_draft(self, chunks: tuple[Chunk, ...], last_rows: Int32) -> None:
        """Draft rows of a prefilled chunk, at once; the prompt's last token waits for the token that follows it."""
        assert self.session is not None
        features, n = self.models.target.features, self.rows.num
        known = np.ones(n, np.bool_)
        for chunk, row in zip(chunks, last_rows.tolist(), strict=True):
            if chunk.is_last:
                known[row] = False
                self.slots.carry_one(chunk.sequence.slot, features[row])
        following = [t for c in chunks for t in (*c.sequence.tokens[c.start + 1 : c.end + 1], *([0] * c.is_last))]
        if known.any():
            self.session.feed(Pending(
                slots=self.rows.slots[:n][known],
                positions=self.rows.positions[:n][known],
                tokens=np.array(following, np.int32)[known],
                features=features[:n][known],
            ))  # fmt: skip

    def _check(self, request: Request) -> None:
        models, sampling, length = self.models, request.sampling, len(request.prompt_ids)
        if length == 0:
            raise ValueError(f"request {request.id}: prompt=[]: must hold at least one token")
        bad = [t for t in request.prompt_ids if not 0 <= t < models.vocab_size]
        if bad:
            raise ValueError(f"request {request.id}: prompt token {bad[0]}: must be in [0, {models.vocab_size})")
        limit = context_limit(models, self.config)
        if length + sampling.max_tokens > limit:
            raise ValueError(
                f"request {request.id}: prompt of {length} tokens + max_tokens={sampling.max_tokens} exceeds the "
                f"{limit} positions there are; shorten the prompt, lower max_tokens, or raise max_context up to the "
                f"model's {models.max_positions}"
            )
        beyond = [t for t in (*sampling.logit_bias, *sampling.stop_token_ids) if not 0 <= t < models.vocab_size]
        if beyond:
            raise ValueError(f"request {request.id}: token id {beyond[0]}: must be in [0, {models.vocab_size})")
        if sampling.stop and models.tokenizer is None:
            raise ValueError(f"request {request.id}: stop={sampling.stop!r}: needs a tokenizer, and none is loaded")


def context_limit(models: LoadedModels, config: EngineConfig) -> int:
    """Tokens of the longest sequence, prompt and output; a slot's KV may reach a tree and one draft row further.

    Raises ValueError if max_context asks for more positions than the model has."""
    limit = models.max_positions
    if config.max_context is not None and config.max_context > limit:
        raise ValueError(f"max_context={config.max_context}: the model was built for {limit} positions")
    return config.max_context or limit


def affordable_pages(models: LoadedModels, config: EngineConfig) -> int:
    """Pages that config.cache_fraction of the free memory holds, at least one."""
    page_bytes = models.bytes_per_token() * config.page_size
    return max(1, int(psutil.virtual_memory().available * config.cache_fraction) // page_bytes)


def new_request(request_id: int, prompt_ids: list[int], sampling: SamplingParams, seed: int) -> Request:
    """A request with its seed resolved: the given one where the parameters name none."""
    return Request(request_id, tuple(prompt_ids), sampling if sampling.seed is not None else sampling.with_seed(seed))
