"""Where a step's time goes: a table of stages with their share of the cycle, and a Chrome trace with named ranges.

The ranges are the meter's laps, and within drafting the calls of the draft's runner; its forward is one native call,
whose layers the library times apart. Ranges within a call are laid out in the order they run.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from aquiline.config import EngineConfig, SamplingParams, SpecConfig
from aquiline.engine.llm import LLM
from aquiline.engine.model import LoadedModels
from aquiline.metrics import Lap, Meter, RunSummary
from aquiline.models.runner import DraftRunner
from aquiline.ops.cpu import LayerTimes
from aquiline.types import Float32, Int32, KVGroup, Rows, TopK

RANGES = {
    "draft": "EAGLE_DRAFT", "masks": "EAGLE_TREE_MASKS", "verify": "BASE_DECODE_STEP", "accept": "EAGLE_ACCEPT",
    "commit": "EAGLE_TAIL_COMMIT", "host": "HOST",
}  # fmt: skip
"""The range of each stage; those within EAGLE_DRAFT follow."""
ATTENTION, FFN, LM_HEAD, FUSE = (
    "EAGLE_DRAFT_ATTENTION_FMHA", "EAGLE_DRAFT_FFN", "EAGLE_DRAFT_LM_HEAD", "EAGLE_DRAFT_FUSE",
)  # fmt: skip


class TimedDraft:
    """A DraftRunner that notes what each of its calls took."""

    def __init__(self, runner: DraftRunner, layers: LayerTimes | None) -> None:
        self.runner, self.layers = runner, layers
        self.laps: list[Lap] = []

    @property
    def hidden(self) -> Float32:
        """The runner's."""
        return self.runner.hidden

    def fuse(self, features: Float32) -> Float32:  # noqa: D102
        began = time.perf_counter()
        fused = self.runner.fuse(features)
        self._note(FUSE, began)
        return fused

    def forward(self, rows: Rows, kv: KVGroup, g: Float32) -> None:  # noqa: D102
        before = self._parts()
        began = time.perf_counter()
        self.runner.forward(rows, kv, g)
        if self.layers is None:  # the torch path does not tell its layers' parts
            self._note(ATTENTION + "+FFN", began)
            return
        attention, mlp = (now - earlier for now, earlier in zip(self._parts()[:2], before[:2], strict=True))
        self.laps += [Lap(ATTENTION, began, attention), Lap(FFN, began + attention, mlp)]

    def top_k(self, row_index: Int32, k: int) -> TopK:  # noqa: D102
        began = time.perf_counter()
        best = self.runner.top_k(row_index, k)
        self._note(LM_HEAD, began)
        return best

    def chain(self, rows: Rows, kv: KVGroup, source: Int32, depth: int) -> Int32:  # noqa: D102
        before = self._parts()
        began = time.perf_counter()
        tokens = self.runner.chain(rows, kv, source, depth)
        if self.layers is None:
            self._note("EAGLE_DRAFT_CHAIN", began)
            return tokens
        for name, now, earlier in zip((ATTENTION, FFN, LM_HEAD), self._parts(), before, strict=True):
            self.laps.append(Lap(name, began, now - earlier))
            began += now - earlier
        return tokens

    def _parts(self) -> tuple[float, float, float]:
        layers = self.layers
        return (layers.attention_s, layers.mlp_s, layers.head_s) if layers is not None else (0.0, 0.0, 0.0)

    def _note(self, name: str, began: float) -> None:
        self.laps.append(Lap(name, began, time.perf_counter() - began))


@dataclass(frozen=True)
class StageRow:
    """One line of the table: a range's calls, time per step and share of the whole cycle; parts stand below a stage."""

    name: str
    calls: int
    ms_per_step: float
    share: float
    is_part: bool


@dataclass(frozen=True)
class Profile:
    """A profiled run: the table, the ranges, and what ran."""

    rows: list[StageRow]
    laps: list[Lap]
    summary: RunSummary
    spec: SpecConfig
    system: dict[str, object] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """The JSON of `aquiline profile --json`."""
        return {
            "stages": [row.__dict__ for row in self.rows],
            "num_steps": self.summary.num_decode_steps,
            "tau": self.summary.counters.tau,
            "drafter": self.spec.drafter,
            "system": self.system,
        }

    def write_trace(self, file: Path) -> None:
        """A file for chrome://tracing or Perfetto: complete events, microseconds, parts on a track below the stages."""
        first = min(lap.began_s for lap in self.laps)
        events = [
            {
                "name": lap.stage, "cat": "aquiline", "ph": "X", "pid": 1,
                "tid": 1 + lap.stage.startswith("EAGLE_DRAFT_"), "ts": (lap.began_s - first) * 1e6,
                "dur": lap.seconds * 1e6,
            }
            for lap in self.laps
        ]  # fmt: skip
        file.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def profile(
    models: LoadedModels, config: EngineConfig, spec: SpecConfig, prompts: list[list[int]], sampling: SamplingParams
) -> Profile:
    """Run prompts once to warm up and once measured; only steps that do nothing but decode count."""
    with LayerTimes() if models.is_native else nullcontext() as layers:
        timed = TimedDraft(models.draft, layers) if models.draft is not None else None
        llm = LLM.from_models(replace(models, draft=timed), config, spec)
        llm.run(prompts, sampling)
        engine = llm.engine
        for index, prompt in enumerate(prompts):
            engine.add(llm.request(index, prompt, sampling))
        while any(s.is_prefilling or not s.output_ids for s in engine.sequences.values()):
            engine.step()
        engine.meter = Meter()
        engine.meter.laps = []
        if timed is not None:
            timed.laps.clear()
        while engine.is_busy:
            engine.step()
    summary = engine.meter.summary()
    laps = [Lap(RANGES[lap.stage], lap.began_s, lap.seconds) for lap in engine.meter.laps]
    parts = timed.laps if timed is not None else []
    return Profile(_table(laps, parts, summary.num_decode_steps), laps + parts, summary, spec, llm.models.system())


def _table(laps: list[Lap], parts: list[Lap], num_steps: int) -> list[StageRow]:
    total = sum(lap.seconds for lap in laps)
    rows = []
    for group, is_part in ((laps, False), (parts, True)):
        seconds: dict[str, float] = defaultdict(float)
        calls: dict[str, int] = defaultdict(int)
        for lap in group:
            seconds[lap.stage] += lap.seconds
            calls[lap.stage] += 1
        rows += [
            StageRow(name, calls[name], 1e3 * seconds[name] / num_steps, seconds[name] / total, is_part)
            for name in seconds
        ]
    order = list(RANGES.values())
    stages = sorted((row for row in rows if not row.is_part), key=lambda row: order.index(row.name))
    drafting = [row for row in rows if row.is_part]
    place = next((i + 1 for i, row in enumerate(stages) if row.name == RANGES["draft"]), 0)
    return stages[:place] + drafting + stages[place:]
