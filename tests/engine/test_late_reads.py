"""Outcomes read one step late: the same texts, at most one step per text in vain, and requests that go in between."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tests.conftest import TINY, engine_config, needs_native, tiny_llm, tiny_models
from tests.engine.oracle import teach
from tests.engine.test_exact import BASELINE, SAMPLINGS, SPECS, check_accounting, prompts, tokens
from tests.engine.test_stops import letters

from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM, Result
from aquiline.engine.sequence import Sequence

pytestmark = needs_native

GREEDY = dataclasses.replace(SAMPLINGS["greedy"], ignore_eos=True)


def ends(result: Result) -> list[str]:
    return [output.finish_reason for output in result.outputs]


def num_wasted(result: Result) -> int:
    """(slot, step) pairs that ran for a sequence whose end had not been read yet."""
    return result.summary.slots.active - result.summary.counters.num_steps


def texts(batch: list[list[int]], truth: Result) -> list[list[int]]:
    return [[*p, *o.token_ids] for p, o in zip(batch, truth.outputs, strict=True)]


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(sampling, id=name, marks=[pytest.mark.rare] if name in ("greedy", "penalised") else [])
        for name, sampling in SAMPLINGS.items()
    ],
)
def test_every_drafter_gives_the_texts_that_are_read_at_once(sampling: SamplingParams) -> None:
    at_once, late = tiny_llm(max_batch=3), tiny_llm(max_batch=3, prefix_cache=True, late_reads=True)
    batch = prompts(8)
    expected = at_once.run(batch, sampling, drafting=BASELINE)
    assert num_wasted(expected) == 0
    for name, drafting in ({"none": BASELINE} | SPECS).items():
        result = late.run(batch, sampling, drafting=drafting)
        assert tokens(result) == tokens(expected), f"{name} differs when its outcomes are read late"
        assert ends(result) == ends(expected)
        check_accounting(result)
        assert num_wasted(result) == len(batch), f"{name}: the step after each end, and no other"
        assert late.engine.pool.num_available == late.engine.pool.num_pages


@pytest.mark.parametrize("name", ["none", "chain4", "static", "dynamic"])
def test_one_forward_at_most_goes_to_waste_per_text(name: str) -> None:
    drafting = ({"none": BASELINE} | SPECS)[name]
    at_once, late = (tiny_llm(max_batch=1, late_reads=is_late) for is_late in (False, True))
    batch = prompts(5)
    truth = at_once.run(batch, GREEDY, drafting=BASELINE)
    if name != "none":
        for llm in (at_once, late):
            teach(llm, texts(batch, truth))
    expected, result = (llm.run(batch, GREEDY, drafting=drafting).summary for llm in (at_once, late))
    assert expected.num_decode_steps == expected.counters.num_steps
    assert 0 < result.num_target_forwards - expected.num_target_forwards <= len(batch)
    assert name == "none" or result.counters.num_accepted_tokens == expected.counters.num_accepted_tokens > 0


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
@pytest.mark.parametrize("name", ["chain8", "dynamic-60-5-10"])
def test_a_step_in_vain_behind_the_last_position(name: str, max_tokens: int) -> None:
    batch = [np.random.default_rng(3).integers(1, 96, TINY.max_positions - max_tokens - d).tolist() for d in (0, 1)]
    params = dataclasses.replace(SAMPLINGS["sampled"], max_tokens=max_tokens, ignore_eos=True)
    expected = tiny_llm(max_batch=2).run(batch, params, drafting=BASELINE)
    late = tiny_llm(max_batch=2, late_reads=True)
    teach(late, texts(batch, tiny_llm(max_batch=2).run(batch, params, drafting=BASELINE)))
    assert tokens(late.run(batch, params, drafting=SPECS[name])) == tokens(expected)


def test_stop_strings_cut_texts_that_ran_on() -> None:
    loaded = dataclasses.replace(tiny_models(), tokenizer=letters())
    at_once, late = (LLM.from_models(loaded, engine_config(2, late_reads=is_late)) for is_late in (False, True))
    batch = prompts(6)
    text = at_once.run(batch, GREEDY, drafting=BASELINE).outputs[2].text
    params = dataclasses.replace(GREEDY, stop=(text[5:7], text[9]))
    expected = at_once.run(batch, params, drafting=BASELINE)
    assert {*ends(expected)} == {"stop", "length"}
    teach(late, texts(batch, at_once.run(batch, GREEDY, drafting=BASELINE)))
    result = late.run(batch, params, drafting=SPECS["chain4"])
    assert [(o.text, o.token_ids) for o in result.outputs] == [(o.text, o.token_ids) for o in expected.outputs]
    assert result.summary.counters.tokens_cut > 0
    check_accounting(result)


def run_on(llm: LLM) -> None:
    while llm.engine.is_busy:
        llm.engine.step()


def add(llm: LLM, number: int, prompt: list[int], name: str = "chain4", priority: int = 0) -> Sequence:
    return llm.engine.add(llm.request(number, prompt, GREEDY, SPECS[name], priority))


@pytest.mark.parametrize("num_steps", range(1, 7))
def test_abort_while_an_outcome_is_unread(num_steps: int) -> None:
    """At every stage from the first chunk on; whoever comes next may take the slot, the pages and the number."""
    llm, batch = tiny_llm(max_batch=2, row_budget=32, late_reads=True, num_pages=16), prompts(6)[3:]
    expected = tokens(tiny_llm(max_batch=2).run(batch, GREEDY, drafting=BASELINE))
    first, beside = add(llm, 0, batch[2]), add(llm, 1, batch[1])
    for _ in range(num_steps):
        llm.engine.step()
    last = llm.engine.pipeline.last
    assert last is not None and first in {*last.plan.decoding, *last.plan.prefilling}
    output, slot = first.output_ids, first.slot
    delta = llm.engine.abort(0)
    assert (delta.token_ids, delta.finish_reason) == ([], "abort") and not llm.engine.pool.owned[slot]
    again = add(llm, 0, batch[0])
    deltas = [delta for _ in range(2) for delta in llm.engine.step()]
    assert again.slot == slot
    assert [token for delta in deltas if delta.request_id == 0 for token in delta.token_ids] == again.output_ids
    run_on(llm)
    assert first.output_ids == output == expected[2][: len(output)]
    assert [again.output_ids, beside.output_ids] == [expected[0], expected[1]]
    assert llm.engine.pool.num_free == 16


def test_abort_of_all_that_is_unread_ends_the_engine() -> None:
    llm = tiny_llm(late_reads=True)
    sequence = add(llm, 0, prompts(1)[0])
    llm.engine.step()
    llm.engine.abort(0)
    assert llm.engine.is_busy, "an outcome is still unread"
    assert llm.engine.step() == [] and not llm.engine.is_busy and sequence.output_ids == []
    add(llm, 0, prompts(1)[0])
    llm.engine.step()
    llm.engine.reset()
    assert not llm.engine.is_busy
    assert tokens(llm.run(prompts(2), GREEDY)) == tokens(tiny_llm().run(prompts(2), GREEDY))


@pytest.mark.parametrize("name", ["chain4", "dynamic"])
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("priority", [0, 1])
def test_preemption_while_an_outcome_is_unread(name: str, prefix_cache: bool, priority: int) -> None:
    """By growth (equal priorities) and by a more urgent request (which comes when the others run): what the unread step
    added is part of the text all the same, and is not computed again."""
    llm = tiny_llm(max_batch=2, late_reads=True, num_pages=8, prefix_cache=prefix_cache)
    batch = [prompts(8)[4], prompts(8)[7][:40]]
    expected = tiny_llm(max_batch=2).run(batch, GREEDY, drafting=BASELINE)
    teach(llm, texts(batch, expected))
    victim = add(llm, 1, batch[1], name, priority) if priority else None
    for _ in range(6 if priority else 0):
        llm.engine.step()
    other = add(llm, 0, batch[0], name)
    victim = victim or add(llm, 1, batch[1], name)
    num_lost = 0
    while llm.engine.is_busy:
        unread, before = llm.engine.pipeline.last, (victim.num_preempted, len(victim.tokens))
        llm.engine.step()
        if victim.num_preempted > before[0]:
            assert unread is not None and victim in unread.plan.decoding, "it ran in the step before"
            assert victim.slot == -1 and (len(victim.tokens) > before[1] or victim.finish_reason is not None)
            num_lost += 1
    assert num_lost >= 1, "the pool should be too small"
    assert [other.output_ids, victim.output_ids] == tokens(expected)
    counters = victim.counters
    assert counters.num_prefilled == 1 and counters.num_prefilled + counters.num_committed == len(victim.output_ids)
