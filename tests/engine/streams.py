"""Reads AsyncLLM's streams, with an end to all patience."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from tests.conftest import engine_config, tiny_models
from tests.engine.test_stops import letters

from aquiline.config import SamplingParams
from aquiline.engine.async_llm import AsyncLLM
from aquiline.engine.llm import LLM
from aquiline.engine.sequence import TokenDelta

PARAMS = SamplingParams(max_tokens=30, temperature=0.9, seed=11, ignore_eos=True)
LONG = dataclasses.replace(PARAMS, max_tokens=300)
PATIENCE_S = 60
"""What hangs fails after this; nothing here takes a second on an idle machine."""


def lettered_llm(max_batch: int = 3, **settings: Any) -> LLM:
    loaded = dataclasses.replace(tiny_models(max_batch=max_batch), tokenizer=letters())
    return LLM.from_models(loaded, engine_config(max_batch, **settings))


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


async def nothing_left(engine: AsyncLLM) -> None:
    """Every request ends and every page comes back, with nobody asking for anything."""
    inner = engine.llm.engine
    await until(lambda: not inner.is_busy and inner.pool.num_available == inner.pool.num_pages)
    assert not engine._streams
