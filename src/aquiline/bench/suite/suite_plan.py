"""What bench, vocab and tune measure: scenarios with their profiles, drafts beside each other, tiles of a device.

Knows no model, engine or kernel, so that a command line can show it at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from aquiline.bench.results.intervals import LEAST_RUNS
from aquiline.config import MODEL, check
from aquiline.settings import setting
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.drafting import Chain, Drafting, NoDraft

BASELINE = "baseline"
SEED = 0
"""The seed of every first prompt; the next prompts have the next seeds."""

Tuned = Literal["gemm", "attention", "all"]
KINDS_OF: dict[Tuned, tuple[str, ...]] = {
    "gemm": ("linear", "head"), "attention": ("attention",), "all": ("linear", "head", "attention"),
}  # fmt: skip
"""Kinds of keys (ops/triton/tile_table.py) by what is tuned."""


@dataclass(frozen=True)
class Load:
    """One scenario: `batch` sequences after contexts of that many real tokens."""

    name: str
    context: int
    batch: int
    is_random: bool = False  # random weights with a simulated tau: contexts that no bundled model was trained for


FULL = (
    Load("baseline", 8192, 1), Load("single", 32768, 1), Load("batch", 8192, 8), Load("large-context", 16384, 4),
    Load("stress", 16384, 16),
)  # fmt: skip
CPU = (
    Load("baseline", 512, 1), Load("single", 2048, 1), Load("batch", 512, 8), Load("large-context", 1024, 4),
    Load("stress", 1024, 16), Load("long", 8192, 1, True), Load("long", 16384, 1, True), Load("long", 32768, 1, True),
    Load("long", 65536, 1, True),
)  # fmt: skip
PROFILES = {"full": FULL, "cpu": CPU}


@dataclass(frozen=True)
class Plan:
    """Which scenarios are run, and how. Every setting's output is as long as the baseline's micro_steps make it."""

    profile: str = setting("cpu", "cpu: contexts a CPU can run; full: 8K to 32K.")
    scenario: tuple[str, ...] = setting((), "Only these: baseline single batch large-context stress long.")
    contexts: tuple[int, ...] = setting(
        (), "These contexts, in tokens, with every batch; beside --scenario: only these of its own."
    )
    batches: tuple[int, ...] = setting((), "These batches, in the same way.")
    own_loads: tuple[Load, ...] = setting((), "Scenarios in the place of the profile's.", is_option=False)
    num_spec_tokens: tuple[int, ...] = setting((2, 3, 4, 5), "Chains to compare.")
    adaptive: bool = setting(True, "Compare adaptive drafting, too; not where tau is simulated.")
    temperatures: tuple[float, ...] = setting((0.0,), "One or several.", name="temperature")
    micro_steps: int = setting(128, "Decode steps of the baseline; all settings write as much.")
    warmup_runs: int = setting(1, "Runs of every setting that do not count.")
    measurement_runs: int = setting(
        LEAST_RUNS, f"Runs of every setting that do; from {LEAST_RUNS} on medians have intervals."
    )
    text_source: str | None = setting(
        None, "Prompts from this file, folder or package. Default: standard library.", name="text"
    )

    def __post_init__(self) -> None:
        check(self.profile in PROFILES, "profile", self.profile, f"must be one of {', '.join(PROFILES)}")
        known = dict.fromkeys(load.name for load in PROFILES[self.profile])
        unknown = sorted(set(self.scenario) - set(known))
        check(not unknown, "scenario", unknown, f"must be of {', '.join(known)}")
        if not self.loads:
            raise ValueError(
                f"scenario={list(self.scenario)}: none has contexts={list(self.contexts) or None}, "
                f"batches={list(self.batches) or None} in profile {self.profile!r}"
            )

    @property
    def loads(self) -> tuple[Load, ...]:
        """The scenarios that are run."""
        if self.own_loads:
            return self.own_loads
        if not self.scenario and (self.contexts or self.batches):
            return tuple(Load("custom", c, b) for c in self.contexts or (512,) for b in self.batches or (1,))
        return tuple(
            load
            for load in PROFILES[self.profile]
            if (not self.scenario or load.name in self.scenario)
            and (not self.contexts or load.context in self.contexts)
            and (not self.batches or load.batch in self.batches)
        )

    def settings(self, is_simulated: bool) -> dict[str, Drafting]:
        """The settings that are compared, the baseline first."""
        chains: dict[str, Drafting] = {f"chain-{k}": Chain(k) for k in self.num_spec_tokens}
        adaptive = {Adaptive.name: Adaptive()} if self.adaptive and not is_simulated else {}
        return {BASELINE: NoDraft()} | chains | adaptive


@dataclass(frozen=True)
class RandomWeights:
    """A target of random weights in the place of a checkpoint, and how much of its drafts is accepted."""

    random_weights: str | None = setting(None, "A config.json: random weights of its shapes.", MODEL)
    simulate_tau: float | None = setting(None, "Acceptance length for random weights. Default: 2.5.", MODEL)

    def __post_init__(self) -> None:
        if self.simulate_tau is not None and self.random_weights is None:
            raise ValueError(
                f"simulate_tau={self.simulate_tau}: goes with --random-weights; a real draft has its own tau"
            )


@dataclass(frozen=True)
class PruningWork:
    """What drafts are served on; rounds: how often each of them, in turn."""

    questions: Path | None = setting(
        None, "Questions that drafts are served on, in any format of `aquiline eval`. Default: a known pair's own.",
        "Measuring",
    )  # fmt: skip
    num_questions: int = setting(12, "The number of questions; 0 measures nothing.", "Measuring")
    new_tokens: int = setting(96, "Tokens of each answer.", "Measuring")
    rounds: int = setting(3, "Runs of each draft on each question, by turns; the median counts.", "Measuring")

    def __post_init__(self) -> None:
        for name, least in (("num_questions", 0), ("new_tokens", 2), ("rounds", 1)):
            check(getattr(self, name) >= least, name, getattr(self, name), f"must be at least {least}")


@dataclass(frozen=True)
class TuningWork:
    """Which runs are recorded, each context beside each batch, and how much of their inventory is tuned."""

    contexts: tuple[int, ...] = setting((8192,), "Prompt tokens of the recorded runs.", "Tuning", name="context")
    batches: tuple[int, ...] = setting((1, 4), "Sequences that decode together in them.", "Tuning", name="batch")
    top: int = setting(32, "Shapes that are tuned: those that read the most bytes.", "Tuning")

    def __post_init__(self) -> None:
        for name, values in (("context", self.contexts), ("batch", self.batches), ("top", (self.top,))):
            check(bool(values) and min(values) >= 1, name, values, "must be at least 1 each")
