"""Many requests: lists of parameters, streams of requests without an end, early ends, and ten thousand in no more
memory than two thousand."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from tests.conftest import TINY, needs_native, tiny_llm
from tests.engine.driving import words
from tests.engine.test_exact import BASELINE, SAMPLINGS, SPECS, prompts, tokens

from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.progress import RequestProgress
from aquiline.engine.sequence import Request, TokenDelta
from aquiline.spec.drafting import Drafting

pytestmark = [needs_native, pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")]

PARAMS = SamplingParams(max_tokens=12, temperature=0.9, seed=11, ignore_eos=True)


def assert_empty(llm: LLM) -> None:
    engine = llm.engine
    assert not engine.is_busy and not engine.sequences and not engine.scheduler.waiting and not engine.due
    assert engine.scheduler.running == [None] * engine.config.max_batch
    assert engine.pool.num_available == engine.pool.num_pages


def test_each_prompt_has_parameters_of_its_own() -> None:
    llm = tiny_llm(max_batch=3)
    each = list(SAMPLINGS.values())
    found = [o.token_ids for o in llm.generate(prompts(5), each)]
    assert found == [llm.generate([p], s)[0].token_ids for p, s in zip(prompts(5), each, strict=True)]
    assert [o.request_id for o in llm.generate(prompts(5), PARAMS)] == list(range(5)), "in the order of the prompts"
    with pytest.raises(ValueError, match="sampling: 2 parameters for 5 prompts; give one, or one per prompt"):
        llm.generate(prompts(5), each[:2])
    assert llm.generate([], PARAMS) == []


def test_a_bar_changes_nothing_and_leaves_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    llm = tiny_llm(max_batch=2)
    quiet = llm.generate(prompts(6), PARAMS)
    assert capfd.readouterr() == ("", "")
    shown = llm.generate(prompts(6), PARAMS, progress=True)
    assert [o.token_ids for o in shown] == [o.token_ids for o in quiet]
    assert capfd.readouterr().out == "", "it is on stderr"


def endless(llm: LLM, taken: list[int]) -> Iterator[Request]:
    for number in itertools.count():
        taken.append(number)
        drafting = (SPECS["chain4"], BASELINE, SPECS["dynamic"])[number % 3]
        yield llm.request(number, words(1 + number % 40, number), PARAMS, drafting)


@pytest.mark.parametrize("max_batch", [1, 3])
def test_requests_are_taken_as_there_is_room(max_batch: int) -> None:
    llm = tiny_llm(max_batch=max_batch)
    taken: list[int] = []
    stream = llm.outputs(endless(llm, taken))
    assert taken == []
    for num_finished, output in enumerate(itertools.islice(stream, 60)):
        assert len(taken) - num_finished <= 2 * max_batch + 16
        number = int(output.request_id)
        expected = tiny_llm(max_batch=1).run([words(1 + number % 40, number)], PARAMS, drafting=BASELINE)
        assert [output.token_ids] == tokens(expected)
    stream.close()  # type: ignore[attr-defined]
    assert_empty(llm)


def test_a_request_may_wait_for_the_output_of_another() -> None:
    """Each text is continued three times; what is not ready keeps nothing else from running."""
    llm = tiny_llm(max_batch=3)
    texts: dict[int, list[int]] = {}
    ready: list[int] = []

    def turns() -> Iterator[Request | None]:
        for number in range(7):
            texts[number] = words(5 + number, number)
            yield llm.request(number, texts[number], PARAMS, BASELINE)
        while ready or llm.engine.sequences:
            yield llm.request(number := ready.pop(), texts[number], PARAMS, BASELINE) if ready else None

    for output in llm.outputs(turns()):
        number = int(output.request_id)
        texts[number] = [*texts[number], *output.token_ids]
        if len(texts[number]) < 5 + number + 3 * PARAMS.max_tokens:
            ready.append(number)
    assert_empty(llm)
    whole = dataclasses.replace(PARAMS, max_tokens=3 * PARAMS.max_tokens)
    for number, text in texts.items():
        assert text[5 + number :] == tiny_llm(max_batch=1).generate([words(5 + number, number)], whole)[0].token_ids
    with pytest.raises(ValueError, match="None waits for an output, and no request runs"):
        list(llm.outputs([None]))


@pytest.mark.parametrize("is_terminal", [False, True])
def test_lines_come_where_there_is_no_terminal(
    is_terminal: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, now = tiny_llm(max_batch=2), itertools.count(0.0, 10.0)
    monkeypatch.setattr("aquiline.engine.progress.time", SimpleNamespace(monotonic=lambda: next(now)))
    monkeypatch.setenv("TTY_COMPATIBLE", str(int(is_terminal)))
    with RequestProgress(9, llm.engine, is_shown=True, num_done=3) as bar:
        for _ in llm.outputs(llm.request(i, words(20, i), PARAMS) for i in range(6)):
            bar.advance()
        bar.note("a line [of] its own")
    shown = capfd.readouterr().err
    lines = [line for line in shown.splitlines() if "done" in line]
    assert "a line [of] its own" in shown
    if is_terminal:
        assert not lines
    else:
        assert [line.split(",")[0] for line in lines] == ["6/9 done", "9/9 done"]
        assert all(re.fullmatch(r"\d/9 done, \d+ tok/s, tau \d\.\d\d, 0:\d\d:\d\d left", line) for line in lines), lines


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("num_read", [0, 1, 2, 3, 5])
def test_closing_a_stream_early_frees_everything(num_read: int, prefix_cache: bool) -> None:
    """Requests of equal length: several finish in one step, and some of them have not been handed out."""
    llm = tiny_llm(max_batch=4, prefix_cache=prefix_cache)
    stream = llm.outputs(llm.request(i, words(20, i), PARAMS, BASELINE) for i in range(100))
    read = [output.request_id for output in itertools.islice(stream, num_read)]
    assert read == list(range(num_read))
    stream.close()  # type: ignore[attr-defined]
    assert_empty(llm)
    assert tokens(llm.run([words(20)], PARAMS)) == tokens(tiny_llm().run([words(20)], PARAMS))


@pytest.mark.parametrize("in_which", ["the source", "a request", "the listener", "the listener at an end"])
def test_an_error_on_the_way_is_raised_as_it_is_and_frees_everything(in_which: str) -> None:
    llm = tiny_llm(max_batch=4)

    def source() -> Iterator[Request]:
        for number in range(60):
            if number == 40 and in_which == "the source":
                raise ZeroDivisionError("on purpose")
            prompt = [96] if number == 40 and in_which == "a request" else words(20, number)
            yield llm.request(number, prompt, PARAMS, BASELINE)

    def listen(delta: TokenDelta) -> None:
        if in_which == "the listener" or (in_which == "the listener at an end" and delta.finish_reason is not None):
            raise ZeroDivisionError("on purpose")

    named = "prompt token 96" if in_which == "a request" else "on purpose"
    with pytest.raises((ZeroDivisionError, ValueError), match=named):
        for _ in llm.outputs(source(), listen):
            pass
    assert_empty(llm)
    assert tokens(llm.run([words(20)], PARAMS)) == tokens(tiny_llm().run([words(20)], PARAMS))


def test_an_id_that_stands_twice_is_refused() -> None:
    llm = tiny_llm(max_batch=4)
    requests = [llm.request(i % 3, words(20, i), PARAMS, BASELINE) for i in range(4)]
    with pytest.raises(ValueError, match="request id 0: is in use by a request that has not finished"):
        list(llm.outputs(requests))
    assert_empty(llm)


def small_requests(llm: LLM, count: int) -> Iterator[Request]:
    """One page of one of seven system prompts, a few tokens of their own; unlike parameters, and drafters by turns."""
    starts = [words(16, i) for i in range(7)]
    specs: list[Drafting] = [SPECS["chain2"], BASELINE, SPECS["dynamic"], BASELINE, SPECS["chain2"]]
    rng = np.random.default_rng(1)
    for number in range(count):
        own = rng.integers(1, TINY.vocab_size, 1 + number % 9).tolist()
        params = dataclasses.replace(PARAMS, max_tokens=2 + number % 2, seed=number)
        if number % 50 == 0:
            params = dataclasses.replace(params, repetition_penalty=1.1, logprobs=2)
        yield llm.request(f"request {number}", [*starts[number % 7], *own], params, specs[number // 100 % 5])


def test_ten_thousand_requests_leave_nothing_behind() -> None:
    """Allocated blocks are counted exactly: one object kept per request would be 8000. What lies outside Python's own
    allocator shows in the resident size."""
    llm = tiny_llm(max_batch=16, num_pages=60, prefix_cache=True, check=False)
    process = psutil.Process()
    blocks, resident, num_hits = [], [], 0
    for number, output in enumerate(llm.outputs(small_requests(llm, 10_000)), 1):
        assert len(output.token_ids) in (2, 3)
        num_hits += output.metrics.num_prefix_hits
        if number in (2000, 10_000):
            gc.collect()
            blocks.append(sys.getallocatedblocks())
            resident.append(process.memory_info().rss)
    assert num_hits > 100_000, "the prefix cache should be in use"
    assert blocks[1] - blocks[0] < 1000, f"{blocks[1] - blocks[0]} blocks more after 8000 requests more"
    assert resident[1] - resident[0] < 8e6, f"{(resident[1] - resident[0]) / 1e6:.1f} MB more"
    assert_empty(llm)
    llm.engine.pool.check()
    assert llm.engine.prefix is not None
    llm.engine.prefix.check()
    assert llm.engine.meter.counters.num_prefilled == 10_000


def test_figures_are_those_of_the_run_not_of_the_engine(capfd: pytest.CaptureFixture[str]) -> None:
    llm = tiny_llm(max_batch=2)
    llm.run([words(20)] * 8, PARAMS)
    began = llm.engine.meter.counters.num_committed
    with RequestProgress(1, llm.engine, is_shown=False) as bar:
        assert bar._figures(bar.began_s + 1.0) == "0 tok/s"
        llm.run([words(20)], PARAMS)
        made = llm.engine.meter.counters.num_committed - began + 1  # the first token is the prefill's
        assert bar._figures(bar.began_s + 1.0).startswith(f"{made} tok/s")
