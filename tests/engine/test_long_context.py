"""Long contexts: speculation behind 8K to 64K tokens gives the baseline's text, whatever the tails."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import numpy as np
import pytest
import torch
from tests.conftest import TINY, TINY_DRAFT, engine_config, from_modules, needs_native, round_to, tiny_pair
from tests.engine.oracle import teach
from tests.engine.test_exact import BASELINE, SPECS, check_accounting, tokens

from aquiline.config import EngineConfig, Environment, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.model import LoadedModels, Loading
from aquiline.models.model_config import DraftConfig
from aquiline.spec.drafting import Static

pytestmark = needs_native

PARAMS = SamplingParams(max_tokens=40, temperature=0.9, seed=11, ignore_eos=True)
CONTEXTS = [8192, *(pytest.param(n, marks=pytest.mark.slow) for n in (16384, 32768, 65536))]
BEFORE = (64, 37, 17, 1)
"""Prompts end so many tokens before the context: whole pages, and ragged; 40 tokens on they have crossed its end, which
is the end of a page (64), of a block of attention (64) and of a span (512)."""

LONG = dataclasses.replace(TINY, hidden_size=32, intermediate_size=32, num_layers=2, num_heads=2, num_kv_heads=1,
                           max_positions=65536 + 64)  # fmt: skip
LONG_DRAFT = DraftConfig(
    model=dataclasses.replace(LONG, num_layers=1), draft_vocab_size=TINY_DRAFT.draft_vocab_size,
    target_hidden_size=32, capture=(0, 1),
)  # fmt: skip


@lru_cache
def models() -> LoadedModels:
    decoder, head = tiny_pair(0, LONG, LONG_DRAFT)
    for module in (decoder, head):
        round_to(module, torch.bfloat16)
    return from_modules(decoder, head, None, Loading("bfloat16"), Environment.read())


def text(context: int) -> list[int]:
    return np.random.default_rng(context).integers(1, LONG.vocab_size, context).tolist()


@lru_cache
def read_llm(context: int, cache_fraction: float) -> LLM:
    """An LLM that has read the context once: its pages, with draft keys, are in the prefix cache."""
    llm = LLM.from_models(models(), EngineConfig(
        max_batch=2, page_size=64, row_budget=512, cache_fraction=cache_fraction, max_context=context + 64,
    ))  # fmt: skip
    result = llm.run([text(context)], dataclasses.replace(PARAMS, max_tokens=1), drafting=SPECS["chain5"])
    assert result.summary.num_prefill_tokens == context
    return llm


@lru_cache
def expected(context: int) -> dict[int, list[int]]:
    """The baseline's text by prompt length; the longest prompt's is also read in other chunks and pages, uncached."""
    config = engine_config(1, 100, page_size=16, check=False, max_context=context + 64)
    fresh = LLM.from_models(models(), config)
    whole = fresh.run([text(context)[: context - BEFORE[-1]]], PARAMS, drafting=BASELINE)
    found = {}
    for before in BEFORE:
        prompt = text(context)[: context - before]
        result = read_llm(context, 0.75).run([prompt], PARAMS, drafting=BASELINE)
        assert result.summary.counters.num_prefix_hits == len(prompt) // 64 * 64
        found[len(prompt)] = tokens(result)[0]
    assert found[context - BEFORE[-1]] == tokens(whole)[0]
    return found


@pytest.mark.parametrize("cache_fraction", [0.75, 0.9])
@pytest.mark.parametrize("context", CONTEXTS)
def test_speculation_behind_a_long_context_gives_the_baseline(context: int, cache_fraction: float) -> None:
    llm = read_llm(context, cache_fraction)
    assert llm.engine.config.cache_fraction == cache_fraction
    for length, truth in expected(context).items():
        prompt = text(context)[:length]
        for name in ("none", "chain2", "chain3", "chain4", "chain5", "static", "dynamic"):
            result = llm.run([prompt], PARAMS, drafting=SPECS.get(name, BASELINE))
            assert tokens(result) == [truth], f"{name} behind {length} tokens"
            assert result.summary.counters.num_prefix_hits == length // 64 * 64
            check_accounting(result)
    llm.engine.pool.check()
    assert llm.engine.pool.num_available == llm.engine.pool.num_pages


@pytest.mark.parametrize("num_drafts", [2, 3, 4, 5])
@pytest.mark.parametrize("context", CONTEXTS)
def test_rollbacks_of_every_length_across_the_ends_of_pages(context: int, num_drafts: int) -> None:
    """Drafts that are right to a depth that changes from step to step, as chains and as trees that are moved; both
    slots in one batch."""
    llm = read_llm(context, 0.75)
    lengths = sorted(expected(context))
    paths = tuple((*(1,) * level, rank) for level in range(num_drafts) for rank in (0, 1))
    tree = Static(paths)
    teach(llm, [[*text(context)[:length], *expected(context)[length]] for length in lengths])
    for drafting in (SPECS[f"chain{num_drafts}"], tree):
        for pair in (lengths[:2], lengths[2:]):
            batch = [text(context)[:length] for length in pair]
            result = llm.run(batch, PARAMS, drafting=drafting)
            assert tokens(result) == [expected(context)[length] for length in pair], (
                f"{drafting.label} behind {pair} tokens"
            )
            assert 0 < result.summary.counters.acceptance_rate < 1
            check_accounting(result)


@pytest.mark.parametrize("context", CONTEXTS)
def test_the_last_position_of_a_long_context(context: int) -> None:
    llm = read_llm(context, 0.9)
    prompt = text(context)[: context - 1]
    params = dataclasses.replace(PARAMS, max_tokens=65)
    assert llm.engine.max_context == len(prompt) + 65
    truth = tokens(llm.run([prompt], params, drafting=BASELINE))
    for name in ("chain5", "dynamic"):
        result = llm.run([prompt], params, drafting=SPECS[name])
        assert tokens(result) == truth and result.outputs[0].finish_reason == "length"
    with pytest.raises(ValueError, match=f"exceeds the {context + 64} positions there are"):
        llm.run([prompt], dataclasses.replace(params, max_tokens=66))
