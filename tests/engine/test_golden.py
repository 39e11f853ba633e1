"""The default arithmetic, pinned: logit hashes and tokens that every machine and every instruction set must reproduce.

The weights are made of integers, so that no library's random numbers or vector maths enter."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.conftest import GEMMA, TINY, TINY_CAPTURE, TINY_DRAFT, engine_config, needs_native

from aquiline.backends.cpu import calls, native
from aquiline.blocks import FLOATS, Array, Parts, in_memory
from aquiline.config import ISAS, Environment, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.model import Loading, from_weights
from aquiline.models.model_config import Experts, ModelConfig
from aquiline.models.model_weights import (
    AttentionWeights,
    DenseWeights,
    DraftWeights,
    LayerWeights,
    ModelWeights,
    MoeWeights,
)
from aquiline.spec.drafting import Chain, NoDraft
from aquiline.types import Float32

pytestmark = needs_native

GOLDEN = Path(__file__).with_name("golden.json")
WITH_EXPERTS = replace(
    TINY, windows=(24, 0) * 2, experts=Experts(count=8, per_token=4, has_bias=True), activation="clamped",
    activation_limit=7.0,
)  # fmt: skip
FAMILIES: dict[str, tuple[ModelConfig, dict[str, str]]] = {
    "experts": (WITH_EXPERTS, {"float32": "packed", "int8": "packed"}),
    "gemma": (replace(TINY, **GEMMA), {"float32": "bfloat16", "int8": "int8"}),
}
"""Targets of other families, and their dtype in each arithmetic."""
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


class Integers:
    """bfloat16 weights that are small integers over a power of two, drawn one after the other."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def norm(self, size: int) -> Array:
        return ((64 + self._whole(size)) / np.float32(64)).astype(FLOATS["bfloat16"])

    def matrix(self, *shape: int) -> Parts:
        return (in_memory((self._whole(*shape) / np.float32(96)).astype(FLOATS["bfloat16"])),)

    def layer(
        self, config: ModelConfig, inputs: int, hidden_norm: Array | None = None, window: int = 0
    ) -> LayerWeights:
        H, inner, q = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
        kv = config.num_kv_heads * config.head_dim
        qkv, o = self.matrix(q + 2 * kv, inputs), self.matrix(H, q)
        q_norm, k_norm = [self.norm(config.head_dim) for _ in "qk"] if config.qk_norm else [None, None]
        attention = AttentionWeights(qkv, o, q_norm=q_norm, k_norm=k_norm, window=window)
        mlp: DenseWeights | MoeWeights = (
            self.mixture(config, config.experts)
            if config.experts
            else DenseWeights(self.matrix(2 * inner, H), self.matrix(H, inner))
        )
        norms = self.norm(H), self.norm(H), hidden_norm
        return LayerWeights(attention, mlp, *norms, *([self.norm(H), self.norm(H)] if config.output_norms else []))

    def mixture(self, config: ModelConfig, experts: Experts) -> MoeWeights:
        """Experts in MXFP4, with scales of 2^-8 to 2^-6."""
        H, inner, count = config.hidden_size, config.intermediate_size, experts.count

        def blocks(rows: int, inputs: int) -> Parts:
            found = self.rng.integers(0, 256, (count, rows, inputs // 32, 17)).astype(np.uint8)
            found[..., 0] = 120 + found[..., 0] % 3
            return tuple(in_memory(each.reshape(rows, -1), "MXFP4") for each in found)

        router = self.matrix(count, H)
        biases = (self._whole(*shape) / np.float32(96) for shape in ((count,), (count, 2 * inner), (count, H)))
        return MoeWeights(router, blocks(2 * inner, H), blocks(H, inner), *biases)

    def _whole(self, *shape: int) -> Float32:
        return self.rng.integers(-24, 25, shape).astype(np.float32)


def golden_target(config: ModelConfig = TINY) -> ModelWeights:
    of, H = Integers(0), TINY.hidden_size
    embed, final_norm, head = of.matrix(TINY.vocab_size, H), of.norm(H), of.matrix(TINY.vocab_size, H)
    layers = tuple(of.layer(config, H, window=config.window(i)) for i in range(TINY.num_layers))
    return ModelWeights(config, embed, layers, final_norm, head, TINY_CAPTURE)


def golden_draft(target: ModelWeights) -> DraftWeights:
    of, config, H, num_ids = Integers(1), TINY_DRAFT.model, TINY_DRAFT.model.hidden_size, TINY_DRAFT.draft_vocab_size
    of.matrix(config.vocab_size, H)  # an embedding of its own, in whose place the target's stands
    fc, hidden_norm, norm, head = of.matrix(H, 3 * H), of.norm(H), of.norm(H), of.matrix(num_ids, H)
    layer = of.layer(config, 2 * H, hidden_norm)
    model = ModelWeights(config, target.embed, (layer,), norm, head, is_draft=True)
    return DraftWeights(TINY_DRAFT, model, fc, np.arange(num_ids, dtype=np.int64))


def golden_llm(dtype: str, arithmetic: str, config: ModelConfig = TINY, kv_dtype: str = "auto") -> LLM:
    target = golden_target(config)
    models = from_weights(target, golden_draft(target), None, Loading(dtype, arithmetic, kv_dtype), Environment.read())
    return LLM.from_models(models, engine_config(4))


def observe(
    dtype: str = "bfloat16", arithmetic: str = "float32", config: ModelConfig = TINY, kv_dtype: str = "auto"
) -> dict[str, object]:
    llm = golden_llm(dtype, arithmetic, config, kv_dtype)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, TINY.vocab_size, n).tolist() for n in (70, 3)]
    found: dict[str, object] = {}
    for name, sampling in SAMPLINGS.items():
        result = llm.run(prompts, sampling, drafting=Chain(3))
        found[name] = [o.token_ids for o in result.outputs]
    llm.run([prompts[0]], SamplingParams(max_tokens=1), drafting=NoDraft())
    backend, model = llm.engine.backend, llm.models.pair.target_model
    logits = model.logits(backend.hidden, np.array([len(prompts[0]) % llm.engine.config.row_budget - 1], np.int32))
    found["logits_sha256"] = hashlib.sha256(np.ascontiguousarray(logits).tobytes()).hexdigest()
    return found


@pytest.fixture
def restored_isa() -> Iterator[None]:
    yield
    calls.select_isa(Environment.read().isa)


def choose_isa(isa: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load what comes with this instruction set, or skip where the CPU lacks it."""
    library = native.load()
    assert library is not None
    if isa not in library.available_isas():
        pytest.skip(f"this CPU has {', '.join(library.available_isas())}")
    monkeypatch.setenv("AQUILINE_ISA", isa)
    monkeypatch.setenv("AQUILINE_THREADS", str(threads))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2])
def test_every_path_reproduces_the_golden_run(
    isa: str, threads: int, restored_isa: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_isa(isa, threads, monkeypatch)
    assert observe() == json.loads(GOLDEN.read_text()), f"{isa} with {threads} threads differs from the golden run"


@pytest.mark.parametrize("isa", [pytest.param(i, marks=[] if "amx" in i else [pytest.mark.rare]) for i in ISAS])
def test_every_path_reproduces_the_golden_run_of_tiles(
    isa: str, restored_isa: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_isa(isa, 2, monkeypatch)
    expected = json.loads(GOLDEN.with_name("golden_tiles.json").read_text())
    assert observe(arithmetic="bfloat16_tiles") == expected, f"{isa} differs from the golden run"


def is_rare(isa: str, arithmetic: str) -> bool:
    """Whether a golden run of a family is left to test-all: where it takes long, and where the dense run, whose kernels
    these are, holds the float32 path each time."""
    return isa == "portable" or (arithmetic == "float32" and isa not in ("avx512_vnni", "neon_dot"))


@pytest.mark.parametrize(
    ("isa", "arithmetic"),
    [
        pytest.param(isa, arithmetic, marks=[pytest.mark.rare] if is_rare(isa, arithmetic) else [])
        for isa in ISAS
        for arithmetic in ("float32", "int8")
    ],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_path_reproduces_the_golden_run_of_a_family(
    name: str, isa: str, arithmetic: str, restored_isa: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_isa(isa, 2, monkeypatch)
    config, dtypes = FAMILIES[name]
    expected = json.loads(GOLDEN.with_name(f"golden_{name}.json").read_text())[arithmetic]
    assert observe(dtypes[arithmetic], arithmetic, config) == expected, f"{isa} differs from the golden run"
