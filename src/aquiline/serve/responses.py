"""/v1/responses: items to messages, and the responses that are kept so that a later one can go on from them."""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from aquiline.serve.admission import read_json
from aquiline.serve.api_errors import ApiError, bad_request, validation_error
from aquiline.serve.protocol import ChatRequest, ResponseRequest

Item = dict[str, Any]

UNSUPPORTED: dict[str, tuple[tuple[object, ...], str]] = {
    "background": ((False,), "is not supported; wait for the reply, or stream it"),
    "conversation": ((), "is not supported; use previous_response_id"),
    "prompt": ((), "stored prompts are not supported; send input"),
    "truncation": (("disabled",), "is not supported: a conversation is never cut silently"),
}
"""Fields of OpenAI's interface that would change the answer: the values that mean nothing special, and why others are
refused."""

PASSED_ON = (
    "model", "temperature", "top_p", "seed", "stream", "cache_salt", "priority", "drafter", "num_spec_tokens",
    "return_token_sources", "learn", "tool_choice", "parallel_tool_calls",
)  # fmt: skip
"""Fields that mean in a response what they mean in a chat."""


CHAT_FIELDS = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text"}
"""Fields of the chat that a response is made by, and what they are called in the request."""

OVERHEAD = 1024
"""Bytes that a stored response takes at most beside its JSON."""


@dataclass(frozen=True)
class StoredResponse:
    """A response and the conversation up to it: input items, and those of the responses before. Both are JSON, as
    Python objects take many times the bytes of their JSON."""

    response: bytes
    input: bytes

    @property
    def items(self) -> list[Item]:
        """The whole conversation, the response's own items last. Raises ValueError for more than a body may hold."""
        return [*read_json(self.input), *read_json(self.response)["output"]]

    @property
    def num_bytes(self) -> int:
        """What it takes in memory."""
        return len(self.response) + len(self.input) + OVERHEAD


@dataclass(eq=False)
class ResponseStore:
    """Responses by id, in memory. Once they take more than max_bytes, the oldest go; 0 keeps none."""

    max_bytes: int
    num_bytes: int = 0
    kept: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)

    def put(self, name: str, kept: StoredResponse) -> None:
        """Keep a response under its id."""
        self.kept[name] = kept
        self.num_bytes += kept.num_bytes
        while self.num_bytes > self.max_bytes:
            _, gone = self.kept.popitem(last=False)
            self.num_bytes -= gone.num_bytes

    def get(self, name: str, param: str = "response_id") -> StoredResponse:
        """The response of an id. Raises ApiError where there is none."""
        if name not in self.kept:
            raise ApiError(404, f"{param}={name[:100]!r}: is not stored; it was dropped, or never kept", param)
        self.kept.move_to_end(name)
        return self.kept[name]

    def drop(self, name: str) -> None:
        """Forget a response. Raises ApiError where there is none."""
        self.num_bytes -= self.get(name).num_bytes
        del self.kept[name]


def kept_before(request: ResponseRequest, store: ResponseStore) -> StoredResponse | None:
    """The response that a request goes on from. Raises ApiError where it is not stored."""
    name = request.previous_response_id
    return None if name is None else store.get(name, "previous_response_id")


def conversation_of(request: ResponseRequest, kept: StoredResponse | None) -> list[Item]:
    """The items of the conversation that a request goes on: those before it, then its own, each with an id."""
    before: list[Item] = [] if kept is None else kept.items
    own = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    return [*before, *({"id": f"item_{uuid.uuid4().hex}", "type": "message"} | item for item in own)]


def as_chat(request: ResponseRequest, items: Sequence[Item]) -> ChatRequest:
    """The chat that a response is the answer to. Raises ApiError naming what is not supported."""
    for name, (harmless, why) in UNSUPPORTED.items():
        value = (request.model_extra or {}).get(name)
        if value is not None and value not in harmless:
            raise bad_request(f"{name}: {why}", name)
    messages = [] if request.instructions is None else [{"role": "system", "content": request.instructions}]
    body: dict[str, Any] = {name: getattr(request, name) for name in PASSED_ON}
    body |= {"messages": [*messages, *_messages(items)], "max_tokens": request.max_output_tokens}
    if (form := (request.text or {}).get("format")) is not None:
        body["response_format"] = _format(form)
    if request.tools:
        body["tools"] = [_tool(tool, place) for place, tool in enumerate(request.tools)]
    if request.top_logprobs:
        body |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    try:
        return ChatRequest.model_validate(body)
    except ValidationError as error:
        raise validation_error(error.errors()) from None


def _format(given: Any) -> Any:
    """The form of an answer, which a response describes beside its type and a chat inside `json_schema`."""
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}


def _messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Items as messages. Calls that follow each other are one message, with the reasoning that led to them; reasoning
    before an answer is not said again."""
    messages: list[dict[str, Any]] = []
    reasoning = ""
    for place, item in enumerate(items):
        kind = item["type"]
        if kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
            reasoning = reasoning if item.get("role") == "assistant" else ""
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if (
                place
                and items[place - 1]["type"] in ("function_call", "message")
                and messages[-1]["role"] == "assistant"
            ):
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages[-1] |= {"reasoning_content": reasoning} if reasoning else {}
        elif kind == "function_call_output":
            output, reasoning = item.get("output"), ""
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind == "reasoning":
            reasoning = _reasoning(item)
        else:
            raise bad_request(f"input.{place}: an item of type {str(kind)[:40]!r} is not supported", f"input.{place}")
    return messages


def _reasoning(item: Item) -> str:
    """The text of an item of reasoning, "" where a client sends none back."""
    parts = item.get("content")
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "".join(text for text in texts if isinstance(text, str))


def _tool(tool: dict[str, Any], place: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise bad_request(f"tools.{place}: a tool of type {str(tool.get('type'))[:40]!r} is not supported", "tools")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
