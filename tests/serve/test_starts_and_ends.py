"""Engines that cannot start, and servers that have no more time: whoever asks is told."""

from __future__ import annotations

import asyncio
import json
import multiprocessing.popen_spawn_posix
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from starlette.types import Message
from tests.serve.serving import until
from tests.serve.silent import SilentLife, silent_service
from tests.serve.test_http import SCOPE, never

from aquiline.config import EngineConfig, PairConfig
from aquiline.serve.client import EngineClient
from aquiline.serve.http import Front
from aquiline.serve.life import Life
from aquiline.serve.server import Server
from aquiline.serve.server_config import Limits
from aquiline.serve.wire import Opening
from aquiline.spec.drafting import NoDraft

CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), RuntimeError("can't start new thread")])
def test_a_process_that_cannot_be_started_ends_the_server(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def broken(*given: object) -> None:
        raise error

    monkeypatch.setattr(multiprocessing.popen_spawn_posix.Popen, "__init__", broken)
    service, ended = silent_service(), []
    service.client = EngineClient(Opening(PairConfig("bundled"), EngineConfig(), NoDraft()))
    service.on_failure = lambda: ended.append(True)
    asyncio.run(service.start())
    assert ended and service.failure is not None and "cannot be started" in service.failure, service.failure
    assert str(error) in service.failure and "free memory" in service.failure


def test_a_process_that_cannot_be_replaced_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the reason is: a ValueError of its models, or an error that nobody has thought of."""
    errors: list[Exception] = [ValueError("no room"), RuntimeError("can't start new thread"), KeyError("odd")]

    def begun(opening: Opening) -> Life:
        if errors:
            raise errors.pop(0)
        return SilentLife()

    async def main() -> str:
        client = EngineClient(Opening(PairConfig("bundled"), EngineConfig(), NoDraft()))
        client._pause_s = 0.0
        monkeypatch.setattr(Life, "begun", begun)
        monkeypatch.setattr("aquiline.serve.client.LONGEST_PAUSE_S", 0.01)
        await asyncio.wait_for(client._restart(), 30)
        return client.state

    assert asyncio.run(main()) == "ready"
    told = [record.fields["error"] for record in caplog.records if record.message == "engine cannot start again"]  # type: ignore[attr-defined]
    assert told == ["no room", "can't start new thread", "'odd'"]


class Ending:
    """A server in a thread, of which requests run that will not end, and to which then SIGTERM comes."""

    def __init__(self, drain_s: float) -> None:
        self.server = Server(silent_service(drain_s=drain_s))
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]}, daemon=True)

    def requests(self, num_signals: int) -> tuple[list[str], httpx.Response]:
        """The lines of a stream that runs meanwhile, and a reply that is whole."""
        self.thread.start()
        until(lambda: self.server.service.client.state == "ready", "the server does not start")
        with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=self.url, timeout=60) as client:
            with client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as reply:
                lines = reply.iter_lines()
                next(lines)
                whole = pool.submit(httpx.post, f"{self.url}/v1/chat/completions", json=CHAT, timeout=60)
                until(lambda: self.server.service.client.num_streams == 2, "the other request has not come")
                for _ in range(num_signals):
                    self.server.handle_exit(signal.SIGTERM, None)
                told = [line for line in lines if line]
            found = told, whole.result()
        self.thread.join(30)
        assert not self.thread.is_alive()
        return found


@pytest.mark.parametrize(("num_signals", "drain_s"), [(1, 0.1), (2, 60)])
def test_what_runs_past_the_end_of_the_time_is_told_so(
    caplog: pytest.LogCaptureFixture, num_signals: int, drain_s: float
) -> None:
    """A stream that only stopped would be taken for a whole text, and a plain 500 for an error of the server's."""
    told, whole = Ending(drain_s).requests(num_signals)
    error = json.loads(told[-1].removeprefix("data: "))["error"]
    assert error["code"] == "draining" and error["type"] == "service_unavailable_error"
    assert whole.status_code == 503 and whole.json()["error"] == error
    assert not [record for record in caplog.records if record.exc_info or "Traceback" in record.getMessage()]


def cancelled(num_sent: int) -> list[Message]:
    """What a client gets of a request that is cancelled once its reply has sent so many messages."""
    sent: list[Message] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for _ in range(num_sent):
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await never()

    async def send(message: Message) -> None:
        sent.append(message)

    async def main() -> None:
        front = Front(app, (), Limits(), lambda status: None)
        task = asyncio.create_task(front(SCOPE | {"headers": []}, never, send))
        await asyncio.sleep(0)
        task.cancel()
        await task

    asyncio.run(main())
    return sent


def test_a_request_that_is_cancelled_is_answered_where_it_was_not() -> None:
    """A server that ends cancels what still hangs, as a body that does not come."""
    start, body = cancelled(0)
    assert start["status"] == 503 and json.loads(body["body"])["error"]["code"] == "draining"
    assert len(cancelled(1)) == 1
