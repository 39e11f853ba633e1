"""The prefix cache under speculation: as many hits as without, no block dropped. What the draft makes of
a hit: test_prefix_drafts.py."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import pytest
from tests.conftest import needs_native, tiny_llm
from tests.engine.driving import words
from tests.engine.storage import fill
from tests.engine.test_exact import BASELINE, SPECS, tokens

from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM, Output
from aquiline.spec.drafting import Drafting

pytestmark = needs_native

PAGE = 16
PARAMS = SamplingParams(max_tokens=41, temperature=0.8, seed=9, ignore_eos=True)
NAMES = ("chain4", "static", "dynamic")


def caching_llm(**settings: int) -> LLM:
    """Its storage begins as NaN: what nobody has written must not be read, nor be right by chance."""
    sizes = {"max_batch": 2, "num_pages": 44} | settings
    llm = tiny_llm("float32", prefix_cache=True, **sizes)  # type: ignore[arg-type]
    fill(llm, float("nan"))
    return llm


ROOMY = 400
"""Pages that hold all that the conversations say: what is dropped for want of room depends on how far steps reach."""


def chat(llm: LLM, drafting: Drafting, lengths: tuple[int, ...], sampling: SamplingParams) -> list[list[Output]]:
    """Conversations that share a system prompt, one per length of first message; each turn's prompt is all that was
    said before and a few new tokens. Outputs per turn."""
    texts = [[*words(37), *words(length, length)] for length in lengths]
    turns = []
    for turn in range(3):
        turns.append(llm.run(texts, sampling, drafting=drafting).outputs)
        texts = [[*o.prompt_ids, *o.token_ids, *words(3 + 5 * turn, turn)] for o in turns[-1]]
    return turns


@lru_cache
def plain_chat(lengths: tuple[int, ...], max_batch: int) -> list[list[Output]]:
    return chat(caching_llm(max_batch=max_batch, num_pages=ROOMY), BASELINE, lengths, PARAMS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_batch", [1, 3])
def test_speculation_hits_as_often_as_decoding_alone(name: str, max_batch: int) -> None:
    lengths = (1, 9, 11, 27, 40)
    plain = plain_chat(lengths, max_batch)
    ours = chat(caching_llm(max_batch=max_batch, num_pages=ROOMY), SPECS[name], lengths, PARAMS)
    for turn, (a, b) in enumerate(zip(plain, ours, strict=True)):
        assert [o.token_ids for o in a] == [o.token_ids for o in b]
        hits = [[o.metrics.num_prefix_hits for o in outputs] for outputs in (a, b)]
        assert hits[0] == hits[1], f"turn {turn}: {hits[0]} alone, {hits[1]} with {name}"
        if turn:
            said = [len(o.prompt_ids) + len(o.token_ids) for o in plain[turn - 1]]
            # The last token of an output is never read: it has no keys, nor has the page that it would fill.
            assert hits[1] == [(n - 1) // PAGE * PAGE for n in said]
    assert sum(o.metrics.num_prefix_hits for o in ours[0]) > 0, "later conversations start with the same system prompt"


@pytest.mark.parametrize("name", ["chain4", "dynamic"])
def test_a_pool_too_small_for_all_that_was_said_changes_hits_and_no_token(name: str) -> None:
    lengths = (1, 9, 11, 27, 40)
    plain = plain_chat(lengths, 3)
    llm = caching_llm(max_batch=3, num_pages=36)
    ours = chat(llm, SPECS[name], lengths, PARAMS)
    assert [[o.token_ids for o in turn] for turn in ours] == [[o.token_ids for o in turn] for turn in plain]
    hits = [sum(o.metrics.num_prefix_hits for turn in turns for o in turn) for turns in (ours, plain)]
    assert 0 < hits[0] < hits[1]
    assert llm.engine.pool.num_available == 36


@pytest.mark.parametrize("name", ["none", *NAMES])
@pytest.mark.parametrize("num_pages", [1, 3])
def test_a_prompt_of_whole_pages_is_a_hit_to_its_last_token(name: str, num_pages: int) -> None:
    drafting = BASELINE if name == "none" else SPECS[name]
    prompt = words(num_pages * PAGE)
    llm = caching_llm()
    first, again = (llm.run([prompt], PARAMS, drafting=drafting) for _ in range(2))
    assert (first.outputs[0].metrics.num_prefix_hits, again.outputs[0].metrics.num_prefix_hits) == (0, len(prompt))
    assert again.summary.counters.prefix_hit_rate == 1
    assert again.summary.num_prefill_tokens == 1, "its last row runs again, for the token it draws"
    assert tokens(first) == tokens(again) == tokens(tiny_llm("float32").run([prompt], PARAMS, drafting=BASELINE))


def test_a_hit_ends_at_the_last_whole_page_of_the_prompt() -> None:
    llm = caching_llm()
    llm.run([words(64)], PARAMS)
    for length, hit in ((15, 0), (16, 16), (17, 16), (31, 16), (32, 32), (63, 48), (64, 64), (65, 64)):
        output = llm.run([words(65)[:length]], PARAMS).outputs[0]
        assert output.metrics.num_prefix_hits == hit, f"prompt of {length}"
    changed = words(64)
    changed[20] += 1
    assert llm.run([changed], PARAMS).outputs[0].metrics.num_prefix_hits == 16


def test_a_running_sequence_s_pages_are_hit() -> None:
    llm = caching_llm()
    first = llm.engine.add(llm.request("first", words(50), PARAMS, SPECS["chain4"]))
    while not first.output_ids:
        llm.engine.step()
    second = llm.engine.add(llm.request("second", words(50), PARAMS, SPECS["chain4"]))
    llm.engine.step()
    assert second.num_hit == 48 and llm.engine.pool.owned[second.slot][:3] == llm.engine.pool.owned[first.slot][:3]
    while llm.engine.is_busy:
        llm.engine.step()
    assert first.output_ids == second.output_ids


@pytest.mark.parametrize("name", NAMES)
def test_text_after_pages_computed_without_speculation(name: str) -> None:
    llm = caching_llm()
    prompt = words(48)
    expected = llm.run([prompt], PARAMS, drafting=BASELINE)
    for text in (prompt, [*prompt, 7], [*prompt, *tokens(expected)[0], 7]):
        plain = tiny_llm("float32").run([text], PARAMS, drafting=BASELINE)
        result = llm.run([text], PARAMS, drafting=SPECS[name])
        assert tokens(result) == tokens(plain)
        assert result.summary.counters.num_prefix_hits == (80 if len(text) > 49 else 48)
        assert result.summary.counters.num_draft_tokens > 0


def test_prompts_whose_logprobs_are_asked_for_are_computed_whole() -> None:
    llm = caching_llm()
    prompt = words(48)
    expected = llm.run([prompt], PARAMS)
    asked = llm.run([prompt], dataclasses.replace(PARAMS, prompt_logprobs=0))
    assert asked.outputs[0].metrics.num_prefix_hits == 0 and asked.summary.num_prefill_tokens == 48
    assert tokens(asked) == tokens(expected)
    assert llm.run([prompt], PARAMS).outputs[0].metrics.num_prefix_hits == 48, "its pages do not displace the others"
    pool = llm.engine.pool
    assert pool.num_free + len(pool.idle) == pool.num_pages and len(pool.idle) == (48 + 40) // PAGE


def test_switched_off_it_keeps_nothing() -> None:
    llm = tiny_llm("float32")
    for _ in range(2):
        assert llm.run([words(48)], PARAMS).summary.counters.num_prefix_hits == 0
    assert llm.engine.pool.num_free == llm.engine.pool.num_pages
