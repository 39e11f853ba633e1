"""How many tokens an event of a stream brings: the first and the last at once, the others by the interval."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from tests.conftest import needs_native
from tests.serve.serving import KEY, Server, running

from aquiline.config import EngineConfig, PairConfig, SamplingParams
from aquiline.engine.sequence import Request
from aquiline.errors import NumericalError
from aquiline.serve.client import STREAMS_PER_TOKEN, EngineClient, EngineDown, Stream
from aquiline.serve.server_config import ServerConfig
from aquiline.serve.wire import Begin, Delta, Opening
from aquiline.spec.drafting import Chain


def delta(name: int, tokens: int, begin: bool = False, end: bool = False, error: str | None = None) -> Delta:
    start = Begin(0, None) if begin else None
    return Delta(name, [7] * tokens, 0, "target", 0, 0, "length" if end else None, None, error, start)


def client_of(interval: int | None) -> EngineClient:
    return EngineClient(Opening(PairConfig("bundled"), EngineConfig(), Chain()), interval)


def stream_of(client: EngineClient, *names: int) -> Stream:
    return Stream(client, [Request(name, (1, 2), SamplingParams(seed=0), Chain()) for name in names])


async def sizes(stream: Stream, deltas: list[Delta]) -> list[int]:
    """Tokens of each group that a reader gets who reads as soon as he may."""
    found: list[int] = []

    async def read() -> None:
        async for group in stream:
            found.append(sum(len(d.token_ids) for d in group))

    reader = asyncio.ensure_future(read())
    for one in deltas:
        stream.put(one)
        for _ in range(5):
            await asyncio.sleep(0)
    await reader
    return found


def test_first_and_last_come_at_once_and_others_together() -> None:
    async def run() -> list[int]:
        steps = [delta(0, 1, begin=True), *(delta(0, 2) for _ in range(5)), delta(0, 1, end=True)]
        return await sizes(stream_of(client_of(4), 0), steps)

    assert asyncio.run(run()) == [1, 4, 4, 3]


def test_each_request_of_a_stream_has_its_edges() -> None:
    async def run() -> list[int]:
        steps = [
            delta(0, 1, begin=True), delta(0, 1), delta(1, 1, begin=True), delta(1, 1), delta(0, 1, end=True),
            delta(1, 1), delta(1, 1, end=True),
        ]  # fmt: skip
        return await sizes(stream_of(client_of(100), 0, 1), steps)

    assert asyncio.run(run()) == [1, 2, 2, 2]


def test_an_interval_of_one_holds_nothing_back() -> None:
    async def run() -> list[int]:
        steps = [delta(0, 1, begin=True), delta(0, 1), delta(0, 3), delta(0, 0), delta(0, 1, end=True)]
        return await sizes(stream_of(client_of(1), 0), steps)

    assert asyncio.run(run()) == [1, 1, 3, 1]


@pytest.mark.parametrize("error", [NumericalError("bad logits"), EngineDown("the engine died")])
def test_what_came_before_an_error_is_read_first(error: Exception) -> None:
    async def run() -> None:
        stream = stream_of(client_of(100), 0)
        stream.take(0)
        stream.put(delta(0, 1, begin=True))
        stream.put(delta(0, 2))
        if isinstance(error, NumericalError):
            stream.put(delta(0, 0, error="bad logits"))
        else:
            stream.fail(error)
        reader = aiter(stream)
        assert sum(len(d.token_ids) for d in await anext(reader)) == 3
        with pytest.raises(type(error), match=str(error)):
            await anext(reader)

    asyncio.run(run())


def test_the_interval_grows_with_the_streams_that_run_unless_it_is_set() -> None:
    class Crowd(EngineClient):
        num_streams = 5 * STREAMS_PER_TOKEN

    opening = Opening(PairConfig("bundled"), EngineConfig(), Chain())
    assert Crowd(opening).interval == 5 and Crowd(opening, 3).interval == 3
    assert client_of(None).interval == 1


@pytest.fixture(scope="module")
def slow_server() -> Iterator[Server]:
    with running(ServerConfig(port=0, api_key=(KEY,), stream_interval=10, log_level="error")) as found:
        yield found


@needs_native
def test_streams_of_few_events_join_to_the_whole_reply(slow_server: Server) -> None:
    """Two choices with a stop string and log-probabilities: the same text, tokens and reasons, in few events."""
    asked = {
        "prompt": "def f(x):",
        "max_tokens": 60,
        "temperature": 0.9,
        "seed": 3,
        "n": 2,
        "logprobs": 1,
        "stop": "\n\n",
    }
    whole = slow_server.post("/v1/completions", **asked)["choices"]
    chunks = [chunk for chunk in slow_server.stream("/v1/completions", **asked) if chunk["choices"]]
    for index, choice in enumerate(whole):
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [t for part in parts if part["logprobs"] for t in part["logprobs"]["tokens"]] == choice["logprobs"][
            "tokens"
        ]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert len(parts) <= 2 + len(choice["logprobs"]["tokens"]) // 5
    slow_server.settle()


@needs_native
def test_who_wrote_what_is_told_token_by_token(slow_server: Server) -> None:
    asked = {
        "prompt": "def f(x):",
        "max_tokens": 40,
        "temperature": 0,
        "return_token_sources": True,
        "ignore_eos": True,
    }
    (choice,) = slow_server.post("/v1/completions", **asked)["choices"]
    chunks = slow_server.stream("/v1/completions", **asked)
    told = [source for chunk in chunks for part in chunk["choices"] for source in part["sources"]]
    assert told == choice["sources"] and {source["by"] for source in told} > {"target"}
    assert len(chunks) < 8 < len(told)
