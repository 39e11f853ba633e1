"""The OpenAI client against a real server on this machine that streams events, and every way a server can be wrong."""

from __future__ import annotations

import http.server
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from aquiline.bench.peers.names import parse_peer
from aquiline.bench.peers.peer import Peer, PeerSetup
from aquiline.bench.results.intervals import decode_tokens_per_s

PROMPT = [7, 8, 9]
NOWHERE = PeerSetup(Path("none"), None, 1, 64)
GAP_S = 0.02


@dataclass
class Server:
    """How the server answers, and what it was asked."""

    address: str = ""
    models: list[str] | None = field(default_factory=lambda: ["small"])
    status: int = 200
    tells_ids: bool = True
    tells_usage: bool = True
    made: int | None = None  # None: as many as asked for
    read_more: int = 0
    breaks_off: bool = False
    refuses: str | None = None  # a field that it does not know
    counts: list[float] | None = None  # drafts, drafted and accepted tokens; None: it has no /metrics
    counts_more: tuple[float, float, float] = (0, 0, 0)  # for each request
    tail: bytes = b"data: [DONE]\n\n"
    asked: list[dict[str, Any]] = field(default_factory=list)

    def events(self, asked: dict[str, Any]) -> Iterator[bytes]:
        """Two tokens a chunk, then the usage, then the end."""
        count = asked["max_tokens"] if self.made is None else self.made
        for first in range(0, count, 2):
            ids = [100 + i for i in range(first, min(first + 2, count))]
            choice = {"index": 0, "text": "".join(f"<{i}>" for i in ids)} | (
                {"token_ids": ids} if self.tells_ids else {}
            )
            yield b": a comment\n\ndata: " + json.dumps({"choices": [choice], "usage": None}).encode() + b"\n\n"
        if self.tells_usage:
            usage = {"prompt_tokens": len(asked["prompt"]) + self.read_more, "completion_tokens": count}
            yield b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
        yield self.tail

    def metrics(self) -> str:
        """Figures as vLLM's server tells them, of two engines."""
        lines = ["# HELP vllm:spec_decode_num_drafts_total Drafts.", "vllm:spec_decode_num_drafts_created 1.7e9"]
        lines.append('vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 7.0')
        for name, value in zip(("drafts", "draft_tokens", "accepted_tokens"), self.counts or (), strict=False):
            for engine in (0, 1):
                lines.append(f'vllm:spec_decode_num_{name}_total{{engine="{engine}",model_name="m n"}} {value / 2}')
        return "\n".join(lines) + "\n"


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self.reply(200 if state.counts else 404, state.metrics().encode())
                return
            assert self.path == "/v1/models"
            found = state.models is not None
            self.reply(200 if found else 404, {"data": [{"id": name} for name in state.models or ()]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.asked.append(asked)
            if state.refuses in asked:
                self.reply(400, {"error": f"{state.refuses}: Extra inputs are not permitted"})
                return
            state.counts = state.counts and [a + b for a, b in zip(state.counts, state.counts_more, strict=True)]
            if state.status != 200 or self.path != "/v1/completions":
                self.reply(state.status, {"error": {"message": "no such\n model"}})
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for event in state.events(asked):
                if state.breaks_off and state.tail == event:
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.close_connection = True
                    self.connection.close()  # with a reset, as of a process that died
                    return
                self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
                time.sleep(GAP_S)
            self.wfile.write(b"0\r\n\r\n")

        def reply(self, status: int, body: dict[str, Any] | bytes) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.address = f"http://127.0.0.1:{running.server_port}/v1"
    threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
    yield state
    running.shutdown()
    running.server_close()


def peer_of(server: Server, model: str = "small") -> Peer:
    return parse_peer(f"openai:{server.address}#{model}").open(NOWHERE)


def test_chunks_are_timed_as_they_come(server: Server) -> None:
    peer = peer_of(server)
    (output,) = peer.generate([PROMPT], 8, 0.5)
    assert output.token_ids == list(range(100, 108)) and output.num_tokens == 8
    assert output.text == "".join(f"<{i}>" for i in range(100, 108))
    assert output.num_steps == 0 < output.first_ms
    assert output.last_ms - output.first_ms >= 3 * 1e3 * GAP_S * 0.9, "chunks were not read one by one"
    (asked,) = server.asked
    assert asked["prompt"] == PROMPT and asked["max_tokens"] == asked["min_tokens"] == 8
    assert asked["ignore_eos"] and asked["stream"] and asked["temperature"] == 0.5 and asked["model"] == "small"
    assert peer.system()["model"] == "small"


def test_prompts_run_at_once_and_come_back_in_order(server: Server) -> None:
    began = time.perf_counter()
    run = peer_of(server).generate([PROMPT, PROMPT[:2], PROMPT[:1]], 40, 0.0)
    alone_s = 21 * GAP_S
    assert time.perf_counter() - began < 2.5 * alone_s
    assert [o.num_tokens for o in run] == [40] * 3 and len(server.asked) == 3
    seconds = (max(o.last_ms for o in run) - min(o.first_ms for o in run)) / 1e3
    assert decode_tokens_per_s(run) == pytest.approx(3 * 39 / seconds)


def test_a_server_without_ids_tells_its_text(server: Server) -> None:
    server.tells_ids = False
    (output,) = peer_of(server).generate([PROMPT], 3, 0.0)
    assert output.token_ids == [] and output.text == "<100><101><102>" and output.num_tokens == 3


def test_a_server_without_a_list_of_models_may_still_have_it(server: Server) -> None:
    server.models = None
    assert peer_of(server).generate([PROMPT], 2, 0.0)[0].num_tokens == 2


def test_a_server_that_refuses_a_wish_is_asked_without_it(server: Server) -> None:
    """TensorRT-LLM takes no field that it does not know, and says which one."""
    server.refuses, server.tells_ids = "return_token_ids", False
    peer = peer_of(server)
    assert [peer.generate([PROMPT], 4, 0.0)[0].num_tokens for _ in range(2)] == [4, 4]
    assert ["return_token_ids" in asked for asked in server.asked] == [True, False, False]
    server.asked.clear()
    assert [each.num_tokens for each in peer_of(server).generate([PROMPT] * 4, 4, 0.0)] == [4] * 4, "all at once"
    assert ["return_token_ids" in asked for asked in server.asked].count(False) == 4
    server.refuses = "ignore_eos"
    with pytest.raises(ValueError, match=r"answered 400: .*ignore_eos: Extra inputs"):
        peer.generate([PROMPT], 4, 0.0)


def test_steps_are_those_that_the_servers_counters_say(server: Server) -> None:
    server.counts, server.counts_more = [1e6, 3e6, 2e6], (4, 12, 5)
    (output,) = peer_of(server).generate([PROMPT], 10, 0.0)
    assert (output.num_steps, output.num_draft_tokens) == (4, 12), "9 tokens: 5 accepted, and one of each step"
    server.counts_more = (4, 12, 2)
    (output,) = peer_of(server).generate([PROMPT], 10, 0.0)
    assert output.num_steps == 7, "three steps went without a draft"
    run = peer_of(server).generate([PROMPT] * 3, 10, 0.0)
    assert sum(o.num_steps for o in run) == 21 and sum(o.num_draft_tokens for o in run) == 36
    server.counts_more = (0, 0, 0)
    assert peer_of(server).generate([PROMPT], 10, 0.0)[0].num_steps == 0, "it drafts nothing"


def refused(server: Server, **answers: object) -> str:
    for name, value in answers.items():
        setattr(server, name, value)
    with pytest.raises(ValueError) as caught:
        peer_of(server).generate([PROMPT], 8, 0.0)
    message = str(caught.value)
    assert message.startswith(f"peer openai:{server.address}#small: the server ") and "\n" not in message
    return message


@pytest.mark.parametrize(
    ("answers", "named"),
    [
        ({"models": ["big", "bigger"]}, "has no model 'small'; it has big, bigger"),
        ({"status": 404}, 'answered 404: {"error": {"message": "no such\\n model"}}; is \'small\' the model\'s name'),
        ({"status": 500}, "answered 500: "),
        ({"made": 5}, "made 5 tokens, 8 were asked for; it must honour ignore_eos"),
        ({"read_more": 1}, "read 4 prompt tokens, 3 were sent"),
        ({"tells_usage": False}, "sent no usage or no text"),
        ({"made": 0}, "sent no usage or no text"),
        ({"tail": b"data: {broken\n\n"}, "sent a chunk that is no JSON: '{broken'"),
        ({"tail": b'data: {"error": {"message": "out of memory"}}\n\n'}, "sent an error in its stream"),
        ({"tail": b"\n"}, "ended its stream without [DONE]"),
        ({"breaks_off": True}, "broke off its stream"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_a_server_does_wrong_is_named(server: Server, answers: dict[str, object], named: str) -> None:
    assert named in refused(server, **answers)


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"the server cannot be reached \(.*\); start the server or mend the address"):
        parse_peer("openai:http://127.0.0.1:9/v1#m").open(NOWHERE)
