"""Every way a text ends, inside an accepted block or at its edge: never a token too many."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tests.conftest import TINY, engine_config, needs_native, tiny_llm, tiny_models
from tests.engine.oracle import known
from tests.engine.test_exact import BASELINE, check_accounting, prompts, tokens
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM
from aquiline.spec.drafting import Chain
from aquiline.text.detokenizer import Detokenizer

pytestmark = needs_native

CHAIN = Chain(5)
GREEDY = SamplingParams(max_tokens=30, ignore_eos=True)
EMPTY = np.zeros(0, np.int32)


def letters(size: int = TINY.vocab_size) -> Tokenizer:
    """Token i is one printable character, the last one é, so that token positions in a text are plain."""
    vocab = {chr(33 + i): i for i in range(size - 1)} | {"é": size - 1}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def lettered_llm(max_batch: int = 8) -> LLM:
    loaded = dataclasses.replace(tiny_models(), tokenizer=letters())
    return LLM.from_models(loaded, engine_config(max_batch))


@pytest.mark.parametrize("limit", [1, 2, 5, 6, 7, 12, 13])
def test_max_tokens_at_every_place_of_a_block(limit: int) -> None:
    llm = tiny_llm()
    batch = prompts(4)
    full = llm.run(batch, GREEDY, drafting=BASELINE)
    params = dataclasses.replace(GREEDY, max_tokens=limit)
    result = llm.run(batch, params, drafting=known(batch, full, 5, TINY.vocab_size))
    assert tokens(result) == [t[:limit] for t in tokens(full)]
    assert {o.finish_reason for o in result.outputs} == {"length"}
    check_accounting(result)


@pytest.mark.parametrize("place", range(1, 14))
def test_a_stop_token_anywhere_in_a_block_ends_the_text_there(place: int) -> None:
    llm = tiny_llm()
    batch = prompts(3)[2:]
    full = llm.run(batch, GREEDY, drafting=BASELINE)
    out = tokens(full)[0]
    params = dataclasses.replace(GREEDY, stop_token_ids=(out[place], 95))
    result = llm.run(batch, params, drafting=known(batch, full, 5, TINY.vocab_size))
    assert tokens(result)[0] == out[: out.index(out[place]) + 1]
    assert result.outputs[0].finish_reason == "stop"
    assert tokens(llm.run(batch, params, drafting=BASELINE)) == tokens(result)
    check_accounting(result)


def test_eos_ends_and_ignore_eos_runs_on() -> None:
    llm = tiny_llm()
    batch = prompts(8)
    loose = {"temperature": 1.0, "seed": 4, "logit_bias": {0: 4.0}}
    free = tokens(llm.run(batch, dataclasses.replace(GREEDY, **loose), drafting=BASELINE))
    eos = TINY.eos_token_ids[0]
    assert any(eos in t for t in free), "the fixture should meet EOS"
    bound = dataclasses.replace(GREEDY, **loose, ignore_eos=False)
    for drafting in (BASELINE, CHAIN):
        result = llm.run(batch, bound, drafting=drafting)
        assert tokens(result) == [t[: t.index(eos) + 1] if eos in t else t for t in free]
        assert [o.finish_reason for o in result.outputs] == ["stop" if eos in t else "length" for t in free]


@pytest.mark.parametrize("start", range(12))
@pytest.mark.parametrize("width", [1, 2, 4])
def test_stop_strings_across_blocks_cut_the_text_before_them(start: int, width: int) -> None:
    llm = lettered_llm()
    batch = prompts(3)[2:]
    full = llm.run(batch, GREEDY, drafting=BASELINE)
    text = full.outputs[0].text
    assert len(text) == GREEDY.max_tokens
    stop = text[start : start + width]
    at = text.index(stop)
    params = dataclasses.replace(GREEDY, stop=(stop, "no such text"))
    result = llm.run(batch, params, drafting=known(batch, full, 5, TINY.vocab_size))
    assert result.outputs[0].text == text[:at]
    assert tokens(result)[0] == tokens(full)[0][: at + width]
    assert result.outputs[0].finish_reason == "stop"
    assert llm.run(batch, params, drafting=BASELINE).outputs[0].text == text[:at]
    check_accounting(result)


def test_deltas_add_up_to_the_output() -> None:
    llm = lettered_llm()
    seen: dict[int, list[int]] = {}
    result = llm.run(
        prompts(3), GREEDY, drafting=CHAIN, on_delta=lambda d: seen.setdefault(d.request_id, []).extend(d.token_ids)
    )
    assert list(seen.values()) == tokens(result)


def test_partial_stop_strings_are_held_back_and_released() -> None:
    detokenizer = Detokenizer(letters(), (), ("abcd", "cx"))
    ids = letters().get_vocab()
    assert detokenizer.add([ids["z"], ids["a"], ids["b"]]) == "z"
    assert detokenizer.add([ids["c"]]) == ""
    assert detokenizer.add([ids["y"]]) == "abcy"
    assert detokenizer.add([ids["c"]]) == ""
    assert detokenizer.add([ids["x"], ids["q"]]) == ""
    assert detokenizer.num_until_stop == 1
    assert detokenizer.finish() == ""
