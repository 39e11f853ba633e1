"""Reasoning and calls are found in text that is cut anywhere; the same parts come out wherever it is cut."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aquiline.text.parsers import Call, Parser, Part, Plain, Text
from aquiline.text.parsing import Parsing

CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
ADD = Call("add", '{"a": 1, "b": "é"}')
SPACE = " \t\r\n"


def parser(kind: str) -> Parser:
    prompt = "<think>\n" if kind.startswith("open") else "a prompt"
    tools = kind.rpartition(" ")[2]
    names = {"hermes": "hermes", "llama": "llama3_json"}
    return Parsing("think" in kind or "open" in kind, names.get(tools)).parser(prompt, has_tools=tools in names)


KINDS = ["plain", "think", "open think", "hermes", "llama", "think hermes", "open think llama"]


def parts_of(kind: str, pieces: list[str]) -> list[Part]:
    """What a parser makes of pieces, texts of a channel joined where they follow each other."""
    made, joined = parser(kind), list[Part]()
    for part in [part for piece in pieces for part in made.feed(piece)] + made.finish():
        assert not isinstance(part, Text) or part.text, "an empty part"
        last = joined[-1] if joined else None
        if isinstance(part, Text) and isinstance(last, Text) and last.channel == part.channel:
            joined[-1] = Text(part.channel, last.text + part.text)
        else:
            joined.append(part)
    return joined


def calls_of(text: str, is_behind: bool = False) -> list[Part]:
    """Hermes' form by regular expressions over the whole text."""
    found = re.match(r"(.*?)<tool_call>(.*?)(?:</tool_call>(.*)|$)", text, re.DOTALL)
    before, inside, after = found.groups() if found else (text, None, None)
    whole = text if after is None else text[: len(text) - len(after)]
    try:
        value = json.loads(inside or "")
        call = Call(value["name"], json.dumps(value.get("arguments", {}), ensure_ascii=False))
    except (ValueError, KeyError, TypeError):
        shown = whole.lstrip(SPACE) if is_behind else whole
        rest = calls_of(after, is_behind and not shown) if after else []
        return [*([Text("content", shown)] if shown else []), *rest]
    before = before.rstrip(SPACE)
    before = before.lstrip(SPACE) if is_behind else before
    return [*([Text("content", before)] if before else []), call, *(calls_of(after, True) if after else [])]


def joined(parts: list[Part]) -> list[Part]:
    out: list[Part] = []
    for part in parts:
        if out and isinstance(part, Text) and isinstance(out[-1], Text) and out[-1].channel == part.channel:
            out[-1] = Text(part.channel, out[-1].text + part.text)
        else:
            out.append(part)
    return out


def whole(kind: str, text: str) -> list[Part]:
    """The same as a parser, told from the whole text."""
    if "think" in kind:
        is_open = kind.startswith("open")
        begun = text if is_open else text.lstrip(SPACE).removeprefix("<think>")
        if is_open or text.lstrip(SPACE).startswith("<think>"):
            reasoning, marker, answer = begun.partition("</think>")
            said = [Text("reasoning", reasoning.strip(SPACE))] if reasoning.strip(SPACE) else []
            rest = kind.removeprefix("open ").removeprefix("think").strip() or "plain"
            return said + (whole(rest, answer.lstrip(SPACE)) if marker else [])
        return whole(kind.removeprefix("think").strip() or "plain", text)
    if kind == "hermes":
        return joined(calls_of(text))
    if kind == "llama" and text.lstrip(SPACE).startswith("{"):
        try:
            value = json.loads(text)
            return [Call(value["name"], json.dumps(value.get("parameters", {}), ensure_ascii=False))]
        except (ValueError, KeyError, TypeError):
            pass
    return [Text("content", text)] if text else []


WORDS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", CALLED, "<", "</", "<tool", "think>", " ", "\n", "a", "é→",
    '{"name": "f"}', '{"name": "f", "parameters": {"x": [1]}}', "{", "}", '"', "[1]", "1",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(WORDS), max_size=9).map("".join)


@given(st.sampled_from(KINDS), TEXTS, st.randoms(use_true_random=False))
def test_any_cut_gives_the_parts_of_the_whole(kind: str, text: str, rng: object) -> None:
    cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(0, 8))))  # type: ignore[attr-defined]
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parts_of(kind, pieces) == whole(kind, text) == parts_of(kind, list(text))


EXAMPLES: list[tuple[str, str, list[Part]]] = [
    ("think", "<think>\nWhy?\n</think>\n\nBecause.", [Text("reasoning", "Why?"), Text("content", "Because.")]),
    ("think", "No tags at all", [Text("content", "No tags at all")]),
    ("think", "<think>cut off", [Text("reasoning", "cut off")]),
    ("think", "<think>cut off \n", [Text("reasoning", "cut off")]),
    ("think", "<think> \n</thi", [Text("reasoning", "</thi")]),
    ("think", "<think> cut </thi", [Text("reasoning", "cut </thi")]),
    ("open think", " \n", []),
    ("think", "<thi", [Text("content", "<thi")]),
    ("open think", "Hm.</think>Yes", [Text("reasoning", "Hm."), Text("content", "Yes")]),
    ("open think", "</think>\n", []),
    ("hermes", f"I add.\n{CALLED}\n{CALLED}\n", [Text("content", "I add."), ADD, ADD]),
    ("hermes", CALLED.removesuffix("</tool_call>"), [ADD]),
    ("hermes", f"{CALLED}\nDone, all of it. ", [ADD, Text("content", "Done, all of it. ")]),
    *(
        ("hermes", text, [Text("content", text)])
        for number in ("NaN", "[Infinity]", "1e999")  # which would be no JSON when they are told
        for text in [f'<tool_call>{{"name": "add", "arguments": {{"a": {number}}}}}</tool_call>']
    ),
    ("hermes", "a \n<tool_call>no</tool_call> b", [Text("content", "a \n<tool_call>no</tool_call> b")]),
    ("hermes", "a <tool_call>no", [Text("content", "a <tool_call>no")]),
    ("llama", '{"name": "f", "parameters": {"x": 1}}; {"name": "g"}', [Call("f", '{"x": 1}'), Call("g", "{}")]),
    ("llama", '{"name": 1}', [Text("content", '{"name": 1}')]),
    ("llama", "a {", [Text("content", "a {")]),
    ("think hermes", f"<think>I <tool_call></think>{CALLED}", [Text("reasoning", "I <tool_call>"), ADD]),
]


@pytest.mark.parametrize(("kind", "text", "parts"), EXAMPLES)
def test_examples_cut_everywhere(kind: str, text: str, parts: list[Part]) -> None:
    for size in range(1, len(text) + 1):
        assert parts_of(kind, [text[at : at + size] for at in range(0, len(text), size)]) == parts, size


def test_what_is_certain_comes_at_once() -> None:
    made = parser("think hermes")
    assert made.feed("<think>so") == [Text("reasoning", "so")]
    assert made.feed(" it is</thi") == [Text("reasoning", " it is")]
    assert made.feed("nk>The") == [Text("content", "The")]
    assert made.feed(" end <") == [Text("content", " end")]
    assert made.feed("b>") == [Text("content", " <b>")]


def test_parsers_are_told_by_the_template() -> None:
    assert Parsing.of(None, None, "auto", "auto") == Parsing()
    assert Parsing.of("x <tool_call> y </think>", None, "auto", "auto") == Parsing(True, "hermes")
    assert Parsing.of("{% if tools %} ipython", None, "auto", "auto") == Parsing(False, "llama3_json")
    assert Parsing.of("x <tool_call> y </think>", None, "none", "none") == Parsing()
    assert Parsing.of(None, None, "think", "hermes") == Parsing(True, "hermes")
    assert isinstance(Parsing(False, "hermes").parser("", has_tools=False), Plain)
