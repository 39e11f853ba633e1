"""The demo: one pair, held-out prompts, every setting on each prompt in turn, outputs compared token for token.

A prompt is a round: speeds are medians over the prompts by the wall clock, speedups medians of the ratios on each
prompt, both with their intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from aquiline.bench.data.prompts import Prompt
from aquiline.bench.results.clock import decode_tokens_per_s, spans_of
from aquiline.bench.results.intervals import Estimate, estimate, paired, rotated
from aquiline.bench.results.result import commit
from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM, Output
from aquiline.metrics import Counters, RunSummary, mean, repeated_share
from aquiline.spec.drafting import Chain, Drafting, Dynamic, NoDraft

NEW_TOKENS = 128
SEED = 0
TEMPERATURES = (0.0, 0.8)
SETTINGS = {
    "baseline": NoDraft(),
    "chain": Chain(),
    "tree": Dynamic(),
}
"""What the demo compares: the default shapes, chosen on other files than the demo's prompts (LOG.md)."""


@dataclass(eq=False)
class Run:
    """One setting at one temperature over all prompts."""

    name: str
    spec: Drafting
    temperature: float
    outputs: list[Output] = field(default_factory=list)
    summaries: list[RunSummary] = field(default_factory=list)

    @property
    def counters(self) -> Counters:
        """Sums over the prompts."""
        total = Counters()
        for summary in self.summaries:
            total.merge(summary.counters)
        return total

    @property
    def rates(self) -> list[float]:
        """Tokens per second of decoding, prompt by prompt."""
        return [decode_tokens_per_s(spans_of([output])) for output in self.outputs]

    @property
    def rates_with_prefill(self) -> list[float]:
        """The same with the time of the prompt."""
        return [len(output.token_ids) / output.total_ms * 1e3 for output in self.outputs]

    def speedup(self, baseline: Run) -> Estimate:
        """Over the baseline on the same prompts."""
        return paired(self.rates, baseline.rates)

    def as_dict(self, baseline: Run) -> dict[str, object]:
        """The demo's JSON row; speedups are against the baseline at the same temperature."""
        counters = self.counters.as_dict()
        picked = ("tau", "acceptance_rate", "per_position", "target_calls_per_token", "num_committed", "num_steps")
        rate, speedup = estimate(self.rates), self.speedup(baseline)
        return {
            "name": self.name,
            "drafter": self.spec.name,
            "temperature": self.temperature,
            "repeated_share": mean([repeated_share(o.token_ids) for o in self.outputs]),
            "tokens_per_s": rate.value,
            "tokens_per_s_interval": [rate.low, rate.high],
            "speedup": speedup.value,
            "speedup_interval": [speedup.low, speedup.high],
            "speedup_with_prefill": paired(self.rates_with_prefill, baseline.rates_with_prefill).value,
        } | {key: counters[key] for key in picked}


@dataclass(frozen=True)
class DemoResult:
    """All runs, the baselines first at each temperature."""

    runs: list[Run]
    prompts: list[Prompt]
    system: dict[str, object]

    def baseline(self, temperature: float) -> Run:
        """The run without speculation at a temperature."""
        return next(r for r in self.runs if r.temperature == temperature and not r.spec.is_speculative)

    def is_identical(self, run: Run) -> bool:
        """Whether a run's every token equals the baseline's."""
        expected = self.baseline(run.temperature).outputs
        return [o.token_ids for o in run.outputs] == [o.token_ids for o in expected]

    @property
    def identical(self) -> bool:
        """Whether speculation changed nothing anywhere."""
        return all(self.is_identical(run) for run in self.runs)

    def as_dict(self) -> dict[str, object]:
        """The JSON of `aquiline demo --json`."""
        return {
            "identical": self.identical,
            "runs": [run.as_dict(self.baseline(run.temperature)) for run in self.runs],
            "prompts": [p.source for p in self.prompts],
            "commit": commit(),
            "system": self.system,
        }


def run_demo(
    llm: LLM, prompts: list[Prompt], on_progress: Callable[[], None], new_tokens: int = NEW_TOKENS
) -> DemoResult:
    """Run every setting at every temperature on every prompt, alternating settings, after one warm-up each."""
    runs = [Run(name, spec, t) for t in TEMPERATURES for name, spec in SETTINGS.items()]
    warm = SamplingParams(max_tokens=16, ignore_eos=True)
    for spec in SETTINGS.values():
        llm.run(prompts[0].text, warm, spec=spec)
    for prompt, run in _alternated(prompts, runs):
        sampling = SamplingParams(max_tokens=new_tokens, temperature=run.temperature, seed=SEED, ignore_eos=True)
        result = llm.run(prompt.text, sampling, spec=run.spec)
        run.outputs.append(result.outputs[0])
        run.summaries.append(result.summary)
        on_progress()
    return DemoResult(runs, prompts, llm.models.system())


def _alternated(prompts: list[Prompt], runs: list[Run]) -> Iterator[tuple[Prompt, Run]]:
    for index, prompt in enumerate(prompts):
        for run in rotated(runs, index):
            yield prompt, run
