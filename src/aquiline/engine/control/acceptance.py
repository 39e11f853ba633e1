"""How often drafts are right, learnt from match events: at each level that a text reached, the target drew the drafted
token, the runner-up, or neither.

A level is observed whether or not its token was verified, because the token that the target drew there is known either
way. So a Cut does not bias the counts. Events are pooled over all sequences of a range of temperatures. Each sequence
also counts its own events, which gain weight as they accumulate and are forgotten within some tens of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from aquiline.spec.confidence import NUM_MARGINS, Guess

_TOKEN_CHANCES = (0.35, 0.4, 0.45, 0.55, 0.65, 0.8, 0.9, 0.95)
_RUNNER_UP_CHANCES = (0.25, 0.25, 0.2, 0.2, 0.15, 0.1, 0.05, 0.02)
"""By the bucket of the margin, the chances of a token and of a runner-up before the first event."""

PRIOR_EVENTS = 8.0
"""The weight, in events, of these first chances, and of a pool's share beside a sequence's own events."""

KEPT_EVENTS = 64.0
"""The weight, in events, that what an earlier run learnt of a bucket or a level has at most."""

POOL_MEMORY, OWN_MEMORY = 1024.0, 48.0
"""Number of events at which half of them are forgotten: of a bucket in a pool, and of a sequence."""

_TEMPERATURE_BOUNDS = (0.0, 0.5, 0.9)
"""Upper bounds of the ranges of temperature. Each range has a pool, and so have the temperatures above the last."""


def pool_number(temperature: float) -> int:
    """The number of the pool that collects the events of a temperature."""
    return sum(temperature > end for end in _TEMPERATURE_BOUNDS)


class Margins(NamedTuple):
    """The distribution of a draft's tokens over the buckets of the margin. first, deeper: the share of each bucket at
    the first level and below it; chances, seconds: the chance of a token and of a runner-up, as in Cut."""

    first: Sequence[float]
    deeper: Sequence[float]
    chances: Sequence[float]
    seconds: Sequence[float]


class Rates:
    """The share of hits among the events of each of a few kinds. Once a kind has `memory` events, half are
    forgotten."""

    def __init__(self, shares: Sequence[float], weight: float, memory: float) -> None:
        self.hits = [share * weight for share in shares]
        self.trials = [weight] * len(shares)
        self.memory = memory

    def add(self, kind: int, hits: float) -> None:
        """Count an event: a hit (1) or none (0), or the number that it brought."""
        trials = self.trials[kind] + 1.0
        hits += self.hits[kind]
        if trials >= self.memory:
            trials, hits = 0.5 * trials, 0.5 * hits
        self.trials[kind], self.hits[kind] = trials, hits

    def begin_with(self, hits: Sequence[float], trials: Sequence[float]) -> None:
        """Begin with the counts of an earlier run."""
        kinds = list(zip(hits, trials, strict=True))
        if len(kinds) != len(self.hits) or not all(
            0.0 <= hit <= trial <= self.memory and trial for hit, trial in kinds
        ):
            raise ValueError(f"hits={hits}, trials={trials}: must be {len(self.hits)} counts each, hits among trials")
        weights = [min(1.0, KEPT_EVENTS / trial) for trial in trials]
        self.hits, self.trials = ([weight * n for weight, n in zip(weights, of, strict=True)] for of in (hits, trials))

    def share(self, kind: int) -> float:
        """Hits per trial."""
        return self.hits[kind] / self.trials[kind]


class MarginCounts:
    """How often each bucket of margins occurred. Once there are `memory` events, half of them are forgotten."""

    def __init__(self, memory: float) -> None:
        self.counts, self.total, self.memory = [1.0] * NUM_MARGINS, float(NUM_MARGINS), memory

    def add(self, margin: int) -> None:
        """Count an event."""
        self.counts[margin] += 1.0
        self.total += 1.0
        if self.total >= self.memory:
            self.counts, self.total = [0.5 * count for count in self.counts], 0.5 * self.total

    def begin_with(self, counts: Sequence[float]) -> None:
        """Begin with the counts of an earlier run."""
        if len(counts) != NUM_MARGINS or not all(0.0 < count <= self.memory for count in counts):
            raise ValueError(f"margins={counts}: must be {NUM_MARGINS} counts")
        weight = min(1.0, KEPT_EVENTS / sum(counts))
        self.counts = [weight * count for count in counts]
        self.total = sum(self.counts)

    def shares(self) -> list[float]:
        """The share of each bucket."""
        return [count / self.total for count in self.counts]


class Pool:
    """The events of all sequences of one range of temperatures.

    chances, seconds: by the bucket of the margin, the shares of tokens and of runners-up that were right. levels: the
    share of right tokens at the first level, and at all deeper levels that were reached. margins: how often each
    bucket occurred at the first level, and at the deeper ones."""

    def __init__(self) -> None:
        self.margins = MarginCounts(POOL_MEMORY), MarginCounts(POOL_MEMORY)
        self.chances, self.seconds = (
            Rates(_TOKEN_CHANCES, PRIOR_EVENTS, POOL_MEMORY),
            Rates(_RUNNER_UP_CHANCES, PRIOR_EVENTS, POOL_MEMORY),
        )
        self.levels = Rates((0.5, 0.5), PRIOR_EVENTS, POOL_MEMORY)

    def counts(self) -> list[list[float]]:
        """All counts, for another run to begin with."""
        rates = [counts for of in (self.chances, self.seconds, self.levels) for counts in (of.hits, of.trials)]
        return [[*counts] for counts in (*rates, *(margins.counts for margins in self.margins))]

    def begin_with(self, counts: Sequence[Sequence[float]]) -> None:
        """Begin with what another run's counts() were. Raises ValueError or TypeError for anything else."""
        *rates, first, deeper = counts
        for own, hits, trials in zip((self.chances, self.seconds, self.levels), rates[::2], rates[1::2], strict=True):
            own.begin_with(hits, trials)
        for margins, found in zip(self.margins, (first, deeper), strict=True):
            margins.begin_with(found)


def new_pools() -> list[Pool]:
    """A pool for each range of temperatures."""
    return [Pool() for _ in range(len(_TEMPERATURE_BOUNDS) + 1)]


class Record:
    """The events of one sequence, beside its pool.

    right: number of right tokens; expected: the number that the pool's chances predicted for their margins. The
    quotient says how much more or less predictable this text is than others with the same margins."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.levels = Rates((0.0, 0.0), 0.0, OWN_MEMORY)
        self.right = self.expected = 0.0

    def share(self, level: int) -> float:
        """The chance of a token at level 0 (the first) or deeper (1), given that the token above it was right."""
        own, pooled = self.levels, self.pool.levels.share(level)
        return (own.hits[level] + PRIOR_EVENTS * pooled) / (own.trials[level] + PRIOR_EVENTS)

    @property
    def calibration(self) -> float:
        """Right tokens per token that the margins predicted; close to 1 while there are few events."""
        return (self.right + 2 * PRIOR_EVENTS) / (self.expected + 2 * PRIOR_EVENTS)

    def observe(self, guesses: Sequence[Guess], drawn: Sequence[int], is_half_blind: bool = False) -> None:
        """Count the levels up to the first wrong guess. drawn: the tokens that the target drew at the guessed
        levels. is_half_blind: the draft saw less than half of its keys, which says nothing of other sequences."""
        pool, level = self.pool, 0
        for (guessed, runner_up, margin), token in zip(guesses, drawn, strict=False):
            is_right = guessed == token
            self.right += is_right
            self.expected += pool.chances.share(margin)
            self.levels.add(level, is_right)
            if not is_half_blind:
                pool.chances.add(margin, is_right)
                pool.seconds.add(margin, runner_up == token)
                pool.levels.add(level, is_right)
                pool.margins[level].add(margin)
            if not is_right:
                break
            level = 1
        if self.expected > OWN_MEMORY:
            self.right, self.expected = 0.5 * self.right, 0.5 * self.expected


def chances_of(record: Record) -> tuple[float, ...]:
    """The chance of a token by the bucket of its margin, corrected for this sequence's text."""
    calibration, rates = record.calibration, record.pool.chances
    return tuple(
        [min(0.99, hits / trials * calibration) for hits, trials in zip(rates.hits, rates.trials, strict=True)]
    )


def seconds_of(record: Record) -> tuple[float, ...]:
    """The chance of a runner-up by the bucket of the margin."""
    rates = record.pool.seconds
    return tuple([hits / trials for hits, trials in zip(rates.hits, rates.trials, strict=True)])


def margins_of(pool: Pool, share: float) -> Margins:
    """The margins of a draft's tokens, and their chances, in a text of which that share of first tokens is right."""
    first, deeper = (counts.shares() for counts in pool.margins)
    chances, seconds = ([r.share(margin) for margin in range(NUM_MARGINS)] for r in (pool.chances, pool.seconds))
    calibration = share / sum(often * chance for often, chance in zip(first, chances, strict=True))
    return Margins(first, deeper, [min(0.99, chance * calibration) for chance in chances], seconds)


assert len(_TOKEN_CHANCES) == len(_RUNNER_UP_CHANCES) == NUM_MARGINS
