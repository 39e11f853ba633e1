"""OpenVINO GenAI in this process, on graphs written from the checkpoint: plain, prompt lookup, and our EAGLE-3 draft.

One prompt runs in OpenVINO's LLMPipeline, several prompts in its continuous batching, both over paged caches. Without
paged caches (sdpa) the LLMPipeline runs several prompts too.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from aquiline.bench.peers.names import PeerSpec
from aquiline.bench.peers.peer import PeerOutput, PeerSetup, conversion, versions

MODEL = "openvino_model.xml"
LOOKUP_MATCH = 3
"""Tokens that must match for prompt lookup."""


def open_peer(spec: PeerSpec, setup: PeerSetup) -> OpenVinoPeer:
    """Write the graphs if they are not there, and compile them. The default is bfloat16 where the CPU has it.

    Raises ValueError for bfloat16 on a CPU without it, for drafting without paged caches, and for a directory without
    a model."""
    has_bf16 = "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    dtype = spec.dtype or ("bfloat16" if has_bf16 else "float32")
    if dtype == "bfloat16" and not has_bf16:
        raise ValueError(f"peer {spec.label}: OpenVINO has no bfloat16 on this CPU; choose float32 or int8")
    if spec.is_speculative and "sdpa" in spec.flags:
        raise ValueError(f"peer {spec.label}: OpenVINO drafts with paged caches only; leave sdpa out")
    if spec.where is not None and not (Path(spec.where) / MODEL).exists():
        raise ValueError(
            f"peer {spec.label}: {spec.where} holds no {MODEL}; name a directory that optimum-cli exported"
        )
    return OpenVinoPeer(spec, setup, dtype, "bf16" if has_bf16 and dtype != "float32" else "f32")


class OpenVinoPeer:
    """One compiled pipeline. precision: that of its arithmetic, as OpenVINO names it."""

    def __init__(self, spec: PeerSpec, setup: PeerSetup, dtype: str, precision: str) -> None:
        self.spec, self.dtype, self.threads = spec, dtype, setup.threads
        self.properties: dict[str, Any] = {
            "INFERENCE_NUM_THREADS": setup.threads, "INFERENCE_PRECISION_HINT": precision,
        }  # fmt: skip
        if "samekv" in spec.flags:
            self.properties["KV_CACHE_PRECISION"] = precision
        target, draft = _models(spec, setup, dtype == "int8")
        more: dict[str, Any] = {"prompt_lookup": True} if spec.drafter == "lookup" else {}
        if draft is not None:
            more["draft_model"] = genai.draft_model(str(draft), "CPU", **self.properties)
        self.backend = "SDPA" if "sdpa" in spec.flags else "PA"
        self.is_continuous = self.backend == "PA" and setup.batch > 1
        options = self.properties | more
        self.pipeline: Any
        if self.is_continuous:
            self.pipeline = genai.ContinuousBatchingPipeline(str(target), _scheduler(setup), "CPU", options)
        else:
            if self.backend == "PA":
                options["scheduler_config"] = _scheduler(setup)
            self.pipeline = genai.LLMPipeline(str(target), "CPU", **options, ATTENTION_BACKEND=self.backend)

    def generate(self, prompts: list[list[int]], new_tokens: int, temperature: float) -> list[PeerOutput]:
        """Continue prompts of one length."""
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = new_tokens, True
        config.do_sample = temperature > 0
        if temperature > 0:
            config.temperature = temperature
        if self.spec.num_spec_tokens is not None:
            config.num_assistant_tokens = self.spec.num_spec_tokens
        if self.spec.drafter == "lookup":
            config.max_ngram_size = LOOKUP_MATCH
        return (self._continuous if self.is_continuous else self._at_once)(prompts, config)

    def _at_once(self, prompts: list[list[int]], config: Any) -> list[PeerOutput]:
        """Continue prompts in one call, which reports its own times."""
        found = self.pipeline.generate(ov.Tensor(np.array(prompts, np.int64)), config)
        metrics = found.perf_metrics
        times = [float(t) for t in metrics.raw_metrics.m_new_token_times]
        first_ms = metrics.get_ttft().mean
        last_ms = first_ms + times[-1] - times[0]
        extended = found.extended_perf_metrics
        drafted = int(extended.get_num_draft_tokens()) if self.spec.drafter == "eagle" and extended is not None else 0
        return [
            PeerOutput(len(tokens), first_ms, last_ms, list(map(int, tokens)), len(times) - 1, drafted)
            for tokens in found.tokens
        ]

    def _continuous(self, prompts: list[list[int]], config: Any) -> list[PeerOutput]:
        """Continue prompts step by step, with the time after each step. The pipeline does not say how many tokens were
        proposed; each delivery after the first counts as a step."""
        began = time.perf_counter()
        handles = [
            self.pipeline.add_request(number, ov.Tensor(np.array([prompt], np.int64)), config)
            for number, prompt in enumerate(prompts)
        ]
        token_ids: list[list[int]] = [[] for _ in prompts]
        arrivals: list[list[float]] = [[] for _ in prompts]
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            now_ms = (time.perf_counter() - began) * 1e3
            for handle, ids, times in zip(handles, token_ids, arrivals, strict=True):
                if handle.can_read():
                    for found in handle.read().values():
                        ids += [int(token) for token in found.generated_ids]
                    times.append(now_ms)
        return [
            PeerOutput(len(ids), times[0], times[-1], ids, len(times) - 1)
            for ids, times in zip(token_ids, arrivals, strict=True)
        ]

    def system(self) -> dict[str, object]:
        """Versions, threads and the properties that decide the speed."""
        own_precision = str(ov.Core().get_property("CPU", "KV_CACHE_PRECISION").to_string())
        return versions("openvino", "openvino-genai") | {
            "threads": self.threads, "backend": self.backend, "precision": self.properties["INFERENCE_PRECISION_HINT"],
            "kv_precision": self.properties.get("KV_CACHE_PRECISION") or own_precision,
            "batching": "continuous" if self.is_continuous else "one call", "drafting": _drafting(self.spec),
        }  # fmt: skip

    def close(self) -> None:
        """Free the model."""
        self.pipeline = None


def _models(spec: PeerSpec, setup: PeerSetup, int8: bool) -> tuple[Path, Path | None]:
    """The folders of target and draft, written if they are not there."""
    if spec.where is not None and spec.drafter != "eagle":
        return Path(spec.where), None
    written = conversion("openvino_graph", f"peer={spec.label!r}")
    target = Path(spec.where) if spec.where is not None else written.target_folder(setup.target, int8, MODEL)
    if spec.drafter != "eagle":
        return target, None
    return target, written.draft_folder(setup.target, setup.draft, int8, MODEL)


def _drafting(spec: PeerSpec) -> str:
    if spec.drafter == "eagle":
        return f"EAGLE-3 head, {spec.num_spec_tokens} tokens"
    if spec.drafter == "lookup":
        return f"prompt lookup, {spec.num_spec_tokens} tokens behind {LOOKUP_MATCH} that match"
    return "none"


def _scheduler(setup: PeerSetup) -> Any:
    """A scheduler that computes whole prompts at once and caches nothing between calls."""
    config = genai.SchedulerConfig()
    config.enable_prefix_caching = False
    config.dynamic_split_fuse = False
    config.max_num_batched_tokens, config.max_num_seqs = setup.max_context * setup.batch, setup.batch
    return config
