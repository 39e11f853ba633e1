"""Who runs next. Host only: no tensors, no models.

Every decoding sequence runs in every step; chunks of prompts share the same forward and take the rows that are left of
the row budget. A sequence is admitted with pages for its prompt, less the pages that the prefix cache has, and grows
page by page. When pages run out the least urgent sequence is preempted: it loses its pages, keeps its tokens and waits.
Once admitted again, it computes the keys that the prefix cache has not kept. A row's result does not depend on the step
that computes it, so preemption does not change the text.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from aquiline.engine.sequence import MARGIN, Request, Sequence
from aquiline.errors import OutOfPages
from aquiline.kv.pool import PagePool
from aquiline.kv.prefix import PrefixCache

MIN_CHUNK = 16
"""Prompt rows of a step in which decoding sequences alone fill the row budget: prompts must not starve."""

MOST_CHUNK_S = 0.1
"""Seconds that a step with prompt rows takes, about, beyond a step of the decoding sequences alone: whoever reads along
must not notice somebody else's prompt."""


@dataclass(frozen=True)
class PlannedChunk:
    """Tokens [start, end) of a sequence, whose keys this step computes.

    is_last: the sequence decodes after this chunk. draws: the chunk's last row draws the first output token. If the
    prefix cache holds the whole prompt, its last row runs again, because that row draws the first output token."""

    sequence: Sequence
    slot: int
    start: int
    end: int
    is_last: bool
    draws: bool


class StepPlan(NamedTuple):
    """One step. admitted: sequences that were given a slot since the last plan; decoding and chunks: in slot order;
    num_prefilling: slots whose prompt was not fully computed before this step; num_empty: slots without a sequence."""

    admitted: tuple[Sequence, ...]
    decoding: tuple[Sequence, ...]
    chunks: tuple[PlannedChunk, ...]
    num_prefilling: int
    num_empty: int

    @property
    def num_chunk_rows(self) -> int:
        """Rows of the chunks."""
        return sum(c.end - c.start for c in self.chunks)


class Scheduler:
    """Owns the waiting queue, the slots and, through the pool, the pages."""

    def __init__(self, pool: PagePool, prefix: PrefixCache | None, num_slots: int, row_budget: int) -> None:
        self.pool, self.prefix, self.row_budget = pool, prefix, row_budget
        self.running: list[Sequence | None] = [None] * num_slots
        self.admitted: list[Sequence] = []  # since the last plan
        self.waiting: list[tuple[int, int, Sequence]] = []  # a heap by urgency
        self.due: dict[Sequence, float] = {}  # time.monotonic at which sequences with a deadline must end
        self.num_preemptions = 0
        self.chunk_rows = row_budget  # prompt rows at most of a step in which others decode
        self._row_s = deque[float](maxlen=3)  # of the last steps with chunks: one that was disturbed is no rule
        self.capacity = min(pool.num_pages, pool.pages_per_slot) * pool.page_size  # KV indices of one sequence at most

    @property
    def num_waiting(self) -> int:
        """Requests that have no slot."""
        return len(self.waiting)

    def check(self, request: Request) -> None:
        """Raises OutOfPages if the pool could never hold the request."""
        need = request.max_tokens_total + MARGIN
        if need > self.capacity:
            size = self.pool.page_size
            raise OutOfPages(
                f"request {request.id}: prompt {len(request.prompt_ids)} + max_tokens {request.sampling.max_tokens} + "
                f"{MARGIN} spare need {self.pool.pages_for(need)} pages of {size} tokens, {self.capacity // size} are "
                "there; shorten it or raise num_pages or max_context"
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that passed `check`."""
        self._wait(sequence)
        if sequence.request.deadline_s is not None:
            self.due[sequence] = sequence.request.arrival + sequence.request.deadline_s

    def overdue(self) -> list[Sequence]:
        """Sequences whose deadline has passed."""
        if not self.due:
            return []
        now = time.monotonic()
        return [sequence for sequence, due in self.due.items() if due <= now]

    def next_plan(self) -> StepPlan | None:
        """Reserve pages for the running sequences, admit waiting ones that fit, and plan a step. None if no sequence
        runs."""
        if self._make_room():
            self._admit()
        active = [s for s in self.running if s is not None]
        if not active:
            return None
        decoding = tuple(s for s in active if not s.is_prefilling)
        prefilling = [s for s in active if s.is_prefilling]
        chunks = self._chunks(prefilling, decoding) if prefilling else ()
        admitted, self.admitted = tuple(self.admitted), []
        plan = StepPlan(admitted, decoding, chunks, len(prefilling), len(self.running) - len(active))
        for sequence in decoding:
            sequence.in_flight += sequence.max_step
            # Even if all drafts that are in flight are right, the step after this one must find room to draft nothing.
            sequence.may_draft = len(sequence.tokens) + sequence.in_flight + sequence.lookahead <= self.capacity
        for chunk in plan.chunks:
            chunk.sequence.num_planned = chunk.end
            chunk.sequence.in_flight += chunk.draws
        return plan

    def find_pages_ahead(self, plan: StepPlan, num_steps: int) -> bool:
        """Reserve the pages that so many steps like this one may reach, the last of which begins before a sequence's
        end. False if they are not there."""
        try:
            for s in plan.decoding:
                last = min(len(s.tokens) + (num_steps - 1) * s.max_step, s.request.max_tokens_total - 1)
                self.pool.reserve(s.slot, last + s.lookahead)
        except OutOfPages:
            return False
        return True

    def repeated(self, plan: StepPlan, num_steps: int) -> None:
        """The plan ran so often: its outcomes will be read one by one."""
        for sequence in plan.decoding:
            sequence.in_flight += (num_steps - 1) * sequence.max_step

    def learn_pace(self, num_rows: int, seconds: float, decode_s: float) -> None:
        """Learn how long a row takes from a step with chunks; decode_s: what a step without chunks takes. Chunks beside
        decoding sequences are then cut to MOST_CHUNK_S, whatever the machine and the model."""
        if num_rows >= MIN_CHUNK:
            self._row_s.append(seconds / num_rows)
            self.chunk_rows = max(MIN_CHUNK, int((MOST_CHUNK_S + decode_s) / median(self._row_s)))

    def remove(self, sequence: Sequence) -> None:
        """Free the slot and pages of a sequence, or take it out of the queue."""
        self.due.pop(sequence, None)
        if sequence.slot >= 0:
            self._vacate(sequence)
        else:
            self.waiting = [entry for entry in self.waiting if entry[2] is not sequence]
            heapq.heapify(self.waiting)

    def _make_room(self) -> bool:
        """Reserve pages for the next step of every decoding sequence, the most urgent first. Returns whether no
        sequence had to be preempted."""
        gave_way = False
        grows = [s for s in self.running if s is not None and not s.is_prefilling and self._grows(s)]
        for sequence in sorted(grows, key=lambda s: s.urgency):
            while sequence.slot >= 0:
                try:
                    self.pool.reserve(sequence.slot, self._need(sequence))
                    break
                except OutOfPages:
                    self._preempt(max((s for s in self.running if s is not None), key=lambda s: s.urgency))
                    gave_way = True
        return not gave_way

    def _grows(self, sequence: Sequence) -> bool:
        reserved = len(self.pool.owned[sequence.slot]) * self.pool.page_size
        return len(sequence.tokens) + sequence.in_flight + sequence.lookahead > reserved

    def _need(self, sequence: Sequence) -> int:
        """KV indices that the next step may reach at most, with all tokens that unread outcomes may have added."""
        wanted = len(sequence.tokens) + sequence.in_flight + sequence.lookahead
        return min(wanted, sequence.request.reach, self.capacity)

    def _admit(self) -> None:
        while self.waiting and self._seat(self.waiting[0][2]):
            heapq.heappop(self.waiting)
        running = [s for s in self.running if s is not None]
        if not self.waiting or not running:
            assert not self.waiting, "an empty engine holds every request that add() let in"
            return
        worst = max(running, key=lambda s: s.urgency)
        if worst.request.priority > self.waiting[0][2].request.priority:
            # One preemption a plan, and only the more urgent sequence takes the room: the outcome of the preempted
            # sequence's last step may not have been read, so it must not be seated again in this plan.
            self._preempt(worst)
            if self._seat(self.waiting[0][2]):
                heapq.heappop(self.waiting)

    def _seat(self, sequence: Sequence) -> bool:
        """Give a sequence a slot, the cached pages that its tokens begin with, and pages for the rest of its prefill.
        Returns False, and changes nothing, if there is no slot or there are too few pages."""
        if None not in self.running:
            return False
        pool, slot = self.pool, self.running.index(None)
        end = max(sequence.num_prompt, len(sequence.tokens) - 1)
        wanted = min(end + sequence.lookahead, self.capacity)
        nodes = []
        if self.prefix is not None and sequence.request.sampling.prompt_logprobs is None:
            nodes = self.prefix.match(sequence.request.cache_salt, sequence.tokens[:end])
        need = pool.pages_for(wanted) - len(nodes)
        spare = sum(s is not None for s in self.running)  # a page for each running sequence to grow into
        if need + spare > pool.num_available - sum(pool.refcount[n.page] == 0 for n in nodes):
            return False
        pool.share(slot, [node.page for node in nodes])
        pool.reserve(slot, wanted)
        self.running[slot] = sequence
        self.admitted.append(sequence)
        sequence.slot, sequence.nodes, sequence.is_published = slot, nodes, self.prefix is not None
        sequence.num_hit = sequence.draft_end = len(nodes) * pool.page_size
        sequence.prefill_end, sequence.in_flight = end, 0
        sequence.num_cached = sequence.num_planned = min(sequence.num_hit, end - 1)
        # Pages published without draft keys cannot be drafted from. The first usable draft key is behind the last such
        # page: it pairs the first feature there with the token after it, so it stands one index further.
        num_undrafted = max((i + 1 for i, node in enumerate(nodes) if not node.has_draft), default=0)
        first_feature = min(num_undrafted * pool.page_size, sequence.num_cached) if num_undrafted else 0
        sequence.first_draft_key = first_feature + 1
        if sequence.num_preempted == 0:
            sequence.counters.num_prompt_tokens += end
            sequence.counters.num_prefix_hits += sequence.num_hit
        return True

    def _chunks(self, prefilling: list[Sequence], decoding: tuple[Sequence, ...]) -> tuple[PlannedChunk, ...]:
        num_decode_rows = sum(s.num_rows for s in decoding)
        budget = max(self.row_budget - num_decode_rows, min(self.row_budget, MIN_CHUNK))
        if decoding:
            budget = min(budget, self.chunk_rows)
        chunks = []
        for sequence in sorted(prefilling, key=lambda s: s.urgency):
            end = min(sequence.prefill_end, sequence.num_planned + budget)
            is_last = end == sequence.prefill_end
            draws = is_last and end == len(sequence.tokens)
            chunks.append(PlannedChunk(sequence, sequence.slot, sequence.num_planned, end, is_last, draws))
            budget -= end - sequence.num_planned
            if budget == 0:
                break
        return tuple(sorted(chunks, key=lambda c: c.slot))

    def _preempt(self, sequence: Sequence) -> None:
        self._vacate(sequence)
        self._wait(sequence)
        sequence.num_preempted += 1
        self.num_preemptions += 1

    def _vacate(self, sequence: Sequence) -> None:
        self.pool.release(sequence.slot)
        if sequence in self.admitted:
            self.admitted.remove(sequence)
        self.running[sequence.slot] = None
        sequence.slot, sequence.nodes = -1, []

    def _wait(self, sequence: Sequence) -> None:
        heapq.heappush(self.waiting, (*sequence.urgency, sequence))
