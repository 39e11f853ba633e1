"""Drafts behind a prefix hit are those after a full prefill; where pages have no draft keys they start behind them
."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tests.conftest import needs_native, tiny_llm
from tests.engine.driving import words
from tests.engine.oracle import deepest, teach
from tests.engine.storage import draft_stored, first_draft_key, native, settle, target_stored
from tests.engine.test_draft_state import COMB
from tests.engine.test_exact import BASELINE, SPECS, tokens
from tests.engine.test_prefix_cache import NAMES, PAGE, PARAMS, caching_llm

from aquiline.engine.llm import LLM
from aquiline.engine.sequence import Sequence
from aquiline.spec.drafting import Drafting

pytestmark = needs_native


def until_decoding(llm: LLM, prompt: list[int], drafting: Drafting) -> Sequence:
    sequence = llm.engine.add(llm.request(0, prompt, PARAMS, drafting))
    while not sequence.output_ids:
        llm.engine.step()
    return sequence


def all_stored(llm: LLM, sequence: Sequence, first_draft_key: int, end: int) -> list[np.ndarray]:
    """The target's keys and values of the first `end` tokens, and the draft's: row j stands at j + 1, and what the last
    step accepted is written at the start of the next one."""
    pages = llm.engine.pool.owned[sequence.slot]
    return [
        *target_stored(llm.engine, pages, end),
        *draft_stored(llm.engine, pages, first_draft_key, sequence.draft_end),
    ]


def assert_same_state(one: LLM, ours: Sequence, other: LLM, theirs: Sequence, end: int, first_key: int = 1) -> None:
    """The same keys and values, bit for bit, of `end` tokens; the draft's from first_key on."""
    assert ours.draft_end == theirs.draft_end > first_key
    a, b = (all_stored(llm, s, first_key, end) for llm, s in ((one, ours), (other, theirs)))
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True)), f"keys or values of {end} tokens"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("extra", [0, 1, 15, 40])
def test_drafts_resume_as_after_a_full_prefill(name: str, extra: int) -> None:
    """The pages that are hit were written partly by a prefill, partly by speculation that was right to every depth and
    moved what it accepted; `extra` new tokens follow a whole number of pages."""
    drafting = SPECS["chain4"] if name == "chain4" else COMB
    llm, other = caching_llm(), tiny_llm("float32")
    prompt = words(21)
    truth = [*prompt, *other.run([prompt], PARAMS, drafting=BASELINE).outputs[0].token_ids]
    taught = teach(llm, [truth])
    filling = llm.run([prompt], PARAMS, drafting=drafting)
    assert 0 < filling.summary.counters.acceptance_rate < 1 and tokens(filling)[0] == truth[21:]
    llm.engine.backend = taught.inner
    again = [*truth[:48], *words(extra, 5)]
    ours, theirs = (until_decoding(one, again, SPECS[name]) for one in (llm, other))
    assert (ours.num_hit, theirs.num_hit) == (48, 0)
    num_steps = 0
    while llm.engine.is_busy:
        assert_same_state(llm, ours, other, theirs, ours.num_cached)
        for one in (llm, other):
            one.engine.step()
        a, b = llm.engine.pipeline.last, other.engine.pipeline.last
        assert a is not None and b is not None
        trees = [step.output.trees.drafted.tokens.tolist() for step in (a, b)]
        assert trees[0] == trees[1], f"proposals of step {num_steps}"
        assert ours.tokens == theirs.tokens
        num_steps += 1
    assert num_steps >= 8 and not other.engine.is_busy


def assert_published_pages(llm: LLM, said: list[int], other: LLM, fresh: Sequence) -> None:
    """Every page the cache has of a text holds what a sequence of another engine, which begins with it, has there."""
    settle(llm.engine)
    assert llm.engine.prefix is not None
    nodes = llm.engine.prefix.match(None, said)
    assert all(node.has_draft for node in nodes)
    end, pages = len(nodes) * PAGE, [node.page for node in nodes]
    theirs = other.engine.pool.owned[fresh.slot]
    for a, b in (
        (target_stored(llm.engine, pages, end), target_stored(other.engine, theirs, end)),
        (draft_stored(llm.engine, pages, 1, end), draft_stored(other.engine, theirs, 1, end)),
    ):
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True)), f"pages of {len(said)} tokens"


@pytest.mark.parametrize("num_drafts", [1, 2, 4])
@pytest.mark.parametrize("num_prompt", range(17, 22))
def test_pages_of_a_sequence_that_ends_around_a_page_s_end_have_draft_keys(num_prompt: int, num_drafts: int) -> None:
    """Ends two before the end of the second page to four behind it, with roots at every distance from it. The last
    step's accepted tokens, cut or not, have reached the target's keys and not yet the draft's."""
    other, drafting = tiny_llm("float32"), SPECS[f"chain{num_drafts}"]
    prompt = words(num_prompt)
    truth = [*prompt, *other.run([prompt], PARAMS, drafting=BASELINE).outputs[0].token_ids]
    fresh = until_decoding(other, truth[:50], drafting)
    for end in range(30, 37):
        llm = caching_llm()
        teach(llm, [truth], deepest)
        llm.run([prompt], dataclasses.replace(PARAMS, max_tokens=end - num_prompt), drafting=drafting)
        assert llm.engine.prefix is not None
        assert len(llm.engine.prefix.match(None, truth[:end])) == (end - 1) // PAGE
        assert_published_pages(llm, truth[:end], other, fresh)


@pytest.mark.parametrize("num_drafts", [1, 2, 4])
@pytest.mark.parametrize("num_prompt", range(17, 22))
def test_pages_of_a_sequence_that_is_aborted_have_all_keys_they_promise(num_prompt: int, num_drafts: int) -> None:
    """After any step: a page whose last tokens were just accepted has not got their draft keys."""
    other, drafting = tiny_llm("float32"), SPECS[f"chain{num_drafts}"]
    prompt = words(num_prompt)
    truth = [*prompt, *other.run([prompt], PARAMS, drafting=BASELINE).outputs[0].token_ids]
    fresh = until_decoding(other, truth[:50], drafting)
    for num_steps in range(1, 3 + 18 // (num_drafts + 1)):
        llm = caching_llm()
        teach(llm, [truth], deepest)
        sequence = llm.engine.add(llm.request(0, prompt, PARAMS, drafting))
        for _ in range(num_steps):
            llm.engine.step()
        llm.engine.abort(0)
        assert sequence.tokens == truth[: len(sequence.tokens)]
        assert_published_pages(llm, sequence.tokens, other, fresh)
    assert llm.engine.prefix is not None and len(llm.engine.prefix.match(None, truth)) == 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("extra", [0, 1, 20])
@pytest.mark.parametrize("num_prompt", [21, 48])
def test_pages_computed_without_speculation_are_hit_and_drafts_start_behind_them(
    num_prompt: int, extra: int, name: str
) -> None:
    """The pages come from a prefill, or from decoding one token at a time."""
    llm, other = caching_llm(), tiny_llm("float32")
    first = llm.run([words(num_prompt)], PARAMS, drafting=BASELINE).outputs[0]
    prompt = [*first.prompt_ids, *first.token_ids][:48] + words(extra, 5)
    ours, theirs = (until_decoding(one, prompt, SPECS[name]) for one in (llm, other))
    first_key = min(48, len(prompt) - 1) + 1  # behind the first feature: that of a row that was computed
    assert ours.num_hit == 48 and first_draft_key(llm, ours.slot) == first_key
    for one in (llm, other):
        one.engine.step()
    assert_same_state(llm, ours, other, theirs, len(prompt), first_key=first_key)


@pytest.mark.parametrize("name", NAMES)
def test_drafts_read_no_key_that_no_draft_has_written(name: str) -> None:
    prompt, proposals = words(53), []
    for garbage in (0.0, 1e4, float("nan")):
        llm = caching_llm()
        llm.run([prompt[:48]], dataclasses.replace(PARAMS, max_tokens=1), drafting=BASELINE)
        backend = native(llm.engine)
        for storage in (backend.draft_kv.k, backend.draft_kv.v):
            storage.fill(garbage)
        backend.fused.fill(garbage)
        sequence = until_decoding(llm, prompt, SPECS[name])
        assert sequence.num_hit == 48
        seen = []
        while llm.engine.is_busy:
            llm.engine.step()
            assert llm.engine.pipeline.last is not None
            seen.append(llm.engine.pipeline.last.output.trees.drafted.tokens.tolist())
        proposals.append(seen)
    assert proposals[0] == proposals[1] == proposals[2]


def test_drafts_start_behind_the_last_page_that_has_no_draft_keys() -> None:
    llm = caching_llm()
    text = words(96)
    for end, drafting in ((32, SPECS["chain4"]), (64, BASELINE), (96, SPECS["chain4"])):
        llm.run([text[:end]], dataclasses.replace(PARAMS, max_tokens=1), drafting=drafting)
    assert llm.engine.prefix is not None
    nodes = llm.engine.prefix.match(None, text)
    assert [node.has_draft for node in nodes] == [True, True, False, False, False, True]
    other = tiny_llm("float32")
    ours, theirs = (until_decoding(one, [*text, 5], SPECS["chain4"]) for one in (llm, other))
    assert first_draft_key(llm, ours.slot) == 81, "its feature stands behind the last page without draft keys"
    assert_same_state(llm, ours, other, theirs, 97, first_key=81)


@pytest.mark.parametrize("drafts_first", [True, False])
def test_of_two_that_compute_the_same_pages_the_one_with_draft_keys_is_kept(drafts_first: bool) -> None:
    """Both are admitted in one step, before either could find the other's pages, and end in it."""
    llm = caching_llm()
    specs = [SPECS["chain4"], BASELINE] if drafts_first else [BASELINE, SPECS["chain4"]]
    for number, drafting in enumerate(specs):
        llm.engine.add(llm.request(number, words(20), dataclasses.replace(PARAMS, max_tokens=1), drafting))
    while llm.engine.is_busy:
        llm.engine.step()
    assert llm.engine.prefix is not None
    assert [node.has_draft for node in llm.engine.prefix.match(None, words(20))] == [True]
    assert len(llm.engine.pool.idle) == 1, "the other's page is free"
    again = until_decoding(llm, words(20), SPECS["chain4"])
    assert again.num_hit == 16 and first_draft_key(llm, again.slot) == 1


def test_a_text_that_others_wrote_without_drafts_keeps_its_own_draft_keys() -> None:
    """It starts behind their pages, and the next page that it fills stands in the cache already."""
    llm, other = caching_llm(), tiny_llm("float32")
    prompt = words(70)
    llm.run([prompt], PARAMS, drafting=BASELINE)
    ours, theirs = (until_decoding(one, prompt, SPECS["chain4"]) for one in (llm, other))
    assert ours.num_hit == 64 and first_draft_key(llm, ours.slot) == 65
    while llm.engine.is_busy:
        assert_same_state(llm, ours, other, theirs, ours.num_cached, first_key=65)
        for one in (llm, other):
            one.engine.step()
    assert len(ours.tokens) > 80, "the page of the tokens from 64 on is full"
