"""Who runs next. Host only: no tensors, no models.

Requests are admitted first come, first served, each with every page it can ever need, and run until done. A step
either prefills (chunks of newly admitted prompts under one row budget) or decodes all running sequences.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from aquiline.engine.sequence import Sequence
from aquiline.errors import OutOfPages
from aquiline.kv.pool import PagePool


@dataclass(frozen=True)
class Chunk:
    """Prompt tokens [start, end) of a sequence, to be cached in this step."""

    sequence: Sequence
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt is complete after it, so that its last row draws the first output token."""
        return self.end == len(self.sequence.tokens)


@dataclass(frozen=True)
class StepPlan:
    """One step: chunks to prefill, or else sequences to decode, both in slot order."""

    chunks: tuple[Chunk, ...] = ()
    decoding: tuple[Sequence, ...] = ()

    @property
    def is_decode(self) -> bool:
        """Whether this step decodes."""
        return not self.chunks


class Scheduler:
    """Owns the waiting queue, the slots and, through the pool, the pages."""

    def __init__(self, pool: PagePool, num_slots: int, row_budget: int) -> None:
        self.pool, self.row_budget = pool, row_budget
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence | None] = [None] * num_slots
        self.lookahead = 1  # KV indices beyond its last token that a sequence may write; set by the engine

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises OutOfPages if the pool could never hold it."""
        need = self.pool.pages_for(self._reach(sequence))
        limit = min(self.pool.num_pages, self.pool.table.shape[1])
        if need > limit:
            raise OutOfPages(
                f"request {sequence.request.id}: prompt {sequence.num_prompt} + max_tokens "
                f"{sequence.request.sampling.max_tokens} + {self.lookahead} drafted need {need} pages of "
                f"{self.pool.page_size} tokens, {limit} are there; shorten it or raise num_pages or max_context"
            )
        self.waiting.append(sequence)

    def next_plan(self) -> StepPlan | None:
        """Admit what fits, then plan a step; None when nothing is left."""
        self._admit()
        active = [s for s in self.running if s is not None]
        budget, chunks = self.row_budget, []
        for sequence in active:
            if not sequence.is_decoding and budget:
                end = min(len(sequence.tokens), sequence.num_cached + budget)
                chunks.append(Chunk(sequence, sequence.num_cached, end))
                budget -= end - sequence.num_cached
        if chunks:
            return StepPlan(chunks=tuple(chunks))
        return StepPlan(decoding=tuple(active)) if active else None

    def finish(self, sequence: Sequence) -> None:
        """Free the slot and pages of a sequence."""
        self.pool.release(sequence.slot)
        self.running[sequence.slot] = None

    def _admit(self) -> None:
        for slot, occupant in enumerate(self.running):
            if occupant is not None or not self.waiting:
                continue
            try:
                self.pool.reserve(slot, self._reach(self.waiting[0]))
            except OutOfPages:
                assert any(self.running), "an empty engine holds every request that add() let in"
                return
            sequence = self.waiting.popleft()
            sequence.slot = slot
            self.running[slot] = sequence

    def _reach(self, sequence: Sequence) -> int:
        return sequence.max_tokens_total + self.lookahead
