"""What goes wrong around AsyncLLM reaches those it concerns, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest
from tests.conftest import needs_native, tiny_llm
from tests.engine import test_bad_logits as bad_logits
from tests.engine.driving import words
from tests.engine.streams import (
    LONG,
    PARAMS,
    PATIENCE_S,
    Gate,
    asked,
    gated_llm,
    nothing_left,
    read,
    run,
    said,
    until,
)
from tests.engine.test_exact import BASELINE, tokens
from tokenizers import decoders

from aquiline.engine.async_llm import AsyncLLM
from aquiline.errors import EngineStopped, NumericalError, OutOfPages

pytestmark = needs_native


def test_a_duplicate_id_is_refused_and_the_first_goes_on() -> None:
    expected = tokens(tiny_llm().run([words(9)], LONG))[0]

    async def main() -> None:
        gate = Gate()
        async with AsyncLLM(gated_llm(gate)) as engine:
            first = asyncio.create_task(read(engine.generate(words(9), LONG, request_id="a")))
            await until(lambda: gate.is_held)
            second = asyncio.create_task(read(engine.generate(words(3), PARAMS, request_id="a")))
            await asked(engine, 2)
            gate.let(1)
            with pytest.raises(ValueError, match="request id 'a': is in use by a request that has not finished"):
                await second
            gate.let()
            assert said(await first) == expected
            assert len(said(await read(engine.generate(words(3), PARAMS, request_id="a")))) == PARAMS.max_tokens

    run(main())


def test_ids_that_nobody_chose_meet_no_chosen_one() -> None:
    async def main() -> None:
        async with AsyncLLM(tiny_llm(max_batch=8)) as engine:
            chosen = [engine.generate(words(3), LONG, request_id=i) for i in range(3)]
            others = [engine.generate(words(3), LONG) for _ in range(3)]
            for deltas in await asyncio.gather(*map(read, chosen + others)):
                assert len(said(deltas)) == LONG.max_tokens

    run(main())


def test_bad_requests_are_raised_to_their_caller_alone() -> None:
    expected = tokens(tiny_llm().run([words(9)], LONG))[0]

    async def main() -> None:
        async with AsyncLLM(tiny_llm(max_batch=2, num_pages=24)) as engine:
            good = asyncio.create_task(read(engine.generate(words(9), LONG)))
            for prompt, params, settings, error, named in (
                ([96], PARAMS, {}, ValueError, "prompt token 96: must be in"),
                ([], PARAMS, {}, ValueError, "must hold at least one token"),
                ("", PARAMS, {}, ValueError, "prompt='': is empty"),
                ("text", PARAMS, {}, ValueError, "the target has no tokenizer.json; pass token ids"),
                (words(390), PARAMS, {}, ValueError, "exceeds the 400 positions there are"),
                (words(365), PARAMS, {}, OutOfPages, "pages of 16 tokens, 24 are there"),
                (words(5), PARAMS, {"deadline_s": 0}, ValueError, "deadline_s=0: must be above 0"),
                (words(5), dataclasses.replace(PARAMS, stop=("x",)), {}, ValueError, "needs a tokenizer"),
                (words(5), dataclasses.replace(PARAMS, stop_token_ids=(96,)), {}, ValueError, "token id 96: must be"),
            ):
                with pytest.raises(error, match=named):
                    await read(engine.generate(prompt, params, **settings))  # type: ignore[arg-type]
            assert said(await good) == expected
            await nothing_left(engine)

    run(main())


@pytest.mark.parametrize("priority", ["1", None, math.nan, True, math.inf])
def test_a_priority_of_another_type_ends_nobody_else(priority: Any) -> None:
    """The queue compares priorities: one that cannot be compared would end the engine's thread, as soon as another
    request waits beside it."""
    params = dataclasses.replace(PARAMS, max_tokens=80)
    expected = tokens(tiny_llm().run([words(9)], params))[0]

    async def main() -> None:
        async with AsyncLLM(tiny_llm(max_batch=1)) as engine:
            good = [asyncio.create_task(read(engine.generate(words(9), params))) for _ in range(2)]
            named = re.escape(f"request bad: priority={priority!r}: must be a whole number")
            with pytest.raises(ValueError, match=named):
                await read(engine.generate(words(9), params, priority=priority, request_id="bad"))
            good += [asyncio.create_task(read(engine.generate(words(9), params))) for _ in range(2)]
            assert [said(deltas) for deltas in await asyncio.gather(*good)] == 4 * [expected]
            await nothing_left(engine)

    run(main())


def test_bad_logits_end_one_stream() -> None:
    llm = bad_logits.poisoned_llm()
    good = bad_logits.words(9)
    expected = llm.run([good], bad_logits.PARAMS, drafting=BASELINE).outputs[0].token_ids

    async def main() -> None:
        async with AsyncLLM(llm) as engine:
            streams = [engine.generate(p, bad_logits.PARAMS) for p in (good, [*good, bad_logits.POISON], good)]
            first, bad, last = await asyncio.gather(*map(read, streams), return_exceptions=True)
            assert isinstance(
                bad, NumericalError
            ) and "request async-1: the target's logits at position 10 are NaN" in str(bad)
            assert not isinstance(first, BaseException) and not isinstance(last, BaseException)
            assert said(first) == said(last) == expected
            await nothing_left(engine)

    run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_in_the_engine_s_thread_reaches_everybody() -> None:
    """Streams that decode, that wait, that come later, from the same loop or another; close() returns."""
    message, gate = "the engine stopped: ZeroDivisionError: broken on purpose", Gate()
    fatal = dataclasses.replace(PARAMS, logit_bias={90: 1e6})
    harmless = dataclasses.replace(LONG, logit_bias={90: -np.inf})
    engine = AsyncLLM(gated_llm(gate, fatal_token=90))

    async def main() -> None:
        waiting = [asyncio.create_task(read(engine.generate(words(9, i), harmless))) for i in range(4)]
        await asked(engine, 4)
        waiting.append(asyncio.create_task(read(engine.generate(words(9), fatal, priority=-1))))
        await asked(engine, 5)
        gate.let()
        for task in waiting:
            with pytest.raises(EngineStopped, match=message):
                await task
        with pytest.raises(EngineStopped, match=message):
            await read(engine.generate(words(3), PARAMS))

    async def later() -> None:
        with pytest.raises(EngineStopped, match=message):
            await read(engine.generate(words(3), PARAMS))

    run(main())
    run(later())
    engine.close()
    assert not engine.llm.engine.is_busy
    assert engine.llm.engine.pool.num_available == engine.llm.engine.pool.num_pages


class BreakingDecoder:
    """Cannot decode token 90, which the tests' tokenizer spells "{"."""

    def decode_chain(self, tokens: list[str]) -> list[str]:
        if "{" in tokens:
            raise ZeroDivisionError("broken on purpose")
        return tokens


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_that_comes_again_while_requests_are_dropped_reaches_everybody_too() -> None:
    """What is held back of a text is decoded when its request is dropped."""
    gate = Gate()
    llm = gated_llm(gate)
    assert llm.models.tokenizer is not None
    llm.models.tokenizer.decoder = decoders.Decoder.custom(BreakingDecoder())
    fatal = dataclasses.replace(PARAMS, logit_bias={90: 1e6})
    harmless = dataclasses.replace(LONG, logit_bias={90: -np.inf})

    async def main() -> None:
        engine = AsyncLLM(llm)
        waiting = [asyncio.create_task(read(engine.generate(words(9, i), harmless))) for i in range(3)]
        await asked(engine, 3)
        await until(lambda: gate.is_held)
        waiting.append(asyncio.create_task(read(engine.generate(words(9), fatal, priority=-1))))
        await asked(engine, 4)
        gate.let()
        done, _ = await asyncio.wait(waiting, timeout=PATIENCE_S / 2)
        assert len(done) == 4, f"{4 - len(done)} of 4 callers wait for ever"
        for task in waiting:
            with pytest.raises(EngineStopped, match="broken on purpose"):
                await task

    run(main())


@pytest.mark.parametrize("times", [1, 2])
def test_close_ends_live_streams(times: int) -> None:
    """Some run, some wait, and one comes while the engine's thread, held in a step, has yet to read that it ends."""

    async def main() -> None:
        gate = Gate()
        engine = AsyncLLM(gated_llm(gate))
        waiting = [asyncio.create_task(read(engine.generate(words(9, i), LONG))) for i in range(4)]
        await until(lambda: gate.is_held)
        await asked(engine, 4)
        closing = [asyncio.create_task(asyncio.to_thread(engine.close)) for _ in range(times)]
        await asked(engine, 4 + times)
        waiting.append(asyncio.create_task(read(engine.generate(words(9), PARAMS))))
        await asked(engine, 5 + times)
        gate.let()
        for task in waiting:
            with pytest.raises(EngineStopped, match="the engine was closed"):
                await task
        await asyncio.gather(*closing)
        with pytest.raises(EngineStopped, match="the engine was closed"):
            await read(engine.generate(words(3), PARAMS))
        assert not engine.llm.engine.is_busy and not engine._streams
        assert engine.llm.engine.pool.num_free == engine.llm.engine.pool.num_pages

    run(main())


def test_a_caller_who_leaves_behind_the_end_keeps_nobody_from_hearing_of_it() -> None:
    """The engine's thread, held in a step, finds a request to end it and behind that one to abort a stream."""

    async def main() -> None:
        gate = Gate()
        engine = AsyncLLM(gated_llm(gate))
        waiting = [asyncio.create_task(read(engine.generate(words(9, i), LONG))) for i in range(3)]
        await until(lambda: gate.is_held)
        await asked(engine, 3)
        closing = asyncio.create_task(asyncio.to_thread(engine.close))
        await asked(engine, 4)
        waiting.pop(0).cancel()
        await asked(engine, 5)
        gate.let()
        done, _ = await asyncio.wait(waiting, timeout=PATIENCE_S / 2)
        assert len(done) == 2, f"{2 - len(done)} of 2 callers wait for ever"
        for task in waiting:
            with pytest.raises(EngineStopped, match="the engine was closed"):
                await task
        await closing

    run(main())


def test_leaving_the_context_ends_the_thread_and_the_llm_serves_another() -> None:
    llm = tiny_llm(max_batch=2)
    expected = tokens(llm.run([words(9)], PARAMS))[0]

    async def main() -> None:
        for _ in range(2):
            async with AsyncLLM(llm) as engine:
                assert said(await read(engine.generate(words(9), PARAMS))) == expected
            assert not engine._thread.is_alive()
            with pytest.raises(EngineStopped, match="the engine was closed"):
                await read(engine.generate(words(9), PARAMS))

    run(main())
    assert tokens(llm.run([words(9)], PARAMS))[0] == expected
