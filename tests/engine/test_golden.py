"""The default arithmetic, pinned: logit hashes and tokens that every machine and every instruction set must reproduce.

The weights are made of integers, so that no library's random numbers or vector maths enter."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.conftest import TINY, TINY_CAPTURE, TINY_DRAFT, engine_config, needs_native
from torch import nn

from aquiline.backends.cpu import calls, native
from aquiline.config import ISAS, Environment, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.model import Loading, from_modules
from aquiline.models.decoder import Decoder
from aquiline.models.eagle import DraftHead
from aquiline.spec.drafting import Chain, NoDraft

pytestmark = needs_native

GOLDEN = Path(__file__).with_name("golden.json")
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=32, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=32, temperature=0.9, seed=1, ignore_eos=True),
    "filtered": SamplingParams(
        max_tokens=32, temperature=1.2, top_k=40, top_p=0.9, min_p=0.01, seed=2, ignore_eos=True
    ),
    "penalised": SamplingParams(
        max_tokens=32, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3,
        logit_bias={24: -1.5, 7: 2.0}, ignore_eos=True,
    ),
    "sampled, penalised": SamplingParams(
        max_tokens=32, temperature=0.8, seed=3, repetition_penalty=1.1, presence_penalty=-0.2, frequency_penalty=0.1,
        logit_bias={0: -math.inf, 81: 1.0}, top_k=60, ignore_eos=True,
    ),
}  # fmt: skip


def integer_weights(module: nn.Module, seed: int) -> None:
    """bfloat16 weights that are small integers over a power of two."""
    rng = np.random.default_rng(seed)
    for name, weight in module.named_parameters():
        whole = torch.from_numpy(rng.integers(-24, 25, tuple(weight.shape)).astype(np.float32))
        weight.data = ((64 + whole) / 64 if "norm" in name else whole / 96).to(torch.bfloat16)


def golden_llm(dtype: str, arithmetic: str) -> LLM:
    decoder, head = Decoder(TINY, capture=TINY_CAPTURE), DraftHead(TINY_DRAFT)
    integer_weights(decoder, 0)
    integer_weights(head, 1)
    head.d2t.copy_(torch.arange(TINY_DRAFT.draft_vocab_size))
    head.embed.data = decoder.embed.data
    models = from_modules(decoder, head, None, Loading(dtype, arithmetic), Environment.read())
    return LLM.from_models(models, engine_config(4))


def observe(dtype: str = "bfloat16", arithmetic: str = "float32") -> dict[str, object]:
    llm = golden_llm(dtype, arithmetic)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, TINY.vocab_size, n).tolist() for n in (70, 3)]
    found: dict[str, object] = {}
    for name, sampling in SAMPLINGS.items():
        result = llm.run(prompts, sampling, drafting=Chain(3))
        found[name] = [o.token_ids for o in result.outputs]
    llm.run([prompts[0]], SamplingParams(max_tokens=1), drafting=NoDraft())
    backend, model = llm.engine.backend, llm.models.pair.target_model
    logits = model.logits(backend._hidden, np.array([len(prompts[0]) % llm.engine.config.row_budget - 1], np.int32))
    found["logits_sha256"] = hashlib.sha256(np.ascontiguousarray(logits).tobytes()).hexdigest()
    return found


@pytest.fixture
def restored_isa() -> Iterator[None]:
    yield
    calls.select_isa(Environment.read().isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2])
def test_every_path_reproduces_the_golden_run(
    isa: str, threads: int, restored_isa: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = native.load()
    assert library is not None
    if isa not in library.available_isas():
        pytest.skip(f"this CPU has {', '.join(library.available_isas())}")
    monkeypatch.setenv("AQUILINE_ISA", isa)
    monkeypatch.setenv("AQUILINE_THREADS", str(threads))
    assert observe() == json.loads(GOLDEN.read_text()), f"{isa} with {threads} threads differs from the golden run"
