"""A run's progress and end: budgets in steps, tokens, epochs and minutes, the time that a judgement takes, and signals.

The learning rate follows the share of the budget that is used (master_weights.py), so everything but a budget in
minutes repeats exactly.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from dataclasses import dataclass
from types import FrameType
from typing import Self

from aquiline.train.train_config import TrainConfig

SHOW_CURSOR = "\x1b[?25h"


@dataclass(eq=False)
class RunProgress:
    """The progress of a run, saved with every checkpoint. seconds: since the command began, plus those of the earlier
    runs that it resumes; prepared_s: those before the first step. best_score: of the draft in OUT; start_score: of the
    draft before the first step, 0 where nobody judged it. bad_steps: steps skipped in a row."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_score: float = 0.0
    best_step: int = 0
    bad_steps: int = 0
    start_score: float = 0.0
    prepared_s: float = 0.0


@dataclass
class Pace:
    """The steps of one command so far: how many, their seconds, and their tokens that are not padding."""

    num_steps: int = 0
    seconds: float = 0.0
    tokens: int = 0

    def add(self, seconds: float, tokens: int) -> None:
        """Count a step."""
        self.num_steps += 1
        self.seconds += seconds
        self.tokens += tokens

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of steps; 0 before the first one."""
        return self.tokens / max(1e-9, self.seconds)

    @property
    def of_a_step(self) -> tuple[float, float]:
        """Mean seconds and mean tokens of a step."""
        return self.seconds / self.num_steps, self.tokens / self.num_steps


class Clock:
    """Seconds of a run, from the start of its command on, and of the longest judgement ("look") so far. saved: when the
    last checkpoint was written, at first when the command began."""

    def __init__(self) -> None:
        self.began = self.saved = time.perf_counter()
        self.earlier = 0.0
        self.look_s = 0.0

    def seconds(self) -> float:
        """Seconds since the command began, plus those of the runs that it resumes."""
        return self.earlier + time.perf_counter() - self.began


class Budget:
    """When a run ends: with whichever of steps, tokens, epochs and minutes is used up first; one epoch by default."""

    def __init__(self, config: TrainConfig, steps_per_epoch: int) -> None:
        self.steps, self.tokens, self.minutes = config.steps, config.tokens, config.minutes
        epochs = config.epochs if (self.steps or self.tokens or self.minutes or config.epochs) else 1.0
        self.epoch_steps = max(1, round(epochs * steps_per_epoch)) if epochs else None

    def share(self, progress: RunProgress, look_s: float) -> float:
        """Share of the budget used; 1 or more ends the run. look_s: seconds that are left for the last judgement."""
        parts = self._parts(progress, look_s)
        return max(used / whole if whole > 0 else 1.0 for used, whole in parts if whole is not None)

    def steps_left(self, progress: RunProgress, look_s: float, pace: Pace) -> int:
        """Steps until the budget is used up at a measured pace."""
        step_s, step_tokens = pace.of_a_step
        pairs = zip(self._parts(progress, look_s), (1, step_tokens, 1, step_s), strict=True)
        return max(0, math.ceil(min((whole - used) / step for (used, whole), step in pairs if whole is not None)))

    def _parts(self, progress: RunProgress, look_s: float) -> list[tuple[float, float | None]]:
        """The used part and the whole of each budget: steps, tokens, epochs and minutes. The whole is None if there is
        no such budget. A budget in minutes begins with the first step and ends `minutes` after the command began."""
        stepping_s = self.minutes and 60 * self.minutes - look_s - progress.prepared_s
        return [
            (progress.step, self.steps), (progress.tokens, self.tokens), (progress.step, self.epoch_steps),
            (progress.seconds - progress.prepared_s, stepping_s),
        ]  # fmt: skip


class StopRequest:
    """Whether somebody wants the run to stop. Within a with statement the first SIGINT or SIGTERM is such a request,
    and `answer` goes to stderr; the second one ends the process at once."""

    def __init__(self, answer: str) -> None:
        self.answer, self.is_made = answer, False
        self.before: dict[int, signal.Handlers | int | None] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # no other thread may set handlers
            self.before = {number: signal.signal(number, self._take) for number in (signal.SIGINT, signal.SIGTERM)}  # type: ignore[misc]
        return self

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.is_made = True
        for each in self.before:
            signal.signal(each, signal.SIG_DFL)
        # Not print: the signal may have interrupted a print. The bar hides the cursor, and a second signal would leave
        # it hidden.
        os.write(2, f"{SHOW_CURSOR if os.isatty(2) else ''}\n{self.answer}\n".encode())

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
