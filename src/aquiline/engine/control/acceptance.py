"""How often drafts are right, from match events alone: at each level that a text reached, the drafted token was the
one that the target drew, or the runner-up was, or neither.

A level is observed whether its token was verified or not: the token that the target drew there is known either way. So
what a Cut leaves out does not bias the counts. Events are pooled by temperature over all sequences; each sequence has
its own beside them, which count for more as they come and forget within some tens of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from aquiline.engine.control.plan import Margins
from aquiline.spec.confidence import NUM_MARGINS, Guess

_CHANCES = (0.35, 0.4, 0.45, 0.55, 0.65, 0.8, 0.9, 0.95)
_SECONDS = (0.25, 0.25, 0.2, 0.2, 0.15, 0.1, 0.05, 0.02)
PRIOR = 8.0
"""Events that the first guesses above count for, and a sequence's pool beside its own events."""

POOL_MEMORY, OWN_MEMORY = 1024.0, 48.0
"""Events after which half are forgotten: of a bucket in a pool, and of a sequence."""

_TEMPERATURES = (0.0, 0.5, 0.9)
"""Upper ends of the ranges of temperature that have a pool each; the last is open."""


def pool_number(temperature: float) -> int:
    """Which pool the events of a temperature belong to."""
    return sum(temperature > end for end in _TEMPERATURES)


NUM_POOLS = len(_TEMPERATURES) + 1


class Rates:
    """Shares of events, one for each of a few kinds. They forget: once a kind has `memory` events, half of them go."""

    def __init__(self, shares: Sequence[float], weight: float, memory: float) -> None:
        self.hits = [share * weight for share in shares]
        self.trials = [weight] * len(shares)
        self.memory = memory

    def add(self, kind: int, is_hit: bool) -> None:
        """Count an event."""
        trials = self.trials[kind] + 1.0
        hits = self.hits[kind] + is_hit
        if trials >= self.memory:
            trials, hits = 0.5 * trials, 0.5 * hits
        self.trials[kind], self.hits[kind] = trials, hits

    def share(self, kind: int) -> float:
        """Hits per trial."""
        return self.hits[kind] / self.trials[kind]


class Counts:
    """How often each bucket of margins came. They forget: once there are `memory` events, half of them go."""

    def __init__(self, memory: float) -> None:
        self.counts, self.total, self.memory = [1.0] * NUM_MARGINS, float(NUM_MARGINS), memory

    def add(self, margin: int) -> None:
        """Count an event."""
        self.counts[margin] += 1.0
        self.total += 1.0
        if self.total >= self.memory:
            self.counts, self.total = [0.5 * count for count in self.counts], 0.5 * self.total

    def shares(self) -> list[float]:
        """Of each bucket."""
        return [count / self.total for count in self.counts]


class Pool:
    """The events of all sequences of one range of temperatures.

    chances, seconds: by the bucket of the margin, the shares of tokens and of runners-up that were right; levels: the
    share of right tokens at the first level, and at all deeper ones that were reached; margins: how often these had
    which margin."""

    def __init__(self) -> None:
        self.margins = Counts(POOL_MEMORY), Counts(POOL_MEMORY)
        self.chances, self.seconds = Rates(_CHANCES, PRIOR, POOL_MEMORY), Rates(_SECONDS, PRIOR, POOL_MEMORY)
        self.levels = Rates((0.5, 0.5), PRIOR, POOL_MEMORY)


class Record:
    """The events of one sequence, beside its pool.

    right and expected: right tokens, and what the pool's chances for their margins had foretold; their quotient says
    how this text differs from others at the same margins."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.levels = Rates((0.0, 0.0), 0.0, OWN_MEMORY)
        self.right = self.expected = 0.0

    def share(self, level: int) -> float:
        """The chance of a token at level 0 (the first) or deeper (1), given that the token above it was right."""
        own, pooled = self.levels, self.pool.levels.share(level)
        return (own.hits[level] + PRIOR * pooled) / (own.trials[level] + PRIOR)

    @property
    def lean(self) -> float:
        """Right tokens for each that was expected by margins, close to 1 while there are few events."""
        return (self.right + 2 * PRIOR) / (self.expected + 2 * PRIOR)

    def observe(self, guesses: Sequence[Guess], drawn: Sequence[int]) -> None:
        """The target drew these tokens where the draft had guessed; the levels up to the first wrong guess count."""
        pool, level = self.pool, 0
        for (guessed, runner_up, margin), token in zip(guesses, drawn, strict=False):
            is_right = guessed == token
            self.right += is_right
            self.expected += pool.chances.share(margin)
            pool.chances.add(margin, is_right)
            pool.seconds.add(margin, runner_up == token)
            pool.levels.add(level, is_right)
            self.levels.add(level, is_right)
            pool.margins[level].add(margin)
            if not is_right:
                break
            level = 1
        if self.expected > OWN_MEMORY:
            self.right, self.expected = 0.5 * self.right, 0.5 * self.expected


def chances_of(record: Record) -> tuple[float, ...]:
    """The chance of a token by the bucket of its margin, as this sequence's text leans."""
    lean, rates = record.lean, record.pool.chances
    return tuple([min(0.99, hits / trials * lean) for hits, trials in zip(rates.hits, rates.trials, strict=True)])


def seconds_of(record: Record) -> tuple[float, ...]:
    """The chance of a runner-up by the bucket of the margin."""
    rates = record.pool.seconds
    return tuple([hits / trials for hits, trials in zip(rates.hits, rates.trials, strict=True)])


def margins_of(pool: Pool, share: float) -> Margins:
    """How a draft's tokens come by their margins, for a text whose first tokens are right as often as `share` says."""
    first, deeper = (counts.shares() for counts in pool.margins)
    chances, seconds = ([r.share(margin) for margin in range(NUM_MARGINS)] for r in (pool.chances, pool.seconds))
    lean = share / sum(often * chance for often, chance in zip(first, chances, strict=True))
    return Margins(first, deeper, [min(0.99, chance * lean) for chance in chances], seconds)


assert len(_CHANCES) == len(_SECONDS) == NUM_MARGINS
