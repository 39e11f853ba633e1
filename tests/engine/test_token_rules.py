"""min_tokens and bad_words: what they forbid never comes, and what is written is the same whatever drafts."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

import pytest
from tests.conftest import engine_config, needs_native, tiny_models, tiny_pair, weights_of
from tests.engine.logits import logits_of
from tests.engine.oracle import known
from tests.engine.test_exact import BASELINE, SPECS, check_accounting, prompts
from tests.engine.test_stops import letters

from aquiline.backends.torch.torch_pair import TorchPair
from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM, Output
from aquiline.engine.model import LoadedModels
from aquiline.spec.drafting import Drafting

WAYS = {"none": BASELINE} | {name: SPECS[name] for name in ("chain4", "static", "dynamic", "dynamic-60-5-10")}
BATCH = prompts(6)
GREEDY = SamplingParams(max_tokens=30)
SAMPLED = SamplingParams(max_tokens=30, temperature=1.2, top_p=0.95, presence_penalty=0.3, seed=8)
both = pytest.mark.parametrize(
    "sampling", [pytest.param(GREEDY, id="greedy", marks=pytest.mark.rare), pytest.param(SAMPLED, id="sampled")]
)


@lru_cache
def lettered(backend: str, late: bool | None = None) -> LLM:
    """Tokens are letters (tests/engine/test_stops.py)."""
    models = tiny_models("float32")
    if backend == "torch":
        models = LoadedModels(TorchPair(*weights_of(*tiny_pair()), "float32"), None, "float32", 0)
    return LLM.from_models(dataclasses.replace(models, tokenizer=letters()), engine_config(3, late_reads=late))


BACKENDS = [pytest.param("native", marks=needs_native), "torch"]


def outputs(backend: str, sampling: SamplingParams, drafting: Drafting = BASELINE) -> list[Output]:
    llm = lettered(backend)
    each = [dataclasses.replace(sampling, seed=i) for i in range(len(BATCH))]
    result = llm.run(BATCH, each, drafting=drafting)
    check_accounting(result)
    return result.outputs


def written(found: list[Output]) -> list[tuple[Any, ...]]:
    return [(o.token_ids, o.text, o.finish_reason) for o in found]


@both
@pytest.mark.parametrize("backend", BACKENDS)
def test_min_tokens_with_every_drafter(backend: str, sampling: SamplingParams) -> None:
    """No stop token before the output has so many; the first that may come ends the text, in a block or at its edge."""
    free = outputs(backend, dataclasses.replace(sampling, ignore_eos=True))
    stops = tuple({token for o in free for token in o.token_ids[:4]})  # texts would end at once
    for min_tokens in (0, 1, 2, 7, 23, 30) if backend == "native" else (0, 2, 7):
        params = dataclasses.replace(sampling, stop_token_ids=stops, min_tokens=min_tokens)
        expected = outputs(backend, params)
        for o in expected:
            early = o.token_ids[:min_tokens]
            assert not {*stops, 0} & {*early}, "a stop token that was forbidden"
            assert len(o.token_ids) >= min_tokens and (o.finish_reason == "stop" or len(o.token_ids) == 30)
        if min_tokens == 0:
            assert max(len(o.token_ids) for o in expected) < 6
        for name, drafting in WAYS.items():
            assert written(outputs(backend, params, drafting)) == written(expected), f"{name}, min_tokens={min_tokens}"


@both
@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_words_with_every_drafter(backend: str, sampling: SamplingParams) -> None:
    """Words of one to four letters that the target would have written are not; their letters apart still are."""
    free = [o.text for o in outputs(backend, sampling)]
    longest = max(free, key=len)
    assert len(longest) > 12
    words = (longest[4:6], longest[7:10], longest[8:12], free[0][:2], free[1][1])
    params = dataclasses.replace(sampling, bad_words=words)
    expected = outputs(backend, params)
    assert not any(word in o.text for o in expected for word in words)
    assert [o.text for o in expected] != free
    letters_of_words = {letter for word in words[:4] for letter in word[-1]} - {free[1][1]}
    assert any(letter in o.text for o in expected for letter in letters_of_words), "only whole words are bad"
    for name, drafting in WAYS.items():
        assert written(outputs(backend, params, drafting)) == written(expected), name


@needs_native
def test_bad_words_that_the_draft_knows_nothing_of() -> None:
    """Drafts that hold a bad word as the target would write it freely: accepted up to it, and not beyond."""
    llm = lettered("native")
    params = dataclasses.replace(GREEDY, ignore_eos=True)
    free = llm.run(BATCH, params, drafting=BASELINE)
    words = tuple(o.text[9:12] for o in free.outputs)
    params = dataclasses.replace(params, bad_words=words)
    expected = llm.run(BATCH, params, drafting=BASELINE).outputs
    for is_comb in (False, True):
        drafting = known(BATCH, llm.run(BATCH, params, drafting=BASELINE), 5, 96, is_comb=is_comb)
        found = llm.run(BATCH, params, drafting=drafting)
        assert written(found.outputs) == written(expected)
        assert found.summary.counters.tau > 4


@needs_native
def test_a_word_may_begin_in_the_prompt() -> None:
    llm = lettered("native")
    prompt = "abcdefg"
    first = llm.run([prompt], GREEDY, drafting=BASELINE).outputs[0]
    word = prompt[-2:] + first.text[0]
    other = llm.run([prompt], dataclasses.replace(GREEDY, bad_words=(word,)), drafting=BASELINE).outputs[0]
    assert other.text[0] != first.text[0]
    law = logits_of(llm.models, llm.encode(prompt))[-1]
    assert law.argsort()[::-1][:2].tolist() == [first.token_ids[0], other.token_ids[0]], "the next best instead"


@needs_native
def test_eos_is_forbidden_too_unless_it_is_ignored() -> None:
    """The target's own end (0, the letter '!') counts as a stop token; ignored, it may come at any place."""
    llm = lettered("native")
    pushed = dataclasses.replace(GREEDY, logit_bias={0: 100.0})
    assert [len(o.token_ids) for o in llm.run(BATCH, pushed).outputs] == [1] * len(BATCH)
    for drafting in WAYS.values():
        found = llm.run(BATCH, dataclasses.replace(pushed, min_tokens=6), drafting=drafting).outputs
        assert [o.token_ids.index(0) for o in found] == [6] * len(BATCH)
        ignored = dataclasses.replace(pushed, min_tokens=6, ignore_eos=True)
        assert all(o.token_ids == [0] * 30 for o in llm.run(BATCH, ignored, drafting=drafting).outputs)


def test_bad_words_need_a_tokenizer() -> None:
    llm = LLM.from_models(
        LoadedModels(TorchPair(*weights_of(*tiny_pair()), "float32"), None, "float32", 0), engine_config(1)
    )
    with pytest.raises(ValueError, match=r"bad_words=.*needs a tokenizer, and none is loaded"):
        llm.run([[5]], SamplingParams(max_tokens=3, bad_words=("a",)))
