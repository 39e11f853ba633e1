"""AsyncLLM: streams of any number of callers, who may leave at any time. When things go wrong:
test_async_failures.py."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from tests.conftest import needs_native, tiny_llm
from tests.engine.driving import words
from tests.engine.streams import (
    LONG,
    PARAMS,
    PATIENCE_S,
    Gate,
    asked,
    gated_llm,
    lettered_llm,
    nothing_left,
    read,
    run,
    said,
    until,
)
from tests.engine.test_exact import BASELINE, SAMPLINGS, SPECS, prompts, tokens

from aquiline.engine.async_llm import AsyncLLM
from aquiline.engine.sequence import TokenDelta

pytestmark = needs_native


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_concurrent_streams_say_what_a_run_says(prefix_cache: bool) -> None:
    """More streams than slots, of unlike parameters and drafters."""
    llm = lettered_llm(prefix_cache=prefix_cache)
    names = ("chain4", "none", "dynamic", "static", "chain1")
    jobs = [(p, s, SPECS.get(n, BASELINE)) for p, s, n in zip(prompts(5), SAMPLINGS.values(), names, strict=True)]
    expected = [llm.run([p], s, drafting=drafting).outputs[0] for p, s, drafting in jobs]

    async def main() -> None:
        async with AsyncLLM(llm) as engine:
            streams = [engine.generate(p, s, drafting=drafting) for p, s, drafting in jobs * 2]
            for deltas, output in zip(await asyncio.gather(*map(read, streams)), expected * 2, strict=True):
                assert said(deltas) == output.token_ids
                assert "".join(delta.text for delta in deltas) == output.text
                assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + [output.finish_reason]
                written = [k < d.num_accepted for d in deltas for k in range(len(d.token_ids))]
                assert written == output.by_draft and sum(d.num_accepted for d in deltas) == sum(output.by_draft)
            assert len({d.request_id for d in deltas}) == 1
            await nothing_left(engine)

    run(main())


def test_text_prompts_and_defaults() -> None:
    llm = lettered_llm()
    expected = llm.run("abc").outputs[0]
    assert len(expected.token_ids) > 1

    async def main() -> None:
        async with AsyncLLM(llm) as engine:
            deltas = await read(engine.generate("abc"))
            assert "".join(delta.text for delta in deltas) == expected.text

    run(main())


def test_deltas_come_while_the_text_is_computed() -> None:
    async def main() -> None:
        async with AsyncLLM(tiny_llm(max_batch=1)) as engine:
            first, second = engine.generate(words(9), LONG), engine.generate(words(9), PARAMS)
            assert len((await anext(first)).token_ids) == 1
            waiting = asyncio.create_task(read(second))
            deltas = [await anext(first) for _ in range(20)]
            assert all(delta.finish_reason is None for delta in deltas)
            assert len(said(await read(first))) + len(said(deltas)) + 1 == LONG.max_tokens
            assert len(said(await waiting)) == PARAMS.max_tokens

    run(main())


def test_priorities_and_deadlines_reach_the_scheduler() -> None:
    expected = tokens(tiny_llm().run([words(9)], LONG, drafting=BASELINE))[0]

    async def main() -> None:
        gate = Gate()
        async with AsyncLLM(gated_llm(gate, max_batch=1)) as engine:
            order = []

            async def one(name: str, **settings: Any) -> list[TokenDelta]:
                deltas = await read(engine.generate(words(9), LONG, drafting=BASELINE, **settings))
                order.append(name)
                return deltas

            patient = asyncio.create_task(one("patient", priority=3))
            await until(lambda: gate.is_held)
            urgent = asyncio.create_task(one("urgent", priority=1))
            late = asyncio.create_task(one("late", priority=9, deadline_s=1e-6))
            await asked(engine, 3)
            gate.let()
            assert said(await patient) == said(await urgent) == expected and order == ["late", "urgent", "patient"]
            assert [(d.token_ids, d.finish_reason) for d in await late] == [([], "deadline")]

    run(main())


def test_callers_in_two_event_loops() -> None:
    llm = tiny_llm(max_batch=2)
    expected = tokens(llm.run(prompts(6), PARAMS))
    found: dict[int, list[int]] = {}

    async def ask(engine: AsyncLLM, numbers: range) -> None:
        streams = [engine.generate(prompts(6)[i], PARAMS) for i in numbers]
        for i, deltas in zip(numbers, await asyncio.gather(*map(read, streams)), strict=True):
            found[i] = said(deltas)

    engine = AsyncLLM(llm)
    threads = [
        threading.Thread(target=lambda numbers=numbers: run(ask(engine, numbers)))
        for numbers in (range(3), range(3, 6))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    engine.close()
    assert [found[i] for i in range(6)] == expected


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_closing_a_stream_aborts_its_request(prefix_cache: bool) -> None:
    expected = tokens(tiny_llm().run([words(9)], PARAMS))[0]

    async def main() -> None:
        gate = Gate()
        async with AsyncLLM(gated_llm(gate, prefix_cache=prefix_cache)) as engine:
            doomed = engine.generate(words(20), LONG, request_id="doomed")
            await anext(doomed)
            stays = asyncio.create_task(read(engine.generate(words(9), PARAMS)))
            await asked(engine, 2)
            sequence = engine.llm.engine.sequences["doomed"]
            await doomed.aclose()
            gate.let()
            assert said(await stays) == expected
            assert sequence.finish_reason == "abort" and len(sequence.output_ids) < 20
            again = await read(engine.generate(words(9), PARAMS, request_id="doomed"))
            assert said(again) == expected, "its id is free"
            await nothing_left(engine)

    run(main())


def test_breaking_out_of_a_loop_aborts_when_the_stream_is_gone() -> None:
    async def main() -> None:
        gate = Gate()
        async with AsyncLLM(gated_llm(gate)) as engine:
            async for delta in engine.generate(words(20), LONG):
                sequence = engine.llm.engine.sequences[delta.request_id]
                break
            await until(lambda: not engine._commands.empty() or sequence.finish_reason is not None)
            gate.let()
            await nothing_left(engine)
            assert sequence.finish_reason == "abort"

    run(main())


@pytest.mark.parametrize("wait_for", ["nothing", "the queue", "a token"])
def test_cancelling_whoever_waits_aborts(wait_for: str) -> None:
    async def main() -> None:
        gate = Gate()
        async with AsyncLLM(gated_llm(gate, max_batch=1)) as engine:
            inner = engine.llm.engine
            running = asyncio.create_task(read(engine.generate(words(20), LONG, request_id="running")))
            await until(lambda: gate.is_held)
            sequences = list(inner.sequences.values())
            doomed = asyncio.create_task(read(engine.generate(words(20, 1), LONG, request_id="doomed")))
            if wait_for == "nothing":
                await asyncio.sleep(0)  # into generate, no further
            else:
                await asked(engine, 2)
                if wait_for == "a token":
                    running.cancel()
                    await asked(engine, 3)
                gate.let(1)
                await until(lambda: "doomed" in inner.sequences)
                sequences.append(inner.sequences["doomed"])
            if wait_for == "a token":
                await until(lambda: bool(sequences[1].output_ids))
            for task in (doomed, running):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            gate.let()
            await nothing_left(engine)
            assert {sequence.finish_reason for sequence in sequences} == {"abort"}
            assert len(said(await read(engine.generate(words(3), PARAMS)))) == PARAMS.max_tokens

    run(main())


def test_a_timeout_around_a_stream_aborts() -> None:
    async def main() -> None:
        gate = Gate()
        async with AsyncLLM(gated_llm(gate)) as engine:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(read(engine.generate(words(20), LONG)), 0.05)
            gate.let()
            await nothing_left(engine)
            assert engine.llm.engine.meter.counters.num_committed < 20

    run(main())


@pytest.mark.parametrize("next_id", ["a", "b"])
def test_closing_a_stream_that_has_ended_unread_aborts_nobody(next_id: str) -> None:
    """Its last delta waits for its caller while its id is free, or another's."""

    async def main() -> None:
        gate = Gate()
        async with AsyncLLM(gated_llm(gate)) as engine:
            sequences = engine.llm.engine.sequences
            first = engine.generate(words(9), PARAMS, drafting=BASELINE, request_id="a")
            await anext(first)
            gate.let(PARAMS.max_tokens - 1)
            await until(lambda: not sequences)
            second = asyncio.create_task(read(engine.generate(words(9), LONG, request_id=next_id)))
            await until(lambda: next_id in sequences and bool(sequences[next_id].output_ids))
            await first.aclose()
            gate.let()
            deltas = await second
            assert deltas[-1].finish_reason == "length" and len(said(deltas)) == LONG.max_tokens

    run(main())


def test_a_stream_nobody_reads_is_no_request() -> None:
    async def main() -> None:
        async with AsyncLLM(tiny_llm()) as engine:
            stream = engine.generate(words(20), LONG)
            await read(engine.generate(words(3), PARAMS))
            assert not engine.llm.engine.is_busy
            await stream.aclose()

    run(main())


def test_an_event_loop_that_has_ended_takes_its_requests_with_it() -> None:
    expected, gate = tokens(tiny_llm().run([words(9)], PARAMS))[0], Gate()
    engine = AsyncLLM(gated_llm(gate))
    loop = asyncio.new_event_loop()
    stream = engine.generate(words(20), LONG, request_id="orphan")
    loop.run_until_complete(stream.__anext__())
    orphan = engine.llm.engine.sequences["orphan"]
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()  # and nobody closed the stream
    gate.let()

    async def main() -> None:
        assert said(await read(engine.generate(words(9), PARAMS))) == expected
        await nothing_left(engine)
        assert orphan.finish_reason == "abort"

    run(main())
    engine.close()


def test_many_callers_that_come_and_go() -> None:
    """Forty callers on three slots; every third gives up after a few tokens, every fifth at once."""
    batch = [words(1 + 5 * i % 40, i) for i in range(40)]
    expected = tokens(tiny_llm(max_batch=3).run(batch, PARAMS))

    async def main() -> None:
        async with AsyncLLM(tiny_llm(max_batch=3, num_pages=24, prefix_cache=True)) as engine:

            async def one(i: int) -> list[int]:
                stream = engine.generate(batch[i], PARAMS, priority=i % 3)
                found: list[int] = []
                if i % 5 == 4:
                    task = asyncio.create_task(read(stream))
                    await asyncio.sleep(0)
                    task.cancel()
                    return found
                async for delta in stream:
                    found += delta.token_ids
                    if i % 3 == 2 and len(found) > 4:
                        break
                await stream.aclose()
                return found

            for i, found in enumerate(await asyncio.gather(*map(one, range(40)))):
                assert found == expected[i][: len(found)]
                assert i % 5 == 4 or i % 3 == 2 or len(found) == PARAMS.max_tokens
            await nothing_left(engine)

    run(main())
