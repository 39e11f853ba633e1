"""The worst of every field, while a stream is watched: no request under the limits delays another for long, or takes
much memory. `make test` sends a body of each kind, benchmarks/chaos.py all of them.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.conftest import needs_native

from aquiline.serve.server_config import Limits

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from served import Served, posted, serving
from worst_bodies import MAX_GROWN_BYTES, WORST, Canary, Felt, most_gap_s

sys.path.pop(0)

pytestmark = [
    needs_native,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="this system has no /proc"),
]

OFTEN = (
    "prompts that are objects", "prompts of no type", "many texts", "a prompt of code", "stop of wrong types",
    "biases of wrong types", "a prediction", "a salt", "messages of no type", "parts that are empty",
    "tools of wrong types", "items of no type", "a text to tokenise", "ids to detokenise",
)  # fmt: skip


class Watched(NamedTuple):
    served: Served
    most_gap_s: float


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    """A server in processes of its own, and how long the canary may wait for an event."""

    async def idle(served: Served) -> list[float]:
        async with Canary(served) as canary:
            await canary.listen(20)
            return await canary.listen(150)

    with serving("--target", "bundled", "--max-model-len", "1024", "--max-num-seqs", "17") as served:
        yield Watched(served, most_gap_s(asyncio.run(idle(served))))


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in WORST]
)
def test_nobody_else_feels_it(watched: Watched, name: str) -> None:
    body = WORST[name].body(Limits().max_body_bytes)

    async def send() -> Felt:
        async with Canary(watched.served) as canary:
            await canary.listen(2)
            return await canary.felt(WORST[name].path, body, watched.most_gap_s)

    found = asyncio.run(asyncio.wait_for(send(), 120))
    assert found.gap_s <= watched.most_gap_s and found.grown_bytes <= MAX_GROWN_BYTES
    assert found.status < 500


def test_threads_that_read_long_bodies_share_one_heap(watched: Watched) -> None:
    """glibc's heap of a thread has 64 MiB of addresses, of which only the first can be written to. It keeps what the
    thread's largest body took."""

    async def send() -> None:
        async with posted(watched.served, WORST["a prompt of code"].path, body) as reply:
            await reply.body()

    async def at_once() -> None:
        await asyncio.gather(*[send() for _ in range(4)])

    body = WORST["a prompt of code"].body(Limits().max_body_bytes)
    asyncio.run(asyncio.wait_for(at_once(), 120))
    maps = watched.served.processes[0].memory_maps(grouped=False)
    bounds = [[int(end, 16) for end in part.addr.split("-")] for part in maps]
    heaps = [
        start for (start, end), (_, last), part in zip(bounds, bounds[1:], maps, strict=False)
        if part.path == "[anon]" and end < last == start + 2**26
    ]  # fmt: skip
    assert len(maps) > 10 and not heaps
