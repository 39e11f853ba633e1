"""Engines that die, clients that leave, queues that are full, servers that are told to end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest
from tests.conftest import needs_native
from tests.serve.serving import HEADERS, PROMPT, Server, held, until

pytestmark = needs_native

LONG: dict[str, Any] = {
    "prompt": PROMPT, "max_tokens": 900, "temperature": 0, "ignore_eos": True, "drafter": "none",
}  # fmt: skip
RUN = "from aquiline.cli.main import app; app()"


def test_a_client_that_leaves_frees_its_pages(server: Server) -> None:
    server.settle()
    before = server.figure("vllm:iteration_tokens_total_sum")
    with held(server):
        with server.client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as reply:
            next(reply.iter_lines())
            assert server.figure("aquiline:pages_used") > 0
        until(lambda: not server.service.gate.num_inside, "nobody sees that the client has left")
    server.settle()
    assert server.figure("vllm:iteration_tokens_total_sum") - before < LONG["max_tokens"], "it was not dropped"
    assert server.figure("aquiline:pages") > 0


def test_a_client_that_leaves_before_the_reply_frees_its_pages(server: Server) -> None:
    server.settle()
    with held(server), pytest.raises(httpx.ReadTimeout):
        server.client.post("/v1/completions", json=LONG | {"n": 4}, timeout=httpx.Timeout(300, read=0.5))
    server.settle()


def test_a_stop_string_ends_the_engine_too(server: Server) -> None:
    server.settle()
    before = server.figure("vllm:iteration_tokens_total_sum")
    reply = server.complete(**LONG | {"stop": "generic"})
    assert reply["choices"][0]["finish_reason"] == "stop"
    server.settle()
    assert reply["usage"]["completion_tokens"] < 100
    assert server.figure("vllm:iteration_tokens_total_sum") - before < LONG["max_tokens"], "it went on to the end"


def test_a_full_queue_says_when_to_come_back(server: Server) -> None:
    """Four slots and four places to wait: of twelve requests at once four are refused, and the others served once they
    have been: until then the engine stands still."""
    server.settle()
    body = LONG | {"max_tokens": 150}

    def ask(seed: int) -> httpx.Response:
        return httpx.post(f"{server.url}/v1/completions", json=body | {"seed": seed}, headers=HEADERS, timeout=300)

    with ThreadPoolExecutor(12) as pool:
        with held(server):
            asked = [pool.submit(ask, seed) for seed in range(12)]
            until(lambda: sum(reply.done() for reply in asked) == 4, "the queue is not full")
            refused = [reply.result() for reply in asked if reply.done()]
        served = [reply for reply in (each.result() for each in asked) if reply not in refused]
    assert {reply.status_code for reply in refused} == {429}
    assert [reply.status_code for reply in served] == [200] * 8
    assert len({reply.json()["choices"][0]["text"] for reply in served}) == 1, "greedy texts differ"
    for reply in refused:
        assert int(reply.headers["retry-after"]) >= 1 and reply.json()["error"]["type"] == "rate_limit_error"
    server.settle()


def test_more_choices_than_the_queue_has_places(server: Server) -> None:
    """No later moment has room for them either."""
    error = server.error("/v1/completions", **LONG | {"n": 9})
    assert error["param"] == "n" and "8 do" in error["message"]


def test_a_dead_engine_is_replaced(server: Server) -> None:
    """Its requests end with an error that may be tried again, streams with an error event; then all is as before."""
    expected = server.text(temperature=0, max_tokens=20)
    restarts = server.figure("aquiline:engine_restarts_total")
    pid = server.service.client.pid
    assert pid is not None

    def ask() -> httpx.Response:
        return httpx.post(f"{server.url}/v1/completions", json=LONG, headers=HEADERS, timeout=300)

    with ThreadPoolExecutor(1) as pool, held(server):
        with server.client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as reply:
            lines = reply.iter_lines()
            next(lines)
            waiting = pool.submit(ask)
            until(lambda: server.service.client.num_streams == 2, "the other request has not come")
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


@pytest.mark.rare
@pytest.mark.skipif(not os.path.exists("/proc"), reason="this system has no /proc")
def test_an_engine_meets_its_first_grammar_on_a_full_disk(server: Server) -> None:
    """The library of grammars imports what asks for a place for temporary files."""
    body = {"temperature": 0, "max_tokens": 9, "structured_outputs": {"regex": "[a-z]{9}"}}
    expected, pid = server.text(**body), server.service.client.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: server.client.get("/ready").status_code == 503, "the engine has not died")
    until(lambda: server.client.get("/ready").status_code == 200, "no new engine")
    restarts, engine = server.figure("aquiline:engine_restarts_total"), psutil.Process(server.service.client.pid)
    engine.rlimit(psutil.RLIMIT_FSIZE, (0, engine.rlimit(psutil.RLIMIT_FSIZE)[1]))
    assert server.text(**body) == expected and len(expected) == 9
    assert server.figure("aquiline:engine_restarts_total") == restarts


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
            asked = LONG | {"stream": True}
            more, less = asked | {"max_tokens": 2000, "n": 16}, asked | {"max_tokens": 100, "priority": -1}
            with (
                httpx.stream("POST", path, json=more, timeout=300) as endless,
                httpx.stream("POST", path, json=less, timeout=300) as reply,
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
                with suppress(httpx.HTTPError):
                    assert "[DONE]" not in "".join(cut), "it would be taken for a whole text"
            assert process.stderr is not None and "Traceback" not in process.stderr.read()
        finally:
            process.kill()


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.HTTPError:
        return False
