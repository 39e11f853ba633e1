"""Engines that die, clients that leave, queues that are full, servers that are told to end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from tests.conftest import needs_native
from tests.serve.serving import HEADERS, PROMPT, Server, until

pytestmark = needs_native

LONG = {"prompt": PROMPT, "max_tokens": 900, "temperature": 0, "ignore_eos": True, "speculative": {"enabled": False}}
RUN = "from aquiline.cli.main import app; app()"


def test_a_client_that_leaves_frees_its_pages(server: Server) -> None:
    server.settle()
    with server.client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as reply:
        next(reply.iter_lines())
        assert server.figure("aquiline:pages_used") > 0
    began, tokens = time.monotonic(), server.figure("vllm:generation_tokens_total")
    server.settle()
    assert time.monotonic() - began < 30, "the request was finished, not dropped"
    assert server.figure("vllm:generation_tokens_total") - tokens < 500
    assert server.figure("aquiline:pages") > 0


def test_a_client_that_leaves_before_the_reply_frees_its_pages(server: Server) -> None:
    server.settle()
    with pytest.raises(httpx.ReadTimeout):
        server.client.post("/v1/completions", json=LONG | {"n": 4}, timeout=0.5)
    server.settle()


def test_a_stop_string_ends_the_engine_too(server: Server) -> None:
    server.settle()
    before = server.figure("vllm:iteration_tokens_total_sum")
    reply = server.complete(**LONG | {"stop": "generic"})
    assert reply["choices"][0]["finish_reason"] == "stop"
    server.settle()
    used = reply["usage"]["total_tokens"]
    assert server.figure("vllm:iteration_tokens_total_sum") - before < used + 100 < 900


def test_a_full_queue_says_when_to_come_back(server: Server) -> None:
    """Four slots and four places to wait: of twelve requests at once four are refused, and the others served."""
    server.settle()

    def ask(seed: int) -> httpx.Response:
        return httpx.post(
            f"{server.url}/v1/completions", json=LONG | {"max_tokens": 150, "seed": seed}, headers=HEADERS, timeout=300
        )

    with ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(ask, range(12)))
    codes = sorted(reply.status_code for reply in replies)
    assert set(codes) == {200, 429} and codes.count(200) >= 8, codes
    texts = {reply.json()["choices"][0]["text"] for reply in replies if reply.status_code == 200}
    assert len(texts) == 1, "greedy texts differ"
    refused = next(reply for reply in replies if reply.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1 and refused.json()["error"]["type"] == "rate_limit_error"
    server.settle()


def test_more_choices_than_the_queue_has_places(server: Server) -> None:
    assert server.error("/v1/completions", 429, **LONG | {"n": 9})["code"] == "queue_full"


def test_a_dead_engine_is_replaced(server: Server) -> None:
    """Its requests end with an error that may be tried again, streams with an error event; then all is as before."""
    expected = server.text(temperature=0, max_tokens=20)
    restarts = server.figure("aquiline:engine_restarts_total")
    pid = server.service.client.pid
    assert pid is not None

    def ask() -> httpx.Response:
        return httpx.post(f"{server.url}/v1/completions", json=LONG, headers=HEADERS, timeout=300)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask)
        with server.client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as reply:
            lines = reply.iter_lines()
            next(lines)
            os.kill(pid, signal.SIGKILL)
            told = [line for line in lines if line]
        failed = waiting.result()
    assert '"engine_restarting"' in told[-1] and "[DONE]" not in told[-1]
    assert failed.status_code == 503 and failed.headers["retry-after"] and "again" in failed.json()["error"]["message"]
    until(lambda: server.client.get("/ready").status_code == 200, "no new engine")
    assert server.service.client.pid != pid
    assert server.text(temperature=0, max_tokens=20) == expected
    assert server.figure("aquiline:engine_restarts_total") == restarts + 1
    server.settle()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def serve_command(port: int, *options: str) -> list[str]:
    given = ["--target", "bundled", "--port", str(port), "--max-num-seqs", "2", "--log-level", "warning", *options]
    return [sys.executable, "-c", RUN, "serve", *given]


def test_the_page_answers_while_the_engine_loads_and_a_signal_ends_both() -> None:
    """The engine process is stopped where it begins, so that it loads for as long as the test wants."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(serve_command(port), stderr=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: bool(engines_of(process.pid)), "there is no engine process")
            (engine,) = engines_of(process.pid)
            engine.suspend()
            until(lambda: answers(f"{url}/health"), "the server does not start")
            assert "<html" in httpx.get(url).text and httpx.get(f"{url}/ready").status_code == 503
            refused = httpx.post(f"{url}/v1/completions", json=LONG)
            assert refused.status_code == 503 and refused.headers["retry-after"], refused.text
            process.send_signal(signal.SIGTERM)
            _, told = process.communicate(timeout=60)
            assert process.returncode == 0 and "Traceback" not in told, told
            assert "does not exist: messages are written one after another and continued as plain text" in told
            assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
        finally:
            process.kill()


def engines_of(pid: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(pid).children() if "spawn_main" in " ".join(child.cmdline())]


def test_a_signal_drains_and_a_second_one_ends() -> None:
    """The first SIGTERM lets streams come to their end and takes nothing new; a second one waits for nothing."""
    port = free_port()
    command = serve_command(port)
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: answers(f"{url}/ready"), "the server does not start")
            path = f"{url}/v1/completions"
            short: dict[str, Any] = LONG | {"stream": True, "max_tokens": 100}
            with (
                httpx.stream("POST", path, json=short | {"max_tokens": 2000}, timeout=300) as endless,
                httpx.stream("POST", path, json=short, timeout=300) as reply,
            ):
                cut, lines = endless.iter_lines(), reply.iter_lines()
                next(cut)
                next(lines)
                process.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
                assert rest[-1] == "data: [DONE]" and '"length"' in rest[-2], "the stream was cut"
                assert process.poll() is None and not answers(f"{url}/health")
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) is not None
                with pytest.raises(httpx.HTTPError):
                    list(cut)
        finally:
            process.kill()


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.HTTPError:
        return False
