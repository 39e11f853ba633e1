"""The figures of one training step, over all parts of its batch and all ranks: losses and accuracies by pass."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from aquiline.train.ttt import TTTResult


@dataclass(frozen=True)
class StepFigures:
    """The figures of one step, or the mean of several (`mean_of`).

    total: the loss that was minimised. tokens: positions that are not padding. Per pass: losses, the mean loss;
    accuracy, how often the best guess was the target's; conditional, the same among rows that were right in all earlier
    passes. NaN where no row counts."""

    total: float
    tokens: int
    losses: tuple[float, ...]
    accuracy: tuple[float, ...]
    conditional: tuple[float, ...]

    @property
    def expected_tau(self) -> float:
        """Tokens that a chain commits per cycle if drafts are right as often as here: 1 + c1 + c1 c2 + ... with the
        conditional accuracies c, up to the first pass that no row reached."""
        reached = itertools.takewhile(lambda c: not math.isnan(c), self.conditional)
        return 1 + sum(itertools.accumulate(reached, lambda a, b: a * b))


def combine(
    results: Sequence[TTTResult], tokens: int, over_ranks: Callable[[Sequence[float]], list[float]]
) -> StepFigures:
    """Figures of a step from the results of its parts; over_ranks sums numbers over all ranks."""
    num_passes = len(results[0].losses)
    sums = [0.0] * (5 * num_passes)
    for result in results:
        for k in range(num_passes):
            num_counted, num_alive = result.counted[k], result.alive[k]
            if num_counted:
                sums[k] += num_counted
                sums[num_passes + k] += num_counted * result.losses[k]
                sums[2 * num_passes + k] += num_counted * result.accuracy[k]
            if num_alive:
                sums[3 * num_passes + k] += num_alive
                sums[4 * num_passes + k] += num_alive * result.conditional[k]
    total = sum(float(result.total.detach()) for result in results)
    whole = over_ranks([total, float(tokens), *sums])
    counted, losses, right, alive, stayed = (whole[2 + i * num_passes : 2 + (i + 1) * num_passes] for i in range(5))
    return StepFigures(
        whole[0], round(whole[1]), _shares(losses, counted), _shares(right, counted), _shares(stayed, alive)
    )


def mean_of(steps: Sequence[StepFigures]) -> StepFigures:
    """The mean of several steps' figures, since a single small batch says little. A figure that a step did not measure
    (NaN) is left out; tokens are summed."""
    columns = [zip(*(getattr(s, name) for s in steps), strict=True) for name in ("losses", "accuracy", "conditional")]
    means = [tuple(_mean(column) for column in passes) for passes in columns]
    return StepFigures(_mean([s.total for s in steps]), sum(s.tokens for s in steps), *means)


def _mean(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _shares(parts: Sequence[float], wholes: Sequence[float]) -> tuple[float, ...]:
    return tuple(part / whole if whole else math.nan for part, whole in zip(parts, wholes, strict=True))
