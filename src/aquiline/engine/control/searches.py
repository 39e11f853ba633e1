"""At which steps a sequence's text is searched for a match. A search takes time, and brings nothing where nothing
repeats."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

PERIODS, UNCOPIED_LIMITS = (1, 2, 4, 16), (1, 4, 64)
"""After 1, 4, 64 steps without a copy, search for a match only every 2nd, 4th, 16th step."""

SMOOTHING = 1 / 16
"""Weight of a step in the average time of searches."""

COST, TIME_SHARE = 3.0, 0.02
"""A search takes this many times its own time, since it ends a run of repeated steps; and the share of the time that
searches may take where they bring less than they cost. Where they would take more, they are rarer, up to every 16th
step."""

INITIAL_GAIN, GAIN_SMOOTHING = 1.0, 1 / 8
"""Tokens that a search brings before the first one, and the weight of a search in that average."""


@dataclass(eq=False)
class SequenceSearches:
    """When one sequence searches. only_copies: copies are all that it drafts; gain: tokens that a search should bring,
    on average; last_copy: number of the step in which it copied text last, or before its first step; next_step: of the
    step from which it searches again."""

    only_copies: bool
    gain: float = INITIAL_GAIN
    last_copy: int = 0
    next_step: int = 0

    def period(self, number: int, price: float, rarer: int) -> int:
        """The sequence searches in one step of this many from step `number` on. price: tokens that a search must bring;
        rarer: how much rarer it searches than by the table if it has not just copied, or brings less."""
        place = bisect_right(UNCOPIED_LIMITS, number - self.last_copy)
        if self.only_copies or (place < 2 and self.gain >= price):
            return PERIODS[place]
        return min(PERIODS[-1], PERIODS[place] * rarer)


class Searches:
    """What is learnt of the searches of all sequences. gain: tokens that one brings, for sequences that begin."""

    def __init__(self) -> None:
        self.gain = INITIAL_GAIN
        self._ms = 0.0  # of the searches of a step, its average
        self._rarer = 1  # of sequences that do not copy: a power of two, so that they fall on the same steps
        self._searched: list[SequenceSearches] = []  # in this step

    def count(self, of: SequenceSearches, number: int, tokens: float) -> None:
        """A sequence searched in step `number`, and should copy so many tokens."""
        self._searched.append(of)
        if tokens:
            of.last_copy = number
        of.gain += GAIN_SMOOTHING * (tokens - of.gain)
        self.gain += GAIN_SMOOTHING**2 * (tokens - self.gain)

    def end_step(self, number: int, ms: float, step_ms: float, rate: float) -> None:
        """Choose when those search next that searched in step `number`. ms: the time of its searches; step_ms: that of
        the whole step; rate: the price of time, in tokens per millisecond."""
        if not self._searched:
            return
        self._ms += SMOOTHING * (ms - self._ms)
        share = COST * self._ms / (TIME_SHARE * step_ms) if step_ms else 1.0
        self._rarer = 2 ** math.ceil(math.log2(max(1.0, share)))
        for of in self._searched:
            period = of.period(number, rate * COST * self._ms, self._rarer)
            of.next_step = (number // period + 1) * period
        self._searched.clear()
