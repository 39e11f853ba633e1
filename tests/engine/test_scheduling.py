"""Who runs when, and that it changes no token: chunks beside decode, priorities, drafters together."""

from __future__ import annotations

import dataclasses
import math

import pytest
from tests.conftest import engine_config, from_modules, needs_native, tiny_llm, tiny_pair
from tests.engine.driving import PARAMS, add, alone, ended, finish, started, words
from tests.engine.test_exact import BASELINE, SAMPLINGS, SPECS, prompts, tokens

from aquiline.config import Environment, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.model import Loading
from aquiline.engine.pipeline import Step
from aquiline.engine.scheduler import MIN_CHUNK

pytestmark = needs_native

LONG = dataclasses.replace(PARAMS, max_tokens=60)


@pytest.mark.parametrize(("num_tokens", "expected"), [(54, [54]), (55, [48, 7]), (102, [48, 54]), (47, [47])])
def test_a_prompt_ends_with_some_rows_more(num_tokens: int, expected: list[int]) -> None:
    """An eighth of 48 rows more, rather than a step for them. The prompt behind it waits for the next step."""
    llm = tiny_llm(max_batch=2, row_budget=48)
    first, second = add(llm, "first", words(num_tokens), PARAMS), add(llm, "second", words(20, 1), PARAMS)
    found = []
    while not first.output_ids:
        llm.engine.step()
        assert llm.engine.pipeline.last is not None
        found.append({c.slot: c.end - c.start for c in llm.engine.pipeline.last.plan.chunks})
    assert [rows[first.slot] for rows in found] == expected
    assert found[-1].get(second.slot, 0) == max(0, min(20, 48 - expected[-1]))
    finish(llm)
    assert first.output_ids == alone(words(num_tokens)) and second.output_ids == alone(words(20, 1))


@pytest.mark.parametrize("name", ["none", "chain4", "dynamic"])
@pytest.mark.parametrize("row_budget", [1, 7, 24, 48])
def test_a_long_prompt_is_cut_beside_a_sequence_that_decodes(name: str, row_budget: int) -> None:
    drafting = BASELINE if name == "none" else SPECS[name]
    llm = tiny_llm(max_batch=2, row_budget=row_budget)
    engine, meter = llm.engine, llm.engine.meter
    first = started(llm, "first", words(5), dataclasses.replace(PARAMS, max_tokens=300), drafting)
    second = add(llm, "second", words(150, 1), PARAMS, drafting)
    num_chunk_rows = []
    while not second.output_ids:
        forwards = meter.num_target_forwards
        deltas = {delta.request_id: delta for delta in engine.step()}
        assert len(deltas["first"].token_ids) >= 1, "who decodes waits for no prompt"
        assert meter.num_target_forwards == forwards + 1
        assert engine.pipeline.last is not None
        num_decode_rows = sum(1 + decoded.num_drafted for decoded in engine.pipeline.last.output.decodes)
        num_chunks = engine.pipeline.last.plan.num_chunk_rows
        assert num_decode_rows == drafting.max_nodes
        assert num_decode_rows + num_chunks <= max(row_budget, num_decode_rows + MIN_CHUNK)
        num_chunk_rows.append(num_chunks)
    room = max(row_budget - drafting.max_nodes, min(row_budget, MIN_CHUNK))
    assert num_chunk_rows == [room] * (150 // room) + ([150 % room] if 150 % room else [])
    finish(llm)
    assert second.output_ids == alone(words(150, 1))
    assert first.output_ids == alone(words(5), dataclasses.replace(PARAMS, max_tokens=300))


def test_a_prompt_does_not_hold_up_others_on_a_slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its chunks beside a sequence that decodes take a tenth of a second, at 4 ms a row; alone it has all rows."""
    llm = tiny_llm(max_batch=2, row_budget=200)
    rows = lambda step: len(step.plan.decoding) + step.plan.num_chunk_rows  # noqa: E731
    monkeypatch.setattr(Step, "seconds", property(lambda step: 0.004 * rows(step)))
    first = started(llm, "first", words(50), LONG)
    finish_at = len(first.output_ids)
    second, chunks = add(llm, "second", words(170, 1)), []
    while not second.output_ids:
        llm.engine.step()
        assert llm.engine.pipeline.last is not None
        chunks.append(llm.engine.pipeline.last.plan.num_chunk_rows)
    assert set(chunks[:-1]) == {25} and len(first.output_ids) == finish_at + len(chunks)
    finish(llm)
    third = add(llm, "third", words(170, 1))
    llm.engine.step()
    assert llm.engine.pipeline.last is not None and llm.engine.pipeline.last.plan.num_chunk_rows == 170
    finish(llm)
    assert second.output_ids == third.output_ids == alone(words(170, 1))


def test_one_step_that_was_disturbed_cuts_no_prompt() -> None:
    scheduler = tiny_llm(max_batch=2, row_budget=200).engine.scheduler
    for seconds in (0.1, 0.1, 10.0):
        scheduler.learn_pace(200, seconds, 0.0)
    assert scheduler.chunk_rows == 200
    scheduler.learn_pace(200, 10.0, 0.0)
    assert scheduler.chunk_rows == MIN_CHUNK


def test_prompts_share_a_step_s_rows_in_the_order_they_came() -> None:
    llm = tiny_llm(max_batch=4, row_budget=48)
    sequences = [add(llm, i, words(20, i)) for i in range(3)]
    spans = []
    while any(not s.output_ids for s in sequences):
        llm.engine.step()
        assert llm.engine.pipeline.last is not None
        plan = llm.engine.pipeline.last.plan
        chunks = zip(plan.prefilling, plan.chunks, strict=True)
        spans.append([(s.request.id, c.start, c.end, c.draws) for s, c in chunks])
    assert spans == [[(0, 0, 20, True), (1, 0, 20, True), (2, 0, 8, False)], [(2, 8, 20, True)]]
    finish(llm)
    assert [s.output_ids for s in sequences] == [alone(words(20, i)) for i in range(3)]


def test_an_urgent_prompt_s_rows_come_before_those_of_earlier_slots() -> None:
    llm = tiny_llm(max_batch=2, row_budget=24)
    patient = add(llm, "patient", words(100), priority=5)
    llm.engine.step()
    urgent = add(llm, "urgent", words(40, 1), priority=1)
    shares = []
    for _ in range(3):
        llm.engine.step()
        assert llm.engine.pipeline.last is not None
        plan = llm.engine.pipeline.last.plan
        shares.append({s.request.id: c.end - c.start for s, c in zip(plan.prefilling, plan.chunks, strict=True)})
    assert patient.slot < urgent.slot
    assert shares == [{"urgent": 24}, {"urgent": 16, "patient": 8}, {"patient": 23}]
    finish(llm)


def test_time_and_rows_of_a_mixed_step_are_shared_out() -> None:
    llm = tiny_llm(max_batch=2, row_budget=24)
    began = llm.engine.meter.mark()
    started(llm, "first", words(5))
    add(llm, "second", words(40, 1))
    finish(llm)
    summary = llm.engine.meter.since(began)
    assert summary.num_prefill_tokens == 45
    assert summary.prefill_ms > 0 and summary.decode_ms > 0
    assert summary.prefill_ms + summary.decode_ms <= summary.wall_ms
    assert math.isclose(sum(summary.stage_ms.values()), summary.decode_ms)


def test_lower_priority_values_run_first_and_equals_in_order_of_arrival() -> None:
    llm = tiny_llm(max_batch=1)
    for name, priority in (("c", 3), ("a1", 1), ("b", 2), ("a2", 1), ("z", -1)):
        add(llm, name, words(20), priority=priority)
    assert ended(finish(llm)) == ["z", "a1", "a2", "b", "c"]


@pytest.mark.parametrize("name", ["none", "chain4", "dynamic"])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 9])
def test_a_more_urgent_arrival_takes_a_slot_and_the_other_resumes_exactly(name: str, num_steps: int) -> None:
    """It arrives before the other's first step, while its prompt is cut in chunks, and while it decodes."""
    drafting = BASELINE if name == "none" else SPECS[name]
    llm = tiny_llm(max_batch=1, row_budget=24)
    patient = add(llm, "patient", words(40), LONG, drafting, priority=5)
    deltas = [delta for _ in range(num_steps) for delta in llm.engine.step()]
    urgent = add(llm, "urgent", words(33, 1), PARAMS, drafting, priority=1)
    deltas += llm.engine.step()
    assert urgent.slot == 0 and patient.slot == -1 and patient.num_preempted == (num_steps > 0)
    assert llm.engine.pool.num_free == llm.engine.pool.num_pages - len(llm.engine.pool.owned[0])
    deltas += finish(llm)
    assert ended(deltas) == ["urgent", "patient"]
    assert urgent.output_ids == alone(words(33, 1)) and patient.output_ids == alone(words(40), LONG)
    said = [t for delta in deltas if delta.request_id == "patient" for t in delta.token_ids]
    assert said == patient.output_ids, "what was said before is not said again"


def test_equals_do_not_displace_each_other() -> None:
    llm = tiny_llm(max_batch=1)
    started(llm, "first", words(20), priority=1)
    add(llm, "second", words(20, 1), priority=1)
    assert ended(finish(llm)) == ["first", "second"] and llm.engine.meter.num_preemptions == 0


def test_the_least_urgent_gives_way_the_latest_of_equals() -> None:
    llm = tiny_llm(max_batch=3)
    running = [started(llm, name, words(20), LONG, priority=p) for name, p in (("a", 2), ("b", 3), ("c", 3))]
    add(llm, "urgent", words(20, 1), priority=1)
    llm.engine.step()
    assert [s.slot >= 0 for s in running] == [True, True, False]
    finish(llm)
    assert {tuple(s.output_ids) for s in running} == {tuple(alone(words(20), LONG))}


def test_a_more_urgent_arrival_takes_pages_where_there_are_slots() -> None:
    llm = tiny_llm(max_batch=3, num_pages=12)
    running = [started(llm, i, words(70, i), LONG, priority=5) for i in range(2)]
    urgent = add(llm, "urgent", words(60, 7), priority=1)
    deltas = llm.engine.step()
    assert urgent.slot >= 0 and running[0].slot >= 0 and running[1].slot == -1
    assert ended(deltas + finish(llm))[0] == "urgent"
    assert [s.output_ids for s in running] == [alone(words(70, i), LONG) for i in range(2)]


def test_a_big_request_is_not_overtaken_by_small_ones_that_would_fit() -> None:
    llm = tiny_llm(max_batch=3, num_pages=12)
    started(llm, "running", words(70), LONG)
    add(llm, "big", words(150, 1))
    for i in range(4):
        add(llm, f"small{i}", words(3, i))
    firsts = []
    for delta in finish(llm):
        if delta.request_id not in firsts:
            firsts.append(delta.request_id)
    assert firsts == ["running", "big", "small0", "small1", "small2", "small3"]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_other_drafters_and_none_side_by_side(sampling: SamplingParams) -> None:
    llm = tiny_llm(max_batch=6)
    params = dataclasses.replace(sampling, ignore_eos=True)
    names = ["chain4", "none", "dynamic", "chain1", "static", "none"]
    specs = [SPECS.get(name, BASELINE) for name in names]
    sequences = [add(llm, i, p, params, s) for i, (p, s) in enumerate(zip(prompts(6), specs, strict=True))]
    num_together = 0
    while llm.engine.is_busy:
        forwards = llm.engine.meter.num_target_forwards
        llm.engine.step()
        assert llm.engine.meter.num_target_forwards == forwards + 1
        last = llm.engine.pipeline.last
        assert last is not None
        num_nodes = [decoded.num_drafted + 1 for decoded in last.output.decodes]
        assert num_nodes == [sequence.request.drafting.max_nodes for sequence in last.plan.decoding]
        num_together += len(num_nodes) == 6
    assert num_together > 5
    for sequence, prompt, name in zip(sequences, prompts(6), names, strict=True):
        assert sequence.output_ids == alone(prompt, params), f"{name} among others"
        drafted = sequence.counters.num_draft_tokens
        assert drafted == sequence.counters.num_steps * (sequence.request.drafting.max_nodes - 1)


def test_drafting_without_a_draft_is_refused_and_the_off_switch_works() -> None:
    models = from_modules(tiny_pair()[0], None, None, Loading("float32"), Environment.read())
    llm = LLM.from_models(models, engine_config())
    assert llm.drafting == BASELINE
    with pytest.raises(ValueError, match="drafter='chain': no draft model is loaded; pass one or use drafter='lookup'"):
        add(llm, 0, words(5), drafting=SPECS["chain4"])
    assert not llm.engine.is_busy
    assert tokens(llm.run([words(20)], PARAMS)) == [alone(words(20))]


def test_a_prompt_waits_where_it_would_take_the_page_that_another_needs_next() -> None:
    """Two pages, and two texts that grow into a second one: together, one would only be computed twice."""
    batch, params = [words(10), words(10, 1)], dataclasses.replace(PARAMS, max_tokens=18)
    result = tiny_llm(max_batch=2, num_pages=2).run(batch, params, drafting=BASELINE)
    assert result.summary.num_preemptions == 0
    assert tokens(result) == [alone(prompt, params) for prompt in batch]


@pytest.mark.parametrize("gone", "abcdef")
def test_who_leaves_the_queue_leaves_the_others_in_their_order(gone: str) -> None:
    """Equals in priority: nobody is preempted, which would mend a wrong order."""
    llm, few = tiny_llm(max_batch=1), dataclasses.replace(PARAMS, max_tokens=2)
    started(llm, "runs", words(5), few)
    for name in "abcdef":
        add(llm, name, words(5), few)
    llm.engine.abort(gone)
    assert ended(finish(llm)) == ["runs", *(name for name in "abcdef" if name != gone)]
