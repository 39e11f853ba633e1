"""How often drafts are right, from match events alone: at each level that a text reached, the drafted token was the
one that the target drew, or the runner-up was, or neither.

A level is observed whether its token was verified or not: the token that the target drew there is known either way. So
what a Cut leaves out does not bias the counts. Events are pooled by temperature over all sequences; each sequence has
its own beside them, which count for more as they come and forget within some tens of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from aquiline.spec.confidence import NUM_MARGINS, Guess

_CHANCES = (0.35, 0.4, 0.45, 0.55, 0.65, 0.8, 0.9, 0.95)
_SECONDS = (0.25, 0.25, 0.2, 0.2, 0.15, 0.1, 0.05, 0.02)
PRIOR = 8.0
"""Events that the first guesses above count for, and a sequence's pool beside its own events."""

POOL_MEMORY, OWN_MEMORY = 512.0, 32.0
"""Events after which older ones count half as much, about: of a bucket in a pool, and of a sequence."""

_TEMPERATURES = (0.0, 0.5, 0.9)
"""Upper ends of the ranges of temperature that have a pool each; the last is open."""


def pool_number(temperature: float) -> int:
    """Which pool the events of a temperature belong to."""
    return sum(temperature > end for end in _TEMPERATURES)


NUM_POOLS = len(_TEMPERATURES) + 1


@dataclass(eq=False)
class Rate:
    """A share of events that forgets: hits and trials both fade as new events come."""

    hits: float
    trials: float
    memory: float

    def add(self, is_hit: bool) -> None:
        """Count an event."""
        fade = 1 - 1 / self.memory if self.trials > self.memory else 1.0
        self.hits, self.trials = self.hits * fade + is_hit, self.trials * fade + 1

    @property
    def share(self) -> float:
        """Hits per trial."""
        return self.hits / self.trials


class Pool:
    """The events of all sequences of one range of temperatures.

    chances, seconds: by the bucket of the margin, the shares of tokens and of runners-up that were right; levels: the
    share of right tokens at the first level, and at all deeper ones that were reached."""

    def __init__(self) -> None:
        self.chances = [Rate(share * PRIOR, PRIOR, POOL_MEMORY) for share in _CHANCES]
        self.seconds = [Rate(share * PRIOR, PRIOR, POOL_MEMORY) for share in _SECONDS]
        self.levels = (Rate(0.5 * PRIOR, PRIOR, POOL_MEMORY), Rate(0.5 * PRIOR, PRIOR, POOL_MEMORY))


@dataclass(eq=False)
class Record:
    """The events of one sequence, beside its pool.

    right and expected: right tokens, and what the pool's chances for their margins had foretold; their quotient says
    how this text differs from others at the same margins."""

    pool: Pool
    levels: tuple[Rate, Rate] = field(default_factory=lambda: (Rate(0.0, 0.0, OWN_MEMORY), Rate(0.0, 0.0, OWN_MEMORY)))
    right: float = 0.0
    expected: float = 0.0

    def share(self, level: int) -> float:
        """The chance of a token at level 0 (the first) or deeper (1), given that the token above it was right."""
        own, pooled = self.levels[level], self.pool.levels[level].share
        return (own.hits + PRIOR * pooled) / (own.trials + PRIOR)

    @property
    def lean(self) -> float:
        """Right tokens for each that was expected by margins, close to 1 while there are few events."""
        return (self.right + 2 * PRIOR) / (self.expected + 2 * PRIOR)

    def observe(self, guesses: Sequence[Guess], drawn: Sequence[int]) -> None:
        """The target drew these tokens where the draft had guessed; the levels up to the first wrong guess count."""
        pool = self.pool
        for level, (guess, token) in enumerate(zip(guesses, drawn, strict=False)):
            is_right = guess.token == token
            chance = pool.chances[guess.margin]
            fade = 1 - 1 / OWN_MEMORY
            self.right, self.expected = self.right * fade + is_right, self.expected * fade + chance.share
            chance.add(is_right)
            pool.seconds[guess.margin].add(guess.runner_up == token)
            deeper = level > 0
            pool.levels[deeper].add(is_right)
            self.levels[deeper].add(is_right)
            if not is_right:
                return


def chances_of(record: Record) -> tuple[float, ...]:
    """The chance of a token by the bucket of its margin, as this sequence's text leans."""
    lean = record.lean
    return tuple(min(0.99, rate.share * lean) for rate in record.pool.chances)


def seconds_of(record: Record) -> tuple[float, ...]:
    """The chance of a runner-up by the bucket of the margin."""
    return tuple(rate.share for rate in record.pool.seconds)


assert len(_CHANCES) == len(_SECONDS) == NUM_MARGINS
