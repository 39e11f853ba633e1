"""Every published figure is derived here, once.

A step is one target forward. A forward may prefill prompts beside sequences that decode; its time is then divided
between the two in proportion to their rows. A forward that only prefills is not a decode step. `committed` counts the
tokens that a step adds to a request's output after cuts at end tokens, stop strings and the length limit, bonus
included. Tokens that were accepted and then cut are counted in tokens_cut. The token that a prefill draws is not
committed by a decode step: output tokens = num_prefilled + num_committed. So tau can be recomputed from output lengths.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import numpy as np

from aquiline.ledger import Ledger

STAGES = ("draft", "verify", "keep", "host")
"""Where the time of a step goes. draft: the draft's missing keys and the trees; verify: the target's forward over trees
and chunks, its draws, and the kept paths; keep: keys and features of kept paths, and the next roots; host: the
rest."""

PARTS = (
    "target_attention", "target_mlp", "target_head", "draft_attention", "draft_mlp", "draft_head", "draft_fusion",
    "rows", "draws",
)  # fmt: skip
"""The parts that stages run. attention: from the input norm to the output projection; mlp: from there to the end of the
layer; head: final norm, logits, the draw or choice; draft_fusion: the features fused for the draft; rows: tokens,
positions and masks of the target's rows, filled; draws: drawn tokens and kept paths, without the head."""


@dataclass
class Counters:
    """Sums over (active slot, step) pairs; one instance per request and one per run."""

    num_steps: int = 0  # active slots summed over decode steps
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_committed: int = 0
    tokens_cut: int = 0
    num_ge2: int = 0  # active steps that committed at least two
    num_prefilled: int = 0  # requests whose first token a prefill sampled
    num_prompt_tokens: int = 0
    num_prefix_hits: int = 0  # prompt tokens that the prefix cache had
    accepted_at: list[int] = field(default_factory=list)  # active steps whose draft at position p + 1 was accepted

    def add(self, num_proposed: int, num_accepted: int, num_committed: int, num_cut: int) -> None:
        """Record one active slot's step."""
        self.num_steps += 1
        self.num_draft_tokens += num_proposed
        self.num_accepted_tokens += num_accepted
        self.num_committed += num_committed
        self.tokens_cut += num_cut
        self.num_ge2 += num_committed >= 2
        if num_accepted > len(self.accepted_at):
            self.accepted_at.extend([0] * (num_accepted - len(self.accepted_at)))
        for position in range(num_accepted):
            self.accepted_at[position] += 1

    def merge(self, other: Counters) -> None:
        """Add another run's sums."""
        for field_ in fields(self):
            if field_.name != "accepted_at":
                setattr(self, field_.name, getattr(self, field_.name) + getattr(other, field_.name))
        width = max(len(self.accepted_at), len(other.accepted_at))
        self.accepted_at.extend([0] * (width - len(self.accepted_at)))
        for position, count in enumerate(other.accepted_at):
            self.accepted_at[position] += count

    @classmethod
    def sum_of(cls, parts: Iterable[Counters]) -> Counters:
        """The sums of several runs."""
        total = cls()
        for part in parts:
            total.merge(part)
        return total

    def minus(self, earlier: Counters) -> Counters:
        """What was counted since `earlier`, a copy of the same counters."""
        names = [f.name for f in fields(self) if f.name != "accepted_at"]
        values = {name: getattr(self, name) - getattr(earlier, name) for name in names}
        before = earlier.accepted_at + [0] * (len(self.accepted_at) - len(earlier.accepted_at))
        accepted_at = [now - then for now, then in zip(self.accepted_at, before, strict=True)]
        while accepted_at and accepted_at[-1] == 0:  # only before `earlier` was a draft accepted at that depth
            accepted_at.pop()
        return Counters(**values, accepted_at=accepted_at)

    @property
    def tau(self) -> float:
        """Mean tokens committed per active slot and step; 1.0 means speculation gave nothing. 0 before any step."""
        return self.num_committed / self.num_steps if self.num_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens / proposed draft tokens; 0 without drafts."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def per_position(self) -> list[float]:
        """Share of active steps whose position-p draft was accepted, p = 1, 2, ..."""
        return [count / self.num_steps for count in self.accepted_at]

    @property
    def fraction_ge2(self) -> float:
        """Share of active steps committing at least two tokens."""
        return self.num_ge2 / self.num_steps if self.num_steps else 0.0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of prompt tokens that the prefix cache had."""
        return self.num_prefix_hits / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    def as_dict(self) -> dict[str, object]:
        """The acceptance figures of a result."""
        return {
            "tau": self.tau,
            "acceptance_rate": self.acceptance_rate,
            "per_position": self.per_position,
            "fraction_ge2": self.fraction_ge2,
            "num_steps": self.num_steps,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_committed": self.num_committed,
            "tokens_cut": self.tokens_cut,
            "num_prefilled": self.num_prefilled,
            "num_prompt_tokens": self.num_prompt_tokens,
            "prefix_hit_rate": self.prefix_hit_rate,
            "target_calls_per_token": 1 / self.tau if self.tau else 0.0,
        }


class StepCounts(NamedTuple):
    """The rows and slots of one step. active, prefilling, empty: of num_slots, those that decoded, whose prompt is
    still computed, and without a request."""

    num_decode_rows: int
    num_chunk_rows: int
    num_draft_rows: int
    num_experts: int
    active: int
    prefilling: int
    empty: int
    num_slots: int


@dataclass
class SlotCounters:
    """How many of the batch's slots decoded, summed over decode steps.

    prefilling counts slots whose prompt is still computed. disabled_finished counts slots without a request.
    disabled_other counts slots that did not decode for any other reason, and must stay 0."""

    steps_by_active: dict[int, int] = field(default_factory=dict)  # decode steps by how many slots decoded
    prefilling: int = 0
    disabled_finished: int = 0
    disabled_other: int = 0
    num_verify_rows: int = 0  # rows of the target's linears and head that decode
    num_draft_rows: int = 0  # rows of the draft's linears
    num_experts: int = 0  # experts that the target read, of all layers together, for prompts' rows beside them too

    def add(self, step: StepCounts) -> None:
        """Record one decode step."""
        self.steps_by_active[step.active] = self.steps_by_active.get(step.active, 0) + 1
        self.prefilling += step.prefilling
        self.disabled_finished += step.empty
        self.disabled_other += step.num_slots - step.active - step.prefilling - step.empty
        self.num_verify_rows += step.num_decode_rows
        self.num_draft_rows += step.num_draft_rows
        self.num_experts += step.num_experts

    def minus(self, earlier: SlotCounters) -> SlotCounters:
        """What was counted since `earlier`, a copy of the same counters."""
        names = [f.name for f in fields(self) if f.name != "steps_by_active"]
        values = {name: getattr(self, name) - getattr(earlier, name) for name in names}
        steps = {n: count - earlier.steps_by_active.get(n, 0) for n, count in self.steps_by_active.items()}
        return SlotCounters(steps_by_active={n: count for n, count in steps.items() if count}, **values)

    @property
    def num_steps(self) -> int:
        """Decode steps."""
        return sum(self.steps_by_active.values())

    @property
    def active(self) -> int:
        """Slots that decoded, summed over steps."""
        return sum(n * count for n, count in self.steps_by_active.items())

    @property
    def active_min(self) -> int:
        """Fewest slots that decoded in a step."""
        return min(self.steps_by_active, default=0)

    @property
    def active_max(self) -> int:
        """Most slots that decoded in a step."""
        return max(self.steps_by_active, default=0)

    @property
    def active_avg(self) -> float:
        """Mean slots that decoded per decode step."""
        return self.active / self.num_steps if self.num_steps else 0.0

    def as_dict(self) -> dict[str, object]:
        """The `slots` object of a JSON result."""
        names = ("num_steps", "active", "active_min", "active_max", "prefilling", "disabled_finished", "disabled_other")
        more = ("num_verify_rows", "num_draft_rows", "num_experts", "active_avg")
        return {name: getattr(self, name) for name in (*names, *more)}


class Lap(NamedTuple):
    """A stretch of time that belongs to one stage; began_s is a value of time.perf_counter."""

    stage: str
    began_s: float
    seconds: float


@dataclass(frozen=True)
class Mark:
    """What a Meter had counted at one moment."""

    counters: Counters
    slots: SlotCounters
    stage_s: dict[str, float]
    part_s: dict[str, float]
    numbers: dict[str, float]
    choices: Ledger
    at_s: float


class Meter:
    """Times the stages of each step and counts forwards, from the engine's start on. `counters` sums the requests that
    have ended; choices: what adaptive drafting chose. A meter is never reset: a run's figures are the difference
    between two moments (`mark`, `since`)."""

    _NUMBERS = (
        "prefill_s", "decode_s", "num_target_forwards", "num_decode_steps", "num_prefill_tokens", "num_preemptions",
    )  # fmt: skip

    def __init__(self) -> None:
        self.counters = Counters()
        self.slots = SlotCounters()
        self.choices = Ledger()
        self.stage_s = dict.fromkeys(STAGES, 0.0)
        self.part_s = dict.fromkeys(PARTS, 0.0)
        self.prefill_s = 0.0
        self.decode_s = 0.0
        self.num_target_forwards = 0
        self.num_decode_steps = 0
        self.num_prefill_tokens = 0
        self.num_preemptions = 0
        self.laps: list[Lap] | None = None  # every lap, where somebody wants a trace
        self._timed = list[tuple[str, float, float]]()  # stages of steps read since `end_step`: name, seconds, share
        self._share = 1.0  # decode rows of the last step / all its rows

    def add_step(self, step: StepCounts, seconds: dict[str, float] | None, parts: dict[str, float]) -> None:
        """Record a step whose outcome was read. seconds: the time of its stages as the backend measured them, None
        where it did not."""
        self.num_target_forwards += 1
        self.num_prefill_tokens += step.num_chunk_rows
        self.num_decode_steps += step.num_decode_rows > 0
        if step.active:
            self.slots.add(step)
        self._share = step.num_decode_rows / (step.num_decode_rows + step.num_chunk_rows)
        if seconds is not None:
            self._timed += [(stage, each, self._share) for stage, each in seconds.items()]
        for part, each in parts.items():
            self.part_s[part] += each * self._share

    def end_step(self, began_s: float) -> None:
        """The engine ends a step that began at that value of time.perf_counter. Time that no stage of the backend took
        counts as the host's; time between two steps is not counted."""
        host_s = time.perf_counter() - began_s - sum(each for _, each, _ in self._timed)
        for stage, each, share in (*self._timed, ("host", max(0.0, host_s), self._share)):
            self.stage_s[stage] += each * share
            self.decode_s += each * share
            self.prefill_s += each * (1 - share)
            if self.laps is not None:
                self.laps.append(Lap(stage, began_s, each))
            began_s += each
        self._timed.clear()

    def mark(self) -> Mark:
        """A copy of all counts at this moment, for `since`."""
        return Mark(
            counters=self.counters.minus(Counters()), slots=self.slots.minus(SlotCounters()),
            stage_s=dict(self.stage_s), part_s=dict(self.part_s),
            numbers={name: getattr(self, name) for name in self._NUMBERS}, choices=self.choices.plus(Ledger()),
            at_s=time.perf_counter(),
        )  # fmt: skip

    def since(self, mark: Mark) -> RunSummary:
        """The figures of everything counted since `mark` was taken."""
        numbers = {name: getattr(self, name) - mark.numbers[name] for name in self._NUMBERS}
        return RunSummary(
            counters=self.counters.minus(mark.counters), slots=self.slots.minus(mark.slots),
            prefill_ms=numbers["prefill_s"] * 1e3, decode_ms=numbers["decode_s"] * 1e3,
            wall_ms=(time.perf_counter() - mark.at_s) * 1e3, num_target_forwards=int(numbers["num_target_forwards"]),
            num_decode_steps=int(numbers["num_decode_steps"]), num_prefill_tokens=int(numbers["num_prefill_tokens"]),
            num_preemptions=int(numbers["num_preemptions"]),
            stage_ms={name: (self.stage_s[name] - mark.stage_s[name]) * 1e3 for name in STAGES},
            part_ms={name: (self.part_s[name] - mark.part_s[name]) * 1e3 for name in PARTS},
            choices=self.choices.minus(mark.choices),
        )  # fmt: skip


@dataclass(frozen=True)
class RunSummary:
    """One run's figures; results and benchmarks read nothing else. stage_ms and part_ms cover decode steps only."""

    counters: Counters
    slots: SlotCounters
    prefill_ms: float
    decode_ms: float
    wall_ms: float
    num_target_forwards: int
    num_decode_steps: int
    num_prefill_tokens: int
    num_preemptions: int
    stage_ms: dict[str, float]
    part_ms: dict[str, float]
    choices: Ledger

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens committed by decode steps per second of decode steps; prefill is in neither."""
        return self.counters.num_committed / self.decode_ms * 1e3 if self.decode_ms else 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens computed per second of prefill; 0 where the prefix cache had all."""
        return self.num_prefill_tokens / self.prefill_ms * 1e3 if self.prefill_ms else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of the whole run, prefill and idle time included."""
        tokens = self.counters.num_committed + self.counters.num_prefilled
        return tokens / self.wall_ms * 1e3 if self.wall_ms else 0.0

    @property
    def slots_line(self) -> str:
        """The batch in one line."""
        s = self.slots
        return (
            f"active slots {s.active_avg:.2f} avg, {s.active_min} min, {s.active_max} max; disabled_finished "
            f"{s.disabled_finished}, disabled_other {s.disabled_other}; committed per active slot "
            f"{self.counters.tau:.2f}; preemptions {self.num_preemptions}; prefix hits "
            f"{self.counters.prefix_hit_rate:.0%}"
        )

    def as_dict(self) -> dict[str, object]:
        """The `metrics` object of a JSON result."""
        return self.counters.as_dict() | {
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "tokens_per_s": self.tokens_per_s,
            "prefill_ms": self.prefill_ms,
            "decode_ms": self.decode_ms,
            "wall_ms": self.wall_ms,
            "num_target_forwards": self.num_target_forwards,
            "num_decode_steps": self.num_decode_steps,
            "num_prefill_tokens": self.num_prefill_tokens,
            "num_preemptions": self.num_preemptions,
            "slots": self.slots.as_dict(),
            "stage_ms": self.stage_ms,
            "adaptive": self.choices.as_dict(),
            "peak_memory_bytes": peak_memory_bytes(),
        }


def peak_memory_bytes() -> int:
    """Largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def repeated_share(token_ids: list[int], n: int = 8) -> float:
    """Share of n-grams that stand earlier in the same text. A small model's text loops, which flatters every drafter;
    this share tells how much."""
    grams = [tuple(token_ids[i : i + n]) for i in range(len(token_ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def mean(values: list[float]) -> float:
    """Arithmetic mean; 0 of nothing."""
    return float(np.mean(values)) if values else 0.0
