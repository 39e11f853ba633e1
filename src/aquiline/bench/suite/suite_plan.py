"""What the benchmark suite runs, as data: scenarios, their profiles, and how each is measured.

Knows no model, so that a command line can show it at once."""

from __future__ import annotations

from dataclasses import dataclass

from aquiline.bench.results.intervals import LEAST_RUNS
from aquiline.config import MODEL
from aquiline.settings import setting
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.drafting import Chain, Drafting, NoDraft

BASELINE = "baseline"


@dataclass(frozen=True)
class Load:
    """One scenario: batch sequences behind contexts of that many real tokens."""

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
class LoadChoice:
    """Which scenarios of a profile are run."""

    profile: str = setting("cpu", "cpu: contexts a CPU can run; full: 8K to 32K.")
    scenario: tuple[str, ...] = setting((), "Only these: baseline single batch large-context stress long.")
    contexts: tuple[int, ...] = setting(
        (), "These contexts, in tokens, with every batch; beside --scenario: only these of its own."
    )
    batches: tuple[int, ...] = setting((), "These batches, in the same way.")

    @property
    def loads(self) -> tuple[Load, ...]:
        """The scenarios. Raises ValueError for a name that there is not, and where none is left."""
        if self.profile not in PROFILES:
            raise ValueError(f"profile={self.profile!r}: must be one of {', '.join(PROFILES)}")
        names, contexts, batches = list(self.scenario) or None, list(self.contexts) or None, list(self.batches) or None
        loads = PROFILES[self.profile]
        unknown = set(self.scenario) - {load.name for load in loads}
        if unknown:
            known = ", ".join(dict.fromkeys(load.name for load in loads))
            raise ValueError(f"scenario={sorted(unknown)}: must be of {known}")
        if not names and (contexts or batches):
            return tuple(Load("custom", c, b) for c in contexts or (512,) for b in batches or (1,))
        found = tuple(
            load
            for load in loads
            if (not names or load.name in names)
            and (not contexts or load.context in contexts)
            and (not batches or load.batch in batches)
        )
        if not found:
            raise ValueError(
                f"scenario={names}: none has contexts={contexts}, batches={batches} in profile {self.profile!r}"
            )
        return found


@dataclass(frozen=True)
class Plan:
    """How scenarios are run. Every setting's output is as long as the baseline's micro_steps make it."""

    loads: tuple[Load, ...]
    profile: str
    num_spec_tokens: tuple[int, ...] = setting((2, 3, 4, 5), "Chains to compare.")
    adaptive: bool = setting(True, "Compare adaptive drafting, too; not where tau is simulated.")
    temperatures: tuple[float, ...] = setting((0.0,), "One or several.", name="temperature")
    micro_steps: int = setting(128, "Decode steps of the baseline; all settings write as much.")
    warmup_runs: int = setting(1, "Runs of every setting that do not count.")
    measurement_runs: int = setting(
        LEAST_RUNS, f"Runs of every setting that do; from {LEAST_RUNS} on medians have intervals."
    )
    seed: int = 0
    text_source: str | None = setting(
        None, "Prompts from this file, folder or package. Default: standard library.", name="text"
    )

    def settings(self, is_simulated: bool) -> dict[str, Drafting]:
        """What is compared: the baseline first."""
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
