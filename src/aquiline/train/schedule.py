"""A run's progress and end: budgets in steps, tokens, epochs and minutes, and the time that a judgement takes.

The learning rate follows the share of the budget that is used (optimizer.py), so everything but a budget in minutes
repeats exactly.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from aquiline.train.config import TrainConfig


@dataclass(eq=False)
class Progress:
    """The progress of a run, saved with every checkpoint. seconds: since the command began, plus those of the earlier
    runs that it resumes. bad_steps: steps skipped in a row."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_score: float = 0.0
    best_step: int = 0
    bad_steps: int = 0


class Clock:
    """Seconds of a run, from the start of its command on, and of the longest judgement ("look") so far."""

    def __init__(self) -> None:
        self.began = self.saved = time.perf_counter()
        self.earlier = 0.0
        self.look_s = 0.0

    def seconds(self) -> float:
        """Seconds since the command began, plus those of the runs that it resumes."""
        return self.earlier + time.perf_counter() - self.began

    def looked(self, began: float) -> None:
        """A judgement has ended that began when `seconds()` was `began`."""
        self.look_s = max(self.look_s, self.seconds() - began)

    def minutes_since_save(self) -> float:
        """Minutes since the last checkpoint, or since the command began."""
        return (time.perf_counter() - self.saved) / 60

    def save_done(self) -> None:
        """A checkpoint has been written just now."""
        self.saved = time.perf_counter()


class Budget:
    """When a run ends: with whichever of steps, tokens, epochs and minutes is used up first; one epoch by default."""

    def __init__(self, config: TrainConfig, steps_per_epoch: int) -> None:
        self.steps, self.tokens, self.minutes = config.steps, config.tokens, config.minutes
        epochs = config.epochs if (self.steps or self.tokens or self.minutes or config.epochs) else 1.0
        self.epoch_steps = max(1, round(epochs * steps_per_epoch)) if epochs else None

    def share(self, progress: Progress, look_s: float) -> float:
        """Share of the budget used; 1 or more ends the run. A budget in minutes leaves `look_s` seconds for the last
        judgement."""
        shares = [0.0]
        for used, budget in (
            (progress.step, self.steps),
            (progress.tokens, self.tokens),
            (progress.step, self.epoch_steps),
        ):
            shares.append(used / budget if budget else 0.0)
        if self.minutes:
            left = 60 * self.minutes - look_s
            shares.append(progress.seconds / left if left > 0 else 1.0)
        return max(shares)
