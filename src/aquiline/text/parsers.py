"""What an answer's text is made of: reasoning, the answer itself, calls of tools.

A parser is fed text in pieces that may be cut anywhere, in the middle of a marker too, and gives parts. The parts of
all pieces together do not depend on where the text was cut. Text that only looked like a call comes out as content, so
no parser ever loses text or ends a generation. A format whose markers are tokens and not text is read in harmony.py;
parsing.py chooses.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from aquiline.checks import parse_json
from aquiline.types import FinishReason

Channel = Literal["content", "reasoning"]

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
GENERIC = "generic"
"""The form of calls for a template that has none: Hermes', described in the system message."""
SPACE = " \t\r\n"


class Text(NamedTuple):
    """A piece of the answer or of the reasoning."""

    channel: Channel
    text: str


class Call(NamedTuple):
    """A call of a tool, whole; arguments is JSON."""

    name: str
    arguments: str


Part = Text | Call


class Read(NamedTuple):
    """What some tokens of an answer brought. num_tokens: how many of them belong to it, the others come after a stop
    string; parts: those that became certain; num_reasoning: tokens of reasoning and its markers among them;
    finish_reason: why the answer has ended, None if it continues."""

    num_tokens: int
    parts: list[Part]
    num_reasoning: int
    finish_reason: FinishReason | None

    def joined(self, later: Read) -> Read:
        """This and the next one as one."""
        return Read(
            self.num_tokens + later.num_tokens, self.parts + later.parts, self.num_reasoning + later.num_reasoning,
            later.finish_reason,
        )  # fmt: skip


class Parser(Protocol):
    """Makes parts of an answer's text."""

    def feed(self, text: str) -> list[Part]:
        """The parts that became certain."""
        ...

    def finish(self) -> list[Part]:
        """The rest, for when no more text comes."""
        ...


class Plain:
    """All text is the answer."""

    def feed(self, text: str) -> list[Part]:
        """The text as it is."""
        return [Text("content", text)] if text else []

    def finish(self) -> list[Part]:
        """Nothing: no text is held back."""
        return []


class Think:
    """Reasoning stands between <think> and </think> at the beginning; what follows is the answer, for `inner`.

    is_open: the prompt has already written <think>. White space around the reasoning, and before the answer after it,
    belongs to neither."""

    def __init__(self, inner: Parser, is_open: bool) -> None:
        self.inner = inner
        self.state: Literal["before", "reasoning", "between", "answer"] = "reasoning" if is_open else "before"
        self.held = ""
        self.is_first = True  # no reasoning was given out yet

    @property
    def is_reasoning(self) -> bool:
        """Whether the next token belongs to the reasoning or its markers."""
        return self.state == "reasoning"

    def feed(self, text: str) -> list[Part]:  # noqa: D102
        self.held += text
        parts: list[Part] = []
        if self.state == "before":
            self._before(parts)
        if self.state == "reasoning":
            self._reasoning(parts)
        if self.state == "between":
            self.held = self.held.lstrip(SPACE)
            self.state = "answer" if self.held else "between"
        if self.state == "answer":
            held, self.held = self.held, ""
            parts += self.inner.feed(held)
        return parts

    def finish(self) -> list[Part]:  # noqa: D102
        held, self.held = self.held, ""
        if self.state == "reasoning":
            held = held.strip(SPACE) if self.is_first else held.rstrip(SPACE)
            return [Text("reasoning", held)] if held else []
        if self.state == "between":
            held = ""
        return [*self.inner.feed(held), *self.inner.finish()]

    def _before(self, parts: list[Part]) -> None:
        begun = self.held.lstrip(SPACE)
        if begun.startswith(THINK):
            self.state, self.held = "reasoning", begun[len(THINK) :]
        elif not THINK.startswith(begun):
            self.state = "answer"

    def _reasoning(self, parts: list[Part]) -> None:
        before, marker, after = self.held.partition(END_THINK)
        if marker:
            self.state, self.held = "between", after
        else:
            keep = overlap(before, END_THINK)
            before, self.held = before[: len(before) - keep], before[len(before) - keep :]
        text = before.rstrip(SPACE)
        if not marker:  # white space is given out once something other than </think> follows
            self.held = before[len(text) :] + self.held
        if self.is_first:
            text = text.lstrip(SPACE)
        if text:
            self.is_first = False
            parts.append(Text("reasoning", text))


class Hermes:
    """Calls stand between <tool_call> and </tool_call> as {"name": ..., "arguments": {...}}; other text is the answer.
    White space around calls belongs to nobody. Qwen's and Hermes' templates ask for this form."""

    def __init__(self) -> None:
        self.held = self.gap = ""  # text that is not certain yet; white space before the marker of a call
        self.is_inside = False
        self.is_after_call = False  # only white space has come since the last call

    def feed(self, text: str) -> list[Part]:  # noqa: D102
        self.held += text
        parts: list[Part] = []
        while self._advance(parts):
            pass
        return parts

    def finish(self) -> list[Part]:  # noqa: D102
        parts, held, self.held = list[Part](), self.held, ""
        if self.is_inside:  # some models end the text in place of the marker
            self._call(parts, held, self.gap + CALL + held)
        else:
            self._content(parts, held)
        return parts

    def _advance(self, parts: list[Part]) -> bool:
        """Take what is certain from the held text. Returns whether there may be more."""
        if self.is_inside:
            inside, marker, after = self.held.partition(END_CALL)
            if marker:
                self._call(parts, inside, self.gap + CALL + inside + END_CALL)
                self.held = after
            return bool(marker)
        before, marker, after = self.held.partition(CALL)
        text = before if marker else before[: len(before) - overlap(before, CALL)]
        shown = text.rstrip(SPACE)
        self._content(parts, shown)
        self.gap = text[len(shown) :]
        self.held = after if marker else before[len(shown) :]
        self.is_inside = bool(marker)
        return self.is_inside

    def _call(self, parts: list[Part], inside: str, whole: str) -> None:
        """A call, or what only looked like one."""
        self.is_inside = False
        call = read_call(inside, "arguments")
        if call is None:
            self._content(parts, whole)
        else:
            parts.append(call)
            self.is_after_call = True

    def _content(self, parts: list[Part], text: str) -> None:
        if self.is_after_call:
            text = text.lstrip(SPACE)
        if text:
            parts.append(Text("content", text))
            self.is_after_call = False


class LlamaJson:
    """An answer that begins with { is calls of tools, {"name": ..., "parameters": {...}}, several separated by ;. Any
    other answer is text. Llama 3's templates ask for this form."""

    def __init__(self) -> None:
        self.held = ""
        self.is_text = False

    def feed(self, text: str) -> list[Part]:  # noqa: D102
        self.held += text
        begun = self.held.lstrip(SPACE)
        self.is_text = self.is_text or (begun != "" and not begun.startswith("{"))
        if not self.is_text or not self.held:
            return []
        text, self.held = self.held, ""
        return [Text("content", text)]

    def finish(self) -> list[Part]:  # noqa: D102
        held, self.held = self.held, ""
        decoder, at, calls = json.JSONDecoder(), 0, list[Part]()
        while at < len(held.rstrip(SPACE)):
            at += len(held[at:]) - len(held[at:].lstrip(SPACE + ";"))
            try:
                _, end = decoder.raw_decode(held, at)
            except (ValueError, RecursionError):
                break
            call = read_call(held[at:end], "parameters")
            if call is None:
                break
            calls.append(call)
            at = end
        else:
            if calls:
                return calls
        return [Text("content", held)] if held else []


TOOL_PARSERS: dict[str, Callable[[], Parser]] = {"hermes": Hermes, "llama3_json": LlamaJson, GENERIC: Hermes}


def read_call(text: str, arguments: str) -> Call | None:
    """The call that a JSON text describes; None if it describes none."""
    try:
        value = parse_json(text, is_strict=True)
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = value.get(arguments, {})
    return Call(value["name"], given if isinstance(given, str) else json.dumps(given, ensure_ascii=False))


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of a text with which the marker may begin; shorter than the marker."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0
