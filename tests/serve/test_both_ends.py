"""Both ends of the pipe between HTTP and engine, each with the other end played."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import time
from collections import deque
from itertools import pairwise
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from prometheus_client.parser import text_string_to_metric_families
from tests.conftest import needs_native, tiny_llm

import aquiline.serve.client as client_module
from aquiline.config import EngineConfig, PairConfig, SamplingParams
from aquiline.engine.sequence import Request
from aquiline.serve.client import LONGEST_PAUSE_S, STEADY_S, EngineClient
from aquiline.serve.engine_process import _Host
from aquiline.serve.life import Life
from aquiline.serve.prometheus import Metrics
from aquiline.serve.wire import Abort, Command, EngineInfo, Opening, Quit, Stats, StepMessage, Submit
from aquiline.spec.drafting import NoDraft


class Script:
    """A connection over which commands come, some before each step, and then the end of the other process."""

    def __init__(self, *commands: list[Command]) -> None:
        self.left, self.told = deque(commands), list[StepMessage]()
        self.is_due = True

    def poll(self, timeout: float | None) -> bool:
        due, self.is_due = self.is_due, True
        return due or timeout is None

    def recv(self) -> list[Command]:
        if not self.left:
            raise EOFError
        self.is_due = False
        return self.left.popleft()

    def send(self, message: StepMessage) -> None:
        self.told.append(message)


@needs_native
def test_the_engine_process_keeps_nothing_of_requests_that_are_gone() -> None:
    """Aborted, ended or refused: a server that runs for weeks must not hold their tokens."""
    lengths, prompts = (200, 3, 3), ((5, 6), (7,), (10**6,))
    samplings = [SamplingParams(max_tokens=length, ignore_eos=True, seed=0) for length in lengths]
    long, short, bad = (Request(i, prompts[i], samplings[i], NoDraft()) for i in range(3))
    script = Script([Submit(long), Submit(short), Submit(bad)], [], [Abort(0)], [Abort(1)], [], [], [Abort(1), Quit()])
    llm = tiny_llm(max_batch=2)
    host = _Host(script, llm)  # type: ignore[arg-type]
    host.run()
    assert script.told[0].added == [0, 1] and [refused.request_id for refused in script.told[0].refused] == [2]
    assert not host.sequences and not llm.engine.sequences
    assert [delta.request_id for step in script.told for delta in step.deltas if delta.finish_reason] == [1]


@pytest.mark.parametrize("size", [1, 3, 1000, 10**6])
def test_messages_come_whole_and_in_order_wherever_the_pipe_cuts_them(size: int) -> None:
    """The other end is a Connection of multiprocessing, as in the engine process; what it writes comes in pieces."""
    info = EngineInfo(*[0] * len(EngineInfo._fields))  # type: ignore[arg-type]
    steps = [StepMessage([0] * number, [], [], Stats(*[number] * 8), 1) for number in (1, 0, 5000)]
    commands, told, ended = [Abort(3), Quit()], list[StepMessage](), asyncio.Event()

    async def main() -> list[object]:
        ours, theirs = socket.socketpair()
        life = Life(SimpleNamespace(), ours)
        life.on_message, life.on_end = told.append, ended.set
        inside, outside = multiprocessing.Pipe()
        for message in (info, *steps):
            inside.send(message)
        inside.close()
        written = b"".join(iter(lambda: os.read(outside.fileno(), 10**6), b""))
        first = asyncio.ensure_future(life.first())
        for place in range(0, len(written), size):
            theirs.sendall(written[place : place + size])
            await asyncio.sleep(0)
        found: list[object] = [await first]
        life.send(*commands)
        with Connection(theirs.detach()) as connection:
            found += await asyncio.to_thread(connection.recv)
        await ended.wait()
        return found

    assert asyncio.run(asyncio.wait_for(main(), 30)) == [info, *commands]
    assert told == steps


def test_a_process_that_is_gone_may_still_be_asked() -> None:
    """A request comes after the process has closed its end and before those are told that wait for it."""

    async def main() -> None:
        ours, theirs = socket.socketpair()
        life, ended = Life(SimpleNamespace(), ours), asyncio.Event()
        life.on_end = ended.set
        first = asyncio.ensure_future(life.first())
        with Connection(theirs.detach()) as connection:
            connection.send(EngineInfo(*[0] * len(EngineInfo._fields)))  # type: ignore[arg-type]
            await first
        await ended.wait()
        life.send(Quit())

    uvloop.run(  # as the server runs; asyncio's own loop drops what is written
        asyncio.wait_for(main(), 30)
    )


def test_a_process_that_ends_while_it_loads_says_so_and_is_not_taken_for_one_that_ran() -> None:
    async def main() -> None:
        client, (ours, theirs) = (
            EngineClient(Opening(PairConfig("bundled"), EngineConfig(), NoDraft())),
            socket.socketpair(),
        )
        life = Life(SimpleNamespace(join=lambda timeout=None: None, is_alive=lambda: False, exitcode=3), ours)
        theirs.close()
        with pytest.MonkeyPatch.context() as patched, pytest.raises(ValueError, match=r"loading \(exit code 3\)"):
            patched.setattr(Life, "begun", lambda opening: life)
            await client.start()
        await asyncio.sleep(0)
        assert client.num_restarts == 0 and client.state == "starting"

    asyncio.run(asyncio.wait_for(main(), 30))


class Played:
    """An engine process that is ready at once, and dies when it is told to."""

    exitcode, pid = -9, 1

    def __init__(self, connection: Connection) -> None:
        self.given = connection

    def start(self) -> None:
        self.connection = Connection(os.dup(self.given.fileno()))
        self.connection.send(EngineInfo(*[0] * len(EngineInfo._fields)))  # type: ignore[arg-type]

    def join(self, timeout: float | None = None) -> None: ...

    def kill(self) -> None:
        self.connection.close()

    def is_alive(self) -> bool:
        return not self.connection.closed


class Processes:
    """What multiprocessing.get_context gives: each process that is started is played."""

    def __init__(self) -> None:
        self.all: list[Played] = []

    def __call__(self, method: str) -> Processes:
        return self

    def Process(self, args: tuple[Connection, Opening], **settings: Any) -> Played:  # noqa: N802
        self.all.append(Played(args[0]))
        return self.all[-1]


def test_an_engine_that_dies_again_and_again_is_waited_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ran for long is replaced at once, and afterwards the waits are short again."""
    processes, pauses, lived = Processes(), list[float](), 0.0

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(multiprocessing, "get_context", processes)
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + lived))
    # Of this module alone: servers of other tests may sleep in threads meanwhile.
    monkeypatch.setattr(client_module, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": pause}))

    async def run() -> None:
        nonlocal lived
        client = EngineClient(Opening(PairConfig("bundled"), EngineConfig(), NoDraft()))
        await client.start()
        for seconds in [0.0] * 12 + [STEADY_S] + [0.0] * 2:
            lived, number = seconds, client.num_restarts
            processes.all[-1].kill()
            while client.num_restarts == number or client.state != "ready":
                await asyncio.sleep(0.001)
        await client.close()

    asyncio.run(asyncio.wait_for(run(), 30))
    soon, late, again = pauses[:12], pauses[12], pauses[13:]
    assert soon[0] < 1 and max(soon) == LONGEST_PAUSE_S
    assert all(2 * a <= b or b == LONGEST_PAUSE_S for a, b in pairwise(soon))
    assert late == 0.0 and again == soon[:2]


def test_sums_go_on_when_the_engine_is_replaced() -> None:
    """The new process counts from zero; what the old one counted is neither lost nor counted again."""
    metrics = Metrics("m")

    def told() -> list[float]:
        families = {family.name: family for family in text_string_to_metric_families(metrics.text().decode())}
        names = (
            "vllm:prefix_cache_queries",
            "vllm:prefix_cache_hits",
            "aquiline:prefill_tokens",
            "vllm:num_preemptions",
        )
        return [next(s.value for s in families[name].samples if s.name.endswith("_total")) for name in names]

    def step(*sums: int) -> None:
        metrics.on_step(StepMessage([], [], [], Stats(1, 0, 1, 5, *sums), 1))

    step(90, 40, 50, 2)
    step(100, 40, 60, 2)
    metrics.on_down()
    assert told() == [100, 40, 60, 2] == told()
    step(10, 4, 6, 1)
    assert told() == [110, 44, 66, 3]
    iterations = next(line for line in metrics.text().decode().splitlines() if "iteration_tokens_total_sum" in line)
    assert float(iterations.split()[-1]) == 66, "tokens of steps, the first after the restart too"
