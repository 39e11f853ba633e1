"""Whose turn it is among fixed settings and planned drafting, by load (rivalry.py), and how the sequences draft in a
fixed setting's turn."""

from __future__ import annotations

from typing import Any, NamedTuple

from aquiline.backends.base import Decode
from aquiline.engine.control.acceptance import pool_number
from aquiline.engine.control.choices import PLAIN, chain_of
from aquiline.engine.control.costs import StepCosts
from aquiline.engine.control.planner import DraftingPlan
from aquiline.engine.control.plans import REPLAN_STEPS
from aquiline.engine.control.rivalry import Found, Rivalry
from aquiline.engine.control.yields import CHAIN_LEVELS, FIRST_CHAIN, NONE, PLANNED
from aquiline.engine.pipeline import StepChoice
from aquiline.engine.scheduler import StepPlan
from aquiline.engine.sequence import Sequence


class RivalryKey(NamedTuple):
    """What rivals are compared for: sequences that draft adaptively and all, rounded up to powers of two, those of
    prompts among them; and the pools of the first that have a draft model."""

    num_adaptive: int
    num_running: int
    pools: frozenset[int]


class Rivals:
    """Whose turn it is, by load, and how the sequences draft in the turn of a fixed setting. number: the rival of the
    last call."""

    def __init__(self) -> None:
        self.number = PLANNED
        self._of_loads: dict[RivalryKey, Rivalry] = {}
        self._known: dict[RivalryKey, Found] = {}  # by an earlier run
        self._rivalry = Rivalry(1.0, 1, can_draft=False)
        self._is_paused = True  # since the last call
        self._is_telling = True  # whether a sequence drafts, or does not, for which it does not copy
        self._is_first = False  # whether another rival had the call before the last one
        self._num_steps, self._ms = 0, 0.0  # of the calls that were not counted yet
        # Of these calls: tokens, without the further ones of drafts of the model and of copies; such drafts; copies.
        self._num_tokens, self._num_drafts, self._num_copies = 0, 0, 0
        self._token_ms = self._chunk_ms = 0.0  # that plain decoding takes for one of its tokens, and for its prompts
        self._due_ms = 0.0  # time of calls alike after which they are counted, and another's turn may be due
        self._mine: tuple[Sequence, ...] = ()
        self._choice: StepChoice | None = None  # of these sequences

    def kept(self) -> list[Any]:
        """What is known of all loads, for a later run."""
        found = self._known | {load: rivalry.found() for load, rivalry in self._of_loads.items()}
        return [[*load[:2], sorted(load.pools), *of] for load, of in found.items() if any(of.turns)]

    def begin_with(self, kept: list[Any]) -> None:
        """Begin with what another run's kept() was. Raises ValueError, TypeError or OverflowError for anything else."""
        for num_adaptive, num_running, pools, fastest, gains, turns in kept:
            load = RivalryKey(int(num_adaptive), int(num_running), frozenset(int(pool) for pool in pools))
            found = Found(int(fastest), [float(gain) for gain in gains], [float(number) for number in turns])
            count = len(CHAIN_LEVELS) if load.pools else FIRST_CHAIN
            is_whole = len(found.gains) == len(found.turns) == count and 0 <= found.fastest < count
            are_sound = all(abs(gain) < 100.0 for gain in found.gains) and all(0.0 <= n < 1e9 for n in found.turns)
            if not (is_whole and are_sound):
                raise ValueError(f"rivals={found}: must be the fastest, and {count} gains and numbers of turns")
            self._known[load] = found

    @property
    def is_fixed(self) -> bool:
        """Whether a fixed setting has been chosen for the last call."""
        return self.number != PLANNED and not self._is_paused

    @property
    def is_trying(self) -> bool:
        """Whether it is not the fastest one's turn."""
        return self._rivalry.current != self._rivalry.fastest

    @property
    def num_left(self) -> int:
        """Steps that the next call has at most. The first one of a rival is apart, since it pays for the change."""
        return 1 if self._is_first else min(REPLAN_STEPS, self._rivalry.num_left)

    def begin_call(
        self, plan: StepPlan, mine: tuple[Sequence, ...], costs: StepCosts, planned: DraftingPlan
    ) -> StepChoice | None:
        """How the adaptive sequences draft in the next call, if it is a fixed setting's turn; None: they are to be
        planned. planned: the last plan that was made for them."""
        is_same = mine == self._mine and not (plan.chunks or plan.admitted)
        if is_same and self._ms < self._due_ms:
            self._is_paused = False
            return self._choice
        is_counted = self._num_steps > 0
        if is_counted:
            yields = self._rivalry.yields
            tokens = self._num_tokens + self._num_drafts * yields.further(self.number)
            tokens += self._num_copies * yields.of_copies
            worth_ms = tokens * self._token_ms + self._chunk_ms
            num_steps = 0 if self._chunk_ms else self._num_steps
            self._rivalry.count(num_steps, worth_ms, self._ms, self._is_first)
        self._num_steps, self._num_tokens, self._num_drafts, self._num_copies = 0, 0, 0, 0
        self._ms, self._is_paused = 0.0, False
        if not is_same:
            self._mine, self._choice = mine, None
            self._rivalry = self._rivalry_of(plan, mine, costs)
        count, keys = len(plan.decoding), float(sum([len(s.tokens) for s in plan.decoding]))
        before = self.number
        num_nodes = planned.num_rows / count - 1.0 if planned.planned_rate else 0.0
        self.number = self._rivalry.begin_call(planned.speedup, num_nodes)
        self._is_first = self.number != before or (self._is_first and not is_counted)
        plain_ms = costs.plain_ms(count, keys)
        self._token_ms = plain_ms / count
        self._chunk_ms = costs.plain_ms(count + plan.num_chunk_rows, keys) - plain_ms if plan.chunks else 0.0
        self._due_ms = 0.0 if self._is_first or plan.chunks else self._rivalry.num_left * self._rivalry.step_ms
        if self.number == PLANNED:
            self._choice = None
            return None
        if self._choice is None or self._is_first:
            levels = CHAIN_LEVELS[self.number]
            decodes = {s: Decode(s.slot, chain_of(s, levels) if levels and s.drafts else PLAIN) for s in mine}
            self._choice = StepChoice(decodes, (), 1)
        self._choice = self._choice._replace(most_steps=self.num_left)
        return self._choice

    def add_planned(
        self, num_sequences: int, num_tokens: int, num_asked: int, num_further: int, num_first: float
    ) -> None:
        """A step of planned drafting brought the sequences that do not copy so many tokens. For the others see
        Yields."""
        self._num_tokens += num_tokens - num_further
        self._num_drafts += num_asked
        if not self._is_first:
            self._rivalry.yields.add_planned(num_sequences, num_tokens, num_asked, num_further, num_first)

    @property
    def further(self) -> float:
        """Tokens that a step brings a sequence beside one, in the turn of this fixed setting."""
        return self._rivalry.yields.further(self.number) if self.number >= FIRST_CHAIN else 0.0

    @property
    def token_rate(self) -> float:
        """What a millisecond brings a sequence in the turn of this fixed setting."""
        return (1.0 + self.further) / self._rivalry.step_ms

    def add_copies(self, num_tokens: int, num_copies: int, is_all: bool) -> None:
        """Copies in a step, each a sequence's, brought so many tokens. is_all: all adaptive sequences copied, and the
        step tells nothing of drafts."""
        if not num_copies:
            return
        self._rivalry.yields.add_copies(num_tokens / num_copies - 1.0)
        self._is_telling = not is_all
        if not is_all:
            self._num_tokens += num_copies
            self._num_copies += num_copies

    def add_fixed(self, kept: list[int]) -> None:
        """A step in the turn of a fixed setting brought each adaptive sequence so many tokens. A backend whose outcomes
        are read late gives one of a step in which there was none, and in the first step that of another rival."""
        self._num_tokens += len(kept)
        if kept and self.number != NONE:
            self._num_drafts += len(kept)
            if not self._is_first:
                self._rivalry.yields.add_chain(self.number, kept)

    def add_step(self, num_other_tokens: int, ms: float) -> None:
        """A step took so long in all, and brought so many tokens of sequences that do not draft adaptively."""
        if self._is_telling and not self._is_paused:
            self._num_steps += 1
            self._num_tokens += num_other_tokens
            self._ms += ms
        self._is_telling = True

    def pause(self) -> None:
        """In the next call nobody drafts adaptively."""
        self._is_paused = True

    def _rivalry_of(self, plan: StepPlan, mine: tuple[Sequence, ...], costs: StepCosts) -> Rivalry:
        pools = frozenset([pool_number(s.request.sampling.temperature) for s in mine if s.drafts])
        number, running = (len(some) + plan.num_prefilling for some in (mine, plan.decoding))
        load = RivalryKey((number - 1).bit_length(), (running - 1).bit_length(), pools)
        if load not in self._of_loads:
            rivalry = self._of_loads[load] = Rivalry(costs.verify(running), number, can_draft=bool(pools))
            if load in self._known:
                rivalry.begin_with(self._known[load])
        return self._of_loads[load]
