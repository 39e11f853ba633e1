"""The prefix cache under speculation (MISSION B2): as many hits as without, no block dropped, drafts as after a full
prefill."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import numpy as np
import pytest
from tests.conftest import TINY, needs_native, tiny_llm
from tests.engine.driving import words
from tests.engine.oracle import Oracle
from tests.engine.test_draft_state import COMB, FickleChain, FickleTree, stored
from tests.engine.test_exact import BASELINE, SPECS, tokens

from aquiline.config import SamplingParams, SpecConfig
from aquiline.engine.llm import LLM, Output
from aquiline.engine.sequence import Sequence

pytestmark = needs_native

PAGE = 16
PARAMS = SamplingParams(max_tokens=41, temperature=0.8, seed=9, ignore_eos=True)
NAMES = ("chain4", "static", "dynamic")


def caching_llm(**settings: int) -> LLM:
    return tiny_llm("float32", prefix_cache=True, **settings)  # type: ignore[arg-type]


ROOMY = 400
"""Pages that hold all that the conversations say: what is dropped for want of room depends on how far steps reach."""


def chat(llm: LLM, spec: SpecConfig, lengths: tuple[int, ...], sampling: SamplingParams) -> list[list[Output]]:
    """Conversations that share a system prompt, one per length of first message; each turn's prompt is all that was
    said before and a few new tokens. Outputs per turn."""
    texts = [[*words(37), *words(length, length)] for length in lengths]
    turns = []
    for turn in range(4):
        turns.append(llm.run(texts, sampling, spec=spec).outputs)
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
    spec = BASELINE if name == "none" else SPECS[name]
    prompt = words(num_pages * PAGE)
    llm = caching_llm()
    first, again = (llm.run([prompt], PARAMS, spec=spec) for _ in range(2))
    assert (first.outputs[0].metrics.num_prefix_hits, again.outputs[0].metrics.num_prefix_hits) == (0, len(prompt))
    assert again.summary.counters.prefix_hit_rate == 1
    assert again.summary.num_prefill_tokens == 1, "its last row runs again, for the token it draws"
    assert tokens(first) == tokens(again) == tokens(tiny_llm("float32").run([prompt], PARAMS, spec=BASELINE))


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


def until_decoding(llm: LLM, prompt: list[int], spec: SpecConfig) -> Sequence:
    sequence = llm.engine.add(llm.request(0, prompt, PARAMS, spec))
    while not sequence.output_ids:
        llm.engine.step()
    return sequence


def keys_and_values(llm: LLM, sequence: Sequence, first_draft_key: int, end: int) -> list[np.ndarray]:
    """The target's of the first `end` tokens, and the draft's: row j stands at j + 1, and what the last step accepted
    is written at the start of the next one."""
    stepper, table = llm.engine.stepper, llm.engine.pool.table
    assert stepper.session is not None
    draft = stored(stepper.session.kv, table, sequence.slot, first_draft_key, sequence.draft_end)
    return [*stored(stepper.kv, table, sequence.slot, 0, end), *draft]


def assert_same_state(one: LLM, ours: Sequence, other: LLM, theirs: Sequence, end: int, first_key: int = 1) -> None:
    """The same keys and values, bit for bit, of `end` tokens; the draft's from first_key on."""
    assert ours.draft_end == theirs.draft_end > first_key
    a, b = (keys_and_values(llm, s, first_key, end) for llm, s in ((one, ours), (other, theirs)))
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True)), f"keys or values of {end} tokens"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("extra", [0, 1, 15, 40])
def test_drafts_resume_as_after_a_full_prefill(name: str, extra: int) -> None:
    """The pages that are hit were written partly by a prefill, partly by speculation that was right to every depth and
    moved what it accepted; `extra` new tokens follow a whole number of pages."""
    kind, spec = (FickleChain, SPECS["chain4"]) if name == "chain4" else (FickleTree, COMB)
    llm, other = caching_llm(), tiny_llm("float32")
    prompt = words(21)
    truth = [*prompt, *other.run([prompt], PARAMS, spec=BASELINE).outputs[0].token_ids]
    llm.engine.drafters[spec] = kind(4, {0: truth}, TINY.vocab_size)
    filling = llm.run([prompt], PARAMS, spec=spec)
    assert 0 < filling.summary.counters.acceptance_rate < 1 and tokens(filling)[0] == truth[21:]
    if name == "chain4":
        del llm.engine.drafters[spec]
    again = [*truth[:48], *words(extra, 5)]
    ours, theirs = (until_decoding(one, again, SPECS[name]) for one in (llm, other))
    assert (ours.num_hit, theirs.num_hit) == (48, 0)
    num_steps = 0
    while llm.engine.is_busy:
        assert_same_state(llm, ours, other, theirs, ours.num_cached)
        for one in (llm, other):
            one.engine.step()
        a, b = llm.engine.last, other.engine.last
        assert a is not None and b is not None
        assert a.tree.tokens.tolist() == b.tree.tokens.tolist(), f"proposals of step {num_steps}"
        assert ours.tokens == theirs.tokens
        num_steps += 1
    assert num_steps >= 8 and not other.engine.is_busy


@pytest.mark.parametrize("num_drafts", [1, 4])
@pytest.mark.parametrize("max_tokens", range(9, 20))
def test_pages_of_a_sequence_that_ends_around_a_page_s_end_have_draft_keys(max_tokens: int, num_drafts: int) -> None:
    """21 + max_tokens - 1 tokens have keys: from two before the end of the second page to eight after it. The last
    step's accepted tokens, cut or not, have reached the target's keys and not yet the draft's."""
    llm, other = caching_llm(), tiny_llm("float32")
    spec = SPECS[f"chain{num_drafts}"]
    prompt = words(21)
    truth = [*prompt, *other.run([prompt], PARAMS, spec=BASELINE).outputs[0].token_ids]
    llm.engine.drafters[spec] = Oracle(num_drafts, {0: truth}, TINY.vocab_size)
    output = llm.run([prompt], dataclasses.replace(PARAMS, max_tokens=max_tokens), spec=spec).outputs[0]
    said = [*prompt, *output.token_ids]
    assert said == truth[: 21 + max_tokens]
    assert llm.engine.prefix is not None and llm.engine.stepper.session is not None
    nodes = llm.engine.prefix.match(said)
    assert len(nodes) == (len(said) - 1) // PAGE and all(node.has_draft for node in nodes)
    fresh = until_decoding(other, truth[:60], spec)
    assert other.engine.stepper.session is not None
    end, pages = len(nodes) * PAGE, np.array([[node.page for node in nodes]], np.int32)
    for ours, theirs, first in (
        (llm.engine.stepper.kv, other.engine.stepper.kv, 0),
        (llm.engine.stepper.session.kv, other.engine.stepper.session.kv, 1),
    ):
        a, b = stored(ours, pages, 0, first, end), stored(theirs, other.engine.pool.table, fresh.slot, first, end)
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("extra", [0, 1, 20])
def test_pages_computed_without_speculation_are_hit_and_drafts_start_behind_them(name: str, extra: int) -> None:
    llm, other = caching_llm(), tiny_llm("float32")
    prompt = words(48)
    llm.run([prompt], dataclasses.replace(PARAMS, max_tokens=1), spec=BASELINE)
    prompt = [*prompt, *words(extra, 5)]
    ours, theirs = (until_decoding(one, prompt, SPECS[name]) for one in (llm, other))
    assert ours.num_hit == 48 and llm.engine.stepper.slots.first_draft_key[ours.slot] == 48
    for one in (llm, other):
        one.engine.step()
    assert_same_state(llm, ours, other, theirs, len(prompt), first_key=48)


@pytest.mark.parametrize("name", NAMES)
def test_text_after_pages_computed_without_speculation(name: str) -> None:
    llm = caching_llm()
    prompt = words(48)
    expected = llm.run([prompt], PARAMS, spec=BASELINE)
    for text in (prompt, [*prompt, 7], [*prompt, *tokens(expected)[0], 7]):
        plain = tiny_llm("float32").run([text], PARAMS, spec=BASELINE)
        result = llm.run([text], PARAMS, spec=SPECS[name])
        assert tokens(result) == tokens(plain)
        assert result.summary.counters.num_prefix_hits == (80 if len(text) > 49 else 48)
        assert result.summary.counters.num_draft_tokens > 0


@pytest.mark.parametrize("name", NAMES)
def test_drafts_read_no_key_that_no_draft_has_written(name: str) -> None:
    prompt, proposals = words(53), []
    for garbage in (0.0, 1e4, float("nan")):
        llm = caching_llm()
        llm.run([prompt[:48]], dataclasses.replace(PARAMS, max_tokens=1), spec=BASELINE)
        assert llm.engine.stepper.session is not None
        for storage in (llm.engine.stepper.session.kv.k, llm.engine.stepper.session.kv.v):
            storage.fill_(garbage)
        sequence = until_decoding(llm, prompt, SPECS[name])
        assert sequence.num_hit == 48
        seen = []
        while llm.engine.is_busy:
            llm.engine.step()
            assert llm.engine.last is not None
            seen.append(llm.engine.last.tree.tokens.tolist())
        proposals.append(seen)
    assert proposals[0] == proposals[1] == proposals[2]


def test_drafts_start_behind_the_last_page_that_has_no_draft_keys() -> None:
    llm = caching_llm()
    text = words(96)
    for end, spec in ((32, SPECS["chain4"]), (64, BASELINE), (96, SPECS["chain4"])):
        llm.run([text[:end]], dataclasses.replace(PARAMS, max_tokens=1), spec=spec)
    assert llm.engine.prefix is not None
    nodes = llm.engine.prefix.match(text)
    assert [node.has_draft for node in nodes] == [True, True, False, False, True, True]
    other = tiny_llm("float32")
    ours, theirs = (until_decoding(one, [*text, 5], SPECS["chain4"]) for one in (llm, other))
    assert llm.engine.stepper.slots.first_draft_key[ours.slot] == 64
    assert_same_state(llm, ours, other, theirs, 97, first_key=64)


@pytest.mark.parametrize("drafts_first", [True, False])
def test_of_two_that_compute_the_same_pages_the_one_with_draft_keys_is_kept(drafts_first: bool) -> None:
    """Both are admitted in one step, before either could find the other's pages, and end in it."""
    llm = caching_llm()
    specs = [SPECS["chain4"], BASELINE] if drafts_first else [BASELINE, SPECS["chain4"]]
    for number, spec in enumerate(specs):
        llm.engine.add(llm.request(number, words(20), dataclasses.replace(PARAMS, max_tokens=1), spec))
    while llm.engine.is_busy:
        llm.engine.step()
    assert llm.engine.prefix is not None
    assert [node.has_draft for node in llm.engine.prefix.match(words(20))] == [True]
    assert len(llm.engine.pool.idle) == 1, "the other's page is free"
    again = until_decoding(llm, words(20), SPECS["chain4"])
    assert again.num_hit == 16 and llm.engine.stepper.slots.first_draft_key[again.slot] == 1


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
