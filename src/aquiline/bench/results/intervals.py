"""Spans of decoding, medians with intervals, and rounds of settings: how every published time is taken and stated.

Decoding is timed by the wall clock, between the same two instants for every engine, ours included. The time inside our
engine's steps would leave out the time between two steps, which other engines' figures contain.

Times on a shared machine have outliers on one side, so one slow run decides a mean. The median is not affected, and its
interval needs no assumption: for any distribution, the chance is known exactly that its median lies outside the k-th
smallest and k-th largest of n independent runs (order statistics; this inverts the sign test). Below six runs no such
interval reaches 95 %, so there is none, and figures say so.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from aquiline.engine.llm import Output

COVERAGE = 0.95
"""The chance that an interval holds the median, at least."""
LEAST_RUNS = 6
"""The fewest runs with an interval: 1 - 2 / 2**6 is 97 %, 1 - 2 / 2**5 is only 94 %."""

T = TypeVar("T")


@dataclass(frozen=True)
class Span:
    """One sequence: its number of tokens, and when the first and the last of them came, in milliseconds since a moment
    that all sequences of a run share."""

    num_tokens: int
    first_ms: float
    last_ms: float

    @property
    def ms_per_token(self) -> float:
        """Mean milliseconds between two tokens."""
        return (self.last_ms - self.first_ms) / max(1, self.num_tokens - 1)


def decode_s(spans: Sequence[Span]) -> float:
    """Seconds from the first token of any sequence to the last. The time of prompts is left out if they ran together;
    all time between two steps is included."""
    return (max(span.last_ms for span in spans) - min(span.first_ms for span in spans)) / 1e3


def decode_tokens_per_s(spans: Sequence[Span]) -> float:
    """Tokens after each sequence's first, per second of decoding; 0 if there was no decoding."""
    seconds = decode_s(spans)
    return sum(span.num_tokens - 1 for span in spans) / seconds if seconds else 0.0


def spans_of(outputs: Sequence[Output]) -> list[Span]:
    """The spans of requests that were submitted together, as LLM.run does. Their arrivals differ by microseconds."""
    return [Span(len(output.token_ids), output.ttft_ms, output.total_ms) for output in outputs]


@dataclass(frozen=True)
class Estimate:
    """A median and the interval that holds it with a chance of 95 % or more; no interval for too few runs."""

    value: float
    low: float | None = None
    high: float | None = None

    def times(self) -> str:
        """The estimate written as a ratio: 1.86x [1.71, 1.93]."""
        return f"{self.value:.2f}x" + (f" [{self.low:.2f}, {self.high:.2f}]" if self.is_sure else "")

    def whole(self) -> str:
        """The estimate written as a rate: 1297 [1204, 1330]."""
        return f"{self.value:.0f}" + (f" [{self.low:.0f}, {self.high:.0f}]" if self.is_sure else "")

    @property
    def is_sure(self) -> bool:
        """Whether there is an interval."""
        return self.low is not None and self.high is not None


def estimate(values: Sequence[float]) -> Estimate:
    """The median of independent runs with its interval. Raises ValueError without values."""
    if not values:
        raise ValueError("values: are none; a median needs one run at least")
    ordered, n = sorted(values), len(values)
    middle = statistics.median(ordered)
    cut = _cut(n)
    return Estimate(middle) if cut is None else Estimate(middle, ordered[cut], ordered[n - 1 - cut])


def paired(values: Sequence[float], base: Sequence[float]) -> Estimate:
    """The median of the rounds' ratios. A slow round slows both settings, so its ratio is still fair.

    Raises ValueError if the numbers of rounds differ."""
    if len(values) != len(base):
        raise ValueError(f"values: {len(values)} rounds against {len(base)}; a ratio needs the same rounds")
    return estimate([value / other for value, other in zip(values, base, strict=True)])


def spread(values: list[float]) -> dict[str, Any]:
    """A quantity that was measured several times, in the form in which results state it. values: in the order of the
    rounds."""
    found = estimate(values)
    return {
        "median": found.value, "low": found.low, "high": found.high, "min": min(values), "max": max(values),
        "values": values,
    }  # fmt: skip


def rotated(settings: Sequence[T], number: int) -> list[T]:
    """The settings in the order of round `number`. Every round begins with another setting, so that no setting always
    runs first, while the machine warms up."""
    first = number % len(settings) if settings else 0
    return [*settings[first:], *settings[:first]]


def _cut(n: int) -> int | None:
    """How many runs the interval leaves out at either end; None if even the interval of all runs covers too little."""
    outside, cut = 0.0, None
    for k in range(n // 2):
        outside += math.comb(n, k) / 2**n
        if 1 - 2 * outside < COVERAGE:
            break
        cut = k
    return cut
