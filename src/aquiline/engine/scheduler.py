"""Who runs next. Host only: no tensors, no models.

Every decoding sequence runs in every step; chunks of prompts share the same forward and take the rows that are left of
the row budget. A sequence is admitted with pages for its prompt, less the pages that the prefix cache has, and grows
page by page. When pages run out the least urgent sequence is preempted: it loses its pages, keeps its tokens and waits.
Once admitted again, it computes the keys that the prefix cache has not kept. A row's result does not depend on the step
that computes it, so preemption does not change the text.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

from aquiline.backends.base import Chunk, Extend
from aquiline.engine.sequence import MARGIN, Request, Sequence
from aquiline.errors import OutOfPages
from aquiline.kv.pool import PagePool
from aquiline.kv.prefix import PrefixCache

MIN_CHUNK = 16
"""Prompt rows of a step in which decoding sequences alone fill the row budget: prompts must not starve."""

MOST_REST = 32
"""Rows beyond the budget with which a prompt may end, an eighth of it at most. A step of their own would take
longer."""

MOST_CHUNK_S = 0.1
"""About how many seconds prompt rows may add to a step of decoding sequences: a reader of a stream must not notice the
prompts of others."""


class StepPlan(NamedTuple):
    """One step. admitted: sequences that were given a slot since the last plan; decoding: those that decode, in slot
    order; chunks: pieces of prompts, in slot order, and prefilling: the sequence of each; num_chunk_rows: rows of all
    chunks; extends: the draft keys that published pages still lack; num_prefilling: slots whose prompt was not fully
    computed before this step; num_empty: slots without a sequence."""

    admitted: tuple[Sequence, ...] = ()
    decoding: tuple[Sequence, ...] = ()
    prefilling: tuple[Sequence, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    num_chunk_rows: int = 0
    extends: tuple[Extend, ...] = ()
    num_prefilling: int = 0
    num_empty: int = 0


class Scheduler:
    """Owns the waiting queue, the slots and, through the pool, the pages.

    draft_window: how many keys a draft row sees at most, its own among them; 0: all. are_drafting: whether the sequence
    that ended last, of those that may draft, was drafting. extends: by slot, the draft keys
    that published pages still lack; the next plan has the backend write them."""

    def __init__(
        self, pool: PagePool, prefix: PrefixCache | None, num_slots: int, row_budget: int, draft_window: int = 0
    ) -> None:
        self.pool, self.prefix, self.row_budget, self.draft_window = pool, prefix, row_budget, draft_window
        self.running: list[Sequence | None] = [None] * num_slots
        self.admitted: list[Sequence] = []  # since the last plan
        self.waiting: list[tuple[int, int, Sequence]] = []  # a heap by urgency
        self.extends: dict[int, Extend] = {}
        self.are_drafting = True
        self.num_preemptions = 0
        self.chunk_rows = row_budget  # prompt rows at most of a step in which others decode
        self._row_s = deque[float](maxlen=3)  # of the last steps with chunks; the median ignores a disturbed one
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
        """Queue a sequence that passed `check`, or one that was preempted."""
        heapq.heappush(self.waiting, (*sequence.urgency, sequence))

    def next_plan(self) -> StepPlan | None:
        """Reserve pages for the running sequences, admit waiting ones that fit, and plan a step. None if no sequence
        runs."""
        if self._make_room():
            self._admit()
        active = [s for s in self.running if s is not None]
        if not active:
            return None
        decoding, unfilled = list[Sequence](), list[Sequence]()
        for sequence in active:
            (unfilled if sequence.is_prefilling else decoding).append(sequence)
        prefilling, chunks = self._chunks(unfilled, decoding) if unfilled else ((), ())
        plan = StepPlan(
            tuple(self.admitted), tuple(decoding), prefilling, chunks, sum(c.end - c.start for c in chunks),
            tuple(self.extends.values()), len(unfilled), len(self.running) - len(active),
        )  # fmt: skip
        self.admitted, self.extends = [], {}
        for sequence in decoding:
            sequence.in_flight += sequence.max_step
            # Even if all drafts that are in flight are right, the step after this one must find room to draft nothing.
            sequence.may_draft = len(sequence.tokens) + sequence.in_flight + sequence.lookahead <= self.capacity
        for sequence, chunk in zip(prefilling, chunks, strict=True):
            sequence.num_planned = chunk.end
            sequence.in_flight += chunk.draws
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

    def learn_pace(self, num_rows: int, seconds: float, decode_s: float) -> None:
        """Learn how long a row takes from a step with chunks; decode_s: the time of a step without chunks. Chunks
        beside decoding sequences are then cut to MOST_CHUNK_S, whatever the machine and the model."""
        if num_rows >= MIN_CHUNK:
            self._row_s.append(seconds / num_rows)
            self.chunk_rows = max(MIN_CHUNK, int((MOST_CHUNK_S + decode_s) / median(self._row_s)))

    def remove(self, sequence: Sequence) -> None:
        """Free the slot and pages of a sequence, or take it out of the queue."""
        if sequence.slot >= 0:
            self._vacate(sequence)
        else:
            self.waiting = [entry for entry in self.waiting if entry[2] is not sequence]
            heapq.heapify(self.waiting)

    def settle(self, sequences: Iterable[Sequence]) -> None:
        """The outcome of a step was committed to these sequences: publish their pages, and remove those that ended."""
        for sequence in sequences:
            self._publish(sequence)
            if sequence.finish_reason is not None:  # published first: its pages may go to another sequence at once
                self.are_drafting = sequence.is_drafting if sequence.drafts else self.are_drafting
                self.remove(sequence)

    def _make_room(self) -> bool:
        """Reserve pages for the next step of every decoding sequence, the most urgent first. Returns whether no
        sequence had to be preempted."""
        gave_way = False
        grows = [s for s in self.running if s is not None and self._grows(s) and not s.is_prefilling]
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
        sequence.num_hit = len(nodes) * pool.page_size
        sequence.prefill_end, sequence.in_flight = end, 0
        sequence.num_cached = min(sequence.num_hit, end - 1)
        self._find_draft_keys(sequence)
        sequence.num_planned = sequence.num_cached
        sequence.num_drafted_pages = sequence.draft_end // pool.page_size
        if sequence.num_preempted == 0:
            sequence.counters.num_prompt_tokens += end
            sequence.counters.num_prefix_hits += sequence.num_hit
        return True

    def renew_draft(self, draft_version: int) -> dict[int, int]:
        """Another draft runs from now on: all draft keys count as missing. Returns, by slot, the first KV index that is
        to have a draft key again: no later draft row of the slot sees one before it."""
        if self.prefix is not None:
            self.prefix.draft_version = draft_version
        firsts = dict[int, int]()
        for sequence in self.running:
            if sequence is not None and sequence.drafts:
                if not sequence.is_prefilling:
                    first_seen = self._first_seen(len(sequence.tokens) - 1)
                    sequence.first_draft_key = max(sequence.first_draft_key, first_seen)
                sequence.draft_end = firsts[sequence.slot] = sequence.first_draft_key
                sequence.num_drafted_pages = sequence.draft_end // self.pool.page_size
        return firsts

    def _first_seen(self, root: int) -> int:
        """The first draft key of the first page in which draft rows of a root, and of later ones, see one."""
        size, window = self.pool.page_size, self.draft_window
        return max(1, (root - window + 1) // size * size if window else 1)

    def _find_draft_keys(self, sequence: Sequence) -> None:
        """Which draft keys a sequence has that was given its slot. No draft row behind the prefill sees a key before
        the window of the first, so none is computed there, but for the rest of the window's first page.

        Pages published without draft keys cannot be drafted from. The first usable draft key is after the last such
        page: it pairs the first feature there with the token after it, so it stands one index further. But if such
        pages were missed before, and sequences draft at present, the prompt is computed again from the first such page
        on: this writes nothing but draft keys, from then on for all. Where an earlier draft has written the keys of a
        page, these and those behind them are missing, and are written from the features there."""
        size, nodes = self.pool.page_size, sequence.nodes
        first_seen = self._first_seen(sequence.prefill_end)
        are_new = [self.prefix is not None and self.prefix.has_draft_keys(node) for node in nodes]
        # A page's last feature pairs with the first token after it: it is read where the key of that is written.
        are_kept = [new or not node.has_draft for new, node in zip(are_new, nodes, strict=True)][1:]
        undrafted = (i for i, node in enumerate(nodes) if sequence.drafts and not node.has_draft)
        missing = [i for i in undrafted if (i + 1) * size >= first_seen + any(are_kept[i : i + 1])]
        old = (i * size for i, is_new in enumerate(are_new) if not is_new and (i + 1) * size > first_seen)
        sequence.first_draft_key = first_seen
        sequence.draft_end = max(min(old, default=sequence.num_hit), first_seen)
        if not missing:
            return
        is_again = self.are_drafting and all(nodes[i].was_missed for i in missing)
        if is_again:
            sequence.num_cached = max(missing[0] * size, first_seen) - 1
        else:
            first_feature = min((missing[-1] + 1) * size, sequence.num_cached)
            sequence.first_draft_key = sequence.draft_end = max(first_feature + 1, first_seen)
        for i in missing:
            nodes[i].was_missed = not is_again

    def _publish(self, sequence: Sequence) -> None:
        """Offer the sequence's full pages of committed tokens to the prefix cache. If the sequence is drafting, a page
        is offered only when its draft keys are written, or will be written before another sequence can read them.
        Pages of a sequence that does not draft are offered without them; should it draft later, they have them from
        then on."""
        size, end, slot = self.pool.page_size, sequence.num_cached, sequence.slot
        drafted = min(sequence.draft_end, end) if sequence.drafts else 0  # no draft key is read from there on
        is_due = end // size > len(sequence.nodes) or drafted // size > sequence.num_drafted_pages
        if not sequence.is_published or slot < 0 or not is_due:
            return
        assert self.prefix is not None
        if sequence.is_drafting and sequence.drafts and drafted // size < end // size:
            if sequence.finish_reason is None:
                end = drafted  # its next drafting step writes them
            else:
                drafted = end // size * size
                self.extends[slot] = Extend(slot, drafted)
        for index in range(sequence.num_drafted_pages, min(len(sequence.nodes), drafted // size)):
            if self._has_draft(sequence, index, drafted):
                own = sequence.nodes[index]
                own.has_draft, own.draft_version = True, self.prefix.draft_version
        is_ahead = sequence.in_flight > 0 or sequence.num_planned > sequence.num_cached
        for index in range(len(sequence.nodes), end // size):
            parent = sequence.nodes[-1] if sequence.nodes else None
            tokens = sequence.tokens[index * size : (index + 1) * size]
            space = sequence.request.cache_salt
            has_draft = self._has_draft(sequence, index, drafted)
            # Elsewhere nothing of the draft would be lost, unless a step that is not committed has written it.
            in_pages = is_ahead or index * size < sequence.features_end
            reads_draft = sequence.drafts and in_pages and sequence.first_draft_key < (index + 1) * size
            node = self.prefix.publish(space, slot, parent, index, tokens, reads_draft, has_draft)
            if node is None:
                sequence.is_published = False
                return
            sequence.nodes.append(node)
        sequence.num_drafted_pages = drafted // size

    def _has_draft(self, sequence: Sequence, index: int, drafted: int) -> bool:
        """Whether a page holds all its draft keys once those below `drafted` are written. Of a draft with a window the
        backend may have dropped the features of missing ones, in steps that are not committed too."""
        start, end = max(1, index * self.pool.page_size), (index + 1) * self.pool.page_size
        if end > drafted or sequence.first_draft_key > start:
            return False
        computed = max(sequence.num_planned, sequence.num_cached + sequence.in_flight)  # at most
        held = computed - self.draft_window + 1 if self.draft_window else start
        return end <= sequence.draft_end or held <= max(start, sequence.draft_end)

    def _chunks(
        self, unfilled: list[Sequence], decoding: list[Sequence]
    ) -> tuple[tuple[Sequence, ...], tuple[Chunk, ...]]:
        """The pieces of prompts that this step computes, in slot order, and the sequence of each."""
        num_decode_rows = sum(s.num_rows for s in decoding)
        budget = max(self.row_budget - num_decode_rows, min(self.row_budget, MIN_CHUNK))
        if decoding:
            budget = min(budget, self.chunk_rows)
        rest = min(MOST_REST, budget // 8)
        chunks = dict[Sequence, Chunk]()
        for sequence in sorted(unfilled, key=lambda s: s.urgency):
            end = min(sequence.prefill_end, sequence.num_planned + budget)
            end = sequence.prefill_end if sequence.prefill_end - end <= rest else end
            is_last = end == sequence.prefill_end
            draws = is_last and end == len(sequence.tokens)
            chunks[sequence] = Chunk(sequence.slot, sequence.num_planned, end, is_last, draws)
            budget -= end - sequence.num_planned
            if budget <= 0:
                break
        prefilling = sorted(chunks, key=lambda s: s.slot)
        return tuple(prefilling), tuple(chunks[s] for s in prefilling)

    def _preempt(self, sequence: Sequence) -> None:
        self._vacate(sequence)
        self.add(sequence)
        sequence.num_preempted += 1
        self.num_preemptions += 1

    def _vacate(self, sequence: Sequence) -> None:
        self.pool.release(sequence.slot)
        if sequence in self.admitted:
            self.admitted.remove(sequence)
        self.running[sequence.slot] = None
        sequence.slot, sequence.nodes = -1, []
