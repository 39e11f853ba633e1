"""Where a step's time goes: a table of stages with their share of the cycle, and a Chrome trace with named ranges.

The ranges are the meter's laps. A native call reports the time of its parts; the trace shows them in their order;
the torch path does not.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM
from aquiline.metrics import Lap, RunSummary
from aquiline.spec.drafting import Drafting
from aquiline.writing import write_whole

RANGES = {
    "draft": "EAGLE_DRAFT", "verify": "BASE_DECODE_STEP", "keep": "EAGLE_TAIL_COMMIT", "host": "HOST",
}  # fmt: skip
"""The range of each stage."""

PARTS = {
    "EAGLE_DRAFT": {
        "EAGLE_DRAFT_ATTENTION_FMHA": "draft_attention", "EAGLE_DRAFT_FFN": "draft_mlp",
        "EAGLE_DRAFT_LM_HEAD": "draft_head", "EAGLE_DRAFT_FUSE": "draft_fusion",
    },
    "BASE_DECODE_STEP": {
        "EAGLE_TREE_MASKS": "rows", "BASE_ATTENTION_FMHA": "target_attention", "BASE_FFN": "target_mlp",
        "BASE_LM_HEAD": "target_head", "EAGLE_ACCEPT": "draws",
    },
}  # fmt: skip
"""The parts of a range that the native backend times, in order, with their names in metrics.PARTS."""


@dataclass(frozen=True)
class Profile:
    """A profiled run: the table, the ranges, the run's own figures, and the way to draft. rows: a range's name, its
    calls, ms_per_step, its share of the whole cycle, and whether it is_part of the stage above it."""

    rows: list[dict[str, Any]]
    laps: list[Lap]
    summary: RunSummary
    drafting: Drafting
    system: dict[str, object]

    def as_dict(self) -> dict[str, object]:
        """The JSON of `aquiline profile --json`."""
        return {
            "stages": self.rows,
            "num_steps": self.summary.num_decode_steps,
            "tau": self.summary.counters.tau,
            "drafter": self.drafting.name,
            "adaptive": self.summary.choices.as_dict(),
            "system": self.system,
        }

    def write_trace(self, file: Path) -> None:
        """A file for chrome://tracing or Perfetto: complete events, microseconds, parts on a track below the stages."""
        first = min(lap.began_s for lap in self.laps)
        events = [
            {
                "name": lap.stage, "cat": "aquiline", "ph": "X", "pid": 1,
                "tid": 1 + (lap.stage not in RANGES.values()), "ts": (lap.began_s - first) * 1e6,
                "dur": lap.seconds * 1e6,
            }
            for lap in self.laps
        ]  # fmt: skip
        write_whole(file, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), "Nothing is left of it")


def profile(llm: LLM, drafting: Drafting, prompts: list[list[int]], sampling: SamplingParams) -> Profile:
    """Run prompts once to warm up and once measured; only steps that do nothing but decode count."""
    llm.run(prompts, sampling, drafting=drafting)
    engine, meter = llm.engine, llm.engine.meter
    engine.backend.time_parts(True)
    for index, prompt in enumerate(prompts):
        engine.add(llm.request(index, prompt, sampling, drafting))
    while any(s.is_prefilling or not s.output_ids for s in engine.sequences.values()):
        engine.step()
    began, laps = meter.mark(), list[Lap]()
    while engine.is_busy:
        meter.laps, before = [], dict(meter.part_s)
        engine.step()
        step = [Lap(RANGES[lap.stage], lap.began_s, lap.seconds) for lap in meter.laps]
        laps += step + _parts(step, {name: meter.part_s[name] - seconds for name, seconds in before.items()})
    meter.laps = None
    summary = meter.since(began)
    return Profile(_table(laps, summary.num_decode_steps), laps, summary, drafting, llm.models.system())


def _parts(step: list[Lap], seconds: dict[str, float]) -> list[Lap]:
    """The parts of one step's stages."""
    laps = []
    for stage in step:
        began = stage.began_s
        for name, part in PARTS.get(stage.stage, {}).items():
            took = seconds[part]
            if took > 0:
                laps.append(Lap(name, began, took))
            began += took
    return laps


def _table(laps: list[Lap], num_steps: int) -> list[dict[str, Any]]:
    """Stages in the order of a step, each followed by its parts."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for lap in laps:
        seconds[lap.stage].append(lap.seconds)
    total = sum(sum(seconds[name]) for name in RANGES.values())
    return [
        {
            "name": name, "calls": len(seconds[name]), "ms_per_step": 1e3 * sum(seconds[name]) / num_steps,
            "share": sum(seconds[name]) / total, "is_part": name != stage,
        }
        for stage in RANGES.values() for name in (stage, *PARTS.get(stage, {})) if seconds[name]
    ]  # fmt: skip
