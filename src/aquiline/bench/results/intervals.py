"""Medians with their intervals, and settings measured in rounds: how every published time is stated and taken.

A time on a shared machine has outliers on one side, so a mean rests on the one slow run there was. The median does not,
and its interval needs no assumption: the chance that the median of the distribution lies outside the k-th smallest and
k-th largest of n independent runs is known exactly, whatever the distribution (order statistics; the sign test turned
round). Below six runs no such interval reaches 95 %, so there is none, and figures say so.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

COVERAGE = 0.95
"""Least chance that an interval holds the median."""
LEAST_RUNS = 6
"""Runs from which on there is an interval: 1 - 2 / 2**6 is 97 %, 1 - 2 / 2**5 is 94 %."""

T = TypeVar("T")


@dataclass(frozen=True)
class Estimate:
    """A median and the interval that holds it with a chance of 95 % or more; no interval for too few runs."""

    value: float
    low: float | None = None
    high: float | None = None

    def times(self) -> str:
        """As a ratio is written: 1.86x [1.71, 1.93]."""
        return f"{self.value:.2f}x" + (f" [{self.low:.2f}, {self.high:.2f}]" if self.is_sure else "")

    def whole(self) -> str:
        """As a rate is written: 1297 [1204, 1330]."""
        return f"{self.value:.0f}" + (f" [{self.low:.0f}, {self.high:.0f}]" if self.is_sure else "")

    @property
    def is_sure(self) -> bool:
        """Whether there is an interval."""
        return self.low is not None and self.high is not None


def estimate(values: Sequence[float]) -> Estimate:
    """The median of independent runs. Raises ValueError for none."""
    if not values:
        raise ValueError("values: are none; a median needs one run at least")
    ordered, n = sorted(values), len(values)
    middle = statistics.median(ordered)
    cut = _cut(n)
    return Estimate(middle) if cut is None else Estimate(middle, ordered[cut], ordered[n - 1 - cut])


def paired(values: Sequence[float], base: Sequence[float]) -> Estimate:
    """The median of the ratios, round by round: what slows down a whole round slows down both.

    Raises ValueError for rounds that differ in number."""
    if len(values) != len(base):
        raise ValueError(f"values: {len(values)} rounds against {len(base)}; a ratio needs the same rounds")
    return estimate([value / other for value, other in zip(values, base, strict=True)])


def spread(values: list[float]) -> dict[str, Any]:
    """How results state a quantity that was measured several times, in the order of the rounds."""
    found = estimate(values)
    return {
        "median": found.value, "low": found.low, "high": found.high, "min": min(values), "max": max(values),
        "values": values,
    }  # fmt: skip


def rotated(settings: Sequence[T], number: int) -> list[T]:
    """The settings in the order of the round of that number: each round another begins, so that none always runs on
    what the same one left in the caches or while the machine still warms up."""
    first = number % len(settings) if settings else 0
    return [*settings[first:], *settings[:first]]


def _cut(n: int) -> int | None:
    """How many runs the interval leaves out at either end; None where even all of them cover too little."""
    outside, cut = 0.0, None
    for k in range(n // 2):
        outside += math.comb(n, k) / 2**n
        if 1 - 2 * outside < COVERAGE:
            break
        cut = k
    return cut
