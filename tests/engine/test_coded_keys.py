"""Keys and values in eight bits (kv_dtype="int8"): text by text as exact as every other storage."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import GEMMA, TINY, engine_config, from_modules, needs_native, round_to, tiny_pair
from tests.engine.driving import words
from tests.engine.storage import fill
from tests.engine.test_exact import BASELINE, SAMPLINGS, SPECS, check_accounting, prompts, tokens
from tests.engine.test_golden import choose_isa, observe, restored_isa

from aquiline.config import ISAS, Environment, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.model import LoadedModels, Loading
from aquiline.models.model_config import ModelConfig

__all__ = ["restored_isa"]

pytestmark = needs_native

GOLDEN = Path(__file__).with_name("golden_coded_keys.json")
CONFIGS = {
    "dense": TINY, "gemma": replace(TINY, **GEMMA),
    "sinks": replace(TINY, sinks=True, windows=(24, 0) * 2, qkv_bias=True, o_bias=True, mlp_bias=True),
}  # fmt: skip


@lru_cache
def models(name: str = "dense") -> LoadedModels:
    config: ModelConfig = CONFIGS[name]
    decoder, head = tiny_pair(7, config)
    for module in (decoder, head):
        round_to(module, torch.bfloat16)
    return from_modules(decoder, head, None, Loading("int8", "int8", "int8"), Environment(None, 1))


def coded_llm(name: str = "dense", max_batch: int = 3, row_budget: int = 48, **settings: int) -> LLM:
    return LLM.from_models(models(name), engine_config(max_batch, row_budget, **settings))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_drafter_gives_the_baseline(name: str) -> None:
    """Chains and trees, whose kept paths move; targets with windows, sinks, biased keys, norms of queries and keys."""
    sampling = SAMPLINGS["sampled"]
    llm = coded_llm(name)
    assert llm.models.pair.kv_dtype == "int8"
    expected = llm.run(prompts(8), sampling, drafting=BASELINE)
    for way, drafting in SPECS.items():
        result = llm.run(prompts(8), sampling, drafting=drafting)
        assert tokens(result) == tokens(expected), f"{way} differs from the baseline"
        check_accounting(result)


def test_batch_chunks_and_pages_change_nothing() -> None:
    sampling = SAMPLINGS["filtered"]
    expected = tokens(coded_llm().run(prompts(8), sampling, drafting=BASELINE))
    for max_batch, row_budget, page_size in ((1, 7, 16), (8, 1, 32), (8, 64, 64)):
        llm = coded_llm("dense", max_batch, row_budget, page_size=page_size)
        for way in ("chain4", "dynamic"):
            assert tokens(llm.run(prompts(8), sampling, drafting=SPECS[way])) == expected, (way, max_batch, row_budget)


def test_cached_pages_bring_their_scales() -> None:
    """Turns of a conversation with a prefix cache and without, in storage whose scales begin as NaN."""
    sampling = SamplingParams(max_tokens=30, temperature=0.8, seed=9, ignore_eos=True)
    texts = []
    for caches in (False, True):
        llm = coded_llm("dense", prefix_cache=caches)
        fill(llm, float("nan"))
        prompt = words(50)
        for turn in range(3):
            result = llm.run([prompt], sampling, drafting=SPECS["dynamic"])
            [output] = result.outputs
            prompt = [*output.prompt_ids, *output.token_ids, *words(5, turn)]
        texts.append(prompt)
        assert (result.summary.counters.num_prefix_hits > 0) == caches
    assert texts[0] == texts[1]


@given(
    st.sampled_from(list(CONFIGS)), st.lists(st.integers(1, 70), min_size=1, max_size=4), st.sampled_from(list(SPECS)),
    st.sampled_from((16, 32, 64)), st.integers(1, 5), st.integers(1, 64), st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=12)
def test_random_conversations(
    name: str, lengths: list[int], way: str, page_size: int, max_batch: int, row_budget: int, seed: int
) -> None:
    """Two turns of several conversations that share a beginning. The second turn begins with cached pages, whose keys
    were moved there with kept paths; all windows, sinks and ways to draft, storage whose scales begin as NaN."""
    sampling = SamplingParams(max_tokens=20, temperature=0.8, seed=seed, ignore_eos=True)
    texts = []
    for drafting, caches in ((BASELINE, False), (SPECS[way], True)):
        llm = coded_llm(name, max_batch, row_budget, page_size=page_size, prefix_cache=caches)
        fill(llm, float("nan"))
        batch = [[*words(40, seed), *words(length, i)] for i, length in enumerate(lengths)]
        for turn in range(2):
            outputs = llm.run(batch, sampling, drafting=drafting).outputs
            batch = [[*o.prompt_ids, *o.token_ids, *words(5, turn)] for o in outputs]
        texts.append(batch)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("isa", ISAS)
def test_every_path_reproduces_the_golden_run(isa: str, restored_isa: None, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_isa(isa, 2, monkeypatch)
    expected = json.loads(GOLDEN.read_text())
    assert observe("int8", "int8", kv_dtype="int8") == expected, f"{isa} differs from the golden run"
