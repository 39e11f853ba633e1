"""The contestants of a comparison, aquiline at one setting and a peer at one setting, with the same methods.

A peer's runs become a result of our schema. Figures that only the engine itself could know are 0: bytes of keys and
values held, acceptance by position.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from aquiline.bench.peers.names import PeerSpec
from aquiline.bench.peers.peer import Peer, PeerOutput
from aquiline.bench.results.result import ModelFacts, Result, Scenario, describe, result_of
from aquiline.blocks import PACKED, is_packed
from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.llm import Result as OwnRun
from aquiline.engine.model import Loading, cpu_name, storage_of, stored_bytes
from aquiline.metrics import Counters, peak_memory_bytes
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
            weights = read_target(self.target, dtype=PACKED)
            storage, settled = storage_of(weights, PACKED), Loading(dtype=PACKED).settled
            arithmetic = "int8" if is_packed(storage) else storage
            return self.facts(storage, arithmetic, stored_bytes(weights, None, settled), has_draft)
        num_bytes = int(shape_of(self.config).num_parameters * WEIGHT_BYTES.get(dtype, 0))
        return self.facts(dtype, dtype, num_bytes, has_draft)


@dataclass(eq=False)
class Own:
    """aquiline at one setting, with its measured runs."""

    name: str
    llm: LLM
    drafting: Drafting
    runs: list[OwnRun] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The setting's name in tables."""
        return f"aquiline {self.name}"

    def run(self, prompts: list[list[int]], sampling: list[SamplingParams]) -> None:
        """Run the prompts and keep the measurement."""
        self.runs.append(self.llm.run(prompts, sampling, drafting=self.drafting))

    def result(self, scenario: Scenario, model: PeerModel) -> Result:
        """The result of the measured runs."""
        own = self.llm.models
        facts = model.facts(own.storage, own.arithmetic, own.weight_bytes, self.drafting.is_speculative)
        return describe(scenario, self.name, self.drafting, facts, self.llm, self.runs)


@dataclass(eq=False)
class Other:
    """A peer at one setting, with its measured runs."""

    spec: PeerSpec
    peer: Peer
    runs: list[list[PeerOutput]] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The setting's name in tables."""
        return self.spec.label

    def run(self, prompts: list[list[int]], sampling: list[SamplingParams]) -> None:
        """Run the prompts and keep the measurement."""
        self.runs.append(self.peer.generate(prompts, sampling[0].max_tokens, sampling[0].temperature))

    def result(self, scenario: Scenario, model: PeerModel) -> Result:
        """The result of the measured runs."""
        spec, peer = self.spec, self.peer
        prompt_ms = [max(output.first_ms for output in run) for run in self.runs]
        has_drafted = any(output.num_draft_tokens for run in self.runs for output in run)
        machine = {} if spec.kind == "openai" else {"cpu": cpu_name(), "cores": os.cpu_count()}
        return result_of(
            scenario, model.facts_of_peer(peer.dtype, spec.drafter == "eagle"), _counters(self.runs, scenario),
            self.runs, [output.token_ids for output in self.runs[0]],
            self.runs, [scenario.batch * scenario.context_tokens / ms * 1e3 for ms in prompt_ms],
            engine=spec.kind,
            setting={
                "name": spec.label,
                "drafter": "other" if spec.is_speculative or has_drafted else "none",
                "num_spec_tokens": spec.num_spec_tokens,
            },
            memory={
                "kv_bytes_per_token": model.config.kv_values_per_token * KV_BYTES.get(peer.dtype, 0),
                "kv_bytes": 0,
                "peak_bytes": 0 if spec.is_served else peak_memory_bytes(),
            },
            stage_ms={}, system=machine | peer.system(),
        )  # fmt: skip


def _counters(runs: list[list[PeerOutput]], scenario: Scenario) -> Counters:
    """Acceptance from a peer's own counts; 0 if it has none."""
    outputs = [output for run in runs for output in run]
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
