"""The engine: requests in, deltas out. Plans a step, has the pipeline issue it, commits the outcome that is due.

Tokens that were computed for a sequence after its end are ignored.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable
from typing import Any

from aquiline.backends.base import Sizes
from aquiline.config import MAX_DEPTH, MAX_NODES, EngineConfig
from aquiline.engine.control.acceptance import new_pools
from aquiline.engine.control.calibrate import chances_file, cost_table, keep_chances, known_chances
from aquiline.engine.control.controller import Controller
from aquiline.engine.control.costs import StepCosts
from aquiline.engine.control.rivals import Rivals
from aquiline.engine.memory import affordable_pages, plan_memory
from aquiline.engine.model import LoadedModels
from aquiline.engine.pipeline import Pipeline, Step, StepChoice, message_of
from aquiline.engine.scheduler import Scheduler, StepPlan
from aquiline.engine.sequence import MARGIN, Request, Sequence, TokenDelta
from aquiline.kv.pool import PagePool
from aquiline.kv.prefix import PrefixCache
from aquiline.metrics import Meter, StepCounts
from aquiline.spec.drafting import Drafting, Proposer
from aquiline.spec.past_outputs import PastOutputs
from aquiline.text.detokenizer import Detokenizer
from aquiline.types import FinishReason

MOST_AHEAD_S = 0.016
"""About how many seconds the steps that are repeated in one call take together: one frame of a screen, which no reader
of a stream notices. A request that arrives during the call waits for its end."""


class Engine:
    """Runs sequences over loaded models; owns slots, pages and the prefix cache. Not thread-safe: see AsyncLLM."""

    def __init__(self, models: LoadedModels, config: EngineConfig) -> None:
        self.models, self.config = models, config
        self.max_context = context_limit(models, config)
        per_slot = -(-(self.max_context + MAX_NODES + MAX_DEPTH + 2) // config.page_size)
        num_pages = config.num_pages or min(per_slot * config.max_batch, affordable_pages(models, config))
        per_slot = min(per_slot, num_pages)  # a checkpoint may name more positions than int32 counts
        self.memory = plan_memory(models, config.page_size, num_pages, self.max_context)
        self.pool = PagePool(num_pages, config.page_size, config.max_batch, per_slot)
        self.prefix = PrefixCache(self.pool) if config.prefix_cache else None
        draft = models.draft_config
        window = 0 if draft is None else draft.model.window(0)
        self.scheduler = Scheduler(self.pool, self.prefix, config.max_batch, config.row_budget, window)
        self._draft_version = models.pair.draft_version
        sizes = Sizes(config.max_batch, num_pages, config.page_size, per_slot, config.row_budget)
        self.backend = models.pair.open(sizes)
        self.pipeline = Pipeline(self.backend.is_async if config.late_reads is None else config.late_reads)
        self.sequences: dict[int | str, Sequence] = {}  # unfinished, by request id
        self.due: dict[Sequence, float] = {}  # time.monotonic at which sequences with a deadline must end
        self.meter = Meter()
        self.with_trees = config.check  # whether outcomes bring the verified trees; may be set between steps
        self._shared: dict[type[Drafting], Any] = {}  # what the proposers of each way to draft on the host share
        self.past = PastOutputs(config.shared_lookup_bytes) if config.shared_lookup_bytes else None
        self.controller: Controller | None = None  # made when the first adaptive request comes
        self._keep: Callable[[], object] | None = None  # writes what it learnt of drafts
        self.on_end: Callable[[Sequence], None] | None = None  # sees every sequence that has ended
        self._step_s: float | None = None  # of the last step that only decoded, where the backend tells
        self._orders = itertools.count()

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence, prompt and output, that positions and pages hold; drafting takes none."""
        return min(self.max_context, self.scheduler.capacity - MARGIN)

    @property
    def is_busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.sequences or self.pipeline.unread)

    @property
    def is_ahead(self) -> bool:
        """Whether the next step has been computed already."""
        return self.pipeline.is_ahead

    def add(self, request: Request) -> Sequence:
        """Queue a request. Raises ValueError naming what cannot work, OutOfPages if it could never fit."""
        self.check(request)
        if (request.sampling.structured is None) != (request.grammar is None):
            raise ValueError(f"request {request.id}: structured needs its compiled grammar, which LLM.request makes")
        if request.id in self.sequences:
            raise ValueError(f"request id {request.id!r}: is in use by a request that has not finished; choose another")
        if request.drafting.is_adaptive:
            self.prepare_choosing()
        sampling, constraint = request.sampling, None
        if request.grammar is not None and sampling.structured is not None:
            constraint = self.models.grammars.constraint(
                request.grammar, self.models.end_ids(sampling), sampling.structured.boundary, request.prompt_ids
            )
        sequence = Sequence(
            request=request,
            detokenizer=Detokenizer(
                self.models.tokenizer if request.with_text else None, request.prompt_ids, sampling.stop
            ),
            eos_token_ids=self.models.end_ids(sampling),
            tokens=list(request.prompt_ids),
            order=next(self._orders),
            proposer=self._proposer(request),
            bad_words=(*self.models.token_sequences(sampling.bad_words), *request.bad_word_ids),
            constraint=constraint,
        )
        self.scheduler.add(sequence)
        self.sequences[request.id] = sequence
        if request.deadline_s is not None:
            self.due[sequence] = request.arrival + request.deadline_s
        return sequence

    def prepare_choosing(self) -> None:
        """Make the controller of adaptive drafting, which needs to know what steps cost. The first adaptive request
        does it too. It takes some seconds if the costs were never measured on this machine."""
        if self.controller is None:
            costs = StepCosts(cost_table(self.models, self.config.calibration))
            file = chances_file(self.models) if self.config.calibration else None
            pools, rivals = (new_pools(), Rivals()) if file is None else known_chances(file)
            self.controller = Controller(costs, self.meter.choices, self.scheduler.draft_window, pools, rivals)
            if file is not None:  # whoever ends the engine, and however
                self._keep = weakref.finalize(self, keep_chances, file, pools, rivals)

    def step(self) -> list[TokenDelta]:
        """Run one step and return what was added to each sequence. The list may be empty while prompts are prefilled or
        while an outcome is read late. The step may have been computed before, together with others."""
        began = time.perf_counter()
        pipeline = self.pipeline
        deltas = self._end_overdue() if self.due else []
        if pipeline.is_late and pipeline.must_read_first(self.scheduler.running):
            deltas += self._commit(pipeline.unread.popleft())
        if self.models.pair.draft_version != self._draft_version and not pipeline.is_ahead:
            deltas += self._renew_draft()
        was_issued = len(pipeline.unread) <= pipeline.lag and self._issue()
        step = pipeline.take(was_issued)
        if step is not None:
            began -= pipeline.unspent_s
            deltas += self._commit(step)
        if self.config.check:
            self._check_pages()
        self.meter.end_step(began)
        if self.controller is not None:
            self.controller.end_step(time.perf_counter() - began)
        return deltas

    def abort(self, request_id: int | str) -> TokenDelta:
        """End a request now, whether it waits or runs. Raises ValueError for an id that is neither waiting nor
        running."""
        if request_id not in self.sequences:
            raise ValueError(f"request id {request_id!r}: is unknown; it has finished, or was never added")
        return self._end(self.sequences[request_id], "abort")

    def reset(self) -> None:
        """Drop every request, waiting or running, and free its pages."""
        for sequence in list(self.sequences.values()):
            self._end(sequence, "abort")
        self.pipeline.drain()

    def close(self) -> None:
        """Drop every request and give the storage back; the engine cannot be used afterwards."""
        self.reset()
        if self._keep is not None:
            self._keep()
        self.past = None
        self.backend.close()

    def _proposer(self, request: Request) -> Proposer | None:
        kind = type(request.drafting)
        if kind not in self._shared:
            self._shared[kind] = request.drafting.shared(self.models.pair.new_index)
        past = None if self.past is None else self.past.space(request.cache_salt)
        return request.drafting.proposer(request.prompt_ids, request.prediction, self._shared[kind], past)

    def _issue(self) -> bool:
        """Plan a step and issue it. Returns whether there was anything to run."""
        preempted = self.scheduler.num_preemptions
        plan = self.scheduler.next_plan()
        self.meter.num_preemptions += self.scheduler.num_preemptions - preempted
        if plan is None:
            return False
        choice = None if self.controller is None else self.controller.choose(plan)
        most = self._most_repeats(plan, choice)
        message = message_of(plan, choice, self.pool.take_changes(), self.with_trees, self.models.tokenizer)
        num_steps = self.pipeline.issue(self.backend, plan, message, most)
        if num_steps > 1 and choice is not None and self.controller is not None:
            self.controller.repeated(num_steps)
        return True

    def _renew_draft(self) -> list[TokenDelta]:
        """Go on with the draft that the pair has now. Returns what outcomes that had to be read first have added."""
        deltas = list[TokenDelta]()
        while self.pipeline.unread:
            deltas += self._commit(self.pipeline.unread.popleft())
        self._draft_version = self.models.pair.draft_version  # first: a later draft's version is then seen as another
        self.backend.renew_draft(self.scheduler.renew_draft(self._draft_version))
        return deltas

    def _most_repeats(self, plan: StepPlan, choice: StepChoice | None) -> int:
        """How often the backend may run this plan before the host is needed: to plan a prompt, look for a stop string,
        follow a grammar, copy text, or choose again."""
        most = self.config.num_continuous_decode_steps
        if most == 1 or self.pipeline.is_late or plan.chunks:
            return 1
        most = min(most, round(MOST_AHEAD_S / self._step_s)) if self._step_s else 1
        if most <= 1 or not all(s.is_repeatable for s in plan.decoding):
            return 1
        if choice is not None:
            most = min(most, choice.most_steps)
        return most if most > 1 and self.scheduler.find_pages_ahead(plan, most) else 1

    def _commit(self, step: Step) -> list[TokenDelta]:
        """Append what a step decided to its sequences, which may end by it. Returns what was added to each."""
        plan, message, output = step.plan, step.message, step.output
        if not plan.chunks:
            self._step_s = step.seconds
        if self.controller is not None:
            self.controller.learn(step)
        running = [s for s in (*plan.decoding, *plan.prefilling) if s.finish_reason is None]
        decodes = zip(plan.decoding, message.decodes, output.decodes, strict=True)
        chunks = zip(plan.prefilling, plan.chunks, output.chunks, strict=True)
        deltas = [sequence.commit_decode(decode, decoded) for sequence, decode, decoded in decodes]
        deltas += [sequence.commit_chunk(chunk, prefilled) for sequence, chunk, prefilled in chunks]
        self.scheduler.settle(running)
        for sequence in running:
            if sequence.finish_reason is not None:
                self._forget(sequence)
        self._measure(step)
        return [delta for delta in deltas if delta is not None]

    def _measure(self, step: Step) -> None:
        """Count a step that was committed, and learn the pace of prompt rows."""
        plan, output = step.plan, step.output
        num_decode_rows = sum(1 + decoded.num_drafted for decoded in output.decodes)
        if plan.chunks and step.seconds:
            self.scheduler.learn_pace(num_decode_rows + plan.num_chunk_rows, step.seconds, self._step_s or 0.0)
        counts = StepCounts(
            num_decode_rows, plan.num_chunk_rows, output.num_draft_rows, output.num_experts, len(plan.decoding),
            plan.num_prefilling, plan.num_empty, self.config.max_batch,
        )  # fmt: skip
        self.meter.add_step(counts, output.seconds, output.parts)

    def _end_overdue(self) -> list[TokenDelta]:
        """End the sequences whose deadline has passed."""
        now = time.monotonic()
        return [self._end(sequence, "deadline") for sequence, due in [*self.due.items()] if due <= now]

    def _end(self, sequence: Sequence, reason: FinishReason) -> TokenDelta:
        """End a sequence between two steps."""
        delta = sequence.end(reason)
        self.scheduler.remove(sequence)
        self._forget(sequence)
        return delta

    def _forget(self, sequence: Sequence) -> None:
        """Drop all that the engine holds of a sequence that has ended and left the scheduler."""
        self.meter.counters.merge(sequence.counters)
        self.due.pop(sequence, None)
        if self.on_end is not None:
            self.on_end(sequence)
        if self.controller is not None:
            self.controller.forget(sequence)
        if self.past is not None:  # also of aborted requests: the server aborts a request at a stop string
            self.past.space(sequence.request.cache_salt).add(sequence.request.prompt_ids, sequence.output_ids)
        sequence.proposer = sequence.constraint = None  # they are large, and callers may keep sequences that have ended
        del self.sequences[sequence.request.id]

    def _check_pages(self) -> None:
        self.pool.check()
        if self.prefix is not None:
            self.prefix.check()

    def check(self, request: Request) -> None:
        """Raises ValueError naming what cannot work on these models, OutOfPages if the request could never fit."""
        models, sampling, length = self.models, request.sampling, len(request.prompt_ids)
        if length == 0:
            raise ValueError(f"request {request.id}: prompt=[]: must hold at least one token")
        for name, ids in (
            ("prompt token", request.prompt_ids), ("prediction token", request.prediction),
            ("logit_bias: token id", sampling.logit_bias), ("stop_token_ids: token id", sampling.stop_token_ids),
            ("bad_word_ids: token id", tuple(itertools.chain(*request.bad_word_ids))),
        ):  # fmt: skip
            if ids and not 0 <= min(ids) <= max(ids) < models.vocab_size:
                bad = next(t for t in ids if not 0 <= t < models.vocab_size)
                raise ValueError(f"request {request.id}: {name} {bad}: must be in [0, {models.vocab_size})")
        models.token_sequences(sampling.bad_words)
        limit = self.max_context
        if length + sampling.max_tokens > limit:
            raise ValueError(
                f"request {request.id}: prompt of {length} tokens + max_tokens={sampling.max_tokens} exceeds the "
                f"{limit} positions there are; shorten the prompt, lower max_tokens, or raise max_context up to the "
                f"model's {models.max_positions}"
            )
        if sampling.stop and models.tokenizer is None:
            raise ValueError(f"request {request.id}: stop={sampling.stop!r}: needs a tokenizer, and none is loaded")
        if sampling.stop and not request.with_text:
            raise ValueError(f"request {request.id}: stop={sampling.stop!r}: needs with_text=True")
        models.check_drafting(request.drafting)
        self.scheduler.check(request)


def context_limit(models: LoadedModels, config: EngineConfig) -> int:
    """Tokens of the longest sequence, prompt and output; a slot's KV may reach a tree and one draft row further.

    Raises ValueError if max_context asks for more positions than the model has."""
    limit = models.max_positions
    if config.max_context is not None and config.max_context > limit:
        raise ValueError(f"max_context={config.max_context}: the model was built for {limit} positions")
    return config.max_context or limit
