"""The demo: one pair, held-out prompts, every setting on each prompt in turn, outputs compared token for token.

A prompt is a round: speeds are medians over the prompts by the wall clock, speedups medians of the ratios on each
prompt, both with their intervals. The fixed chain is the fastest of several on other prompts than the demo's, so that
it is not the best by chance; where a pair has no other prompts, it is the default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aquiline.bench.data.datasets import load_questions
from aquiline.bench.data.prompts import excerpts, read_prompts
from aquiline.bench.plots import COLORS, draw_positions, name_positions, new_figure, save_plot
from aquiline.bench.results import intervals
from aquiline.bench.results.intervals import Estimate, paired, rotated, spans_of
from aquiline.bench.results.result import commit
from aquiline.bench.theory.bounds import EXPECTED_CHAIN, Costs, expectation
from aquiline.bench.theory.measure import last_level_cache
from aquiline.bench.theory.roofline import forward_cost
from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM, Output
from aquiline.metrics import Counters, RunSummary, mean, repeated_share
from aquiline.models.counting import shape_of
from aquiline.models.known_pairs import PAIRS
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.drafting import Chain, Drafting, Dynamic, NoDraft
from aquiline.text.chat_template import ChatTemplate, conversation

NEW_TOKENS = 128
SEED = 0
TEMPERATURES = (0.0, 0.8)
NAMES = ("baseline", "adaptive", "chain", "tree")
CHAINS = (1, 2, 3, 4)
"""Lengths that the fixed chain is chosen from."""

NUM_OTHERS, OTHER_TOKENS = 6, 48
"""The number of prompts that it is chosen on, and the tokens that are generated for each of them."""

SHOWN = 8
"""Positions of a draft that are drawn."""


@dataclass(frozen=True)
class DemoPrompt:
    """A prompt, its name for a reader, and the question in it, if there is one."""

    source: str
    token_ids: list[int]
    question: str | None = None


@dataclass(frozen=True)
class Demo:
    """The prompts and lengths of a demo. name: of the pair; others: prompts that the fixed chain is chosen on; end_ids:
    tokens that end an answer, or None for texts that are written to their length."""

    name: str
    prompts: list[DemoPrompt]
    others: list[DemoPrompt] = field(default_factory=list)
    end_ids: tuple[int, ...] | None = None
    new_tokens: int = NEW_TOKENS

    @property
    def num_runs(self) -> int:
        """Runs of a prompt, for a bar."""
        return len(TEMPERATURES) * (len(NAMES) * len(self.prompts) + len(CHAINS) * len(self.others))

    def sampling(self, temperature: float) -> SamplingParams:
        """How every text is drawn."""
        return SamplingParams(
            max_tokens=self.new_tokens, temperature=temperature, seed=SEED, stop_token_ids=self.end_ids or (),
            ignore_eos=self.end_ids is None,
        )  # fmt: skip


@dataclass(eq=False)
class DemoRun:
    """One setting at one temperature over all prompts. baseline: the run without speculation at that temperature; None
    for the baseline itself."""

    name: str
    drafting: Drafting
    temperature: float
    baseline: DemoRun | None = None
    outputs: list[Output] = field(default_factory=list)
    summaries: list[RunSummary] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Its name with the number of drafted tokens K or verified nodes N, where that is fixed."""
        if not self.drafting.is_speculative or self.drafting.is_adaptive:
            return self.name
        is_chain = self.drafting.max_nodes == self.drafting.max_depth + 1
        return self.name + (f" K={self.drafting.max_depth}" if is_chain else f" N={self.drafting.max_nodes}")

    @property
    def counters(self) -> Counters:
        """Sums over the prompts."""
        return Counters.sum_of(summary.counters for summary in self.summaries)

    @property
    def rates(self) -> list[float]:
        """Tokens per second of decoding, prompt by prompt."""
        return [intervals.decode_tokens_per_s(spans_of([output])) for output in self.outputs]

    @property
    def rates_with_prefill(self) -> list[float]:
        """Tokens per second of whole requests, the time of the prompt included."""
        return [len(output.token_ids) / output.total_ms * 1e3 for output in self.outputs]

    @property
    def speedup(self) -> Estimate:
        """The speedup over the baseline on the same prompts."""
        return paired(self.rates, (self.baseline or self).rates)

    @property
    def is_identical(self) -> bool:
        """Whether every token equals the baseline's."""
        expected = (self.baseline or self).outputs
        return [o.token_ids for o in self.outputs] == [o.token_ids for o in expected]

    def as_dict(self) -> dict[str, object]:
        """The demo's JSON row."""
        counters = self.counters.as_dict()
        picked = ("tau", "acceptance_rate", "per_position", "target_calls_per_token", "num_committed", "num_steps")
        rate, speedup = intervals.estimate(self.rates), self.speedup
        return {
            "name": self.name,
            "title": self.title,
            "drafter": self.drafting.name,
            "temperature": self.temperature,
            "repeated_share": mean([repeated_share(o.token_ids) for o in self.outputs]),
            "tokens_per_s": rate.value,
            "tokens_per_s_interval": [rate.low, rate.high],
            "speedup": speedup.value,
            "speedup_interval": [speedup.low, speedup.high],
            "speedup_with_prefill": paired(self.rates_with_prefill, (self.baseline or self).rates_with_prefill).value,
        } | {key: counters[key] for key in picked}


@dataclass(frozen=True)
class DemoResult:
    """All runs, the baselines first at each temperature."""

    demo: Demo
    runs: list[DemoRun]
    system: dict[str, object]
    costs: Costs

    @property
    def identical(self) -> bool:
        """Whether speculation changed nothing anywhere."""
        return all(run.is_identical for run in self.runs)

    def as_dict(self) -> dict[str, object]:
        """The JSON of `aquiline demo --json`."""
        return {
            "pair": self.demo.name,
            "identical": self.identical,
            "runs": [run.as_dict() for run in self.runs],
            "prompts": [prompt.source for prompt in self.demo.prompts],
            "chain_chosen_on": [prompt.source for prompt in self.demo.others],
            "expectation": expectation(self.costs),
            "commit": commit(),
            "system": self.system,
        }


def demo_of(name: str, template: ChatTemplate, package: str | None = None) -> Demo:
    """The demo of a known pair, through its target's chat template. A chat model answers the pair's questions; the
    prompts that its chain is chosen on are spread evenly over the pair's other questions. Any other model continues
    held-out texts, or files of an installed package. Raises ValueError if that is not installed or too small."""
    pair = PAIRS[name]
    if template.has_template and package is None:
        asked, others = _asked(template, pair.demo), _asked(template, pair.questions)
        return Demo(name, asked, others[:: len(others) // NUM_OTHERS][:NUM_OTHERS], template.end_ids)
    assert template.tokenizer is not None, "known pairs have tokenizers"
    texts = read_prompts(pair.demo) if package is None else excerpts(template.tokenizer, package)
    return Demo(name, [DemoPrompt(text.source, template.encode(conversation([text.text]))) for text in texts])


def _asked(template: ChatTemplate, file: Path) -> list[DemoPrompt]:
    """The first turns of the questions in a file."""
    return [
        DemoPrompt(str(question.id), template.encode(conversation(question.turns[:1])), question.turns[0])
        for question in load_questions(file)
    ]


def run_demo(llm: LLM, demo: Demo, on_progress: Callable[[], None]) -> DemoResult:
    """Run every setting at every temperature on every prompt, alternating settings, after one warm-up each."""
    tree = Dynamic()
    for drafting in (NoDraft(), Adaptive(), Chain(), tree):
        llm.run([demo.prompts[0].token_ids], SamplingParams(max_tokens=16, ignore_eos=True), drafting=drafting)
    runs = list[DemoRun]()
    for temperature in TEMPERATURES:
        chain = _fastest_chain(llm, demo, temperature, on_progress) if demo.others else Chain()
        baseline = DemoRun(NAMES[0], NoDraft(), temperature)
        drafts = zip(NAMES[1:], (Adaptive(), chain, tree), strict=True)
        runs += [baseline, *(DemoRun(name, drafting, temperature, baseline) for name, drafting in drafts)]
    for index, prompt in enumerate(demo.prompts):
        for run in rotated(runs, index):
            result = llm.run([prompt.token_ids], demo.sampling(run.temperature), drafting=run.drafting)
            run.outputs.append(result.outputs[0])
            run.summaries.append(result.summary)
            on_progress()
    return DemoResult(demo, runs, llm.models.system(), measured_costs(llm))


def measured_costs(llm: LLM) -> Costs:
    """The costs of a chain on this machine: those that adaptive drafting goes by, corrected by the steps that ran."""
    llm.engine.prepare_choosing()
    assert llm.engine.controller is not None
    costs, passes = llm.engine.controller.costs, (1,) * EXPECTED_CHAIN
    one, rows = (costs.step_ms(costs.verify(rows)) for rows in (1, EXPECTED_CHAIN + 1))
    shape = shape_of(llm.models.target_config, llm.models.storage)
    drafting = costs.draft_ms(passes) if llm.models.draft_config is not None else None
    return Costs(
        forward_cost(shape.body, batch=1, context=0).weight_bytes, last_level_cache(), rows / one,
        None if drafting is None else (rows + drafting) / one,
    )  # fmt: skip


def _fastest_chain(llm: LLM, demo: Demo, temperature: float, on_progress: Callable[[], None]) -> Chain:
    """The chain that decodes the other prompts in the least time; all chains write the same tokens."""
    seconds = dict.fromkeys(map(Chain, CHAINS), 0.0)
    sampling = replace(demo.sampling(temperature), max_tokens=OTHER_TOKENS)
    for index, prompt in enumerate(demo.others):
        for chain in rotated(list(seconds), index):
            output = llm.run([prompt.token_ids], sampling, drafting=chain).outputs[0]
            seconds[chain] += intervals.decode_s(spans_of([output]))
            on_progress()
    return min(seconds, key=lambda chain: seconds[chain])


def plot_demo(result: DemoResult, path: Path) -> None:
    """Write a PNG. Raises ValueError if matplotlib is not installed."""
    figure, grid = new_figure(1, 2, (11, 3.8))
    _draw_rates(grid[0][0], result)
    _draw_acceptance(grid[0][1], result)
    sources = f"{len(result.demo.prompts)} held-out prompts, {result.system['cpu']}, {result.system['dtype']} storage"
    figure.suptitle(f"same tokens, fewer target calls: {sources}", fontsize=10)
    save_plot(figure, path, "Nothing is left of it")


def _draw_rates(axes: Any, result: DemoResult) -> None:
    """Draw a bar for each run, with its interval, speedup and tau; the runs of a temperature stand together."""
    width = len(result.runs) // len(TEMPERATURES) + 1
    rates = [intervals.estimate(run.rates) for run in result.runs]
    named = {}
    for group, temperature in enumerate(TEMPERATURES):
        runs = [(run, rate) for run, rate in zip(result.runs, rates, strict=True) if run.temperature == temperature]
        for place, (run, rate) in enumerate(runs):
            x = group * width + place
            bar = axes.bar(x, rate.value, color=COLORS[run.drafting.name], width=0.9)
            if rate.low is not None and rate.high is not None:
                ends = [[rate.value - rate.low], [rate.high - rate.value]]
                axes.errorbar(x, rate.value, yerr=ends, color="#1a202c", capsize=3, linewidth=1)
            told = f"{run.speedup.value:.2f}x\ntau {run.counters.tau:.2f}"
            axes.text(x, rate.high or rate.value, told, ha="center", va="bottom", fontsize=7)
            named[run.name] = bar
    middles = [group * width + (width - 2) / 2 for group in range(len(TEMPERATURES))]
    axes.set_xticks(middles, [f"temperature {t:g}" for t in TEMPERATURES])
    axes.set_ylabel("decode tok/s")
    axes.set_ylim(0, 1.45 * max(rate.high or rate.value for rate in rates))
    axes.legend(list(named.values()), list(named), fontsize=8, loc="upper right")


def _draw_acceptance(axes: Any, result: DemoResult) -> None:
    """Draw acceptance by position: a line for each run that drafts, dashed where it was sampled."""
    for run in result.runs:
        if run.drafting.is_speculative:
            draw_positions(
                axes, run.counters.per_position[:SHOWN], linestyle="--" if run.temperature else "-",
                color=COLORS[run.drafting.name], label=f"{run.name}, temperature {run.temperature:g}",
            )  # fmt: skip
    name_positions(axes)
    axes.legend(fontsize=8)
