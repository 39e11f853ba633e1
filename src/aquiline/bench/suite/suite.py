"""Runs scenarios: all settings continue the same prompts, in an order that is rotated every round, and each setting
has a result file. Results that are there are not measured again.

A scenario prefills once: its prompts' pages stay in the prefix cache, draft keys included, and every setting's requests
begin after them. Decode and prefill are therefore timed apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from aquiline.backends.base import Watched
from aquiline.bench.data.prompts import RealPrompts, real_prompts
from aquiline.bench.results import result as results
from aquiline.bench.results.integrity import problems
from aquiline.bench.results.intervals import paired, rotated
from aquiline.bench.results.result import ModelFacts, Result, Scenario
from aquiline.bench.suite.scenarios import ModelSource
from aquiline.bench.suite.simulated import SimulatedBackend
from aquiline.bench.suite.suite_plan import SEED, Load, Plan
from aquiline.bench.theory.roofline import roofline_of
from aquiline.config import EngineConfig, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.llm import Result as Run
from aquiline.errors import AquilineError
from aquiline.kv.pool import PagePool
from aquiline.spec.drafting import Drafting, NoDraft


@dataclass
class Progress:
    """The progress of a suite, for a bar: a scenario with its number of runs, then each run. skipped: loads that cannot
    run."""

    start: Callable[[str, int], None] = lambda name, runs: None
    advance: Callable[[], None] = lambda: None
    skipped: list[str] = field(default_factory=list)


def run_suite(
    plan: Plan, source: ModelSource, random_source: ModelSource, out: Path, progress: Progress
) -> Iterator[Result]:
    """Run every load of the plan and yield each result, those found in `out` included.

    A load that cannot run here (a context past the model's, pages that do not fit) is named in progress.skipped."""
    out.mkdir(parents=True, exist_ok=True)
    for load in plan.loads:
        own = random_source if load.is_random else source
        for temperature in (0.0,) if load.is_random else plan.temperatures:
            try:
                yield from LoadRun(plan, load, own, temperature, out).run(progress)
            except (ValueError, AquilineError) as error:
                progress.skipped.append(f"{load.name} {load.context} x {load.batch}: {error}")


class LoadRun:
    """One load at one temperature."""

    def __init__(self, plan: Plan, load: Load, source: ModelSource, temperature: float, out: Path) -> None:
        self.plan, self.load, self.source, self.temperature, self.out = plan, load, source, temperature, out
        # After the context and the output a step writes up to a whole tree.
        room = load.context + plan.micro_steps + 1
        page = EngineConfig().page_size
        pages = PagePool(1, page, 1, 1).pages_for(room + 64) * load.batch
        self.config = EngineConfig(max_batch=load.batch, max_context=room, num_pages=pages, row_budget=512)

    def file(self, setting: str) -> Path:
        """The file of a setting's result."""
        name = f"{self.plan.profile}-{self.load.name}-{self.load.context}x{self.load.batch}-t{self.temperature:g}"
        return self.out / f"{name}-{setting}.json"

    def run(self, progress: Progress) -> Iterator[Result]:
        """The results of all settings: read back if all are there, whole and of this commit, else measured."""
        plan = self.plan
        settings = plan.settings(self.source.random_config is not None)
        label = f"{self.load.name} {self.load.context} x {self.load.batch}, temperature {self.temperature:g}"
        progress.start(label, len(settings) * (plan.warmup_runs + plan.measurement_runs) + 1)
        found = [result for result in map(self._read, settings) if result is not None]
        if len(found) == len(settings):
            yield from found
            return
        llm = LLM.from_models(self.source.load(), self.config, NoDraft())
        real = real_prompts(self.load.context, self.load.batch, llm.models, plan.text_source)
        prompts, scenario = real.token_ids, self._scenario(real)
        simulated = self._simulated(llm)
        # The prompts' pages, with the draft's keys: the last setting drafts.
        first = SamplingParams(max_tokens=1, ignore_eos=True)
        prefill = llm.run(prompts, first, drafting=settings[list(settings)[-1]])
        if simulated is not None:
            self._decode(llm, prompts, NoDraft())  # its texts replace the drafts
        progress.advance()
        measured, violations = self._measure(llm, prompts, settings, simulated, progress)
        progress.start("this machine's ceilings", 1)
        ideal = roofline_of(llm.models)
        baseline: list[float] = []
        for name, drafting in settings.items():
            result = results.describe(
                scenario, name, drafting, self._model(llm, drafting), llm, measured[name], prefill
            )
            rates, tau = result["throughput_tokens_per_sec"], result["eagle_speculation"]["mean_acceptance_length"]
            baseline = baseline or rates["values"]
            if broken := list(dict.fromkeys(violations[name])):
                result["perf_violations"] = broken
            if not drafting.is_adaptive:  # steps of many shapes have no one ideal
                cycle = ideal.cycle(drafting, tau, self.load.batch, self.load.context + plan.micro_steps // 2)
                speedup = paired(rates["values"], baseline).value
                result["roofline"] = ideal.report(cycle, rates["median"], speedup)
            results.write_result(result, self.file(name))
            yield result

    def _measure(
        self, llm: LLM, prompts: list[list[int]], settings: dict[str, Drafting], simulated: SimulatedBackend | None,
        progress: Progress,
    ) -> tuple[dict[str, list[Run]], dict[str, list[str]]]:  # fmt: skip
        """The measured runs of every setting, and the rules of PERF mode that they broke. Each round, warm-up included,
        begins with another setting."""
        measured: dict[str, list[Run]] = {name: [] for name in settings}
        violations: dict[str, list[str]] = {name: [] for name in settings}
        backend = llm.engine.backend if simulated is None else simulated.inner
        for number in range(self.plan.warmup_runs + self.plan.measurement_runs):
            for name in rotated(list(settings), number):
                if simulated is not None:
                    simulated.owed = 0.0
                is_measured = number >= self.plan.warmup_runs
                broken = backend.watch_perf() if is_measured and isinstance(backend, Watched) else []
                run = self._decode(llm, prompts, settings[name])
                violations[name] += broken
                if is_measured:
                    measured[name].append(run)
                progress.advance()
        return measured, violations

    def _simulated(self, llm: LLM) -> SimulatedBackend | None:
        """The engine's backend, wrapped where random weights have no acceptance of their own."""
        if self.source.simulated_tau is None:
            return None
        simulated = SimulatedBackend(llm.engine.backend, self.source.simulated_tau, llm.models.vocab_size)
        llm.engine.backend = simulated
        return simulated

    def _scenario(self, prompts: RealPrompts) -> Scenario:
        load, plan = self.load, self.plan
        return Scenario(
            name=load.name, profile=plan.profile, context_tokens=load.context, batch=load.batch,
            new_tokens=plan.micro_steps + 1, temperature=self.temperature, seed=SEED,
            prompts_sha256=results.tokens_sha256(prompts.token_ids), prompts_source=prompts.source,
            warmup_runs=plan.warmup_runs, measurement_runs=plan.measurement_runs,
        )  # fmt: skip

    def _decode(self, llm: LLM, prompts: list[list[int]], drafting: Drafting) -> Run:
        sampling = [
            SamplingParams(
                max_tokens=self.plan.micro_steps + 1, temperature=self.temperature, seed=SEED + i,
                ignore_eos=True,
            )
            for i in range(len(prompts))
        ]  # fmt: skip
        run = llm.run(prompts, sampling, drafting=drafting)
        missing = run.summary.counters.num_prompt_tokens - run.summary.counters.num_prefix_hits
        assert missing <= len(prompts) * llm.engine.config.page_size, f"{missing} prompt tokens were computed again"
        return run

    def _model(self, llm: LLM, drafting: Drafting) -> ModelFacts:
        target, draft = self.source.names
        tau = self.source.simulated_tau if drafting.is_speculative else None
        return ModelFacts(
            target=target, draft=draft, dtype=llm.models.storage, arithmetic=llm.models.arithmetic,
            random_weights=self.source.random_config is not None,
            weight_bytes=llm.models.weight_bytes,
            simulated_tau=None if tau is None else min(tau, drafting.max_depth + 1),  # no more than a chain can give
        )  # fmt: skip

    def _read(self, setting: str) -> Result | None:
        """A result that need not be measured again."""
        try:
            result: Result = json.loads(self.file(setting).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        plan, pair = self.plan, self.source.pair
        scenario, model, system = (result.get(name, {}) for name in ("scenario", "model", "system"))
        wanted = {
            "new_tokens": plan.micro_steps + 1, "seed": SEED, "warmup_runs": plan.warmup_runs,
            "measurement_runs": plan.measurement_runs,
        }  # fmt: skip
        is_ours = (
            all(scenario.get(name) == value for name, value in wanted.items())
            and self.source.stores(model.get("dtype"))
            and pair.arithmetic in ("auto", model.get("arithmetic"))
            and pair.draft_dtype in ("auto", system.get("draft_dtype"))
            and result.get("commit") == results.commit()
            and not problems(result)
        )
        return result if is_ours and not results.is_dirty(result) else None  # changes differ under one name
