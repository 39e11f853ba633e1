"""Every published figure is derived here, once. Definitions: EAGLE3.md §5.

A step is one target forward that decodes; prefill forwards are timed apart and are not steps. `committed` counts the
tokens a step adds to a request's output after EOS, stop and length cuts, bonus included; what was accepted and then
cut is tokens_cut. The token a prefill samples is not committed by a step: sum of output tokens = num_prefilled +
num_committed, which is how tau can be recomputed from output lengths.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

STAGES = ("draft", "verify", "accept", "commit", "host")


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
        for name in ("num_steps", "num_draft_tokens", "num_accepted_tokens", "num_committed", "tokens_cut", "num_ge2"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.num_prefilled += other.num_prefilled
        width = max(len(self.accepted_at), len(other.accepted_at))
        self.accepted_at.extend([0] * (width - len(self.accepted_at)))
        for position, count in enumerate(other.accepted_at):
            self.accepted_at[position] += count

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
            "target_calls_per_token": 1 / self.tau if self.tau else 0.0,
        }


class Meter:
    """Times the stages of each step and the forwards; `counters` sums the requests that have finished."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.stage_s = dict.fromkeys(STAGES, 0.0)
        self.prefill_s = 0.0
        self.decode_s = 0.0
        self.num_target_forwards = 0
        self.num_decode_steps = 0
        self.num_prefill_tokens = 0
        self._staged_s = 0.0

    @contextmanager
    def step(self, is_decode: bool) -> Iterator[None]:
        """One engine step; what no stage claims of a decode step is the host's."""
        began, self._staged_s = time.perf_counter(), 0.0
        before = dict(self.stage_s)
        yield
        elapsed = time.perf_counter() - began
        if is_decode:
            self.decode_s += elapsed
            self.num_decode_steps += 1
            self.stage_s["host"] += elapsed - self._staged_s
        else:
            self.prefill_s += elapsed
            self.stage_s = before

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """One stage of the current step."""
        began = time.perf_counter()
        yield
        elapsed = time.perf_counter() - began
        self.stage_s[name] += elapsed
        self._staged_s += elapsed

    def summary(self) -> RunSummary:
        """The run so far."""
        return RunSummary(
            counters=self.counters, prefill_ms=self.prefill_s * 1e3, decode_ms=self.decode_s * 1e3,
            num_target_forwards=self.num_target_forwards, num_decode_steps=self.num_decode_steps,
            num_prefill_tokens=self.num_prefill_tokens,
            stage_ms={name: seconds * 1e3 for name, seconds in self.stage_s.items()},
        )  # fmt: skip


@dataclass(frozen=True)
class RunSummary:
    """One run's figures; results and benchmarks read nothing else."""

    counters: Counters
    prefill_ms: float
    decode_ms: float
    num_target_forwards: int
    num_decode_steps: int
    num_prefill_tokens: int
    stage_ms: dict[str, float]

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens committed by decode steps per second of decode steps; prefill is in neither."""
        return self.counters.num_committed / self.decode_ms * 1e3 if self.decode_ms else 0.0

    def as_dict(self) -> dict[str, object]:
        """The `metrics` object of a JSON result."""
        return self.counters.as_dict() | {
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "prefill_ms": self.prefill_ms,
            "decode_ms": self.decode_ms,
            "num_target_forwards": self.num_target_forwards,
            "num_decode_steps": self.num_decode_steps,
            "num_prefill_tokens": self.num_prefill_tokens,
            "stage_ms": self.stage_ms,
        }


def repeated_share(token_ids: list[int], n: int = 8) -> float:
    """Share of n-grams that stood earlier in the same text: a small model's loops, which flatter every drafter."""
    grams = [tuple(token_ids[i : i + n]) for i in range(len(token_ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def mean(values: list[float]) -> float:
    """Arithmetic mean; 0 of nothing."""
    return float(np.mean(values)) if values else 0.0
