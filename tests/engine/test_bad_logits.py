"""Logits that are not numbers end the request that met them, and nothing else."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import numpy as np
import pytest
import torch
from tests.conftest import TINY, engine_config, from_modules, needs_native, round_to, tiny_pair
from tests.engine.oracle import Known
from tests.engine.test_exact import BASELINE, SPECS

from aquiline.config import Environment, SamplingParams
from aquiline.engine.llm import LLM, Output
from aquiline.engine.model import LoadedModels, Loading
from aquiline.errors import NumericalError

pytestmark = needs_native

POISON = 7
"""The token whose embedding is NaN, in target and draft: whoever reads it, in a prompt or as drawn, gets no numbers."""

PARAMS = SamplingParams(max_tokens=20, temperature=0.9, seed=11, ignore_eos=True, logit_bias={POISON: -np.inf})
NAMES = ("none", "chain4", "static", "dynamic", "dynamic-60-5-10")


@lru_cache
def poisoned_models() -> LoadedModels:
    decoder, head = tiny_pair()
    for module in (decoder, head):
        round_to(module, torch.bfloat16)
        module.embed.data[POISON] = float("nan")
    return from_modules(decoder, head, None, Loading("bfloat16"), Environment.read())


def poisoned_llm(max_batch: int = 4, prefix_cache: bool = False) -> LLM:
    return LLM.from_models(poisoned_models(), engine_config(max_batch, prefix_cache=prefix_cache))


def words(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(POISON + 1, TINY.vocab_size, count).tolist()


def outputs(llm: LLM, batch: list[list[int]], name: str, each: list[SamplingParams] | None = None) -> list[Output]:
    drafting = SPECS.get(name, BASELINE)
    requests = [llm.request(i, p, (each or [PARAMS] * len(batch))[i], drafting) for i, p in enumerate(batch)]
    found = {output.request_id: output for output in llm.outputs(requests)}
    return [found[i] for i in range(len(batch))]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", [0, 16, 29])
def test_a_prompt_that_cannot_be_read_ends_alone(name: str, place: int) -> None:
    llm = poisoned_llm()
    good = [words(n, n) for n in (5, 16, 33)]
    expected = [o.token_ids for o in outputs(llm, good, "none")]
    bad = words(30)
    bad[place] = POISON
    found = outputs(llm, [good[0], bad, good[1], good[2], bad], name)
    assert [o.finish_reason for o in found] == ["length", "error", "length", "length", "error"]
    assert [found[i].token_ids for i in (0, 2, 3)] == expected
    for i in (1, 4):
        assert found[i].token_ids == [] and found[i].error == (
            f"request {i}: the target's logits at position 30 are NaN or have no finite value; check the checkpoint's "
            "weights and dtype, and whether logit_bias, bad_words, min_tokens and structured leave any token"
        )
    assert not llm.engine.is_busy and llm.engine.pool.num_free == llm.engine.pool.num_pages


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_pages_that_held_nan_serve_the_next_request(prefix_cache: bool) -> None:
    llm = poisoned_llm(1, prefix_cache)
    expected = outputs(poisoned_llm(4), [words(40)], "none")[0].token_ids
    bad = [*words(32), POISON, *words(60, 1)]
    for name in NAMES:
        assert outputs(llm, [bad], name)[0].finish_reason == "error"
        assert outputs(llm, [words(40)], name)[0].token_ids == expected, name


@pytest.mark.parametrize("name", NAMES)
def test_a_drawn_token_that_cannot_be_read_ends_its_text_alone(name: str) -> None:
    """POISON is drawn after a while; the step that reads it fails. The draft may propose it, and reads it too."""
    llm = poisoned_llm()
    batch = [words(n, n) for n in (5, 16, 33, 9)]
    tempted = dataclasses.replace(PARAMS, logit_bias={POISON: 3.0})
    each = [PARAMS, tempted, PARAMS, tempted]
    expected, found = outputs(llm, batch, "none", each), outputs(llm, batch, name, each)
    assert [o.finish_reason for o in expected] == ["length", "error", "length", "error"]
    for ours, plain in zip(found, expected, strict=True):
        assert (ours.token_ids, ours.finish_reason, ours.error) == (plain.token_ids, plain.finish_reason, plain.error)
        assert ours.finish_reason == "length" or ours.token_ids[-1] == POISON


@pytest.mark.parametrize("K", [1, 2, 3, 4])
@pytest.mark.parametrize("is_cut", [False, True])
def test_what_was_accepted_before_the_bad_logits_is_kept(K: int, is_cut: bool) -> None:
    """An oracle drafts POISON too, and what comes before it: the block whose last row has no numbers holds true tokens.
    Where max_tokens cuts the text right there, nothing is wrong with it."""
    llm = poisoned_llm()
    prompt = words(16, 16)
    tempted = dataclasses.replace(PARAMS, logit_bias={POISON: 3.0})
    truth = outputs(llm, [prompt], "none", [tempted])[0].token_ids
    assert len(truth) == 10 and truth[-1] == POISON
    params = dataclasses.replace(tempted, max_tokens=10 if is_cut else 20)
    plain = outputs(llm, [prompt], "none", [params])[0]
    assert (plain.token_ids, plain.finish_reason) == (truth, "length" if is_cut else "error")
    drafting = Known(((*prompt, *truth),), K, TINY.vocab_size)
    found = next(llm.outputs([llm.request(0, prompt, params, drafting)]))
    assert (found.finish_reason, found.token_ids, found.error) == (plain.finish_reason, truth, plain.error)
    assert len(found.by_draft) == len(found.token_ids) == found.metrics.num_prefilled + found.metrics.num_committed


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("limits", [(1, 1), (1, 30), (30, 1)])
def test_run_raises_and_the_engine_goes_on(limits: tuple[int, int]) -> None:
    """Beside the bad one, requests that end in the same step and such as run on."""
    llm = poisoned_llm()
    expected = outputs(llm, [words(9)], "none")[0].token_ids
    each = [PARAMS, *(dataclasses.replace(PARAMS, max_tokens=n) for n in limits)]
    with pytest.raises(NumericalError, match="request 0: the target's logits at position 1 are NaN"):
        llm.run([[POISON], words(5), words(6)], each)
    assert not llm.engine.is_busy and llm.engine.pool.num_free == llm.engine.pool.num_pages
    assert llm.run([words(9)], PARAMS).outputs[0].token_ids == expected
