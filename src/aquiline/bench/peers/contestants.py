"""The contestants of a comparison, aquiline at one setting and a peer at one setting, with the same methods.

A peer's runs become a result of our schema. Figures that only the engine itself could know are 0: bytes of keys and
values held, acceptance by position.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from statistics import median

from aquiline.bench.peers.names import PeerSpec
from aquiline.bench.peers.peer import Peer, PeerOutput
from aquiline.bench.results.integrity import SCHEMA
from aquiline.bench.results.intervals import decode_tokens_per_s, spread
from aquiline.bench.results.result import ModelFacts, Result, Scenario, commit, describe, speculation, tokens_sha256
from aquiline.blocks import PACKED, is_packed
from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM, Output
from aquiline.engine.llm import Result as OwnRun
from aquiline.engine.model import Loading, cpu_name, storage_of, stored_bytes
from aquiline.metrics import Counters, mean, peak_memory_bytes, repeated_share
from aquiline.models.counting import shape_of
from aquiline.models.load import read_model_config, read_target
from aquiline.models.model_config import ModelConfig
from aquiline.spec.drafting import Drafting

WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "int4": 0.5}
"""Bytes of a converted weight."""
KV_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of a stored key or value."""


@dataclass(frozen=True)
class PeerModel:
    """The model that all settings run. target and draft: checkpoints as `resolve` finds them; names: theirs in results;
    is_random: whether the weights are random."""

    target: Path
    draft: Path | None
    names: tuple[str, str | None]
    is_random: bool = False

    @cached_property
    def config(self) -> ModelConfig:
        """The target's geometry."""
        return read_model_config(self.target)

    def facts(self, dtype: str, arithmetic: str, num_bytes: int, has_draft: bool) -> ModelFacts:
        """The model as a result states it."""
        target, draft = self.names
        return ModelFacts(target, draft if has_draft else None, dtype, arithmetic, self.is_random, None, num_bytes)

    def facts_of_peer(self, dtype: str, has_draft: bool) -> ModelFacts:
        """The model as a peer with that dtype runs it. Every engine here rounds inputs to int8 to multiply packed
        blocks."""
        if dtype == PACKED:
            storage, num_bytes = self._file
            return self.facts(storage, "int8" if is_packed(storage) else storage, num_bytes, has_draft)
        num_bytes = int(shape_of(self.config).num_parameters * WEIGHT_BYTES.get(dtype, 0))
        return self.facts(dtype, dtype, num_bytes, has_draft)

    @cached_property
    def _file(self) -> tuple[str, int]:
        """How a GGUF file stores the target's weights, and their bytes."""
        weights = read_target(self.target, dtype=PACKED)
        return storage_of(weights, PACKED), stored_bytes(weights, None, Loading(dtype=PACKED).settled)


class Own:
    """aquiline at one setting."""

    def __init__(self, name: str, llm: LLM, drafting: Drafting) -> None:
        self.name, self.label, self.llm, self.drafting = name, f"aquiline {name}", llm, drafting
        self.runs: list[OwnRun] = []

    @property
    def outputs(self) -> list[Output]:
        """The outputs of all runs."""
        return [output for run in self.runs for output in run.outputs]

    def run(self, prompts: list[list[int]], sampling: list[SamplingParams]) -> None:
        """Run the prompts and keep the measurement."""
        self.runs.append(self.llm.run(prompts, sampling, drafting=self.drafting))

    def result(self, scenario: Scenario, model: PeerModel) -> Result:
        """The result of the measured runs."""
        own = self.llm.models
        facts = model.facts(own.storage, own.arithmetic, own.weight_bytes, self.drafting.is_speculative)
        return describe(scenario, self.name, self.drafting, facts, self.llm, self.runs)


class Other:
    """A peer at one setting."""

    def __init__(self, spec: PeerSpec, peer: Peer) -> None:
        self.label, self.spec, self.peer = spec.label, spec, peer
        self.runs: list[list[PeerOutput]] = []

    @property
    def outputs(self) -> list[PeerOutput]:
        """The outputs of all runs."""
        return [output for run in self.runs for output in run]

    def run(self, prompts: list[list[int]], sampling: list[SamplingParams]) -> None:
        """Run the prompts and keep the measurement."""
        self.runs.append(self.peer.generate(prompts, sampling[0].max_tokens, sampling[0].temperature))

    def result(self, scenario: Scenario, model: PeerModel) -> Result:
        """The result of the measured runs."""
        spec, peer, first = self.spec, self.peer, self.runs[0]
        kv_bytes = model.config.kv_values_per_token * KV_BYTES.get(peer.dtype, 0)
        machine = {} if spec.kind == "openai" else {"cpu": cpu_name(), "cores": os.cpu_count()}
        return {
            "schema": SCHEMA,
            "scenario": asdict(scenario) | {"repeated_share": mean([repeated_share(o.token_ids) for o in first])},
            "setting": {
                "name": spec.label,
                "drafter": "other" if spec.is_speculative or any(o.num_draft_tokens for o in self.outputs) else "none",
                "num_spec_tokens": spec.num_spec_tokens,
            },
            "engine": spec.kind,
            "model": asdict(model.facts_of_peer(peer.dtype, spec.drafter == "eagle")),
            **_times(scenario, self.runs),
            "memory": {
                "kv_bytes_per_token": kv_bytes,
                "kv_bytes": 0,
                "peak_bytes": 0 if spec.is_served else peak_memory_bytes(),
            },
            "output": {
                "num_tokens": [o.num_tokens for o in self.outputs],
                "sha256": tokens_sha256(o.token_ids for o in first),
            },
            "eagle_speculation": speculation(_counters(self.outputs, scenario)),
            "stage_ms": {},
            "system": machine | peer.system(),
            "commit": commit(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }


def _times(scenario: Scenario, runs: list[list[PeerOutput]]) -> dict[str, object]:
    """The rates and times of a peer's runs, each with its spread."""
    rates = [decode_tokens_per_s(run) for run in runs]
    prompt_s = [max(o.first_ms for o in run) / 1e3 for run in runs]
    return {
        "throughput_tokens_per_sec": spread(rates),
        "prefill_tokens_per_sec": spread([scenario.batch * scenario.context_tokens / s for s in prompt_s]),
        "latency_ms_per_token": spread([scenario.batch / rate * 1e3 for rate in rates]),
        "ttft_ms": spread([median(o.first_ms for o in run) for run in runs]),
        "itl_ms": spread([median((o.last_ms - o.first_ms) / (o.num_tokens - 1) for o in run) for run in runs]),
    }


def _counters(outputs: list[PeerOutput], scenario: Scenario) -> Counters:
    """Acceptance from a peer's own counts; 0 if it has none."""
    known = [output for output in outputs if output.num_steps]
    committed = sum(output.num_tokens - 1 for output in known)
    steps = sum(output.num_steps for output in known)
    drafted = sum(output.num_draft_tokens for output in known)
    return Counters(
        num_steps=steps, num_committed=committed, num_prefilled=len(known), num_draft_tokens=drafted,
        # A step keeps what it accepted and one token more; the last one may have been cut.
        num_accepted_tokens=min(committed - steps, drafted),
        num_prompt_tokens=len(outputs) * scenario.context_tokens,
    )  # fmt: skip
