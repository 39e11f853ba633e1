"""/v1/responses: items, events, and responses that a later one goes on from."""

from __future__ import annotations

import json
from sys import getsizeof
from typing import Any

import pytest
from tests.conftest import needs_native
from tests.serve.serving import OTHER, PROMPT, Server
from tests.serve.test_choices import K, recorded_job, tokenizer

from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM
from aquiline.serve.protocol import ResponseRequest
from aquiline.serve.response_events import ResponseReply
from aquiline.serve.responses import ResponseStore, StoredResponse, as_chat

pytestmark = needs_native

ASKED: dict[str, Any] = {"input": PROMPT, "temperature": 0, "max_output_tokens": 20}


def text_of(response: Any) -> str:
    (item,) = response["output"]
    return str(item["content"][0]["text"])


def events(server: Server, **body: Any) -> list[dict[str, Any]]:
    with server.client.stream("POST", "/v1/responses", json=body | {"stream": True}) as reply:
        blocks = "".join(reply.iter_text()).split("\n\n")
    found = []
    for block in blocks[:-1]:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def test_a_response_and_its_stream(server: Server, llm: LLM) -> None:
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=20))[0].text
    response = server.post("/v1/responses", **ASKED)
    assert text_of(response) == expected and response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["usage"]["output_tokens"] == 20 and response["usage"]["input_tokens_details"]["cached_tokens"] >= 0
    told = events(server, **ASKED)
    names = [event["type"].removeprefix("response.") for event in told]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert "".join(event["delta"] for event in told if event["type"].endswith("text.delta")) == expected
    assert text_of(told[-1]["response"]) == expected == told[-4]["text"]


def test_a_conversation_goes_on(server: Server, llm: LLM) -> None:
    first = server.post("/v1/responses", **ASKED)
    second = server.post("/v1/responses", **ASKED | {"input": OTHER, "previous_response_id": first["id"]})
    prompt = "\n\n".join([PROMPT, text_of(first), OTHER])
    assert text_of(second) == llm.generate(prompt, SamplingParams(max_tokens=20))[0].text
    kept = server.client.get(f"/v1/responses/{second['id']}").json()
    assert kept == second
    items = server.client.get(f"/v1/responses/{second['id']}/input_items").json()["data"]
    assert [item["role"] for item in items] == ["user", "assistant", "user"] and items[0]["content"] == OTHER
    assert server.client.delete(f"/v1/responses/{first['id']}").json()["deleted"]
    assert server.client.get(f"/v1/responses/{first['id']}").status_code == 404
    error = server.error("/v1/responses", 404, **ASKED | {"previous_response_id": first["id"]})
    assert error["param"] == "previous_response_id"


def test_what_is_not_to_be_kept(server: Server) -> None:
    response = server.post("/v1/responses", **ASKED, store=False)
    assert server.client.get(f"/v1/responses/{response['id']}").status_code == 404


def test_refusals(server: Server) -> None:
    for more, param in (
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"input": [{"type": "image"}]}, "input"),
        ({"input": [{"type": "message", "content": "a"}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ):
        error = server.error("/v1/responses", **ASKED | more)
        assert error["param"] == param and error["message"].startswith(param), error


def test_items_become_messages() -> None:
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Add."}]},
        {"type": "reasoning", "content": []},
        {"type": "function_call", "call_id": "a", "name": "add", "arguments": '{"x": 1}'},
        {"type": "function_call", "call_id": "b", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "2"},
    ]
    request = ResponseRequest(input="", instructions="Be brief.", tools=[{"type": "function", "name": "add"}])
    chat = as_chat(request, items)
    assert [message.role for message in chat.messages] == ["system", "user", "assistant", "tool"]
    calls = chat.messages[2].tool_calls or []
    assert [call.id for call in calls] == ["a", "b"] and calls[0].function.arguments == '{"x": 1}'
    assert chat.tools is not None and chat.tools[0].function.name == "add"


def test_reasoning_goes_back_with_the_calls_it_led_to() -> None:
    """Up to the next turn of a user or a tool; in front of an answer it is not said again."""

    def reasoned(text: str) -> dict[str, object]:
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}

    call = {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}"}
    items = [
        {"type": "message", "role": "user", "content": "Add."}, reasoned("first"), call, call,
        {"type": "function_call_output", "call_id": "a", "output": "2"}, call,
        {"type": "function_call_output", "call_id": "a", "output": "2"}, reasoned("second"),
        {"type": "message", "role": "assistant", "content": "I add."}, call,
        {"type": "function_call_output", "call_id": "a", "output": "2"}, reasoned("third"),
        {"type": "message", "role": "assistant", "content": "4"}, {"type": "message", "role": "user", "content": "So?"},
        {"type": "reasoning", "content": 5}, {"type": "reasoning", "content": [5, {"text": 5}]}, call,
    ]  # fmt: skip
    said = as_chat(ResponseRequest(input=""), items).messages
    told = [(message.model_extra or {}).get("reasoning_content") for message in said if message.role == "assistant"]
    assert told == ["first", None, "second", None, None]


def test_the_oldest_responses_are_dropped() -> None:
    """What is counted is what is held: bytes, and what Python needs around them."""
    store = ResponseStore(20_000)
    for number in range(50):
        store.put(str(number), StoredResponse(b'{"output":["%s"]}' % (b"x" * 100), b"[]"))
        assert store.num_bytes <= 20_000
        held = sum(map(getsizeof, (store.kept, *store.kept, *store.kept.values())))
        held += sum(getsizeof(each) for kept in store.kept.values() for each in (vars(kept), *vars(kept).values()))
        assert held <= store.num_bytes
    assert "49" in store.kept and "0" not in store.kept and len(store.kept) > 10
    for name in list(store.kept):
        store.drop(name)
    assert store.num_bytes == 0
    ResponseStore(0).put("a", StoredResponse(b'{"output":[]}', b"[]"))


def test_a_response_that_is_read_is_kept_for_longer(server: Server) -> None:
    """There is room for a few, and those that nobody has read for longest are dropped."""
    asked = ASKED | {"input": "-" * 4000, "max_output_tokens": 1}
    read, other = (server.post("/v1/responses", **asked)["id"] for _ in range(2))
    for _ in range(8):
        assert server.client.get(f"/v1/responses/{read}").status_code == 200
        server.post("/v1/responses", **asked)
    assert server.client.get(f"/v1/responses/{other}").status_code == 404


@pytest.mark.parametrize("size", range(1, K + 2))
def test_reasoning_and_a_call_as_items(size: int) -> None:
    job, gains = recorded_job("both", size)
    store = ResponseStore(10_000)
    reply = ResponseReply(job, ResponseRequest(input="a"), [], store, tokenizer())
    raw = reply.begin() + [event for gain in gains for event in reply.add(job.choices[0], gain)] + reply.end()
    told = [json.loads(event.partition(b"data: ")[2]) for event in raw]
    final = told[-1]["response"]
    reasoning, call = final["output"]
    assert (final["status"], reasoning["type"], call["type"]) == ("completed", "reasoning", "function_call")
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "To add"}]
    assert call["name"] == "add" and json.loads(call["arguments"]) == {"a": 1} and call["status"] == "completed"
    assert [event["output_index"] for event in told if event["type"] == "response.output_item.done"] == [0, 1]
    assert "".join(event["delta"] for event in told if event["type"] == "response.reasoning_text.delta") == "To add"
    (done,) = (event for event in told if event["type"] == "response.function_call_arguments.done")
    assert done["arguments"] == call["arguments"] and done["item_id"] == call["id"]
    assert store.get(job.id).items == final["output"]
