"""Structured output over HTTP: what clients ask for by OpenAI's and vLLM's names, tools that must be called, and what
is refused by name."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.conftest import needs_native
from tests.engine.grammars import PERSON
from tests.serve.serving import Server, running

from aquiline.config import EngineConfig, SamplingParams, Structured
from aquiline.engine.grammar import Grammars
from aquiline.engine.llm import LLM
from aquiline.models.known_pairs import BUNDLED_TARGET
from aquiline.serve.api_errors import ApiError
from aquiline.serve.compiling import MAX_COMPILES, Compiling
from aquiline.serve.engine_process import _Host
from aquiline.serve.protocol import ChatRequest
from aquiline.serve.server_config import ServerConfig
from aquiline.serve.structured import asked_of
from aquiline.serve.wire import Prepare, Quit
from aquiline.spec.drafting import NoDraft
from aquiline.text.tokenizer import load_tokenizer

pytest.importorskip("xgrammar", reason="not installed: xgrammar")
pytestmark = needs_native

BODY = {"temperature": 1, "seed": 5, "max_tokens": 100}
NAMED_SCHEMA: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
OBJECT = {"type": "json_object"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {
    "type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}}, "required": ["a", "b"],
}}}  # fmt: skip
OTHER = {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "properties": {}}}}
FORMS = {
    "generic": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    "hermes": "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}\n{% endfor %}{# <tool_call> #}",
    "llama3_json": "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}\n{% endfor %}{# ipython #}",
}


def follows(text: str, schema: dict[str, Any] = PERSON) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


def test_completions_chats_and_responses_follow_a_schema(server: Server) -> None:
    texts = [server.text(response_format=NAMED_SCHEMA, drafter=drafter, **BODY) for drafter in ("chain", "none")]
    assert texts[0] == texts[1] and follows(texts[0])
    (choice,) = server.chat(response_format=NAMED_SCHEMA, **BODY)["choices"]
    assert choice["finish_reason"] == "stop" and follows(choice["message"]["content"])
    form = {"format": {"type": "json_schema", "name": "person", "schema": PERSON}}
    reply = server.post("/v1/responses", input="Hi", temperature=1, max_output_tokens=100, text=form)
    assert follows(reply["output"][-1]["content"][0]["text"]) and reply["text"] == form
    chunks = server.stream("/v1/completions", prompt="a", response_format=NAMED_SCHEMA, **BODY)
    assert follows("".join(chunk["choices"][0]["text"] for chunk in chunks))


def test_the_other_forms_and_those_that_ask_for_nothing(server: Server) -> None:
    assert server.text(structured_outputs={"choice": ["left", "right"]}, **BODY) in ("left", "right")
    assert server.text(structured_outputs={"regex": "[0-9]{3}"}, **BODY).isdecimal()
    assert server.text(structured_outputs={"grammar": 'root ::= "x" | "y"', "json": None}, **BODY) in ("x", "y")
    assert follows(server.text(structured_outputs={"json": PERSON, "disable_any_whitespace": True}, **BODY))
    text = server.text(response_format={"type": "json_object"}, **BODY | {"max_tokens": 60})
    assert text.startswith("{")
    assert server.text(response_format={"type": "text"}, **BODY) == server.text(**BODY)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "its type must be text, json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs a schema"),
        ({"response_format": {**NAMED_SCHEMA, "json_schema": {"schema": {"not": {}}}}}, "response_format", "not at #"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "regex='(a': Regex parsing error"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "give one of json, regex"),
        ({"structured_outputs": {"rgx": "a"}}, "structured_outputs", "its fields are json, regex"),
        ({"structured_outputs": {}}, "structured_outputs", "give one of"),
        ({"structured_outputs": {"json": PERSON, "json_object": True}}, "structured_outputs", "does not go with json"),
        ({"structured_outputs": {"json": {"required": 5}}}, "structured_outputs", "required at #: 5 must be of type"),
        ({"structured_outputs": {"regex": "a"}, "response_format": OBJECT}, "structured_outputs", "does not go"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "structured_outputs", "drop ignore_eos"),
        ({"guided_json": {}}, "guided_json", "use structured_outputs"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_by_name(server: Server, body: Any, param: str, message: str) -> None:
    error = server.error("/v1/completions", prompt="a", **body)
    assert error["param"] == param and message in error["message"]


def test_a_grammar_that_takes_too_long_to_follow_is_the_clients_to_mend(server: Server) -> None:
    tokenizer = load_tokenizer(BUNDLED_TARGET)
    assert tokenizer is not None
    letter = {str(tokenizer.encode("a").ids[-1]): 100}
    body: dict[str, Any] = BODY | {"max_tokens": 480, "logit_bias": letter, "structured_outputs": {"regex": "(a*)*b"}}
    error = server.error("/v1/completions", prompt="a", **body)
    assert error["message"].startswith("structured: the grammar took too long to follow; write it so that")


def test_a_response_names_its_own_field(server: Server) -> None:
    error = server.error("/v1/responses", input="Hi", text={"format": {"type": "xml"}})
    assert error["param"] == "text" and "must be text" in error["message"]
    form = {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}
    error = server.error("/v1/responses", input="Hi", text=form)
    assert error["param"] == "text" and "text: json: not at #" in error["message"]


@pytest.fixture(scope="module", params=FORMS)
def tooled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose template has calls of tools in one of the forms."""
    file: Path = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(FORMS[request.param])
    with running(ServerConfig(chat_template=str(file))) as server:
        assert server.service.parsing.tools == request.param
        yield server


@pytest.mark.rare
def test_tools_are_called_where_they_must_be(tooled: Server) -> None:
    schema = TOOL["function"]["parameters"]  # type: ignore[index]
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        body = {"tools": [TOOL, OTHER], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 200}
        for seed in range(4):
            (told,) = tooled.chat(temperature=1, seed=seed, **body)["choices"]
            (call,) = told["message"]["tool_calls"]
            assert told["finish_reason"] == "tool_calls" and not told["message"]["content"]
            assert call["function"]["name"] in ("add", "other")[: 1 + (choice == "required")]
            assert call["function"]["name"] == "other" or follows(call["function"]["arguments"], schema)
    body = {"input": "Hi", "tools": [{"type": "function", **TOOL["function"]}], "max_output_tokens": 200}  # type: ignore[dict-item]
    reply = tooled.post("/v1/responses", tool_choice={"type": "function", "name": "add"}, **body)
    assert [item["type"] for item in reply["output"]] == ["function_call"]
    for choice, message in (
        ({"type": "function", "function": {"name": "x"}}, "names no tool"), ("always", "must be none, auto, required"),
    ):  # fmt: skip
        error = tooled.error(
            "/v1/chat/completions", messages=[{"role": "user", "content": "a"}], tools=[TOOL], tool_choice=choice
        )
        assert error["param"] == "tool_choice" and message in error["message"]


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}]} | fields)


def test_strict_tools_may_be_called_by_their_schema_alone() -> None:
    strict = {"type": "function", "function": TOOL["function"] | {"strict": True}}  # type: ignore[operator]
    assert asked_of(chat(tools=[TOOL]), "hermes").structured is None
    asked = asked_of(chat(tools=[strict, OTHER]), "hermes")
    assert asked.structured is not None and asked.field == "tools"
    form = json.loads(str(asked.structured.structural_tag))["format"]
    assert form["type"] == "triggered_tags" and form["triggers"] == ["<tool_call>"]
    schemas = [tag["content"]["json_schema"] for tag in form["tags"]]
    assert schemas == [TOOL["function"]["parameters"], {"type": "object"}]  # type: ignore[index]
    for fields, param in (
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
    ):  # fmt: skip
        with pytest.raises(ApiError) as refused:
            asked_of(chat(**fields), "hermes")
        assert refused.value.param == param
    wrong = {"type": "function", "function": {"name": "sub", "parameters": {"not": {}}, "strict": True}}
    for choice in ("auto", "required"):
        with pytest.raises(ApiError, match="tools: sub: json: not at #: is not supported") as refused:
            asked_of(chat(tools=[strict, wrong], tool_choice=choice), "hermes")
        assert refused.value.param == "tools"
    with pytest.raises(ApiError, match="cannot be forced"):
        asked_of(chat(tools=[TOOL], tool_choice="required"), None)


BOMB = "(" + "|".join(f"a{{0,{number}}}" for number in range(1, 900)) + ")*b"  # 8 kB


def test_a_request_waits_for_its_grammar_only_so_long_and_few_are_compiled_at_once() -> None:
    tokenizer = load_tokenizer(BUNDLED_TARGET)
    assert tokenizer is not None

    def processes() -> list[multiprocessing.process.BaseProcess]:
        return [child for child in multiprocessing.active_children() if child.name == "aquiline-grammar"]

    async def main() -> None:
        compiling, begun = Compiling(Grammars(tokenizer, 4096), (0,), 2.0), set[int | None]()

        async def compiled(regex: str) -> str:
            return await compiling.compiled(SamplingParams(structured=Structured(regex=regex)), "structured_outputs")

        async def refused() -> str:
            with pytest.raises(ApiError, match=r"compiling its grammar takes longer than 2 s") as error:
                await compiled(BOMB)
            return str(error.value.param)

        others, began = {child.pid for child in processes()}, time.monotonic()
        bombs = asyncio.gather(*(refused() for _ in range(4)))
        while not bombs.done():
            assert time.monotonic() < began + 300, "the limit ends nothing"
            await asyncio.sleep(0.02)
            begun |= {child.pid for child in processes()} - others
        assert await bombs == ["structured_outputs"] * 4
        assert len(begun) == MAX_COMPILES, "the others never began"
        assert not begun & {child.pid for child in processes()}, "which have ended"
        assert await compiled("[0-9]") == await compiled("[0-9]")
        assert len(sound := {child.pid for child in processes()} - others) == 1, "one serves both"
        (compiler,) = compiling._idle
        compiler.process.kill()
        compiler.process.join()
        assert await compiled("[0-9]") and not sound & {child.pid for child in processes()}, "a dead one is replaced"
        compiling.close()

    asyncio.run(main())


def test_the_room_of_a_grammar_whose_thread_cannot_start_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(BUNDLED_TARGET)
    assert tokenizer is not None

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        compiling = Compiling(Grammars(tokenizer, 4096), (0,), 0.2)
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        for _ in range(MAX_COMPILES + 1):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                await compiling.compiled(SamplingParams(structured=Structured(regex="a")), "structured_outputs")

    asyncio.run(main())


def test_everything_else_of_a_request_is_checked_before_its_grammar_is_compiled(server: Server) -> None:
    bad = {"structured_outputs": {"regex": "("}}
    assert server.error("/v1/completions", prompt=[9999], **bad)["message"].startswith("prompt token 9999")
    assert "maximum context length" in server.error("/v1/completions", prompt="a", max_tokens=5000, **bad)["message"]
    server.service.gate.num_inside += server.service.gate.limit
    try:
        assert server.error("/v1/completions", 429, prompt="a", **bad)["code"] == "queue_full"
    finally:
        server.service.gate.num_inside -= server.service.gate.limit
    assert "Regex parsing error" in server.error("/v1/completions", prompt="a", **bad)["message"]
    assert not server.service.gate.num_inside


def test_an_engine_that_cannot_import_the_library_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are told, each its own reason."""
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    engine = EngineConfig(max_batch=1, max_context=64, calibration=False)
    with LLM("bundled", drafting=NoDraft(), engine=engine) as llm:
        llm.engine.models = replace(llm.models, tokenizer=None)  # for which there are no grammars either
        ours, theirs = multiprocessing.Pipe()
        ours.send([Prepare()])
        ours.send([Quit()])
        _Host(theirs, llm).run()
        for thread in threading.enumerate():
            if thread.name == "aquiline-grammar":
                thread.join()
    assert not raised
