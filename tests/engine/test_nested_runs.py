"""One LLM used inside its own runs: between two outputs, in a listener, in the source of requests, by turns. Every
request says what it says alone, and nobody waits for ever."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from tests.conftest import needs_native
from tests.engine.driving import MANY, words
from tests.engine.streams import lettered_llm
from tests.engine.test_exact import BASELINE, SPECS

from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM, Output
from aquiline.engine.sequence import Request, TokenDelta

pytestmark = needs_native

PARAMS = SamplingParams(max_tokens=6, temperature=0.9, seed=11, ignore_eos=True)
LONG = dataclasses.replace(PARAMS, max_tokens=20)


def patient_llm(**settings: Any) -> LLM:
    """Raises where it steps for ever."""
    llm = lettered_llm(**settings)
    step, steps = llm.engine.step, iter(range(MANY))

    def counted() -> list[TokenDelta]:
        if next(steps, None) is None:
            raise AssertionError(f"nothing ends in {MANY} steps")
        return step()

    llm.engine.step = counted  # type: ignore[method-assign]
    return llm


def requests(llm: LLM, count: int, sampling: SamplingParams = LONG, first: int = 0) -> Iterator[Request]:
    specs = (SPECS["chain4"], BASELINE, SPECS["dynamic"])
    for number in range(first, first + count):
        yield llm.request(number, words(5 + number % 30, number), sampling, specs[number % 3])


def assert_outputs(outputs: list[Output], count: int, sampling: SamplingParams = LONG, first: int = 0) -> None:
    """Each of the requests gave one output, the one it gives in a run of their own."""
    alone = lettered_llm(max_batch=8)
    expected = {
        o.request_id: (o.token_ids, o.text, "length") for o in alone.outputs(requests(alone, count, sampling, first))
    }
    assert len(outputs) == count
    assert {o.request_id: (o.token_ids, o.text, o.finish_reason) for o in outputs} == expected


def assert_idle(llm: LLM) -> None:
    assert not llm.engine.is_busy and llm.engine.pool.num_available == llm.engine.pool.num_pages


@pytest.mark.parametrize(("max_batch", "late_reads"), [(1, True), (3, False)])
def test_generate_between_two_outputs(max_batch: int, late_reads: bool) -> None:
    """Of more requests than are taken at once; the outer ones have numbers for ids as well."""
    llm = patient_llm(max_batch=max_batch, late_reads=late_reads)
    outer, inner = [], []
    for output in llm.outputs(requests(llm, 26, PARAMS)):
        outer.append(output)
        if len(outer) % 4 == 1:
            inner.append(llm.generate([words(9), words(3, 1)], PARAMS))
    assert_outputs(outer, 26, PARAMS)
    expected = [o.token_ids for o in lettered_llm().generate([words(9), words(3, 1)], PARAMS)]
    assert [[o.token_ids for o in outputs] for outputs in inner] == 7 * [expected]
    assert_idle(llm)


def test_the_outer_requests_go_on_while_the_inner_one_runs() -> None:
    """What they have said by then comes at once, without a further step."""
    llm = patient_llm(max_batch=4)
    stream = llm.outputs([llm.request("short", words(5), PARAMS), *requests(llm, 3)])
    first = next(stream)
    llm.generate([words(9)], dataclasses.replace(PARAMS, max_tokens=100))
    forwards = llm.engine.meter.num_target_forwards
    rest = list(stream)
    assert first.request_id == "short" and llm.engine.meter.num_target_forwards == forwards
    assert_outputs(rest, 3)


def test_generate_in_a_listener_keeps_deltas_in_order() -> None:
    llm = patient_llm(max_batch=3)
    heard: dict[int | str, str] = {}
    asked: list[Output] = []

    def listen(delta: TokenDelta) -> None:
        if len(asked) < 5:
            asked.extend(llm.generate([words(7)], PARAMS))
        heard[delta.request_id] = heard.get(delta.request_id, "") + delta.text

    outputs = list(llm.outputs(requests(llm, 8), listen))
    assert_outputs(outputs, 8)
    assert heard == {output.request_id: output.text for output in outputs}
    assert len({tuple(output.token_ids) for output in asked}) == 1


def test_generate_in_the_source_of_requests() -> None:
    """Requests that depend on what the same model says; others end meanwhile, and their ids are free again."""
    llm = patient_llm(max_batch=3)

    def source() -> Iterator[Request]:
        for request in requests(llm, 25, PARAMS):
            llm.generate([words(4)], PARAMS)
            yield request

    assert_outputs(list(llm.outputs(source())), 25, PARAMS)
    assert_idle(llm)


def test_two_streams_by_turns() -> None:
    llm = patient_llm(max_batch=3)
    one, other = llm.outputs(requests(llm, 6)), llm.outputs(requests(llm, 6, first=6))
    pairs = list(zip(one, other, strict=True))
    assert_outputs([a for a, _ in pairs], 6)
    assert_outputs([b for _, b in pairs], 6, first=6)
    assert next(one, None) is next(other, None) is None
    assert_idle(llm)


@pytest.mark.parametrize("late_reads", [False, True])
def test_closing_the_inner_stream_keeps_the_outer_one(late_reads: bool) -> None:
    llm = patient_llm(max_batch=3, late_reads=late_reads)
    outputs = []
    for output in llm.outputs(requests(llm, 6)):
        outputs.append(output)
        inner = llm.outputs(requests(llm, 6, first=100))
        next(inner)
        inner.close()  # type: ignore[attr-defined]
        assert not any(isinstance(name, int) and name >= 100 for name in llm.engine.sequences)
    assert_outputs(outputs, 6)
    assert_idle(llm)


@pytest.mark.parametrize("ends", ["one", "all"])
def test_what_somebody_else_ends_is_an_output_too(ends: str) -> None:
    llm = patient_llm(max_batch=3)
    running = list(requests(llm, 3)) + [llm.request("short", words(5), PARAMS)]
    outputs = []
    for output in llm.outputs(running):
        outputs.append(output)
        if output.request_id == "short" or len(outputs) == 1:
            others = list(llm.engine.sequences)
            if ends == "all":
                llm.engine.reset()
            elif others:
                llm.engine.abort(others[0])
    assert {output.request_id for output in outputs} == {0, 1, 2, "short"}
    aborted = [output for output in outputs if output.finish_reason == "abort"]
    assert len(aborted) == 3 if ends == "all" else len(aborted) in (1, 2)
    for output in aborted:
        assert output.text == "".join(chr(33 + token) for token in output.token_ids)
    assert_idle(llm)


def test_a_step_that_fails_in_the_inner_run_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = patient_llm(max_batch=3)
    outputs, repeat = [], llm.engine.backend.repeat

    def broken(*args: Any) -> Any:
        raise ZeroDivisionError("broken on purpose")

    for output in llm.outputs(requests(llm, 4)):
        outputs.append(output)
        if len(outputs) == 1:
            monkeypatch.setattr(llm.engine.backend, "repeat", broken)
            with pytest.raises(ZeroDivisionError, match="broken on purpose"):
                llm.generate([words(4)], PARAMS)
            monkeypatch.setattr(llm.engine.backend, "repeat", repeat)
    assert [output.finish_reason for output in outputs] == ["length", "abort", "abort", "abort"]
    assert_idle(llm)
    assert_outputs(list(llm.outputs(requests(llm, 4))), 4)


def test_a_run_s_figures_include_the_runs_inside_it() -> None:
    llm = patient_llm(max_batch=3)
    inner = []

    def listen(delta: TokenDelta) -> None:
        if len(inner) < 2:
            inner.append(llm.run([words(7)], PARAMS))

    outer = llm.run([words(9), words(20, 1)], LONG, on_delta=listen)
    own, all_of_it = [result.summary for result in inner], outer.summary
    assert 0 < sum(s.num_target_forwards for s in own) < all_of_it.num_target_forwards
    assert all_of_it.counters.num_committed + all_of_it.counters.num_prefilled == 2 * 20 + 2 * 6
    assert all_of_it.slots.num_steps == all_of_it.num_decode_steps and all_of_it.slots.active_max <= 3
    assert llm.engine.meter.num_target_forwards == all_of_it.num_target_forwards


def test_an_id_whose_output_waits_to_be_taken_is_refused() -> None:
    """Else the later request would take the place of the output."""
    llm = patient_llm(max_batch=3)

    def source() -> Iterator[Request]:
        yield from requests(llm, 1)
        llm.generate([words(4)], dataclasses.replace(PARAMS, max_tokens=100))
        yield from requests(llm, 1)

    with pytest.raises(ValueError, match="request id 0: is in use by an output that waits to be taken"):
        list(llm.outputs(source()))
    assert_idle(llm)
