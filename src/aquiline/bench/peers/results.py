"""A peer's measured runs as a result in our schema, and how many of its tokens are ours.

Figures that cannot be known outside an engine are 0: bytes of keys and values held, acceptance by position.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from tokenizers import Tokenizer

from aquiline.bench.peers.base import Peer, PeerOutput, PeerRun, PeerSpec
from aquiline.bench.results.integrity import SCHEMA
from aquiline.bench.results.intervals import spread
from aquiline.bench.results.result import ModelFacts, Result, Scenario, commit, speculation, tokens_sha256
from aquiline.blocks import PACKED, is_packed
from aquiline.engine.model import Loading, cpu_name, storage_of, stored_bytes
from aquiline.metrics import Counters, mean, peak_memory_bytes, repeated_share
from aquiline.models.config import ModelConfig
from aquiline.models.load import load_target
from aquiline.types import storage_dtype

BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "int4": 0.5}


@dataclass(frozen=True)
class Stored:
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
    file: Stored | None = None

    def stored(self, dtype: str) -> Stored:
        """The weights of a peer with that dtype."""
        if dtype != PACKED:
            return Stored(dtype, dtype, int(self.num_weights * BYTES.get(dtype, 0)))
        assert self.file is not None, "a peer runs the packed weights of a target that has none"
        return self.file


def file_weights(target: Path) -> Stored:
    """The weights of a GGUF file. Every engine here rounds inputs to int8 to multiply packed blocks."""
    decoder = load_target(target, dtype=PACKED)
    dtype = storage_of(decoder, PACKED)
    num_bytes = stored_bytes(decoder, None, Loading(dtype=PACKED).settled)
    return Stored(dtype, "int8" if is_packed(dtype) else dtype, num_bytes)


def result_of(scenario: Scenario, spec: PeerSpec, peer: Peer, model: PeerModel, runs: list[PeerRun]) -> Result:
    """The result of the measured runs of one peer setting."""
    outputs = [output for run in runs for output in run.outputs]
    counters = _counters(outputs, scenario)
    rates = [run.decode_tokens_per_s for run in runs]
    stored = model.stored(peer.dtype)
    is_server = spec.kind == "openai"
    kv_bytes = (
        model.config.kv_values_per_token * storage_dtype(peer.dtype).itemsize
        if peer.dtype in ("float32", "bfloat16")
        else 0
    )
    return {
        "schema": SCHEMA,
        "scenario": asdict(scenario) | {"repeated_share": mean([repeated_share(o.token_ids) for o in runs[0].outputs])},
        "setting": {
            "name": spec.label,
            "drafter": "other" if spec.is_speculative else "none",
            "num_spec_tokens": spec.num_spec_tokens,
        },
        "engine": spec.kind,
        "model": asdict(
            ModelFacts(
                target=model.target, draft=model.draft if spec.eagle is not None else None, dtype=stored.dtype,
                arithmetic=stored.arithmetic, random_weights=model.is_random, simulated_tau=None,
                weight_bytes=stored.num_bytes,
            )
        ),
        "throughput_tokens_per_sec": spread(rates),
        "prefill_tokens_per_sec": spread([
            len(run.outputs) * scenario.context_tokens / max(o.ttft_ms for o in run.outputs) * 1e3 for run in runs
        ]),
        "latency_ms_per_token": spread([scenario.batch / rate * 1e3 for rate in rates]),
        "ttft_ms": spread([median(o.ttft_ms for o in run.outputs) for run in runs]),
        "itl_ms": spread([
            median((o.total_ms - o.ttft_ms) / (o.num_tokens - 1) for o in run.outputs) for run in runs
        ]),
        "memory": {
            "kv_bytes_per_token": kv_bytes, "kv_bytes": 0, "peak_bytes": 0 if spec.is_served else peak_memory_bytes(),
        },
        "output": {
            "num_tokens": [o.num_tokens for o in outputs],
            "sha256": tokens_sha256(o.token_ids for o in runs[0].outputs),
        },
        "eagle_speculation": speculation(counters),
        "stage_ms": {},
        "system": ({} if is_server else {"cpu": cpu_name(), "cores": os.cpu_count()}) | peer.system(),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
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
        return _leading(output.token_ids, expected)
    if output.text is None or tokenizer is None:
        return None
    count = 0
    while count < len(expected) and output.text.startswith(tokenizer.decode(expected[: count + 1])):
        count += 1
    return count


def _leading(found: list[int], expected: list[int]) -> int:
    for index, (a, b) in enumerate(zip(found, expected, strict=False)):
        if a != b:
            return index
    return min(len(found), len(expected))
