"""Runs scenarios: all settings behind the same prompts, their order rotated in every round, a result file each; what is
there is not run again.

A scenario prefills once: its prompts' pages stay in the prefix cache, draft keys included, and every setting's requests
begin behind them. Decode and prefill are therefore timed apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from aquiline.bench.data.prompts import text_prompts
from aquiline.bench.results.integrity import problems
from aquiline.bench.results.intervals import paired, rotated
from aquiline.bench.results.result import (
    ModelFacts,
    Result,
    Scenario,
    commit,
    describe,
    is_dirty,
    tokens_sha256,
    write_result,
)
from aquiline.bench.suite.scenarios import ModelSource
from aquiline.bench.suite.simulated import SimulatedBackend
from aquiline.bench.suite.suite_plan import Load, Plan
from aquiline.bench.theory.ceilings import ceilings_of
from aquiline.bench.theory.choice import LimitsChoice
from aquiline.bench.theory.roofline import Roofline
from aquiline.config import EngineConfig, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.llm import Result as Run
from aquiline.errors import AquilineError
from aquiline.kv.pool import PagePool
from aquiline.models.counting import draft_shape_of, shape_of
from aquiline.models.known_pairs import BUNDLED_TARGET
from aquiline.models.shape import precision_of
from aquiline.spec.drafting import Drafting, NoDraft


@dataclass
class Progress:
    """What a suite tells whoever watches: a scenario with its number of runs, then each run."""

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
        # A step writes up to its tree behind the context and the output.
        room = load.context + plan.micro_steps + 1
        page = EngineConfig().page_size
        pages = PagePool(1, page, 1, 1).pages_for(room + 64) * load.batch
        self.config = EngineConfig(max_batch=load.batch, max_context=room, num_pages=pages, row_budget=512)

    def file(self, setting: str) -> Path:
        """Where a setting's result stands."""
        name = f"{self.plan.profile}-{self.load.name}-{self.load.context}x{self.load.batch}-t{self.temperature:g}"
        return self.out / f"{name}-{setting}.json"

    def run(self, progress: Progress) -> Iterator[Result]:
        """The results of all settings: read back if all are there, whole and of this commit, else measured."""
        plan = self.plan
        settings = plan.settings(self.source.random_config is not None)
        label = f"{self.load.name} {self.load.context} x {self.load.batch}, temperature {self.temperature:g}"
        progress.start(label, len(settings) * (plan.warmup_runs + plan.measurement_runs) + 1)
        found = [self._read(name) for name in settings]
        if all(found):
            yield from (result for result in found if result is not None)
            return
        llm = LLM.from_models(self.source.load(), self.config, NoDraft())
        prompts, scenario = self._prompts(llm.models.tokenizer)
        simulated = self._simulated(llm)
        prefill = self._prefill(llm, prompts, settings[list(settings)[-1]])
        if simulated is not None:
            self._decode(llm, prompts, NoDraft())  # whose texts the drafts are replaced by
        progress.advance()
        measured = self._measure(llm, prompts, settings, simulated, progress)
        progress.start("this machine's ceilings", 1)
        ideal = self._roofline(llm)
        baseline: list[float] = []
        for name, drafting in settings.items():
            result = describe(scenario, name, drafting, self._model(llm, drafting), llm, measured[name], prefill)
            rates, tau = result["throughput_tokens_per_sec"], result["eagle_speculation"]["mean_acceptance_length"]
            baseline = baseline or rates["values"]
            speedup = paired(rates["values"], baseline).value
            context = self.load.context + plan.micro_steps // 2
            if not drafting.is_adaptive:  # whose steps have many shapes, and so no one ideal
                result["roofline"] = ideal.report(drafting, tau, self.load.batch, context, rates["median"]) | {
                    "spec_efficiency": ideal.spec_efficiency(speedup, drafting, tau, self.load.batch, context),
                    "notes": ideal.notes(),
                }
            write_result(result, self.file(name))
            yield result

    def _measure(
        self, llm: LLM, prompts: list[list[int]], settings: dict[str, Drafting], simulated: SimulatedBackend | None,
        progress: Progress,
    ) -> dict[str, list[Run]]:  # fmt: skip
        """The measured runs of every setting. Each round, warm-up included, begins with another setting."""
        measured: dict[str, list[Run]] = {name: [] for name in settings}
        for number in range(self.plan.warmup_runs + self.plan.measurement_runs):
            for name in rotated(list(settings), number):
                if simulated is not None:
                    simulated.start(self._tau_of(settings[name]))
                run = self._decode(llm, prompts, settings[name])
                if number >= self.plan.warmup_runs:
                    measured[name].append(run)
                progress.advance()
        return measured

    def _roofline(self, llm: LLM) -> Roofline:
        """What this machine allows on these models; its ceilings are measured once and kept."""
        models = llm.models
        assert models.draft_config is not None, "the suite compares a draft with the baseline"
        target = shape_of(models.target_config, models.storage)
        ceilings = ceilings_of(LimitsChoice(arithmetic=models.arithmetic), models.storage, lambda stage: None)
        return Roofline(
            target, draft_shape_of(models.draft_config, target), precision_of(models.storage, None), ceilings
        )

    def _simulated(self, llm: LLM) -> SimulatedBackend | None:
        """The engine's backend, wrapped where random weights have no acceptance of their own."""
        if self.source.simulated_tau is None:
            return None
        simulated = SimulatedBackend(llm.engine.backend, self.source.simulated_tau, llm.models.vocab_size)
        llm.engine.backend = simulated
        return simulated

    def _tau_of(self, drafting: Drafting) -> float:
        """The simulated tau of a setting: no more than its chain can give."""
        assert self.source.simulated_tau is not None
        return min(self.source.simulated_tau, drafting.max_depth + 1)

    def _prompts(self, tokenizer: Tokenizer | None) -> tuple[list[list[int]], Scenario]:
        load, plan = self.load, self.plan
        if tokenizer is None:
            tokenizer = Tokenizer.from_file(str(BUNDLED_TARGET / "tokenizer.json"))
        found = text_prompts(load.context, load.batch, tokenizer, plan.text_source)
        vocab = self.source.random_config.vocab_size if self.source.random_config is not None else None
        prompts = [[t % vocab for t in p.token_ids] if vocab is not None else p.token_ids for p in found]
        held_out = all(p.is_held_out for p in found)
        source = f"{plan.text_source or 'standard library'}{', held out' if held_out else ', partly trained on'}"
        return prompts, Scenario(
            name=load.name, profile=plan.profile, context_tokens=load.context, batch=load.batch,
            new_tokens=plan.micro_steps + 1, temperature=self.temperature, seed=plan.seed,
            prompts_sha256=tokens_sha256(prompts), prompts_source=source, warmup_runs=plan.warmup_runs,
            measurement_runs=plan.measurement_runs,
        )  # fmt: skip

    def _prefill(self, llm: LLM, prompts: list[list[int]], drafting: Drafting) -> Run:
        """Compute the prompts' pages, the draft's keys included."""
        return llm.run(prompts, SamplingParams(max_tokens=1, ignore_eos=True), drafting=drafting)

    def _decode(self, llm: LLM, prompts: list[list[int]], drafting: Drafting) -> Run:
        sampling = [
            SamplingParams(
                max_tokens=self.plan.micro_steps + 1, temperature=self.temperature, seed=self.plan.seed + i,
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
        is_simulated = self.source.simulated_tau is not None and drafting.is_speculative
        return ModelFacts(
            target=target, draft=draft, dtype=llm.models.storage, arithmetic=llm.models.arithmetic,
            random_weights=self.source.random_config is not None,
            simulated_tau=self._tau_of(drafting) if is_simulated else None, weight_bytes=llm.models.weight_bytes,
        )  # fmt: skip

    def _read(self, setting: str) -> Result | None:
        """A result that need not be measured again."""
        file = self.file(setting)
        if not file.exists():
            return None
        try:
            result: Result = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            return None
        plan, scenario = self.plan, result.get("scenario", {})
        wanted = {
            "new_tokens": plan.micro_steps + 1, "seed": plan.seed, "warmup_runs": plan.warmup_runs,
            "measurement_runs": plan.measurement_runs,
        }  # fmt: skip
        model, source = result.get("model", {}), self.source
        is_ours = all(scenario.get(name) == value for name, value in wanted.items())
        is_ours &= source.stores(model.get("dtype")) and source.arithmetic in ("auto", model.get("arithmetic"))
        is_ours &= source.draft_dtype in ("auto", result.get("system", {}).get("draft_dtype"))
        is_ours &= result.get("commit") == commit() and not problems(result)
        return result if is_ours and not is_dirty(result) else None  # changes differ under one name
