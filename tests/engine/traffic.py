"""Random traffic through an engine over the tiny pair, and all that must hold of it after every step."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter

import pytest
from tests.conftest import engine_config
from tests.engine.fickle import Fickle
from tests.engine.invariants import check_cached_pages, check_outcome, check_sequences, unread_sequences
from tests.engine.oracle import Taught
from tests.engine.storage import native
from tests.engine.wishes import PAGE, Wish, alone, lone_llm, models

from aquiline.config import LARGEST
from aquiline.engine.llm import LLM, Output
from aquiline.engine.sequence import Request, Sequence, TokenDelta
from aquiline.errors import OutOfPages
from aquiline.kv.prefix import Node


@dataclasses.dataclass(frozen=True)
class Setup:
    """An engine's sizes and habits. is_taught: drafts are right to varying depths, else as a random head has them."""

    num_pages: int = 11
    max_batch: int = 4
    row_budget: int = 16
    prefix_cache: bool = True
    late_reads: bool = False
    is_taught: bool = True
    is_fickle: bool = True  # what adaptive sequences draft is chosen at random
    draft_window: int = 0  # keys that the draft sees, and whose features a slot holds; 0: all
    num_continuous: int = 1  # steps that may be repeated in one call; drafts that are taught are not


class Traffic:
    """An engine, the truth about every request in it, and in `seen` how often what was hoped for has happened."""

    def __init__(self, setup: Setup) -> None:
        config = engine_config(
            setup.max_batch, setup.row_budget, PAGE, num_pages=setup.num_pages, prefix_cache=setup.prefix_cache,
            late_reads=setup.late_reads, shared_lookup_bytes=2**16, num_continuous_decode_steps=setup.num_continuous,
        )  # fmt: skip
        self.engine = LLM.from_models(models(setup.draft_window), config).engine
        if setup.is_fickle:
            self.engine.controller = Fickle()
        self.live: dict[int | str, Sequence] = {}
        self.received: dict[int | str, list[TokenDelta]] = {}
        self.truth: dict[Sequence, Output] = {}
        self.texts: list[tuple[int, ...]] = []  # prompts that came, and texts that finished
        self.ended: list[Sequence] = []
        self.seen: Counter[str] = Counter()
        self.undrafted: dict[Node, int] = {}  # cached pages without draft keys
        self._watch()
        self._poison()
        if setup.is_taught:
            self.engine.backend = Taught(self.engine.backend, self._text_in)

    def add(self, wish: Wish) -> None:
        """Submit a request under a number that nobody has at this moment; what can never fit must be refused."""
        number = next(n for n in itertools.count() if n not in self.live)
        request = Request(number, wish.prompt, wish.params, wish.drafting, wish.priority)
        if request.max_tokens_total > self.engine.max_length:
            with pytest.raises(OutOfPages):
                self.engine.add(request)
            self.seen["refused"] += 1
        else:
            self.live[number] = sequence = self.engine.add(request)
            self.received[number] = []
            self.texts.append(wish.prompt)
            self.truth[sequence] = alone(wish.prompt, wish.sampling, wish.max_tokens)
        self.check()

    def step(self) -> None:
        """One engine step, and whether what it said is true."""
        running = [s for s in self.engine.scheduler.running if s is not None]
        counts, unread = {s: s.num_preempted for s in running}, unread_sequences(self.engine)
        for delta in self.engine.step():
            self._receive(delta)
        for sequence in [s for s, count in counts.items() if s.num_preempted > count]:
            assert all(s.urgency < sequence.urgency for s in running if s.slot >= 0), "the least urgent gives way"
            self.seen["preempted"] += 1
            self.seen["preempted unread"] += sequence in unread
        self._look()
        self.check()

    def abort(self, number: int | str) -> None:
        """End a request; what it has so far must be the beginning of its text."""
        sequence = self.live.pop(number)
        self.seen["aborted running"] += sequence.slot >= 0
        self.seen["aborted waiting"] += sequence.slot < 0
        self.seen["aborted unread"] += sequence in unread_sequences(self.engine)
        self.seen["aborted ahead"] += sum(sequence in step.plan.decoding for step in self.engine.pipeline.unread) > 1
        delta = self.engine.abort(number)
        assert (delta.request_id, delta.token_ids, delta.finish_reason) == (number, [], "abort")
        self._end(sequence)
        self.check()
        self.check_cached()

    def abort_all(self) -> None:
        """Drop everything."""
        self.engine.reset()
        for sequence in self.live.values():
            assert sequence.finish_reason == "abort"
            self._end(sequence)
        self.live.clear()
        assert not self.engine.is_busy
        self.check()

    def drain(self) -> None:
        """Everything finishes, no page stays in use, what stays cached is what its tokens give, and can be dropped."""
        tokens_left = sum(s.request.max_tokens_total + PAGE for s in self.live.values())
        for _ in range(2 * tokens_left + 2):
            if not self.engine.is_busy:
                break
            self.step()
        assert not self.engine.is_busy and not self.live, "the engine does not come to an end"
        pool, meter = self.engine.pool, self.engine.meter
        assert not pool.refcount.any() and pool.num_available == pool.num_pages
        for name in ("num_committed", "num_prefilled", "num_steps", "num_accepted_tokens", "num_prefix_hits"):
            total = sum(getattr(s.counters, name) for s in self.ended)
            assert getattr(meter.counters, name) == total, f"{name} of the run and of its requests"
        self.check_cached()
        if self.engine.prefix is not None:
            self.engine.prefix.clear()
        assert pool.num_free == pool.num_pages

    def check(self) -> None:
        """What must hold between any two calls; the engine itself checks its pages after every step."""
        assert self.engine.sequences == self.live
        check_sequences(self.engine)
        check_outcome(self.engine)

    def check_cached(self) -> None:
        """Cached pages hold what a fresh prefill of their tokens writes."""
        self.seen["draft pages checked"] += check_cached_pages(self.engine, lone_llm().engine)

    def _receive(self, delta: TokenDelta) -> None:
        sequence, deltas = self.live[delta.request_id], self.received[delta.request_id]
        truth = self.truth[sequence]
        deltas.append(delta)
        output = [token for d in deltas for token in d.token_ids]
        assert output == truth.token_ids[: len(output)], f"{sequence.request}: differs from the same run alone"
        if delta.finish_reason is not None:
            assert (len(output), delta.finish_reason) == (len(truth.token_ids), truth.finish_reason)
            assert "".join(d.text for d in deltas) == truth.text
            self.texts.append(tuple(sequence.tokens))
            del self.live[delta.request_id]
            self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        truth, counters, output = self.truth.pop(sequence), sequence.counters, sequence.output_ids
        deltas = self.received.pop(sequence.request.id)
        assert output == [token for d in deltas for token in d.token_ids] == truth.token_ids[: len(output)]
        if sequence.request.sampling.frequency_penalty == LARGEST:
            assert len({*output}) == len(output), "no token stands twice"
        assert sum(d.num_accepted for d in deltas) == sum(source != "target" for source in sequence.sources)
        assert sequence.logprobs == (truth.logprobs or [])[: len(output)]
        assert counters.num_prefilled + counters.num_committed == len(output) == len(sequence.sources)
        assert counters.num_prefilled == bool(output), "however often it was preempted"
        assert counters.num_prompt_tokens == sequence.num_prompt or not output
        assert counters.num_committed == counters.num_steps + counters.num_accepted_tokens - counters.tokens_cut
        self.seen["accepted"] += counters.num_accepted_tokens
        self.seen["cut"] += counters.tokens_cut
        self.seen["prefix hits"] += counters.num_prefix_hits
        self.ended.append(sequence)

    def _text_in(self, slot: int) -> list[int]:
        sequence = self.engine.scheduler.running[slot]
        assert sequence is not None
        return [*sequence.request.prompt_ids, *self.truth[sequence].token_ids]

    def _watch(self) -> None:
        """Count what leaves no trace."""
        pool = self.engine.pool
        evicted = pool.evicted

        def counted_evicted(page: int) -> None:
            self.seen["evicted"] += 1
            evicted(page)

        pool.evicted = counted_evicted

    def _poison(self) -> None:
        """Make every page that is handed out hold NaN, so that no result can come from keys that nobody wrote."""
        pool, backend = self.engine.pool, native(self.engine)
        take = pool._take

        def taken(last: int, count: int) -> int:
            page = take(last, count)
            for kv in (backend.kv, backend.draft_kv):
                kv.k[page] = kv.v[page] = math.nan
            backend.fused[page] = math.nan
            return page

        pool._take = taken  # type: ignore[method-assign]

    def _look(self) -> None:
        """Count what the step did."""
        if self.engine.pipeline.last is not None:
            plan, message = self.engine.pipeline.last.plan, self.engine.pipeline.last.message
            starts = [(s, chunk.start) for s, chunk in zip(plan.prefilling, plan.chunks, strict=True)]
            first = [(s, start) for s, start in starts if start <= s.num_hit]
            self.seen["whole hits"] += sum(start < s.num_hit for s, start in first)
            self.seen["resumed"] += sum(s.num_preempted > 0 for s, _ in first)
            self.seen["resumed on a hit"] += sum(s.num_preempted * s.num_hit > 0 for s, _ in first)
            self.seen["drafts completed"] += len(message.extends)
            self.seen["computed again"] += sum(start + 1 < s.num_hit for s, start in first)
            self.seen["drafted behind undrafted pages"] += sum(
                a.drafts and a.first_draft_key > 1 for a in message.admits
            )
            self.seen["mixed drafters"] += len({s.request.drafting for s in plan.decoding}) > 1
            self.seen["mixed with prefill"] += bool(plan.decoding and plan.chunks)
        if self.engine.prefix is not None:
            nodes = self.engine.prefix.by_page.values()
            self.seen["upgraded"] += sum(node.has_draft for node in nodes if node in self.undrafted)
            self.undrafted = {node: node.page for node in nodes if not node.has_draft}
