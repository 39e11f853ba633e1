"""A server of the bundled pair for tests: uvicorn in a thread of this process, the engine in a process of its own."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import psutil
import uvicorn

from aquiline.config import ChatConfig, EngineConfig, PairConfig
from aquiline.engine.learning.learn_config import LearnConfig
from aquiline.serve.app import make_app
from aquiline.serve.server import open_service
from aquiline.serve.server_config import Limits, ServerConfig
from aquiline.serve.service import Service
from aquiline.serve.wire import StepMessage
from aquiline.spec.drafting import Chain

KEY = "a key for tests"
HEADERS = {"authorization": f"Bearer {KEY}"}
ENGINE = EngineConfig(max_batch=4, max_context=1024, page_size=16, check=True, calibration=False)
LIMITS = Limits(max_waiting=4, max_body_bytes=100_000, max_stored_bytes=20_000)
PAIR = PairConfig("bundled")
PROMPT = "def fibonacci(n):"
OTHER = "class Stack:\n    def __init__(self):\n"


class Server:
    """A running server: its address, its service, and a client of it."""

    def __init__(self, service: Service, server: uvicorn.Server, port: int) -> None:
        self.service, self.server = service, server
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, headers=HEADERS, timeout=300)

    def post(self, path: str, status: int = 200, **body: Any) -> Any:
        """The JSON of a reply, which has the status."""
        reply = self.client.post(path, json=body)
        assert reply.status_code == status, reply.text
        return reply.json()

    def complete(self, prompt: Any = PROMPT, **body: Any) -> Any:
        return self.post("/v1/completions", prompt=prompt, **body)

    def text(self, prompt: Any = PROMPT, **body: Any) -> str:
        (choice,) = self.complete(prompt, **body)["choices"]
        return str(choice["text"])

    def chat(self, content: str = PROMPT, **body: Any) -> Any:
        return self.post("/v1/chat/completions", messages=[{"role": "user", "content": content}], **body)

    def error(self, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
        """The error of a reply in OpenAI's shape."""
        error = self.post(path, status, **body)["error"]
        assert set(error) == {"message", "type", "param", "code"} and isinstance(error["message"], str)
        return dict(error)

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The chunks of a streamed reply, which ends as it must."""
        with self.client.stream("POST", path, json=body | {"stream": True}) as reply:
            assert reply.status_code == 200, reply.read()
            assert reply.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in reply.iter_lines() if line]
        assert lines.pop() == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    def figure(self, name: str) -> float:
        """A figure of /metrics, summed over its labels."""
        lines = self.client.get("/metrics").text.splitlines()
        found = [float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + "{", name + " "))]
        assert found, f"{name} is not in /metrics"
        return sum(found)

    def settle(self) -> None:
        """Wait until no request is left: in the engine, in a page, in the gate."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "aquiline:pages_used")
        until(lambda: not self.service.gate.num_inside and not any(map(self.figure, names)), "requests are left")


@contextmanager
def held(server: Server) -> Iterator[None]:
    """The engine process is stopped by the first tokens that it tells of, up to the end of the block. So it does not
    come to the end of a text before the test has done what it does inside, however busy the machine is."""
    client = server.service.client
    engine, on_step = psutil.Process(client.pid), client.on_step

    def stop(message: StepMessage) -> None:
        on_step(message)
        if message.deltas:
            engine.suspend()

    client.on_step = stop
    try:
        yield
    finally:
        client.on_step = on_step
        with suppress(psutil.NoSuchProcess):
            engine.resume()


@contextmanager
def running(
    config: ServerConfig,
    limits: Limits = LIMITS,
    engine: EngineConfig = ENGINE,
    pair: PairConfig = PAIR,
    learning: LearnConfig = LearnConfig(),
) -> Iterator[Server]:
    """A server that is ready."""
    service = open_service(pair, engine, Chain(), config, limits, ChatConfig(), learning)
    server = uvicorn.Server(uvicorn.Config(make_app(service), port=0, log_config=None, access_log=False, lifespan="on"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started or not thread.is_alive(), "the server does not start")
    until(lambda: service.client.state == "ready" or service.failure is not None, "the engine does not start")
    assert server.started and service.failure is None, service.failure
    try:
        yield Server(service, server, server.servers[0].sockets[0].getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(30)


def until(is_true: Callable[[], bool], what: str, patience: int = 6000) -> None:
    """Wait for something, two minutes of a process that runs; one that is stopped meanwhile may take longer."""
    for _ in range(patience):
        if is_true():
            return
        time.sleep(0.02)
    raise AssertionError(what)
