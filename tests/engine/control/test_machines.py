"""Adaptive drafting on machines that nobody tuned: the bundled pair writes real text by a made-up clock.

A backend is wrapped so that each step takes the time that a table says, within 3 %. The engine knows that table as it
is, with rows that seem to cost 1.4 times as much, or as it was when reading took 1.5 times as long. Everything is
deterministic, so no quiet machine is needed. Milliseconds of a step are compared with those that plain decoding takes
for as many tokens of as many sequences: then it does not matter which sequences happen to run together.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from aquiline.backends.base import Backend, Pending, StepInput, StepOutput
from aquiline.bench.data.prompts import text_prompts
from aquiline.bench.suite.simulated import ReadOutcome
from aquiline.config import EngineConfig, SamplingParams
from aquiline.engine.control.controller import Controller
from aquiline.engine.control.costs import CostTable, StepCosts, passes_of, times_by_rows
from aquiline.engine.llm import LLM
from aquiline.engine.pipeline import Step
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.drafting import Chain, Drafting, NoDraft

NOISE = 0.03
LEAST_OF_BEST, LEAST_IF_WRONG, LEAST_OF_PLAIN = 0.95, 0.88, 0.97
"""Of the best fixed setting, if the engine knows what rows cost and if it does not, and of plain decoding. The texts
have a hundred tokens, so what is not known of them at first counts."""

FIXED: tuple[Drafting, ...] = (NoDraft(), Chain(1), Chain(2), Chain(3), Chain(5))


def machine(rows: list[tuple[int, float]], first: float, deeper: float, each: float) -> CostTable:
    """Times of forwards by rows, and of the draft's passes: of one row, and what each further row adds."""
    passes = (times_by_rows([(1, ms), (64, ms + 63 * each)]) for ms in (first, deeper))
    return CostTable(times_by_rows(rows), *passes)


MACHINES = {
    "memory binds": machine([(1, 2.0), (4, 2.1), (8, 2.3), (16, 2.7), (64, 6.0)], 0.25, 0.2, 0.003),
    "rows are dear": machine([(1, 2.0), (2, 2.3), (4, 2.8), (8, 5.0), (16, 9.4), (64, 36.0)], 0.25, 0.2, 0.05),
    "tiles of four rows": machine(
        [(1, 2.0), (4, 2.1), (5, 2.9), (8, 3.0), (9, 3.9), (12, 4.0), (16, 4.8), (64, 18.0)], 0.25, 0.2, 0.01
    ),
    "the first pass is dear": machine([(1, 2.0), (4, 2.2), (8, 2.4), (16, 3.0), (64, 8.0)], 0.9, 0.05, 0.003),
    "drafts are dear": machine([(1, 2.0), (2, 2.4), (4, 3.2), (8, 5.2), (16, 9.6), (64, 36.0)], 0.7, 0.5, 0.08),
}


class Clocked:
    """Wraps a backend: steps take the times of a machine. spent, plain, by machine: the time of all steps, without
    their rows of prompts, and what plain decoding would have taken for their tokens."""

    is_async = False

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.costs = {name: StepCosts(table) for name, table in MACHINES.items()}

    def begin(self, name: str) -> None:
        self.name, self.noise = name, random.Random(1)
        self.spent, self.plain = dict.fromkeys(MACHINES, 0.0), dict.fromkeys(MACHINES, 0.0)

    def speedups(self) -> dict[str, float]:
        return {name: self.plain[name] / self.spent[name] for name in MACHINES}

    def step(self, step: StepInput) -> Pending:
        return self.repeat(step, 1)[0]

    def repeat(self, step: StepInput, most: int) -> Sequence[Pending]:
        return [ReadOutcome(self._timed(step, pending.read())) for pending in self.inner.repeat(step, most)]

    def _timed(self, step: StepInput, output: StepOutput) -> StepOutput:
        rows = sum(1 + decoded.num_drafted for decoded in output.decodes)
        chunk_rows = sum(chunk.end - chunk.start for chunk in step.chunks)
        count, tokens = len(step.decodes), sum(len(decoded.kept) for decoded in output.decodes)
        passes = passes_of(step.decodes, output.decodes, [0] * count)
        for name, costs in self.costs.items() if count else ():
            self.spent[name] += costs.draft_ms(*passes) + costs.verify(rows)
            self.plain[name] += costs.verify(count) / count * tokens
        mine = self.costs[self.name]
        times = {"draft": mine.draft_ms(*passes), "verify": mine.verify(rows + chunk_rows), "keep": 0.0}
        seconds = {name: ms / 1e3 * math.exp(self.noise.gauss(0, NOISE)) for name, ms in times.items()}
        return output._replace(seconds=seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Hostless(Controller):
    """The engine's own time is not that of the made-up clock."""

    seconds = 0.0

    def learn(self, step: Step) -> None:
        super().learn(step)
        self.seconds = step.seconds or 0.0

    def end_step(self, seconds: float) -> None:
        self._inside_ms = 0.0
        super().end_step(self.seconds)


@pytest.mark.rare
@pytest.mark.parametrize("batch, temperature", [(1, 0.8), (4, 0.0)])
def test_no_machine_is_slower_than_with_the_best_fixed_setting(batch: int, temperature: float) -> None:
    llm = LLM("bundled", drafting=Adaptive(), engine=EngineConfig(max_batch=batch, max_context=320, prefix_cache=False))
    assert llm.models.tokenizer is not None
    prompts = [prompt.token_ids for prompt in text_prompts(100, 3 + batch, llm.models.tokenizer)]
    sampling = [
        SamplingParams(max_tokens=96, temperature=temperature, seed=i, ignore_eos=True) for i in range(3 + batch)
    ]
    clocked: Any = Clocked(llm.engine.backend)
    llm.engine.backend = clocked

    def speedups(drafting: Drafting, name: str, believed: CostTable) -> dict[str, float]:
        clocked.begin(name)
        llm.engine.controller = Hostless(StepCosts(believed))
        llm.run(prompts, sampling, drafting=drafting)
        return clocked.speedups()  # type: ignore[no-any-return]

    fixed = [speedups(drafting, "drafts are dear", MACHINES["drafts are dear"]) for drafting in FIXED]
    for name, true in MACHINES.items():
        best, one = max(found[name] for found in fixed), true.verify[1]
        dearer = CostTable((0.0, *(one + 1.4 * (ms - one) for ms in true.verify[1:])), true.first, true.deeper)
        slow = CostTable((0.0, *(max(1.5 * one, ms) for ms in true.verify[1:])), true.first, true.deeper)
        for believed in (true, dearer, slow):
            found = speedups(Adaptive(lookup=False), name, believed)[name]
            least = LEAST_OF_BEST if believed is true else LEAST_IF_WRONG
            assert found >= least * best and found >= LEAST_OF_PLAIN, (name, believed is true, found, best)
    llm.close()
