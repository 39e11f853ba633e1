"""Reads AsyncLLM's streams, with an end to all patience, and holds its thread where a test wants it."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any

from tests.conftest import engine_config, tiny_models
from tests.engine.test_stops import letters

from aquiline.backends.base import Pending, StepInput
from aquiline.config import SamplingParams
from aquiline.engine.async_llm import AsyncLLM
from aquiline.engine.llm import LLM
from aquiline.engine.sequence import TokenDelta

PARAMS = SamplingParams(max_tokens=30, temperature=0.9, seed=11, ignore_eos=True)
LONG = dataclasses.replace(PARAMS, max_tokens=300)
PATIENCE_S = 60
"""What hangs fails after this; nothing here takes a second on an idle machine."""


def lettered_llm(max_batch: int = 3, **settings: Any) -> LLM:
    loaded = dataclasses.replace(tiny_models(), tokenizer=letters())
    return LLM.from_models(loaded, engine_config(max_batch, **settings))


class Gate:
    """Holds the engine's thread in every step that decodes, until it is let on: what a test has seen running cannot end
    before it says so."""

    def __init__(self) -> None:
        self.is_held = False
        self.permits = threading.Semaphore(0)

    def hold(self) -> None:
        self.is_held = True
        assert self.permits.acquire(timeout=PATIENCE_S), "nobody let the engine on"
        self.is_held = False

    def let(self, num_steps: int = 1_000_000) -> None:
        self.permits.release(num_steps)


def gated_llm(gate: Gate, max_batch: int = 2, fatal_token: int = -1, **settings: Any) -> LLM:
    """An LLM with letters for tokens; a step that decodes a sequence whose root is fatal_token raises."""

    loaded = dataclasses.replace(tiny_models(), tokenizer=letters())
    llm = LLM.from_models(loaded, engine_config(max_batch, **settings))
    engine = llm.engine
    repeat = engine.backend.repeat

    def gated(message: StepInput, most: int) -> Sequence[Pending]:
        if message.decodes:
            gate.hold()
            running = [engine.scheduler.running[decode.slot] for decode in message.decodes]
            if any(sequence is not None and sequence.tokens[-1] == fatal_token for sequence in running):
                raise ZeroDivisionError("broken on purpose")
        return repeat(message, most)

    engine.backend.repeat = gated  # type: ignore[method-assign]
    return llm


async def read(stream: AsyncGenerator[TokenDelta]) -> list[TokenDelta]:
    return [delta async for delta in stream]


def said(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, PATIENCE_S))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


async def asked(engine: AsyncLLM, count: int) -> None:
    """Until so many requests (or calls of close) have reached the engine or its queue, none of which can have ended."""
    await until(lambda: len(engine.llm.engine.sequences) + engine._commands.qsize() == count)


async def nothing_left(engine: AsyncLLM) -> None:
    """Every request ends and every page comes back, with nobody asking for anything."""
    inner = engine.llm.engine
    await until(lambda: not inner.is_busy and inner.pool.num_available == inner.pool.num_pages)
    assert not engine._streams
