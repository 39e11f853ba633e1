"""At which steps a sequence's text is searched for a match. A search takes time, and brings nothing where nothing
repeats. A run of repeated steps ends for it only where it should bring more than that costs."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

PERIODS, UNCOPIED_LIMITS = (1, 2, 4, 16), (1, 4, 64)
"""After 1, 4, 64 steps without a copy, search for a match only every 2nd, 4th, 16th step."""

FIXED_STEPS, FIXED_PERIOD = 4, 16
"""Where a fixed setting goes on: at how many steps behind a copy to search for the next one. Later, and before the
first, one of the sequences is searched every 16 steps."""

SMOOTHING = 1 / 16
"""Weight of a step in the average time of searches."""

TIME_SHARE, RAREST = 0.005, 32
"""The share of the time that searches may take where they bring less than they cost. Where they would take more, they
are rarer, up to every 32nd step."""

INITIAL_GAIN, GAIN_SMOOTHING = 1.0, 1 / 8
"""The gain of a search before the first one, and the weight of a search in that average."""


@dataclass(eq=False)
class SequenceSearches:
    """When one sequence searches. only_copies: copies are all that it drafts; gain: tokens that a search should bring
    beyond what they cost, on average; last_copy: number of the step in which it copied text last, or before its first
    step; next_step: of the step from which it searches again; eager_until: of the step up to which it searches at each
    one beside a fixed setting; is_awaited: whether a run of repeated steps ends for that."""

    only_copies: bool
    gain: float = INITIAL_GAIN
    last_copy: int = 0
    next_step: int = 0
    eager_until: int = 0
    is_awaited: bool = True

    def wait(self, number: int, is_found: bool, period: int) -> None:
        """Choose the next step from which it searches where a fixed setting goes on: the next one if it copies in step
        `number`, or has just copied, else `period` steps later."""
        if is_found:
            self.last_copy, self.eager_until = number, number + FIXED_STEPS
        self.next_step = number + (1 if number < self.eager_until else period)

    def plan(self, number: int, price: float, alone_price: float, rarer: int) -> None:
        """Choose the next step after step `number` from which it searches. price: tokens that a search must bring, or
        it is `rarer` than by the table; alone_price: those that it must bring beside them to be awaited."""
        place = bisect_right(UNCOPIED_LIMITS, number - self.last_copy)
        self.is_awaited = self.only_copies or (place < 2 and self.gain >= price + alone_price)
        period = PERIODS[place]
        if not self.only_copies and self.gain < price:
            period = min(RAREST, period * rarer)
        self.next_step = (number // period + 1) * period


class Searches:
    """What is learnt of the searches of all sequences. gain: that of one, for sequences that begin."""

    def __init__(self) -> None:
        self.gain = INITIAL_GAIN
        self._ms = 0.0  # of the searches of a step, its average
        self._rarer = 1  # of sequences that do not copy: a power of two, so that they fall on the same steps
        self._searched: list[SequenceSearches] = []  # in this step

    def count(self, of: SequenceSearches, number: int, is_found: bool, gain: float) -> None:
        """A sequence searched in step `number`. is_found: whether it copies; gain: the tokens that it should copy, less
        those that their time could bring otherwise."""
        self._searched.append(of)
        if is_found:
            of.last_copy = number
        of.gain += GAIN_SMOOTHING * (gain - of.gain)
        self.gain += GAIN_SMOOTHING**2 * (gain - self.gain)

    def end_step(self, number: int, ms: float, alone_ms: float, step_ms: float, rate: float) -> None:
        """Choose when those search next that searched in step `number`. ms: the time of its searches; alone_ms: what it
        costs that a step is not repeated; step_ms: the time of the whole step; rate: the price of time, in tokens per
        millisecond."""
        if not self._searched:
            return
        self._ms += SMOOTHING * (ms - self._ms)
        share = self._ms / (TIME_SHARE * step_ms) if step_ms else 1.0
        self._rarer = 2 ** math.ceil(math.log2(max(1.0, share)))
        price = rate * self._ms / len(self._searched)
        for of in self._searched:
            of.plan(number, price, rate * alone_ms, self._rarer)
        self._searched.clear()
