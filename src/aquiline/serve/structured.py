"""Structured output that a client asks for: its fields as a source of a grammar, which `compiling` compiles."""

from __future__ import annotations

import json
from typing import Any

from aquiline.checks import shown
from aquiline.config import Boundary, Structured, structured_of
from aquiline.engine.schema import check_schema
from aquiline.serve.api_errors import ApiError, bad_request
from aquiline.serve.protocol import ChatRequest, Sampling, Tool
from aquiline.text.harmony import CHANNEL, CONSTRAIN, ENDS, FINAL, FUNCTIONS, MESSAGE, RECIPIENT, ROLE, START
from aquiline.text.parsers import CALL, END_CALL, GENERIC
from aquiline.text.parsing import HARMONY

WRITTEN: dict[str, tuple[str, str, str]] = {
    **dict.fromkeys(("hermes", GENERIC), (f'{CALL}\n{{"name": "%s", "arguments": ', f"}}\n{END_CALL}", "\n")),
    "llama3_json": ('{"name": "%s", "parameters": ', "}", "; "),
}
"""How calls of tools are written, by parser: what comes before the arguments, after them, and between two calls."""

Format = dict[str, Any]
"""A part of a structural tag."""


class Asked:
    """What a request asks its text to be. field: of the body, None where nothing is asked."""

    def __init__(self, structured: Structured | None = None, field: str = "") -> None:
        self.structured, self.field = structured, field


def asked_of(request: Sampling, tool_parser: str | None) -> Asked:
    """The structured output that a request asks for, by itself or by the tools it must call. tool_parser: reads calls.

    Raises ApiError naming what is not understood, and fields that ask for two things."""
    found = [Asked(_of_format(request.response_format), "response_format")]
    if request.structured_outputs is not None:
        found.append(Asked(_of_outputs(request.structured_outputs), "structured_outputs"))
    if isinstance(request, ChatRequest):
        found.append(_of_tools(request, tool_parser))
    given = [asked for asked in found if asked.structured is not None]
    if len(given) > 1:
        raise bad_request(f"{given[1].field}: does not go with {given[0].field}; ask for one of them", given[1].field)
    if given and given[0].field != "tool_choice" and isinstance(request, ChatRequest) and request.has_tools:
        field = given[0].field
        if field != "tools":
            raise bad_request(f"{field}: does not go with tools; drop them, or say tool_choice=none", field)
    return given[0] if given else Asked()


def _of_format(given: dict[str, Any] | None) -> Structured | None:
    kind = None if given is None else given.get("type")
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return Structured(json=True)
    if kind == "json_schema":
        described = given.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if not isinstance(schema, dict):
            raise bad_request("response_format.json_schema: needs a schema, an object", "response_format")
        return Structured(json=schema)
    if kind == "structural_tag":
        return Structured(structural_tag=given)
    raise bad_request(
        f"response_format={shown(given)}: its type must be text, json_object, json_schema or structural_tag",
        "response_format",
    )


def _of_outputs(given: dict[str, Any]) -> Structured | None:
    fields = {name: value for name, value in given.items() if value is not None and value is not False}
    if fields.pop("json_object", False):
        if "json" in fields:
            raise bad_request("structured_outputs: json_object does not go with json", "structured_outputs")
        fields["json"] = True
    for ignored in ("disable_any_whitespace", "disable_additional_properties"):  # it is so here without them
        fields.pop(ignored, None)
    try:
        return structured_of(fields)
    except ValueError as error:
        raise bad_request(f"structured_outputs: {error}", "structured_outputs") from None


def _of_tools(request: ChatRequest, tool_parser: str | None) -> Asked:
    """Calls that must be made, and those of strict tools that may be."""
    choice, tools = request.tool_choice, request.tools or []
    if choice in (None, "auto", "none"):
        is_strict = any(tool.function.strict for tool in tools) and choice != "none"
        if not is_strict or tool_parser not in ("hermes", GENERIC, HARMONY):
            return Asked()
        _check_tools([tool for tool in tools if tool.function.strict])
        return Asked(_calls(tools, tool_parser, may_answer=True), "tools")
    if not tools:
        raise bad_request(f"tool_choice={shown(choice)}: needs tools", "tool_choice")
    if tool_parser is None:
        raise bad_request(
            f"tool_choice={shown(choice)}: calls of this model are not read and cannot be forced; use auto",
            "tool_choice",
        )
    if choice != "required":
        name = _named(choice)
        tools = [tool for tool in tools if tool.function.name == name]
        if not tools:
            raise bad_request(f"tool_choice={shown(choice)}: names no tool of the request", "tool_choice")
    _check_tools(tools)
    is_single = choice != "required" or request.parallel_tool_calls is False
    return Asked(_calls(tools, tool_parser, is_single=is_single), "tool_choice")


def _check_tools(tools: list[Tool]) -> None:
    """Raises ApiError naming the tool whose parameters no grammar expresses."""
    for tool in tools:
        try:
            check_schema(json.dumps(tool.function.parameters or {}))
        except ValueError as error:
            raise bad_request(f"tools: {tool.function.name[:60]}: {error}", "tools") from None


def _named(choice: str | dict[str, Any]) -> str:
    """The tool that a choice names, in the form of chats or of responses."""
    function = choice.get("function", choice) if isinstance(choice, dict) else {}
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(choice, dict) or choice.get("type") != "function" or not isinstance(name, str):
        raise bad_request(
            f"tool_choice={shown(choice)}: must be none, auto, required, or name a function", "tool_choice"
        )
    return name


def _calls(tools: list[Tool], parser: str, is_single: bool = False, may_answer: bool = False) -> Structured:
    """Calls of these tools as a structural tag, in the form that a parser reads. may_answer: text may stand beside
    them, or instead."""
    if parser == HARMONY:
        return _harmony_call(tools, may_answer)
    begin, end, separator = WRITTEN[parser]
    tags = [
        {"type": "tag", "begin": begin % _name(tool), "content": _arguments(tool, may_answer), "end": end}
        for tool in tools
    ]
    if may_answer:
        form: Format = {"type": "triggered_tags", "triggers": [CALL], "tags": tags}
    else:
        form = {
            "type": "tags_with_separator", "tags": tags, "separator": separator, "at_least_one": True,
            "stop_after_first": is_single,
        }  # fmt: skip
    return Structured(structural_tag={"type": "structural_tag", "format": form})


def _harmony_call(tools: list[Tool], may_answer: bool) -> Structured:
    """A whole answer in the Harmony format as a structural tag: messages of the channel analysis, then one call, after
    which the model's turn ends. may_answer: commentary may come before it, and an answer in its place.

    xgrammar's own tag of the format, `get_model_structural_tag("harmony")`, forces no call: it is followed by no text
    at all, and by reasoning alone. It also takes the markers as letters."""
    before = ("analysis", "commentary") if may_answer else ("analysis",)
    free: Format = {"type": "any_text"}
    header = _in_order(_token(CHANNEL), _either(*map(_text, before)), _token(MESSAGE))
    message = _in_order(header, free, _token(ENDS[0]), _token(START), _text(ROLE))
    space: Format = {"type": "optional", "content": _text(" ")}
    kind = _either(_in_order(space, _token(CONSTRAIN), _text("json")), _text(" json"))
    last = [_in_order(_token(CHANNEL), _text(FINAL), _token(MESSAGE), free)] if may_answer else []
    for tool in tools:
        to = _text(f" {RECIPIENT}{FUNCTIONS}{_name(tool)}")
        commentary = _in_order(_token(CHANNEL), _text("commentary"))
        to_function = _either(_in_order(commentary, to), _in_order(to, commentary))
        last.append(_in_order(to_function, kind, _token(MESSAGE), _arguments(tool, may_answer)))
    form = _in_order({"type": "star", "content": message}, _either(*last))
    return Structured(structural_tag={"type": "structural_tag", "format": form}, boundary=Boundary(()))


def _token(text: str) -> Format:
    return {"type": "token", "token": text}


def _text(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _in_order(*parts: Format) -> Format:
    return {"type": "sequence", "elements": list(parts)}


def _either(*parts: Format) -> Format:
    return {"type": "or", "elements": list(parts)}


def _arguments(tool: Tool, may_answer: bool) -> Format:
    """The arguments of a call. Those of tools that may be called and are not strict are any object."""
    parameters = tool.function.parameters
    schema = {"type": "object"} if parameters is None or (may_answer and not tool.function.strict) else parameters
    return {"type": "json_schema", "max_whitespace_cnt": 1, "json_schema": schema}


def _name(tool: Tool) -> str:
    name = tool.function.name
    if not name or not all(letter.isalnum() or letter in "_-." for letter in name):
        raise ApiError(400, f"tools: {name[:60]!r} is no name of a function; use letters, digits, _ and -", "tools")
    return name
