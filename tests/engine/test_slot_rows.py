"""A slot that has nothing to decode has no row in any forward, and reports nothing."""

from __future__ import annotations

import dataclasses

import pytest
from tests.conftest import TINY, needs_native, tiny_llm
from tests.engine.driving import PARAMS, add, alone, started, words
from tests.engine.oracle import Known
from tests.engine.test_exact import BASELINE, SPECS

pytestmark = needs_native

LONG = dataclasses.replace(PARAMS, max_tokens=60)


@pytest.mark.parametrize("name", ["none", "chain4", "static", "dynamic"])
def test_rows_of_every_linear_fall_as_slots_finish(name: str) -> None:
    """Four slots, ends at 4, 8, 12 and 16 tokens, nobody waits: a finished slot has no row in verify, head or draft."""
    drafting = BASELINE if name == "none" else SPECS[name]
    llm = tiny_llm(max_batch=4)
    began, slots = llm.engine.meter.mark(), llm.engine.meter.slots
    sequences = [
        add(llm, i, words(5, i), dataclasses.replace(PARAMS, max_tokens=4 * i + 4), drafting) for i in range(4)
    ]
    llm.engine.step()  # all prompts
    assert slots.num_steps == slots.num_verify_rows == slots.num_draft_rows == 0
    carried = dict.fromkeys(sequences, 1)  # features of accepted tokens that the draft has not read
    num_active, num_active_sum = [], 0
    while llm.engine.is_busy:
        active = [s for s in sequences if s.finish_reason is None]
        before = llm.engine.meter.mark()
        llm.engine.step()
        added = llm.engine.meter.since(before).slots
        last = llm.engine.pipeline.last
        assert last is not None and set(last.plan.decoding) == set(active)
        tree, result = last.output.trees
        assert len(tree.tokens) == len(active) * drafting.max_nodes
        assert added.num_verify_rows == len(active) * drafting.max_nodes
        expected = sum(carried[s] + drafting.draft_rows for s in active) if name != "none" else 0
        assert added.num_draft_rows == expected
        assert added.disabled_finished == 4 - len(active)
        for sequence, accepted in zip(last.plan.decoding, result.num_accepted.tolist(), strict=True):
            carried[sequence] = accepted + 1
        num_active.append(len(active))
        num_active_sum += len(active)
    assert num_active == sorted(num_active, reverse=True) and set(num_active) == {1, 2, 3, 4}
    assert (slots.active_min, slots.active_max, slots.active) == (1, 4, num_active_sum)
    assert slots.active_avg == num_active_sum / len(num_active) and slots.num_steps == len(num_active)
    assert slots.disabled_other == slots.prefilling == 0
    assert llm.engine.meter.counters.num_steps == num_active_sum
    assert "disabled_other 0" in llm.engine.meter.since(began).slots_line


def test_slots_of_a_step_are_all_accounted_for() -> None:
    llm = tiny_llm(max_batch=4, row_budget=24)
    started(llm, "decodes", words(5))
    add(llm, "prefills", words(100, 1))
    began = llm.engine.meter.mark()
    llm.engine.step()
    slots = llm.engine.meter.since(began).slots
    assert (slots.active, slots.prefilling, slots.disabled_finished, slots.disabled_other) == (1, 1, 2, 0)


def test_dead_slots_report_nothing() -> None:
    llm = tiny_llm(max_batch=5)
    doomed = started(llm, "doomed", words(5), LONG)
    truth = (*words(6, 1), *alone(words(6, 1), LONG))  # of the second, which is drafted by who knows it
    specs = [BASELINE, Known((truth,), 4, TINY.vocab_size), SPECS["dynamic"]]
    sequences = [add(llm, i, words(5 + i, i), LONG, drafting) for i, drafting in enumerate(specs)]
    for _ in range(3):
        llm.engine.step()
    assert [s.slot for s in (doomed, *sequences)] == [0, 1, 2, 3]
    llm.engine.abort("doomed")
    llm.engine.step()
    last = llm.engine.pipeline.last
    assert last is not None
    found = last.by_slot(5)
    assert found["accepted"].shape == (5,) and found["draft"].shape == (5, 12) and found["mask"].shape == (5, 12, 1)
    for dead in (0, 4):
        assert found["accepted"][dead] == 0 and (found["draft"][dead] == -1).all() and not found["mask"][dead].any()
    assert found["accepted"][2] == 4
    tree, result = last.output.trees
    shape = tree.topology
    for b, sequence in enumerate(last.plan.decoding):
        first, end = shape.offsets[b], shape.offsets[b + 1]
        num = end - first
        assert found["accepted"][sequence.slot] == result.num_accepted[b]
        draft, mask = found["draft"][sequence.slot], found["mask"][sequence.slot, :, 0]
        assert draft[0] == -1, "the root is no draft"
        assert draft[1:num].tolist() == tree.tokens[first + 1 : end].tolist() and (draft[num:] == -1).all()
        assert [int(m).bit_count() for m in mask[:num]] == (shape.depths[first:end] + 1).tolist()
        assert not mask[num:].any()
