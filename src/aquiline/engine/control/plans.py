"""Which plan the steps of a load follow, for how long, and when another is made: plans take time, and grow old."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from aquiline.engine.control.acceptance import Pool
from aquiline.engine.control.planner import MIN_SPEEDUP, DraftingPlan

INITIAL_PLANS, PLAN_TIME_SHARE = 8.0, 0.01
"""Number of plans that may be made before any time has passed, and the share of the time that plans may take. Where
they would take more, an older plan is followed for longer, even one of another load."""

REPLAN_STEPS, TIMING_STEPS = 32, 8
"""A plan is followed for 32 steps, the first one of a load until its sequences took 32 steps together, and the next
ones for twice as many each; timings are learnt from every 8th step. A plan costs some hundreds of microseconds for a
batch, a timing some tens."""

TRIAL_PERIOD, TRIAL_STEPS, TRIAL_SPEEDUP, TRIAL_TIME_SHARE, MOST_TRIALS = 256, 4, 0.8, 0.01, 4
"""Where nobody drafts, the best way to draft is tried for 4 of 256 steps, if it is expected to bring at least 0.8 of
the tokens: what rows cost beside each other is known for sure only where it was timed. Trials are rarer where the draft
keys that they begin with would take more than this share of the time. Each of up to four trials in a row that no
drafting has followed makes those of its load half as frequent."""

RESTING_SHARE = 0.002
"""Where sequences draft, four steps in a row sometimes do not, at most four of 256, and tell what that takes: steps
that draft do not tell how much of their time is that of their rows. They may cost this share of the tokens."""


class PlanKey(NamedTuple):
    """What a plan is made for: sequences that draft adaptively and all that decode, rounded, whether prompts are
    computed beside them, and the pools of the first, since how far it pays to draft depends on the temperature."""

    num_adaptive: int
    num_decoding: int
    has_chunks: bool
    pools: frozenset[Pool]


class _Planned(NamedTuple):
    """The plan of a load. until: the number of the step from which it is old; steps: how many steps it is followed for;
    is_trial: whether it tries to draft, or not to; num_trials: trials in a row that no drafting has followed."""

    plan: DraftingPlan
    until: int
    steps: int
    is_trial: bool = False
    num_trials: int = 0


class Plans:
    """The plans of all loads. current: the one that is followed."""

    def __init__(self) -> None:
        self.current = _Planned(DraftingPlan(0.0, 0.0, 0), 0, 0)
        self._of_loads: dict[PlanKey, _Planned] = {}
        self._last_trial = -TRIAL_PERIOD  # the number of its step
        self._num_left, self._plan_ms = INITIAL_PLANS, 0.0  # plans that may be made now; the time that one takes

    def earn(self, num_steps: int, step_ms: float) -> None:
        """Plans may take a share of the time of these steps."""
        if self._plan_ms:
            earned = num_steps * PLAN_TIME_SHARE * step_ms / self._plan_ms
            self._num_left = min(INITIAL_PLANS, self._num_left + earned)

    def take(
        self, load: PlanKey, now: int, num_adaptive: int, beginning_steps: Callable[[], float],
        make: Callable[[float], DraftingPlan],
    ) -> None:  # fmt: skip
        """Follow the plan of a load in step number `now`. beginning_steps: how many steps' time it takes the
        sequences to begin to draft; make: a new plan, given the least speedup for which it drafts."""
        last = self._of_loads.get(load)
        older = last or self.current
        if last is not None and now < last.until:
            pass
        elif self._num_left < 1.0 and not older.is_trial:
            last = older._replace(until=now + TIMING_STEPS)
        elif last is None:
            steps = max(math.ceil(REPLAN_STEPS / num_adaptive), self.current.steps)
            last = _Planned(self._made(make, MIN_SPEEDUP), now + steps, steps)
        elif not load.has_chunks and self._may_try(now, last, beginning_steps):
            self._last_trial = now
            num_trials = min(MOST_TRIALS, last.num_trials + 1)
            last = _Planned(self._made(make, TRIAL_SPEEDUP), now + TRIAL_STEPS, last.steps, True, num_trials)
        elif not load.has_chunks and self._may_rest(now, last.plan.speedup):
            self._last_trial = now
            plain = DraftingPlan(last.plan.rate / last.plan.speedup, last.plan.row_ms, last.plan.num_rows)
            last = _Planned(plain, now + TRIAL_STEPS, last.steps, True)
        else:
            steps, plan = min(REPLAN_STEPS, 2 * last.steps), self._made(make, MIN_SPEEDUP)
            last = _Planned(plan, now + steps, steps, num_trials=0 if plan.planned_rate else last.num_trials)
        self.current = self._of_loads[load] = last

    def _may_try(self, now: int, last: _Planned, beginning_steps: Callable[[], float]) -> bool:
        if last.plan.planned_rate:
            return False
        passed = (now - self._last_trial) / (1 << last.num_trials)
        return passed >= TRIAL_PERIOD and passed >= beginning_steps() / TRIAL_TIME_SHARE

    def _may_rest(self, now: int, speedup: float) -> bool:
        period = max(TRIAL_PERIOD, TRIAL_STEPS * (1.0 - 1.0 / speedup) / RESTING_SHARE)
        return speedup > 1.0 and now - self._last_trial >= period

    def _made(self, make: Callable[[float], DraftingPlan], least_speedup: float) -> DraftingPlan:
        began = time.perf_counter()
        found = make(least_speedup)
        self._num_left, self._plan_ms = self._num_left - 1.0, (time.perf_counter() - began) * 1e3
        return found


def rounded(count: int) -> int:
    """Counts that share a plan: each up to four, and then those within about a fifth of each other."""
    return count if count <= 4 else round(4 * math.log2(count))
