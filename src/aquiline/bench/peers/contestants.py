"""The contestants of a comparison: aquiline at one setting and a peer at one setting, with the same methods; and a
peer's runs as a result in our schema.

Figures that cannot be known outside an engine are 0: bytes of keys and values held, acceptance by position.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from tokenizers import Tokenizer

from aquiline.bench.peers.names import PeerSpec
from aquiline.bench.peers.peer import Peer, PeerOutput, PeerRun
from aquiline.bench.results.integrity import SCHEMA
from aquiline.bench.results.intervals import spread
from aquiline.bench.results.result import ModelFacts, Result, Scenario, commit, describe, speculation, tokens_sha256
from aquiline.blocks import PACKED, is_packed
from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.llm import Result as OwnRun
from aquiline.engine.model import Loading, cpu_name, storage_of, stored_bytes
from aquiline.metrics import Counters, mean, peak_memory_bytes, repeated_share
from aquiline.models.load import load_target
from aquiline.models.model_config import ModelConfig
from aquiline.spec.drafting import Drafting

WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "int4": 0.5}
"""Bytes of a converted weight."""
KV_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of a stored key or value."""


@dataclass(frozen=True)
class StoredWeights:
    """How weights are stored and multiplied, and their bytes."""

    dtype: str
    arithmetic: str
    num_bytes: int


@dataclass(frozen=True)
class PeerModel:
    """The model that peers run. target and draft: names for tables; num_weights: of the target. file: the weights of a
    GGUF target as the file has them, which peers with dtype "packed" run; None for other targets."""

    target: str
    draft: str | None
    config: ModelConfig
    num_weights: int
    is_random: bool
    file: StoredWeights | None = None

    def facts(self, dtype: str, has_draft: bool) -> ModelFacts:
        """The model of a peer with that dtype."""
        weights = StoredWeights(dtype, dtype, int(self.num_weights * WEIGHT_BYTES.get(dtype, 0)))
        if dtype == PACKED:
            assert self.file is not None, "a peer runs the packed weights of a target that has none"
            weights = self.file
        draft = self.draft if has_draft else None
        return ModelFacts(
            self.target, draft, weights.dtype, weights.arithmetic, self.is_random, None, weights.num_bytes
        )


def file_weights(target: Path) -> StoredWeights:
    """The weights of a GGUF file. Every engine here rounds inputs to int8 to multiply packed blocks."""
    decoder = load_target(target, dtype=PACKED)
    dtype = storage_of(decoder, PACKED)
    num_bytes = stored_bytes(decoder, None, Loading(dtype=PACKED).settled)
    return StoredWeights(dtype, "int8" if is_packed(dtype) else dtype, num_bytes)


class Own:
    """aquiline at one setting."""

    def __init__(self, name: str, llm: LLM, spec: Drafting) -> None:
        self.name, self.label, self.llm, self.spec = name, f"aquiline {name}", llm, spec
        self.runs: list[OwnRun] = []

    @property
    def texts(self) -> list[PeerOutput]:
        """The outputs of all runs, in a peer's form."""
        outputs = [output for run in self.runs for output in run.outputs]
        return [PeerOutput(len(o.token_ids), o.token_ids, [o.ttft_ms, o.total_ms]) for o in outputs]

    def run(self, prompts: list[list[int]], sampling: list[SamplingParams]) -> None:
        """Run the prompts and keep the measurement."""
        self.runs.append(self.llm.run(prompts, sampling, drafting=self.spec))

    def result(self, scenario: Scenario, model: PeerModel) -> Result:
        """The result of the measured runs."""
        models, draft = self.llm.models, model.draft if self.spec.is_speculative else None
        dtype, arithmetic = (str(models.system()[name]) for name in ("dtype", "arithmetic"))
        facts = ModelFacts(model.target, draft, dtype, arithmetic, model.is_random, None, models.weight_bytes)
        return describe(scenario, self.name, self.spec, facts, self.llm, self.runs)


class Other:
    """A peer at one setting."""

    def __init__(self, spec: PeerSpec, peer: Peer) -> None:
        self.label, self.spec, self.peer = spec.label, spec, peer
        self.runs: list[PeerRun] = []

    @property
    def texts(self) -> list[PeerOutput]:
        """The outputs of all runs."""
        return [output for run in self.runs for output in run.outputs]

    def run(self, prompts: list[list[int]], sampling: list[SamplingParams]) -> None:
        """Run the prompts and keep the measurement."""
        self.runs.append(self.peer.generate(prompts, sampling[0].max_tokens, sampling[0].temperature))

    def result(self, scenario: Scenario, model: PeerModel) -> Result:
        """The result of the measured runs."""
        spec, peer, first = self.spec, self.peer, self.runs[0].outputs
        kv_bytes = model.config.kv_values_per_token * KV_BYTES.get(peer.dtype, 0)
        machine = {} if spec.kind == "openai" else {"cpu": cpu_name(), "cores": os.cpu_count()}
        return {
            "schema": SCHEMA,
            "scenario": asdict(scenario) | {"repeated_share": mean([repeated_share(o.token_ids) for o in first])},
            "setting": {
                "name": spec.label,
                "drafter": "other" if spec.is_speculative else "none",
                "num_spec_tokens": spec.num_spec_tokens,
            },
            "engine": spec.kind,
            "model": asdict(model.facts(peer.dtype, spec.eagle is not None)),
            **_times(scenario, self.runs),
            "memory": {
                "kv_bytes_per_token": kv_bytes,
                "kv_bytes": 0,
                "peak_bytes": 0 if spec.is_served else peak_memory_bytes(),
            },
            "output": {
                "num_tokens": [o.num_tokens for o in self.texts],
                "sha256": tokens_sha256(o.token_ids for o in first),
            },
            "eagle_speculation": speculation(_counters(self.texts, scenario)),
            "stage_ms": {},
            "system": machine | peer.system(),
            "commit": commit(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }


def _times(scenario: Scenario, runs: list[PeerRun]) -> dict[str, object]:
    """The rates and times of a peer's runs, each with its spread."""
    rates = [run.decode_tokens_per_s for run in runs]
    last_first_ms = [max(o.ttft_ms for o in run.outputs) for run in runs]
    between_ms = [median((o.total_ms - o.ttft_ms) / (o.num_tokens - 1) for o in run.outputs) for run in runs]
    return {
        "throughput_tokens_per_sec": spread(rates),
        "prefill_tokens_per_sec": spread([
            len(run.outputs) * scenario.context_tokens / ms * 1e3 for run, ms in zip(runs, last_first_ms, strict=True)
        ]),
        "latency_ms_per_token": spread([scenario.batch / rate * 1e3 for rate in rates]),
        "ttft_ms": spread([median(o.ttft_ms for o in run.outputs) for run in runs]),
        "itl_ms": spread(between_ms),
    }  # fmt: skip


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


def agreement(output: PeerOutput, expected: list[int], tokenizer: Tokenizer | None) -> int | None:
    """How many leading tokens are the expected ones. If a server returns no ids, its text is compared with the decoded
    tokens; None if there is no text or no tokenizer."""
    if output.token_ids:
        pairs = zip(output.token_ids, expected, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(output.token_ids), len(expected)))
    if output.text is None or tokenizer is None:
        return None
    count = 0
    while count < len(expected) and output.text.startswith(tokenizer.decode(expected[: count + 1])):
        count += 1
    return count
