"""A client's stream goes on at another server, and its text is the one that a single server gives."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from tests.conftest import needs_native
from tests.serve.serving import KEY, PROMPT, Server, held, until

from aquiline.serve.resuming import StreamLost, resumed_text

BODY = {"prompt": "p", "max_tokens": 9}
WHOLE = "one two three"


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text}]}).encode() + b"\n\n"


def failure(kind: str) -> bytes:
    return b"data: " + json.dumps({"error": {"type": kind, "message": "told"}}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
ENDS = {
    "cut": (200, event("one t")),
    "cut inside an event": (200, event("one t") + event("wo")[:-9]),
    "engine died": (200, event("one") + failure("service_unavailable_error")),
    "busy": (429, b"{}"),
    "draining": (503, b"{}"),
    "nothing": (200, b""),
}  # fmt: skip
"""How a try may end before the text does, with which status and bytes."""


@contextmanager
def scripted(*replies: tuple[int, bytes]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that gives one reply after the other and then the whole text; the bodies that it got."""
    left, got = list(replies), list[dict[str, Any]]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            status, content = left.pop(0) if left else (200, event("one") + event(" two") + event(" three") + DONE)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", got
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("name", ENDS)
def test_a_text_goes_on_where_it_was_cut(name: str) -> None:
    with scripted(ENDS[name]) as (url, got):
        assert "".join(resumed_text([url], BODY, pause_s=0.01)) == WHOLE
    first, second = got
    assert first == second and isinstance(first["seed"], int) and first["stream"], "the same request, with its seed"


def test_another_server_is_tried_and_the_seed_that_was_given_kept() -> None:
    with scripted() as (url, got):
        nobody = "http://127.0.0.1:9"
        assert "".join(resumed_text([nobody, url], BODY | {"seed": 3}, pause_s=0.01)) == WHOLE
    assert [body["seed"] for body in got] == [3]


def test_tries_come_to_an_end() -> None:
    with scripted(*[ENDS["cut"]] * 3) as (url, got), pytest.raises(StreamLost, match="3 tries"):
        list(resumed_text([url], BODY, max_tries=3, pause_s=0.01))
    assert len(got) == 3


def test_a_server_of_another_model_is_noticed() -> None:
    with scripted(ENDS["cut"], (200, event("other") + DONE)) as (url, _), pytest.raises(StreamLost, match="same model"):
        list(resumed_text([url], BODY, pause_s=0.01))


@pytest.mark.parametrize("reply", [(400, b'{"error": "told"}'), (200, failure("invalid_request_error"))])
def test_what_is_refused_is_not_sent_again(reply: tuple[int, bytes]) -> None:
    with scripted(reply) as (url, got), pytest.raises(ValueError, match="told"):
        list(resumed_text([url], BODY, pause_s=0.01))
    assert len(got) == 1


@pytest.mark.parametrize(("urls", "n"), [([], 1), (["http://127.0.0.1:9"], 2)], ids=["no server", "two texts"])
def test_what_cannot_be_resumed_is_refused(urls: list[str], n: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        list(resumed_text(urls, BODY | {"n": n}))


@needs_native
@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
def test_a_killed_engine_is_not_seen(server: Server, chat: bool) -> None:
    what = {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": PROMPT}
    body = what | {"max_tokens": 300, "temperature": 0.9, "seed": 5, "ignore_eos": True}
    reply = server.post("/v1/chat/completions" if chat else "/v1/completions", **body)["choices"][0]
    pieces = resumed_text([server.url], body, api_key=KEY)
    with held(server):
        text = next(pieces)
        pid = server.service.client.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    assert text + "".join(pieces) == (reply["message"]["content"] if chat else reply["text"])
    until(lambda: server.service.client.state == "ready", "no new engine")
    server.settle()
