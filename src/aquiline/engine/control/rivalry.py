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
from typing import NamedTuple

from aquiline.engine.control.yields import CHAIN_LEVELS, FIRST_CHAIN, NONE, PLANNED, Yields

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
