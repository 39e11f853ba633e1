"""OpenVINO GenAI in this process, on graphs written from the checkpoint: plain, prompt lookup, and our EAGLE-3 draft.

One prompt runs in OpenVINO's LLMPipeline, several prompts in its continuous batching, both over paged caches. Without
paged caches (sdpa) the LLMPipeline runs several prompts too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from aquiline.bench.peers.base import PeerOutput, PeerRun, PeerSpec, Place, library, versions
from aquiline.bench.peers.converted import converted, shares_embedding, stored_dtype
from aquiline.bench.peers.openvino_batch import Batched
from aquiline.models.families import config_file, read_fields
from aquiline.models.formats import load_draft
from aquiline.models.load import load_target

MODEL = "openvino_model.xml"
ov = library("openvino")
genai = library("openvino_genai")


def open_peer(spec: PeerSpec, place: Place) -> OpenVinoPeer:
    """Write the graphs if they are not there, and compile them. The default is bfloat16 where the CPU has it.

    Raises ValueError for bfloat16 on a CPU without it, for eagle without a draft, for drafting without paged caches,
    and for a directory without a model."""
    has_bf16 = "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    dtype = spec.dtype or ("bfloat16" if has_bf16 else "float32")
    if dtype == "bfloat16" and not has_bf16:
        raise ValueError(f"peer {spec.label}: OpenVINO has no bfloat16 on this CPU; choose float32 or int8")
    if spec.eagle is not None and place.draft is None:
        raise ValueError(f"peer {spec.label}: drafts with an EAGLE-3 head and none is given; pass --draft")
    if spec.is_speculative and "sdpa" in spec.flags:
        raise ValueError(f"peer {spec.label}: OpenVINO drafts with paged caches only; leave sdpa out")
    if spec.where is not None and not (Path(spec.where) / MODEL).exists():
        raise ValueError(
            f"peer {spec.label}: {spec.where} holds no {MODEL}; name a directory that optimum-cli exported"
        )
    return OpenVinoPeer(spec, place, dtype, "bf16" if has_bf16 else "f32")


class OpenVinoPeer:
    """One compiled pipeline."""

    def __init__(self, spec: PeerSpec, place: Place, dtype: str, best: str) -> None:
        self.spec, self.dtype, self.threads = spec, dtype, place.threads
        self.properties: dict[str, Any] = {
            "INFERENCE_NUM_THREADS": place.threads,
            "INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16", "int8": best}[dtype],
        }
        if "samekv" in spec.flags:
            self.properties["KV_CACHE_PRECISION"] = self.properties["INFERENCE_PRECISION_HINT"]
        target = Path(spec.where) if spec.where is not None else _target(place.target, dtype == "int8")
        more: dict[str, Any] = {"prompt_lookup": True} if spec.lookup is not None else {}
        if spec.eagle is not None:
            assert place.draft is not None
            draft = _draft(place.target, place.draft, dtype == "int8")
            more["draft_model"] = genai.draft_model(str(draft), "CPU", **self.properties)
        self.backend = "SDPA" if "sdpa" in spec.flags else "PA"
        if self.backend == "PA":
            more["scheduler_config"] = _scheduler(place)
        self.batch = place.batch
        self.batched: Batched | None = None
        self.pipeline: Any = None
        if self.backend == "PA" and place.batch > 1:
            self.batched = Batched(spec, target, self.properties | more)
        else:
            self.pipeline = genai.LLMPipeline(
                str(target), "CPU", **self.properties, **more, ATTENTION_BACKEND=self.backend
            )  # fmt: skip

    def generate(self, prompts: list[list[int]], new_tokens: int, temperature: float) -> PeerRun:
        """Continue prompts of one length; at most as many as the peer was opened for."""
        if len(prompts) > self.batch:
            raise ValueError(f"peer {self.spec.label}: was opened for {self.batch} prompts, {len(prompts)} given")
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = new_tokens, True
        config.do_sample = temperature > 0
        if temperature > 0:
            config.temperature = temperature
        count = self.spec.lookup or self.spec.eagle
        if count is not None:
            config.num_assistant_tokens = count
        if self.spec.lookup is not None:
            config.max_ngram_size = 3
        if self.batched is not None:
            return self.batched.generate(prompts, config)
        found = self.pipeline.generate(ov.Tensor(np.array(prompts, np.int64)), config)
        metrics = found.perf_metrics
        times = [float(t) for t in metrics.raw_metrics.m_new_token_times]
        arrivals = [metrics.get_ttft().mean + t - times[0] for t in times]
        extended = found.extended_perf_metrics
        drafted = int(extended.get_num_draft_tokens()) if self.spec.eagle is not None and extended is not None else 0
        return PeerRun([
            PeerOutput(
                len(tokens), [int(t) for t in tokens], arrivals, num_steps=len(times) - 1, num_draft_tokens=drafted
            )
            for tokens in found.tokens
        ])  # fmt: skip

    def system(self) -> dict[str, object]:
        """Versions, threads and the properties that decide the speed."""
        return versions("openvino", "openvino-genai") | {
            "threads": self.threads, "backend": self.backend, "precision": self.properties["INFERENCE_PRECISION_HINT"],
            "kv_precision": self.properties.get("KV_CACHE_PRECISION") or _own_kv_precision(),
            "batching": "continuous" if self.batched is not None else "one call",
            "drafting": _drafting(self.spec),
        }  # fmt: skip

    def close(self) -> None:
        """Free the model."""
        self.pipeline = self.batched = None


def _own_kv_precision() -> str:
    """The plugin's default precision of keys and values."""
    return str(ov.Core().get_property("CPU", "KV_CACHE_PRECISION").to_string())


def _drafting(spec: PeerSpec) -> str:
    if spec.eagle is not None:
        return f"EAGLE-3 head, {spec.eagle} tokens"
    return f"prompt lookup, {spec.lookup} tokens behind 3 that match" if spec.lookup is not None else "none"


def _scheduler(place: Place) -> Any:
    """A scheduler that computes whole prompts at once and caches nothing between calls."""
    config = genai.SchedulerConfig()
    config.enable_prefix_caching = False
    config.dynamic_split_fuse = False
    config.max_num_batched_tokens, config.max_num_seqs = place.max_context * place.batch, place.batch
    return config


def _target(target: Path, int8: bool) -> Path:
    from aquiline.bench.peers.openvino_graph import target_graph

    def write(directory: Path) -> None:
        graph = target_graph(load_target(target, dtype=stored_dtype(target)), int8)
        _save(graph, directory, target)

    return converted([target], f"openvino{'-int8' if int8 else ''}", write)


def _draft(target: Path, draft: Path, int8: bool) -> Path:
    from aquiline.bench.peers.openvino_graph import draft_graph

    def write(directory: Path) -> None:
        decoder = load_target(target, dtype=stored_dtype(target))
        head = load_draft(draft, decoder, dtype=stored_dtype(draft))
        if not shares_embedding(head, decoder):
            raise ValueError("draft: has an embedding of its own; OpenVINO GenAI puts the target's in its place")
        graph = draft_graph(head, int8)
        _save(graph, directory, draft)

    return converted([target, draft], f"openvino-eagle3{'-int8' if int8 else ''}", write)


def _save(graph: Any, directory: Path, checkpoint: Path) -> None:
    """Write a model in the form that GenAI reads. GenAI requires some end token, though every run here ignores it."""
    ov.save_model(graph, directory / MODEL, False)
    (directory / "config.json").write_text(json.dumps(read_fields(config_file(checkpoint))))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
