"""The engine: requests in, deltas out. Plans a step, has it computed, and commits what it decided.

Commit is right whether an outcome is read at once or after the next step is out (EngineConfig.late_commit): what the
device needs of the past it has, and a sequence found to have ended has its next outcome ignored.
"""

from __future__ import annotations

import itertools

from aquiline.config import MAX_DEPTH, MAX_NODES, EngineConfig, SpecConfig
from aquiline.engine.memory import affordable_pages, plan_memory
from aquiline.engine.model import LoadedModels
from aquiline.engine.scheduler import MIN_CHUNK, Scheduler, StepPlan
from aquiline.engine.sequence import LogitAdjustments, Request, Sequence, TokenDelta
from aquiline.engine.step import Outcome, Stepper
from aquiline.kv.pool import PagePool
from aquiline.kv.prefix import PrefixCache
from aquiline.metrics import Meter
from aquiline.spec.drafters import Drafter, drafter
from aquiline.text.detokenizer import Detokenizer
from aquiline.types import FinishReason


class Engine:
    """Runs sequences over loaded models; owns slots, pages and the prefix cache. Not thread-safe: see AsyncLLM."""

    def __init__(self, models: LoadedModels, config: EngineConfig) -> None:
        self.models, self.config = models, config
        self.max_context = context_limit(models, config)
        self._check_rows(1)
        per_slot = -(-(self.max_context + MAX_NODES + MAX_DEPTH + 2) // config.page_size)
        num_pages = config.num_pages or min(per_slot * config.max_batch, affordable_pages(models, config))
        self.memory = plan_memory(models, config.page_size, num_pages, self.max_context)
        self.pool = PagePool(num_pages, config.page_size, config.max_batch, per_slot)
        self.prefix = PrefixCache(self.pool) if config.prefix_cache else None
        self.scheduler = Scheduler(self.pool, self.prefix, config.max_batch, config.row_budget)
        self.stepper = Stepper(models, config, self.pool)
        self.sequences: dict[int | str, Sequence] = {}  # unfinished, by request id
        self.drafters: dict[SpecConfig, Drafter | None] = {}
        self.meter = Meter()
        self.last: Outcome | None = None  # what the last step decided
        self._unread: Outcome | None = None  # with late_commit: the outcome that is read when the next step is out
        self._orders = itertools.count()

    @property
    def is_busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.sequences) or self._unread is not None

    def add(self, request: Request) -> Sequence:
        """Queue a request. Raises ValueError naming what cannot work, OutOfPages if it could never fit."""
        self.check(request)
        if request.id in self.sequences:
            raise ValueError(f"request id {request.id!r}: is in use by a request that has not finished; choose another")
        sampling = request.sampling
        eos = () if sampling.ignore_eos else self.models.eos_token_ids
        if request.spec not in self.drafters:
            self.drafters[request.spec] = drafter(request.spec)
        sequence = Sequence(
            request=request,
            detokenizer=Detokenizer(self.models.tokenizer, request.prompt_ids, sampling.stop),
            eos_token_ids=frozenset(eos) | frozenset(sampling.stop_token_ids),
            tokens=list(request.prompt_ids),
            order=next(self._orders),
            drafter=self.drafters[request.spec],
        )
        if sampling.changes_logits:
            sequence.adjustments = LogitAdjustments(sampling, request.prompt_ids, self.models.vocab_size)
        self.scheduler.add(sequence)
        self.sequences[request.id] = sequence
        return sequence

    def step(self) -> list[TokenDelta]:
        """Run one step; what was added to each sequence. Empty lists are normal while prompts are prefilled."""
        meter = self.meter
        meter.begin()
        deltas = [self._end(sequence, "deadline") for sequence in self.scheduler.overdue()]
        preempted = self.scheduler.num_preemptions
        plan = self.scheduler.next_plan()
        outcome = self.last = self.stepper.run(plan, meter) if plan is not None else None
        if self.config.late_commit:
            outcome, self._unread = self._unread, outcome
        if outcome is not None:
            deltas += self._commit(outcome)
        if self.config.check:
            self._check_pages()
        meter.lap("host")
        if plan is not None:
            self._count(plan)
            meter.num_preemptions += self.scheduler.num_preemptions - preempted
        return deltas

    def abort(self, request_id: int | str) -> TokenDelta:
        """End a request now, waiting or running. Raises ValueError for an id that is not there."""
        if request_id not in self.sequences:
            raise ValueError(f"request id {request_id!r}: is unknown; it has finished, or was never added")
        return self._end(self.sequences[request_id], "abort")

    def reset(self) -> None:
        """Drop every request, waiting or running, and free its pages."""
        for sequence in list(self.sequences.values()):
            self._end(sequence, "abort")
        self._unread = None

    def _commit(self, outcome: Outcome) -> list[TokenDelta]:
        deltas, touched = [], []
        for b, sequence in enumerate(outcome.decoding):
            sequence.in_flight -= sequence.max_step
            if sequence.finish_reason is not None:
                continue
            kept = outcome.kept[b]
            delta = self._append(sequence, kept, len(kept) - 1, outcome)
            num_kept = len(delta.token_ids)
            sequence.counters.add(outcome.num_drafted[b], len(kept) - 1, num_kept, len(kept) - num_kept)
            deltas.append(delta)
            touched.append(sequence)
            if sequence.slot == outcome.slots[b]:
                sequence.num_cached += num_kept
                sequence.draft_end = outcome.positions[b] + 1
        for number, chunk in enumerate(outcome.plan.chunks):
            sequence = chunk.sequence
            sequence.in_flight -= chunk.draws
            if sequence.finish_reason is not None:
                continue
            if sequence.slot == chunk.slot:
                sequence.num_cached = sequence.draft_end = chunk.end
            if chunk.draws:
                delta = self._append(sequence, [outcome.first_tokens[number]], 0, outcome)
                sequence.counters.num_prefilled += len(delta.token_ids)
                deltas.append(delta)
            touched.append(sequence)
        size = self.pool.page_size
        for sequence in touched:
            if sequence.is_published and sequence.num_cached // size > len(sequence.nodes) and sequence.slot >= 0:
                self._publish(sequence)
            if sequence.finish_reason is not None:
                self._forget(sequence)
        return deltas

    def _append(self, sequence: Sequence, tokens: list[int], num_accepted: int, outcome: Outcome) -> TokenDelta:
        logprobs = outcome.logprobs.get(sequence) if outcome.logprobs else None
        if tokens[-1] >= 0:
            return sequence.append(tokens, num_accepted, logprobs)
        delta = sequence.append(tokens[:-1], num_accepted, logprobs)  # true, whatever comes after them
        if delta.finish_reason is not None:
            return delta
        end = sequence.end(
            "error",
            f"request {sequence.request.id}: the target's logits at position {len(sequence.tokens)} are NaN or "
            "have no finite value; check the checkpoint's weights and dtype",
        )
        return delta._replace(text=delta.text + end.text, finish_reason="error", error=end.error)

    def _publish(self, sequence: Sequence) -> None:
        """Offer the pages whose tokens are committed and whose draft keys, if it drafts, are written."""
        assert self.prefix is not None
        size, end, drafts = self.pool.page_size, sequence.num_cached, sequence.drafter is not None
        if drafts and sequence.draft_end // size < end // size and sequence.finish_reason is not None:
            if self._unread is None or sequence not in self._unread.decoding:
                self.stepper.complete_draft(sequence)
            sequence.draft_end = end
        if drafts:
            end = min(end, sequence.draft_end)
        for index in range(len(sequence.nodes), end // size):
            parent = sequence.nodes[-1] if sequence.nodes else None
            tokens = sequence.tokens[index * size : (index + 1) * size]
            node = self.prefix.publish(sequence.slot, parent, index, tokens, drafts)
            if node is None:
                sequence.is_published = False
                return
            sequence.nodes.append(node)

    def _end(self, sequence: Sequence, reason: FinishReason) -> TokenDelta:
        delta = sequence.end(reason)
        self._forget(sequence)
        return delta

    def _forget(self, sequence: Sequence) -> None:
        self.meter.counters.merge(sequence.counters)
        self.scheduler.remove(sequence)
        del self.sequences[sequence.request.id]

    def _count(self, plan: StepPlan) -> None:
        assert self.last is not None
        draft_rows = 0
        if self.stepper.session is not None:
            draft_rows, self.stepper.session.num_rows = self.stepper.session.num_rows, 0
        num_decode_rows = self.last.num_decode_rows
        self.meter.end(num_decode_rows, plan.num_chunk_rows)
        if plan.decoding:
            self.meter.slots.add(
                self.config.max_batch, len(plan.decoding), plan.num_prefilling, plan.num_empty, num_decode_rows,
                draft_rows,
            )  # fmt: skip

    def _check_pages(self) -> None:
        self.pool.check()
        if self.prefix is not None:
            self.prefix.check()

    def check(self, request: Request) -> None:
        """Raises ValueError naming what cannot work on these models, OutOfPages if the request could never fit."""
        models, sampling, length = self.models, request.sampling, len(request.prompt_ids)
        if length == 0:
            raise ValueError(f"request {request.id}: prompt=[]: must hold at least one token")
        bad = [t for t in request.prompt_ids if not 0 <= t < models.vocab_size]
        if bad:
            raise ValueError(f"request {request.id}: prompt token {bad[0]}: must be in [0, {models.vocab_size})")
        limit = self.max_context
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
        self.check_spec(request.spec)
        self.scheduler.check(request)

    def check_spec(self, spec: SpecConfig) -> None:
        """Raises ValueError for a way to draft that the models cannot do, or cannot in max_batch slots at once."""
        if spec.drafter != "none":
            self.models.check_spec(spec)
        self._check_rows(max(spec.max_nodes, spec.draft_rows))

    def _check_rows(self, width: int) -> None:
        """Raises ValueError if a step, each of whose slots runs `width` rows, outgrows what the models were loaded for:
        trees and the least chunk beside them, or one chunk after the other and each one's row behind a prefix hit."""
        batch, budget, most = self.config.max_batch, self.config.row_budget, self.models.max_rows
        rows = max(budget + batch, batch * width + min(budget, MIN_CHUNK))
        if rows > most:
            raise ValueError(
                f"row_budget={budget}, max_batch={batch}: with {width} rows a slot a step may have {rows}, and the "
                f"models were loaded for {most}; lower one of them, or load the models with this EngineConfig"
            )


def context_limit(models: LoadedModels, config: EngineConfig) -> int:
    """Tokens of the longest sequence, prompt and output; a slot's KV may reach a tree and one draft row further.

    Raises ValueError if max_context asks for more positions than the model has."""
    limit = models.max_positions
    if config.max_context is not None and config.max_context > limit:
        raise ValueError(f"max_context={config.max_context}: the model was built for {limit} positions")
    return config.max_context or limit
