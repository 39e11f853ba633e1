"""Decode steps that the backend repeats in one call: the same texts, none in vain, and what comes in between."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Items

import pytest
from tests.conftest import engine_config, needs_native, tiny_llm, tiny_models
from tests.engine.fickle import Fickle
from tests.engine.test_exact import BASELINE, SAMPLINGS, SPECS, check_accounting, prompts, tokens
from tests.engine.test_stops import letters

import aquiline.engine.engine as engine_module
from aquiline.backends.base import Pending, StepInput
from aquiline.config import EngineConfig, SamplingParams
from aquiline.engine.control.plans import REPLAN_STEPS
from aquiline.engine.llm import LLM
from aquiline.spec.adaptive import Adaptive

pytestmark = needs_native

LONG = SamplingParams(max_tokens=60, temperature=1.0, ignore_eos=True, seed=3)


@pytest.fixture(autouse=True)
def _steps_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many steps are repeated depends on how long they take, and tests must not."""
    monkeypatch.setattr(engine_module, "MOST_AHEAD_S", 1e9)


def ahead(llm: LLM) -> list[tuple[int, int]]:
    """From now on: how many steps each call of the backend might run, and how many it ran."""
    found, repeat = list[tuple[int, int]](), llm.engine.backend.repeat

    def counted(step: StepInput, most: int) -> Items[Pending]:
        outcomes = repeat(step, most)
        found.append((most, len(outcomes)))
        return outcomes

    llm.engine.backend.repeat = counted  # type: ignore[method-assign]
    return found


def llm_of(num_continuous: int = 8, **settings: object) -> LLM:
    return tiny_llm(num_continuous_decode_steps=num_continuous, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_texts_are_those_of_single_steps_and_none_runs_in_vain(sampling: SamplingParams) -> None:
    single, several = tiny_llm(max_batch=3), llm_of(max_batch=3)
    batch = prompts(8)
    expected = single.run(batch, sampling, drafting=BASELINE)
    for name, drafting in ({"none": BASELINE} | SPECS).items():
        calls = ahead(several)
        result, own = several.run(batch, sampling, drafting=drafting), single.run(batch, sampling, drafting=drafting)
        assert tokens(result) == tokens(expected), f"{name} differs where steps are repeated"
        assert [o.finish_reason for o in result.outputs] == [o.finish_reason for o in expected.outputs]
        check_accounting(result)
        assert result.summary.slots.active == result.summary.counters.num_steps, f"{name}: steps behind an end"
        assert result.summary.counters.num_steps == own.summary.counters.num_steps
        assert sum(ran for _, ran in calls) == result.summary.num_target_forwards
        assert max(ran for _, ran in calls) > 1 or drafting.proposer((), (), None, None) is not None


def test_adaptive_sequences_repeat_what_they_chose() -> None:
    sampling = dataclasses.replace(LONG, max_tokens=120)
    expected = tokens(tiny_llm(max_batch=3).run(prompts(6), sampling, drafting=BASELINE))
    llm = llm_of(max_batch=3, prefix_cache=True)
    calls = ahead(llm)
    result = llm.run(prompts(6), sampling, drafting=Adaptive())
    assert tokens(result) == expected and max(ran for _, ran in calls) > 1
    check_accounting(result)
    choices = result.summary.choices
    assert sum(choices.steps.values()) == result.summary.counters.num_steps
    assert choices.num_chosen < result.summary.num_decode_steps, "one choice stood for several steps"
    assert choices.num_timed > result.summary.num_decode_steps // 16
    llm = llm_of(num_continuous=64, max_batch=3)
    calls = ahead(llm)
    assert tokens(llm.run(prompts(6), sampling, drafting=Adaptive(lookup=False))) == expected
    assert 1 < max(most for most, _ in calls) <= REPLAN_STEPS


def test_random_choices_are_repeated_and_change_no_text() -> None:
    llm = llm_of(max_batch=3, prefix_cache=True)
    llm.engine.controller = Fickle(5)
    calls = ahead(llm)
    expected = tokens(tiny_llm(max_batch=3).run(prompts(6), LONG, drafting=BASELINE))
    assert tokens(llm.run(prompts(6), LONG, drafting=Adaptive())) == expected
    assert sum(ran > 1 for _, ran in calls) > 3


def test_whoever_comes_is_seated_once_the_outcomes_are_told() -> None:
    llm = llm_of(max_batch=2)
    first = llm.engine.add(llm.request(0, prompts(1)[0], LONG, BASELINE))
    while len(llm.engine.pipeline.unread) < 3:
        llm.engine.step()
    second = llm.engine.add(llm.request(1, prompts(2)[1], LONG, BASELINE))
    for _ in range(len(llm.engine.pipeline.unread)):
        before = len(first.tokens)
        llm.engine.step()
        assert second.slot == -1 and len(first.tokens) == before + 1, "one outcome a step"
    llm.engine.step()
    assert second.slot == 1
    while llm.engine.is_busy:
        llm.engine.step()
    assert [first.output_ids, second.output_ids] == tokens(tiny_llm().run(prompts(2), LONG, drafting=BASELINE))


def test_abort_before_the_outcomes_are_told() -> None:
    llm = llm_of(max_batch=2, num_pages=16)
    expected = tokens(tiny_llm().run(prompts(3), LONG, drafting=BASELINE))
    first, beside = (llm.engine.add(llm.request(i, prompts(2)[i], LONG, SPECS["chain4"])) for i in range(2))
    while len(llm.engine.pipeline.unread) < 3:
        llm.engine.step()
    output = first.output_ids
    assert llm.engine.abort(0).token_ids == []
    again = llm.engine.add(llm.request(0, prompts(3)[2], LONG, SPECS["chain4"]))
    while llm.engine.is_busy:
        llm.engine.step()
    assert first.output_ids == output == expected[0][: len(output)]
    assert [beside.output_ids, again.output_ids] == expected[1:]
    assert llm.engine.pool.num_free == 16
    llm.engine.add(llm.request(0, prompts(1)[0], LONG, BASELINE))
    while len(llm.engine.pipeline.unread) < 3:
        llm.engine.step()
    llm.engine.reset()
    assert not llm.engine.is_busy and llm.engine.pool.num_free == 16


def test_stop_strings_are_looked_for_after_every_step() -> None:
    loaded = dataclasses.replace(tiny_models(), tokenizer=letters())
    llm = LLM.from_models(loaded, engine_config(2, num_continuous_decode_steps=8))
    text = llm.run(prompts(1), LONG, drafting=BASELINE).outputs[0].text
    calls = ahead(llm)
    result = llm.run(prompts(1), dataclasses.replace(LONG, stop=(text[20:22],)), drafting=BASELINE)
    assert result.outputs[0].finish_reason == "stop" and {most for most, _ in calls} == {1}


@pytest.mark.parametrize("seconds", [0.0, 1e-9])
def test_long_steps_are_not_repeated(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(engine_module, "MOST_AHEAD_S", seconds)
    llm = llm_of()
    calls = ahead(llm)
    llm.run(prompts(2), LONG, drafting=BASELINE)
    assert {most for most, _ in calls} == {1}


def test_without_pages_to_run_ahead_steps_run_one_by_one() -> None:
    """Two sequences that together need all pages there are, and more for a while if they ran ahead."""
    sampling = dataclasses.replace(LONG, max_tokens=62)
    batch = [prompts(8)[4], prompts(8)[4][::-1]]
    llm = llm_of(num_continuous=64, max_batch=2, num_pages=2 * -(-(len(batch[0]) + 62 + 1) // 16))
    expected = tokens(tiny_llm(max_batch=2).run(batch, sampling, drafting=BASELINE))
    result = llm.run(batch, sampling, drafting=BASELINE)
    assert tokens(result) == expected and result.summary.num_preemptions == 0


def test_times_are_counted_once() -> None:
    llm = llm_of(max_batch=2)
    llm.run(prompts(2), LONG, drafting=SPECS["chain4"])
    calls = ahead(llm)
    summary = llm.run(prompts(2), LONG, drafting=SPECS["chain4"]).summary
    assert max(ran for _, ran in calls) > 1
    assert 0.5 * summary.wall_ms < summary.decode_ms + summary.prefill_ms <= summary.wall_ms
    assert all(each >= 0 for each in summary.stage_ms.values())


@pytest.mark.parametrize("number", [0, 65])
def test_a_number_out_of_range_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match=f"num_continuous_decode_steps={number}: must be from 1"):
        EngineConfig(num_continuous_decode_steps=number)
