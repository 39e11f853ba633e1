"""A tiny pair and what it served, for the tests of the learner."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import tiny

from aquiline.backends.torch.eagle import save_head
from aquiline.config import EngineConfig, PairConfig, SamplingParams
from aquiline.engine.learning.store import LearningStore, Served, ServedWriter
from aquiline.engine.llm import LLM
from aquiline.engine.model import ResolvedPair
from aquiline.regenerate.answering import rejected_tokens
from aquiline.spec.drafting import Chain

LENGTH = 3
FAST = 1e-2
"""A learning rate at which a draft that has learnt nothing learns in a short run."""


def write_pair(folder: Path) -> PairConfig:
    """A target and a draft that has learnt nothing."""
    save_head(tiny.head(tiny.target()), folder / "draft")
    return PairConfig(str(tiny.write_target(folder / "target")), str(folder / "draft"))


def serve(pair: PairConfig, num: int, seed: int = 0) -> list[Served]:
    """Answers of 48 tokens to `num` requests, greedily and at a temperature by turns."""
    llm = LLM.from_models(ResolvedPair.of(pair).load(), EngineConfig(max_batch=16), Chain(LENGTH))
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(1, 48, 6).tolist() for _ in range(num)]
    sampling = [SamplingParams(max_tokens=48, temperature=0.8 * (i % 2), seed=i, ignore_eos=True) for i in range(num)]
    served = []
    for prompt, asked, output in zip(prompts, sampling, llm.generate(prompts, sampling), strict=True):
        missed = np.flatnonzero(rejected_tokens(output.by_draft, LENGTH)) + len(prompt)
        served.append(Served(prompt + output.token_ids, len(prompt), missed.tolist(), asked.temperature))
    return served


def write_store(folder: Path, pair: PairConfig, served: list[Served]) -> LearningStore:
    """A learning folder in which these requests were served."""
    store = LearningStore(folder)
    store.claim({"target": pair.target, "draft": pair.draft, "capture": None}, {"target": "tiny"})
    writer = ServedWriter(store, 1 << 24)
    for each in served:
        writer.add(each)
    return store


def weights(draft: Path) -> bytes:
    """A draft's tensors as they lie in its file."""
    return (draft / "model.safetensors").read_bytes()


def told(store: LearningStore) -> object:
    """What learner.json says; None if there is none."""
    place = store.folder / "learner.json"
    return json.loads(place.read_text()) if place.exists() else None
