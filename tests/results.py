"""Results of real runs of the bundled pair, to be judged as they are and in broken copies."""

from __future__ import annotations

import copy
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from aquiline.bench.results.intervals import spread
from aquiline.bench.results.result import ModelFacts, Result, Scenario, describe, tokens_sha256
from aquiline.config import EngineConfig, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.spec.drafting import Chain, NoDraft

NEW_TOKENS, RUNS = 24, 3
SETTINGS = {
    "baseline": NoDraft(),
    "chain-2": Chain(2),
    "chain-3": Chain(3),
}
BASELINE, CHAIN = "baseline.json", "chain-3.json"
NOTHING = spread([0.0] * RUNS)


PROMPTS = ("import os\n\ndef main(path):\n", "class Node:\n    def __init__(self", "def test_add():\n", "import sys\n")


@lru_cache
def _measured(batch: int, temperature: float, num_runs: int) -> str:
    llm = LLM("bundled", engine=EngineConfig(max_batch=batch, prefix_cache=False))
    prompts = [llm.encode(text)[:4] for text in PROMPTS[:batch]]
    scenario = Scenario(
        name="baseline", profile="cpu", context_tokens=4, batch=batch, new_tokens=NEW_TOKENS, temperature=temperature,
        seed=3, prompts_sha256=tokens_sha256(prompts), prompts_source="here", warmup_runs=0, measurement_runs=num_runs,
    )  # fmt: skip
    facts = ModelFacts("bundled", "bundled", "bfloat16", "float32", False, None, llm.models.weight_bytes)
    sampling = [SamplingParams(NEW_TOKENS, temperature, seed=3 + i, ignore_eos=True) for i in range(batch)]
    found = {}
    for name, drafting in SETTINGS.items():
        runs = [llm.run(prompts, sampling, drafting=drafting) for _ in range(num_runs)]
        found[f"{name}.json"] = describe(scenario, name, drafting, facts, llm, runs)
    return json.dumps(found)


def measured(batch: int = 2, temperature: float = 0.8, num_runs: int = RUNS) -> dict[str, Result]:
    """A baseline and two chains by file name, as one clean checkout on one named machine would have left them."""
    found: dict[str, Result] = json.loads(_measured(batch, temperature, num_runs))
    for result in found.values():
        result["commit"] = "0123456789ab"
        result["system"] |= {"cpu": "Some CPU", "isa": "avx2", "path": "native"}
    return found


def changed(result: Result, **fields: Any) -> Result:
    """A copy with fields replaced; `scenario__seed=1` reaches into objects."""
    found = copy.deepcopy(result)
    for path, value in fields.items():
        *owners, name = path.split("__")
        owner = found
        for inner in owners:
            owner = owner[inner]
        owner[name] = value
    return found


def at_speed(result: Result, *values: float) -> Result:
    """A copy whose measured runs made so many tokens per second."""
    assert len(values) == result["scenario"]["measurement_runs"]
    latency = [result["scenario"]["batch"] / value * 1e3 for value in values]
    return changed(result, throughput_tokens_per_sec=spread(list(values)), latency_ms_per_token=spread(latency))


def write_all(results: dict[str, Result], directory: Path) -> Path:
    """Write results as they are, sound or not."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, result in results.items():
        (directory / name).write_text(json.dumps(result))
    return directory
