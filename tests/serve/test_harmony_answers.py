"""A served target that answers in the Harmony format: whole and streamed, however it is drafted."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import needs_native
from tests.harmony import ANSWER, ARGUMENTS, CALL, harmony_tokenizer
from tests.serve.serving import ENGINE, KEY, LIMITS, PAIR, Server, running

from aquiline.config import ChatConfig, PairConfig
from aquiline.serve.server import open_service
from aquiline.serve.server_config import ServerConfig
from aquiline.spec.drafting import Chain

pytestmark = needs_native
TOKENIZER = harmony_tokenizer()
TOOLS = [{
    "type": "function",
    "function": {
        "name": "add", "description": "Adds.", "parameters": {"properties": {"a": {"type": "number"}}},
    },
}]  # fmt: skip
SETTINGS: dict[str, Any] = {"temperature": 0, "presence_penalty": 2, "max_tokens": 64}
TO_CALL = {str(TOKENIZER.token_to_id(word)): -100 for word in ("final", "Yes")}
WAYS = [
    {"drafter": "none"},
    {"drafter": "chain"},
    {"drafter": "lookup", "prediction": {"type": "content", "content": ANSWER}},
    {"drafter": "lookup", "prediction": {"type": "content", "content": CALL}},
]


def num_tokens(text: str) -> int:
    return len(TOKENIZER.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def served(harmony_pair: Path) -> Iterator[Server]:
    pair = PairConfig(str(harmony_pair / "target"), str(harmony_pair / "draft"))
    with running(ServerConfig(api_key=(KEY,)), pair=pair) as server:
        yield server


def streamed(server: Server, **body: Any) -> dict[str, Any]:
    """The message of a streamed chat and why it ended."""
    message: dict[str, Any] = {"reasoning_content": "", "content": "", "tool_calls": []}
    body = {"messages": [{"role": "user", "content": "Hi"}], **SETTINGS, **body}
    for chunk in server.stream("/v1/chat/completions", **body):
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        for name in message:
            message[name] += delta.get(name) or type(message[name])()
    return message | {"finish_reason": choice["finish_reason"]}


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_has_reasoning_and_content(served: Server, way: dict[str, Any]) -> None:
    reply = served.chat("Hi", **SETTINGS, **way)
    (choice,) = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Yesé", "reasoning_content": "Hm🦅"}
    assert choice["finish_reason"] == "stop"
    usage = reply["usage"]
    assert usage["completion_tokens"] == num_tokens(ANSWER)
    assert usage["completion_tokens_details"]["reasoning_tokens"] == num_tokens(ANSWER.partition("<|start|>")[0])
    if way.get("prediction", {}).get("content") == ANSWER:
        assert usage["completion_tokens_details"]["accepted_prediction_tokens"] > num_tokens(ANSWER) / 2
    told = streamed(served, **way)
    assert told == {"reasoning_content": "Hm🦅", "content": "Yesé", "tool_calls": [], "finish_reason": "stop"}


@pytest.mark.parametrize("way", WAYS)
def test_a_call_of_a_tool(served: Server, way: dict[str, Any]) -> None:
    asked = {**SETTINGS, "tools": TOOLS, "logit_bias": TO_CALL, **way}
    (choice,) = served.chat("Hi", **asked)["choices"]
    assert choice["message"]["reasoning_content"] == "Hm🦅" and choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": ARGUMENTS} and choice["finish_reason"] == "tool_calls"
    told = streamed(served, **asked)
    assert told["finish_reason"] == "tool_calls" and told["reasoning_content"] == "Hm🦅" and not told["content"]
    assert [each["function"] for each in told["tool_calls"]] == [call["function"]]


@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_must_be_made(served: Server, way: dict[str, Any]) -> None:
    """The target alone would answer after its reasoning; the function that it may not call is not called."""
    pytest.importorskip("xgrammar", reason="not installed: xgrammar")
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    add, other = ({"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("add", "sub"))
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        asked = {**SETTINGS, "tools": [add, other], "tool_choice": choice, **way}
        (told,) = served.chat("Hi", **asked)["choices"]
        assert told["message"]["reasoning_content"] == "Hm🦅" and told["message"]["content"] is None
        (call,) = told["message"]["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": ARGUMENTS} and told["finish_reason"] == "tool_calls"
        assert [each["function"] for each in streamed(served, **asked)["tool_calls"]] == [call["function"]]
    asked |= {"tool_choice": {"type": "function", "function": {"name": "sub"}}, "max_tokens": 150}
    asked["logit_bias"] = {str(TOKENIZER.token_to_id(word)): -100 for word in ("analysis", "a")}
    (told,) = served.chat("Hi", **asked)["choices"]
    assert [call["function"]["name"] for call in told["message"]["tool_calls"]] == ["sub"]


def test_strict_tools_and_an_answer(served: Server) -> None:
    pytest.importorskip("xgrammar", reason="not installed: xgrammar")
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"]}
    function = {"name": "add", "parameters": schema, "strict": True}
    asked = {**SETTINGS, "tools": [{"type": "function", "function": function}]}
    (told,) = served.chat("Hi", **asked)["choices"]
    assert told["message"] == {"role": "assistant", "content": "Yesé", "reasoning_content": "Hm🦅"}
    (told,) = served.chat("Hi", **asked, logit_bias=TO_CALL)["choices"]
    (call,) = told["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 7}, "which the target alone would not write"


def test_a_response_has_an_item_of_reasoning(served: Server) -> None:
    """Without presence_penalty, which responses do not have, the target thinks until it is cut."""
    thought = num_tokens(ANSWER.partition("<|start|>")[0])
    whole = served.post("/v1/responses", input="Hi", temperature=0, max_output_tokens=2 * thought + 2, tools=[
        {"type": "function", **TOOLS[0]["function"]},
    ])  # fmt: skip
    (item,) = whole["output"]
    assert item["type"] == "reasoning" and item["content"][0]["text"] == "Hm🦅\n\nHm🦅"
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == 2 * thought + 2
    assert whole["status"] == "incomplete"


def test_stop_strings_cut_what_is_shown(served: Server) -> None:
    """A word that stands in headers alone ends nothing."""
    (choice,) = served.chat("Hi", **SETTINGS, stop=["final", "é"])["choices"]
    assert choice["message"]["content"] == "Yes" and choice["message"]["reasoning_content"] == "Hm🦅"
    (choice,) = served.chat("Hi", **SETTINGS, stop=["m"])["choices"]
    assert choice["message"] == {"role": "assistant", "content": "", "reasoning_content": "H"}
    assert choice["finish_reason"] == "stop"


def test_log_probabilities_are_of_all_tokens(served: Server) -> None:
    (choice,) = served.chat("Hi", **SETTINGS, logprobs=True)["choices"]
    tokens = b"".join(
        bytes(entry["bytes"]) for entry in choice["logprobs"]["content"] if "\ufffd" not in entry["token"]
    )
    assert len(choice["logprobs"]["content"]) == num_tokens(ANSWER) and tokens.startswith(b"<|channel|>analysis")


def test_what_cannot_be_read_is_text_and_one_warning(served: Server, caplog: pytest.LogCaptureFixture) -> None:
    """A call without tools in the request, and an answer that is cut in a header."""
    with caplog.at_level(logging.WARNING, "aquiline.serve"):
        (choice,) = served.chat("Hi", **SETTINGS, logit_bias=TO_CALL)["choices"]
        served.settle()
    assert choice["message"]["content"] == f"commentary to=functions.add json{ARGUMENTS}"
    assert choice["finish_reason"] == "stop"
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "no function that may be called" in warning.fields["why"]  # type: ignore[attr-defined]
    (choice,) = served.chat("Hi", **SETTINGS | {"max_tokens": 2})["choices"]
    assert choice["message"]["content"] == "analysis" and choice["finish_reason"] == "length"


def test_a_target_without_the_markers_is_refused() -> None:
    config = ServerConfig(tool_call_parser="harmony")
    with pytest.raises(ValueError, match=r"tool_call_parser='harmony': the vocabulary has no token <\|start\|>; take"):
        open_service(PAIR, ENGINE, Chain(), config, LIMITS, ChatConfig())


def test_history_reaches_the_template_as_it_takes_it(served: Server) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
    said = {"role": "assistant", "content": "I will add.", "reasoning_content": "Hm.", "tool_calls": [call]}
    asked = [{"role": "user", "content": "Hi"}, said, {"role": "tool", "tool_call_id": "1", "content": "4"}]
    ids = served.post("/tokenize", messages=asked, tools=TOOLS)["tokens"]
    text = TOKENIZER.decode(ids, skip_special_tokens=False)
    assert text.endswith(
        "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.\n\nI will add.<|end|>"
        f"<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>"
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"4"<|end|><|start|>assistant'
    )
    assert "type add = (_: {\na: number,\n}) => any;" in text
    assert json.loads(ARGUMENTS) == {"a": 2}
