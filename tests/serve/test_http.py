"""Sockets that misbehave, and parts of chats that the bundled target has no template for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message
from tests.serve.test_choices import CALL, K, recorded_job, tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers

from aquiline.config import ChatConfig, EngineConfig, Environment, PairConfig
from aquiline.engine.encode import encode_chats
from aquiline.errors import CheckpointError
from aquiline.serve.admission import Admission, has_key
from aquiline.serve.api_errors import ApiError, bad_request
from aquiline.serve.chat_completions import ChatReply
from aquiline.serve.http import ClientGone, EventStream, Front, disconnect, error_response, while_connected
from aquiline.serve.protocol import ChatMessage, ChatRequest, Tool
from aquiline.serve.request_prompts import Prompts
from aquiline.serve.server import open_service, with_environment
from aquiline.serve.server_config import Limits, ServerConfig
from aquiline.spec.drafting import NoDraft
from aquiline.text.chat_template import ChatTemplate

SCOPE: dict[str, Any] = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
LIMITS = Limits(max_body_bytes=100, max_stalled_s=0.05)
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}<tool_call></think>"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}\n{% endfor %}"
)


async def never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


def test_a_client_that_takes_nothing_is_dropped() -> None:
    closed = []

    async def main() -> None:
        async def events() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield b"data: x\n\n"

        async def send(message: Message) -> None:
            if message["type"] == "http.response.body":
                await never()

        stream = EventStream(events(), lambda: closed.append(True), 0.05)
        await asyncio.wait_for(stream(SCOPE, never, send), 30)

    asyncio.run(main())
    assert closed == [True]


@pytest.mark.parametrize(("last", "ends"), [(3, [True, True, False]), (9, [True, True, True, False])])
def test_the_last_event_ends_the_reply_where_it_is_known(last: int, ends: list[bool]) -> None:
    """Else, as after an error, an empty message does."""
    sent: list[Message] = []

    async def main() -> None:
        async def events() -> AsyncIterator[bytes]:
            for number in range(3):
                yield b"data: %d\n\n" % number

        async def send(message: Message) -> None:
            sent.append(message)

        await EventStream(events(), lambda: None, 30, lambda: len(sent) == last)(SCOPE, never, send)

    asyncio.run(main())
    assert [message["more_body"] for message in sent[1:]] == ends
    assert b"".join(message["body"] for message in sent[1:]) == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"


def test_a_client_that_leaves_ends_the_work() -> None:
    cancelled = []

    async def main() -> None:
        async def work() -> None:
            try:
                await never()
            finally:
                cancelled.append(True)

        async def gone() -> Message:
            await asyncio.sleep(0.01)
            return {"type": "http.disconnect"}

        with pytest.raises(ClientGone):
            await asyncio.wait_for(while_connected(disconnect(gone), work()), 30)

    asyncio.run(main())
    assert cancelled == [True]


def front(receive: Any, headers: dict[str, str] | None = None, keys: tuple[str, ...] = ()) -> int:
    """The status with which a request is answered by an app that reads its whole body."""
    statuses = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        from starlette.exceptions import HTTPException

        try:
            while (await receive()).get("more_body"):
                pass
            error = ApiError(200, "read")
        except HTTPException as caught:
            error = ApiError(caught.status_code, caught.detail)
        await error_response(error)(scope, receive, send)

    async def send(message: Message) -> None:
        statuses.append(message.get("status"))

    raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    made = Front(app, keys, LIMITS, lambda status: None)
    asyncio.run(asyncio.wait_for(made(SCOPE | {"headers": raw}, receive, send), 30))
    return int(statuses[0])


def test_bodies_that_do_not_end_or_do_not_come() -> None:
    async def more() -> Message:
        return {"type": "http.request", "body": b"x" * 30, "more_body": True}

    async def whole() -> Message:
        return {"type": "http.request", "body": b"x" * 30, "more_body": False}

    assert front(whole) == 200 and front(more) == 413 and front(never) == 408
    assert front(whole, {"content-length": "101"}) == 413
    assert front(whole, keys=("k",)) == 401 and front(whole, {"authorization": "Bearer k"}, ("j", "k")) == 200


def test_keys_are_whole_words() -> None:
    assert has_key("Bearer a", ("a", "b")) and has_key("bearer b", ("a", "b"))
    for given in (None, "", "Bearer", "Bearer ", "Basic a", "Bearer ab", "a"):
        assert not has_key(given, ("a", "b"))
    assert not has_key("Bearer a", ())


def test_keys_that_nobody_can_send_are_refused_at_the_start() -> None:
    for key in ("", " a", "a ", "a\n", "a\tb", "schlüssel", "鍵", "\x7f"):
        with pytest.raises(ValueError, match=r"^api_key='key 2 of 2': can never be sent in a header; use"):
            ServerConfig(api_key=("ok", key))
    with pytest.raises(ValueError, match="api_key"):
        with_environment(ServerConfig(), Environment(None, None, api_key="a b "))
    ServerConfig(api_key=("a key of words", "sk-1/2+3=="))


def test_origins_that_no_browser_sends_are_refused_at_the_start() -> None:
    for origin in ("page.test", "http://page.test/", "http://page.test/a", "http://Page.test", "http://", ""):
        with pytest.raises(ValueError, match="allowed_origins"):
            ServerConfig(allowed_origins=(origin,))
    ServerConfig(allowed_origins=("*", "http://page.test", "https://page.test:8443", "chrome-extension://abc"))


@pytest.mark.parametrize(
    ("path", "level"), [("/ready", "DEBUG"), ("/metrics", "DEBUG"), ("/health", "DEBUG"), ("/v1/models", "WARNING")]
)
def test_what_is_polled_does_not_fill_the_log(caplog: pytest.LogCaptureFixture, path: str, level: str) -> None:
    """A load balancer asks for /ready once a second while models load."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await error_response(ApiError(503, "the engine is starting"))(scope, receive, send)

    async def send(message: Message) -> None:
        pass

    with caplog.at_level("DEBUG", logger="aquiline.serve"):
        front = Front(app, (), LIMITS, lambda status: None)
        asyncio.run(front(SCOPE | {"path": path}, never, send))
    assert [record.levelname for record in caplog.records if record.message == "served"] == [level]


def test_the_gate() -> None:
    gate = Admission(num_slots=2, max_waiting=1)
    gate.enter(2)
    gate.enter(1)
    with pytest.raises(ApiError) as refused:
        gate.enter(4)
    assert (refused.value.status, refused.value.param) == (400, "n"), "there never is room for four"
    with pytest.raises(ApiError) as refused:
        gate.enter(1)
    assert refused.value.status == 429 and int(refused.value.headers["retry-after"]) >= 1
    gate.leave(2, 5.0)
    gate.enter(2)
    gate.is_closed = True
    gate.leave(3, 1.0)
    with pytest.raises(ApiError) as refused:
        gate.enter(1)
    assert refused.value.status == 503


def test_the_gate_says_to_come_back_when_those_that_wait_have_run() -> None:
    """Two run and eight wait. A choice takes a second at first, and then as long as choices took of late."""
    gate = Admission(num_slots=2, max_waiting=8)

    def retry_after() -> int:
        with pytest.raises(ApiError) as refused:
            gate.enter(1)
        return int(refused.value.headers["retry-after"])

    gate.enter(10)
    found = [retry_after()]
    for took_s in (3.0, 0.01, 1000.0):
        for _ in range(150):
            gate.leave(1, took_s)
            gate.enter(1)
        found.append(retry_after())
    assert found == [4, 12, 1, 60]


def prompts(template: str | None = TEMPLATE) -> Prompts:
    return Prompts(tokenizer(), ChatTemplate(template, {}, tokenizer()))


def test_tools_reach_the_template() -> None:
    messages = [
        ChatMessage(role="developer", content=[{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]),
        ChatMessage(role="assistant", tool_calls=[{"function": {"name": "add", "arguments": '{"a": 1}'}}]),
        ChatMessage(role="tool", content="2", tool_call_id="x"),
    ]
    tool = Tool(function={"name": "add", "parameters": {"type": "object"}})
    text, ids = prompts().chat(messages, 4096, [tool])
    assert '"name": "add"' in text.split("\n")[0] and "system: Be\nbrief." in text
    assert '"arguments": {"a": 1}' in text and "tool: 2" in text
    assert tokenizer().decode(ids) == text
    with pytest.raises(ApiError, match="is not JSON"):
        prompts().chat(
            [ChatMessage(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": "{"}}])], 4096
        )
    with pytest.raises(ApiError, match="image_url"):
        prompts().chat([ChatMessage(role="user", content=[{"type": "image_url"}])], 4096)


def test_prompts_are_those_of_a_chat_in_python() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"}, {"role": "user", "content": "And?"},
    ]  # fmt: skip
    served = prompts().chat([ChatMessage.model_validate(message) for message in messages], 4096)[1]
    assert encode_chats(prompts().template, [messages, messages[:1]])[0] == served


def test_a_template_whose_end_the_model_does_not_have_is_refused_at_the_start(tmp_path: Path) -> None:
    letters = Tokenizer(models.WordLevel({chr(33 + i): i for i in range(96)}, unk_token="!"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.add_special_tokens(["<E>"])
    letters.save(str(tmp_path / "tokenizer.json"))
    config = {
        "model_type": "llama", "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
        "eos_token_id": 2, "bos_token_id": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    ends = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<E>{% endif %}{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": ends}))
    pair = PairConfig(target=str(tmp_path))
    with pytest.raises(CheckpointError, match="ends an answer with token 96, and the model has 96 tokens; take the"):
        open_service(pair, EngineConfig(), NoDraft(), ServerConfig(), Limits(), ChatConfig())


def chat_reply(name: str, size: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The deltas of a recorded answer and the message that is not streamed."""
    request = ChatRequest(messages=[{"role": "user", "content": "a"}], return_token_sources=True)
    job, gains = recorded_job(name, size)
    reply = ChatReply(job, request, "none", tokenizer())
    events = reply.begin() + [event for gain in gains for event in reply.add(job.choices[0], gain)]
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
    return [chunk["choices"][0] for chunk in chunks], reply.whole()["choices"][0]


@pytest.mark.parametrize("size", range(1, K + 2))
def test_a_chat_with_reasoning_and_a_call(size: int) -> None:
    deltas, whole = chat_reply("both", size)
    message = whole["message"]
    assert message["reasoning_content"] == "To add" and message["content"] is None
    assert whole["finish_reason"] == deltas[-1]["finish_reason"] == "tool_calls"
    calls = [call for each in deltas for call in each["delta"].get("tool_calls", [])]
    assert [call.pop("index") for call in calls] == [0] and calls == message["tool_calls"]
    function = json.loads(CALL.split("\n")[1])
    assert calls[0]["function"]["name"] == function["name"]
    assert json.loads(calls[0]["function"]["arguments"]) == function["arguments"]
    said = "".join(each["delta"].get("reasoning_content", "") for each in deltas)
    assert said == "To add" == "".join(entry["text"] for entry in message["sources"])
    assert {entry["in"] for entry in message["sources"]} == {"reasoning"}


def test_settings_and_errors() -> None:
    with pytest.raises(ValueError, match="port=70000"):
        ServerConfig(port=70000)
    with pytest.raises(ValueError, match="max_request_s=0"):
        Limits(max_request_s=0)
    with pytest.raises(ValueError, match="max_body_bytes=0"):
        Limits(max_body_bytes=0)
    assert bad_request("a", "b").body() == {
        "error": {"message": "a", "type": "invalid_request_error", "param": "b", "code": None}
    }
