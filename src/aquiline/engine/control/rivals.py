"""Fixed settings rival planned drafting: no drafting, and whole chains. They take the host next to no time, and what a
plan really brings at a load, with all that it takes beside it, is only known by what it brought.

The fastest rival at a load goes on. The others have turns, whenever what these cost has been earned. Of chains, one
about as long as what the plan drafts is the first, and then the neighbours of the fastest one. Turns tell what time
steps take; what they bring is learnt from all steps (yields.py), since texts differ more than rivals do.

A machine is faster or slower for some hundreds of milliseconds at a time, and stands still for tens. So a turn is made
of pieces of eight steps, and behind each of them the fastest goes on for as many. A piece is compared with the pace of
the fastest on both sides, and the median of the pieces counts. By how much they differ, so much a turn may mislead.
"""

from __future__ import annotations

import math
from statistics import median, stdev
from typing import Any, NamedTuple

from aquiline.backends.base import Decode
from aquiline.engine.control.acceptance import pool_number
from aquiline.engine.control.choices import PLAIN, chain_of
from aquiline.engine.control.costs import StepCosts
from aquiline.engine.control.planner import DraftingPlan
from aquiline.engine.control.plans import REPLAN_STEPS
from aquiline.engine.control.yields import CHAIN_LEVELS, FIRST_CHAIN, NONE, PLANNED, Yields
from aquiline.engine.pipeline import StepChoice
from aquiline.engine.scheduler import StepPlan
from aquiline.engine.sequence import Sequence

TURN_STEPS, PIECE_STEPS, PACE_STEPS, COUNTED_STEPS = 64, 8, 256, 32
"""Steps of a turn, and of each piece of it; those over which the time of a step and the pace of steps with prompts are
averaged; and those that are counted at a time between turns. All these numbers count time: a step with a prompt is many
steps."""

TURN_MS, LEAST_TURN = 250.0, 16
"""Where 64 steps take longer a turn ends after this time, but not before so many steps, nor before 64 of all its
sequences together."""

COST_SHARE, MOST_COST, FIRST_COST = 0.005, 32, 16
"""The share of the time that turns may cost, and the steps that they may cost at once, and at first."""

MOST_LOST, FIRST_WAIT, NEXT_WAIT, HOPELESS_WAIT = 4, 2, 1, 40
"""The steps after whose loss a turn ends. Numbers of turns for which another one waits: the first; each further one,
whose cost must have been earned; and those where no other rival may well be faster, at most."""

LITTLE_SPEEDUP, NOTHING = 1.15, 0.02
"""Where a plan promises less than this speedup, none has its turn first: costs that were learnt from steps that draft
err by as much for others. Where it drafts nothing, and brings under 0.02 tokens beside one, none goes on at once."""

TURN_MEMORY, TURN_NOISE, NOISE_MEMORY = 8, 0.03, 8
"""Turns that a rival's gain is averaged over. By what share one may seem faster in a turn by the machine's mood: at
first, and then as the pieces of the last 8 turns tell."""

TOKEN_NOISE, TEXT_NOISE, LEAD, MOST_GAIN = 0.02, 0.07, 0.7, 0.5
"""The same for one sequence by the tokens that a rival brings beyond a chain of 1, and, beside none, by the text. A
lead must be 0.7 times as large as all of it, which is by the root of their number less after several turns, or steps
whose tokens are known. The most that a single turn may seem faster or slower."""


class Found(NamedTuple):
    """What turns have shown: the fastest rival, and by rival gains, logarithms of rates beside each other, and the
    number of turns, one that ended early as the part that it had."""

    fastest: int
    gains: list[float]
    turns: list[float]


class Rivalry:
    """The rivals at one load. current, fastest: the numbers of the one whose turn it is, and of the fastest one;
    step_ms: the time of a step without prompts, on average; yields: tokens of steps.

    Sequences and prompts come and go and texts grow, so the time of a step is compared with its worth: what plain
    decoding should take, behind these contexts, for as many tokens as the step should bring, and for the same prompt
    rows. And that is compared with the pace of the fastest: milliseconds in which it does a millisecond's worth, in
    steps with prompts and in others."""

    def __init__(self, step_ms: float, num_sequences: int, can_draft: bool) -> None:
        self.current = self.fastest = PLANNED
        self.step_ms, self._num_sequences = step_ms, num_sequences
        count = len(CHAIN_LEVELS) if can_draft else FIRST_CHAIN
        self._gains, self._turns = [0.0] * count, [0.0] * count  # logarithms of rates, beside each other
        self._last_turns = [0] * count  # the number of each one's last turn
        self._worths, self._times = [0.0, 0.0], [0.0, 0.0]  # of the fastest's last steps, without and with prompts
        self._num_timed = 0  # steps that step_ms is averaged over
        self._earned = float(FIRST_COST)  # the steps that turns may cost now
        self._turn_noise, self._num_noises = TURN_NOISE, 1
        self._losts: list[float] = []  # of the pieces of the turn, as shares of their times
        self._other: int | None = None  # whose turn it is beside the fastest
        self._wait = 0.0  # the turns for which the fastest goes on before another's is due
        self.yields = Yields()
        self._wait_for(FIRST_WAIT)

    def begin_with(self, found: Found) -> None:
        """Begin with what an earlier run has found. A turn or two may change it, once their cost has been earned."""
        self.fastest, self._gains = found.fastest, found.gains
        self._turns, self._earned = [min(1.0, number) for number in found.turns], 0.0
        self._wait_for(NEXT_WAIT)

    def found(self) -> Found:
        """What the turns have shown so far."""
        return Found(self.fastest, self._gains, self._turns)

    @property
    def num_left(self) -> int:
        """Steps for which the one whose turn it is goes on at least: the rest of a piece, if anybody has a turn."""
        return COUNTED_STEPS if self._other is None else max(1, round(PIECE_STEPS - self._ms / self.step_ms))

    @property
    def _turn_steps(self) -> int:
        """Steps of a turn, those of the fastest between its pieces apart."""
        least = max(LEAST_TURN, TURN_STEPS // self._num_sequences)
        return max(least, min(TURN_STEPS, round(TURN_MS / self.step_ms)))

    def begin_call(self, speedup: float, num_nodes: float) -> int:
        """Whose turn the next call is. speedup, num_nodes: what planned drafting is expected to bring, and the nodes
        that it verifies for a sequence."""
        steps = self._ms / self.step_ms
        if self._does_nothing(speedup, num_nodes):
            self._gains[NONE], self._turns[NONE] = max(self._gains[:FIRST_CHAIN]), 1.0
            self._go_on_with(NONE)
        elif self._other is None:
            self._begin_turn(steps / self._turn_steps, speedup, num_nodes)
        elif steps >= PIECE_STEPS:
            self._end_piece(self._other)
        return self.current

    def count(self, num_steps: int, worth_ms: float, ms: float, is_first: bool) -> None:
        """The steps of a call took so long; num_steps: 0 if it had prompts. is_first: it was the first of a piece, and
        paid for the change: draft keys that were missing, caches. That counts as a cost of turns."""
        if num_steps:
            self._num_timed = min(PACE_STEPS, self._num_timed + num_steps)
            self.step_ms += (ms / num_steps - self.step_ms) * num_steps / self._num_timed
        has_prompts = not num_steps
        worth, took = self._worths[has_prompts], self._times[has_prompts]
        lost_ms = ms - worth_ms * took / worth if worth else 0.0
        self._earned += (self.current == self.fastest) * COST_SHARE * ms / self.step_ms
        if is_first:
            self._earned -= max(0.0, lost_ms) / self.step_ms
            return
        self._ms += ms
        if self.current == self.fastest:
            memory_ms = (PACE_STEPS if has_prompts else PIECE_STEPS) * self.step_ms
            kept = max(0.0, 1.0 - ms / memory_ms)
            self._worths[has_prompts], self._times[has_prompts] = kept * worth + worth_ms, kept * took + ms
        elif worth:
            self._earned -= lost_ms / self.step_ms
            self._counted_ms += ms
            self._lost_ms += lost_ms
            self._piece_ms += ms
            self._piece_worths[has_prompts] += worth_ms

    def _does_nothing(self, speedup: float, num_nodes: float) -> bool:
        """Whether planned drafting goes on and brings nothing. None does the same for less, which no turn need tell."""
        is_known = self._other is None and self._num_timed >= self._turn_steps and self.yields.of_plans < NOTHING
        return is_known and num_nodes < 0.5 and self._begins_with_none(speedup)

    def _go_on_with(self, rival: int) -> None:
        if rival != self.fastest:  # beside a new one others are little known
            self.fastest, self._turns = rival, [min(1.0, turns) for turns in self._turns]
        self._wait_for(NEXT_WAIT)

    def _begin_turn(self, turns: float, speedup: float, num_nodes: float) -> None:
        """Begin another rival's turn if it is due and its cost was earned. turns: for how many the fastest has gone on
        since the last one."""
        is_free = self._begins_with_none(speedup) and not self._turns[NONE]
        if self._num_timed < self._turn_steps or (turns < self._wait and not is_free):
            return
        self._wait = turns + 1.0  # if none begins
        others = self._others(speedup, num_nodes)
        other = max(others, key=self._hope)
        is_hopeless = self._hope(other) <= self._gains[self.fastest]
        if is_hopeless and turns < min(HOPELESS_WAIT, FIRST_WAIT + sum(self._turns)):
            return
        if max(self._last_turns) % 4 == 3:  # the one that seems hopeless may have become the fastest
            other = min(others, key=lambda i: self._last_turns[i])
        if self._earned >= self._expected_cost(other, speedup):
            self._other, self._losts, self._counted_ms, self._lost_ms = other, [], 0.0, 0.0
            self._begin_piece(other)

    def _begins_with_none(self, speedup: float) -> bool:
        """Whether planned drafting goes on, and promises little."""
        return len(self._gains) > FIRST_CHAIN and self.fastest == PLANNED and speedup < LITTLE_SPEEDUP

    def _others(self, speedup: float, num_nodes: float) -> list[int]:
        """The rivals that may be faster than the fastest, the likeliest of those first that have had no turn."""
        chain, count = self._best_chain, len(self._gains)
        if chain is None:
            chains = sorted(range(FIRST_CHAIN, count), key=lambda i: abs(CHAIN_LEVELS[i] - num_nodes))[:1]
        else:
            chains = [i for i in (chain, chain - 1, chain + 1) if i < count]
        found = [NONE, *chains, PLANNED] if self._begins_with_none(speedup) else [*chains, NONE, PLANNED]
        return [i for i in dict.fromkeys(found) if i != self.fastest]

    @property
    def _best_chain(self) -> int | None:
        """The fastest chain, None if none has had a turn."""
        tried = [i for i in range(FIRST_CHAIN, len(self._gains)) if self._turns[i]]
        return max(tried, key=lambda i: self._gains[i], default=None)

    def _hope(self, rival: int) -> float:
        """A gain that the rival may well have."""
        return self._gains[rival] + self._noise(rival) if self._turns[rival] else math.inf

    def _noise(self, rival: int) -> float:
        """By how much the rival may seem faster than the fastest without being so."""
        turns = min(TURN_MEMORY, self._turns[rival])
        size = self._num_sequences / TURN_STEPS
        noise = (self._turn_noise + TOKEN_NOISE / math.sqrt(size * self._turn_steps)) / math.sqrt(turns)
        if NONE in (rival, self.fastest):
            known = self.yields.num_steps(self.fastest if rival == NONE else rival)
            noise += TEXT_NOISE / math.sqrt(size * max(1.0, known))
        return noise

    def _expected_cost(self, rival: int, speedup: float) -> float:
        """The steps that a turn should cost, which ends behind the piece in which it has lost too much. A chain that
        has had none is taken for the fastest one, and a first fixed setting may bring nothing."""
        known = rival if self._turns[rival] else self._best_chain if rival >= FIRST_CHAIN else None
        lag = math.log(speedup) if known is None else self._gains[self.fastest] - self._gains[known]
        share = 1.0 - math.exp(-max(0.0, lag))
        return min(self._turn_steps * share, MOST_LOST + PIECE_STEPS * share)

    def _wait_for(self, turns: float) -> None:
        """The fastest goes on for so many turns at least."""
        self.current, self._other = self.fastest, None
        self._ms, self._wait = 0.0, turns

    def _begin_piece(self, rival: int) -> None:
        self.current, self._ms = rival, 0.0
        self._piece_worths, self._piece_ms, self._paces = [0.0, 0.0], 0.0, self._fastest_paces()

    def _end_piece(self, other: int) -> None:
        """A piece has ended, of the rival whose turn it is or of the fastest behind one of these."""
        if self.current == other:
            self.current, self._ms = self.fastest, 0.0
            return
        if self._piece_ms:
            paces = zip(self._piece_worths, self._paces, self._fastest_paces(), strict=True)
            fastest_ms = sum([worth * (before + behind) / 2 for worth, before, behind in paces])
            self._losts.append(1.0 - fastest_ms / self._piece_ms)
        if self._counted_ms >= self._turn_steps * self.step_ms or self._lost_ms > MOST_LOST * self.step_ms:
            self._end_turn(other)
        else:
            self._begin_piece(other)

    def _fastest_paces(self) -> list[float]:
        """The time in which the fastest did a millisecond's worth just now, in steps without prompts and with them."""
        return [took / (worth or math.inf) for worth, took in zip(self._worths, self._times, strict=True)]

    def _end_turn(self, mine: int) -> None:
        # A turn of bad luck ends early. Did it count as much as any other, rivals would all seem slower.
        weight = min(1.0, self._counted_ms / (self._turn_steps * self.step_ms))
        self._turns[mine] += weight
        self._last_turns[mine] = max(self._last_turns) + 1
        number = min(TURN_MEMORY, self._turns[mine])
        share = max(math.exp(-MOST_GAIN), min(math.exp(MOST_GAIN), 1.0 - median(self._losts)))
        self._gains[mine] += (self._gains[self.fastest] + math.log(share) - self._gains[mine]) * weight / number
        leads = self._gains[mine] - self._gains[self.fastest] > LEAD * self._noise(mine)
        self._go_on_with(mine if leads else self.fastest)
        self._earned = max(-MOST_COST, min(MOST_COST, self._earned))
        if len(self._losts) > 1:
            self._num_noises = min(NOISE_MEMORY, self._num_noises + 1)
            of_turn = stdev(self._losts) * math.sqrt(PIECE_STEPS / self._turn_steps)
            self._turn_noise += (of_turn - self._turn_noise) / self._num_noises


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
        self._is_first = False  # whether another rival had the call before the last one
        self._num_steps, self._ms = 0, 0.0  # of the calls that were not counted yet
        self._num_tokens, self._num_drafts = 0, 0  # of these calls, further ones apart that drafts of the model brought
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
        if self._num_steps:
            tokens = self._num_tokens + self._num_drafts * self._rivalry.yields.further(self.number)
            worth_ms = tokens * self._token_ms + self._chunk_ms
            num_steps = 0 if self._chunk_ms else self._num_steps
            self._rivalry.count(num_steps, worth_ms, self._ms, self._is_first)
        self._num_steps, self._num_tokens, self._num_drafts, self._ms, self._is_paused = 0, 0, 0, 0.0, False
        if not is_same:
            self._mine, self._choice = mine, None
            self._rivalry = self._rivalry_of(plan, mine, costs)
        count, keys = len(plan.decoding), float(sum([len(s.tokens) for s in plan.decoding]))
        before = self.number
        num_nodes = planned.num_rows / count - 1.0 if planned.planned_rate else 0.0
        self.number = self._rivalry.begin_call(planned.speedup, num_nodes)
        self._is_first = self.number != before
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
        """A step of planned drafting brought the sequences so many tokens. For the others see Yields."""
        self._num_tokens += num_tokens - num_further
        self._num_drafts += num_asked
        if not self._is_first:
            self._rivalry.yields.add_planned(num_sequences, num_tokens, num_asked, num_further, num_first)

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
        if not self._is_paused:
            self._num_steps += 1
            self._num_tokens += num_other_tokens
            self._ms += ms

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
