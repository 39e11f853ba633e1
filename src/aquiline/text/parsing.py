"""Which reader an answer needs. A reader takes the tokens of one answer and gives its parts, whatever format it is in.

Commands and the server use it. It knows templates by their text and vocabularies by their markers, and no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tokenizers import Tokenizer

from aquiline.config import Boundary
from aquiline.text.detokenizer import Detokenizer
from aquiline.text.harmony import CHANNEL, FINAL, MESSAGE, Harmony, missing_markers
from aquiline.text.parsers import CALL, END_THINK, GENERIC, SPACE, THINK, TOOL_PARSERS, Parser, Plain, Read, Think
from aquiline.types import FinishReason

HARMONY = "harmony"


class Reader(Protocol):
    """Makes parts of an answer's tokens. problem: what could not be read, if something could not; it is content."""

    problem: str | None

    def take(self, token_ids: list[int], finish_reason: FinishReason | None) -> Read:
        """The parts that the next tokens made certain, as in Detokenizer.take: cut at a stop string; with the
        finish_reason "stop" the last token is a stop token."""
        ...


class TextReader:
    """Reads an answer whose markers are text."""

    problem: str | None = None

    def __init__(self, detokenizer: Detokenizer, parser: Parser) -> None:
        self.detokenizer, self.parser = detokenizer, parser

    def take(self, token_ids: list[int], finish_reason: FinishReason | None) -> Read:  # noqa: D102
        if not isinstance(self.parser, Think):
            return self._take(token_ids, finish_reason)
        read = Read(0, [], 0, None)
        for place in range(max(1, len(token_ids))):  # one by one, to know which of them are reasoning
            is_last = place >= len(token_ids) - 1
            read = read.joined(self._take(token_ids[place : place + 1], finish_reason if is_last else None))
            if read.finish_reason is not None:
                break
        return read

    def _take(self, token_ids: list[int], finish_reason: FinishReason | None) -> Read:
        num_tokens, text, finish_reason = self.detokenizer.take(token_ids, finish_reason)
        was_reasoning = self._is_reasoning
        parts = self.parser.feed(text)
        num_reasoning = num_tokens if was_reasoning or self._is_reasoning else 0  # its markers too
        if finish_reason is not None:
            parts += self.parser.finish()
        return Read(num_tokens, parts, num_reasoning, finish_reason)

    @property
    def _is_reasoning(self) -> bool:
        return isinstance(self.parser, Think) and self.parser.is_reasoning


@dataclass(frozen=True)
class Parsing:
    """What a target's answers are read by. tools: a name of TOOL_PARSERS, or HARMONY; None where the template has no
    tools. is_harmony: answers are in the Harmony format, whose reasoning is told apart if it `thinks`."""

    thinks: bool = False
    tools: str | None = None
    is_harmony: bool = False

    @classmethod
    def of(
        cls, template: str | None, tokenizer: Tokenizer | None, reasoning: str = "auto", tools: str = "auto"
    ) -> Parsing:
        """As the settings reasoning_parser and tool_call_parser say; "auto" is told by what the template writes.

        Raises ValueError where Harmony is asked for and the vocabulary lacks its markers, or it is to be mixed with
        another format."""
        text, missing = template or "", missing_markers(tokenizer)
        asked = {"reasoning_parser": reasoning, "tool_call_parser": tools}
        named = [field for field, value in asked.items() if value == HARMONY]
        others = [f"{field}={value}" for field, value in asked.items() if value not in ("auto", "none", HARMONY)]
        if named and missing:
            fix = "take the tokenizer of a gpt-oss model, or another parser"
            raise ValueError(f"{named[0]}={HARMONY!r}: the vocabulary has no token {missing[0]}; {fix}")
        if named and others:
            raise ValueError(f"{named[0]}={HARMONY!r}: does not go with {others[0]}; use auto or none")
        is_told = CHANNEL in text and not missing and not others and "auto" in asked.values()
        if named or is_told:
            return cls(reasoning != "none", None if tools == "none" else HARMONY, is_harmony=True)
        if tools == "auto":
            other = GENERIC if text and "tools" not in text else "none"
            tools = "hermes" if CALL in text else "llama3_json" if "tools" in text and "ipython" in text else other
        thinks = reasoning == "think" or (reasoning == "auto" and END_THINK in text)
        return cls(thinks, None if tools == "none" else tools)

    def reader(
        self,
        tokenizer: Tokenizer,
        prompt_ids: tuple[int, ...],
        prompt: str = "",
        stop: tuple[str, ...] = (),
        has_tools: bool = False,
    ) -> Reader:
        """A reader of one answer to a prompt, which is given as tokens and as text; stop: texts that end it; has_tools:
        the request names tools that may be called."""
        if self.is_harmony:
            return Harmony(tokenizer, prompt_ids, stop, self.thinks, has_tools and self.tools is not None)
        return TextReader(Detokenizer(tokenizer, prompt_ids, stop), self.parser(prompt, has_tools))

    def boundary(self, tokenizer: Tokenizer) -> Boundary | None:
        """Where in an answer a grammar begins: after the reasoning; None where there is none. Raises ValueError where
        the marks of reasoning are no tokens."""
        if self.is_harmony:
            channel, message = tokenizer.token_to_id(CHANNEL), tokenizer.token_to_id(MESSAGE)
            assert channel is not None and message is not None, "Parsing.of asks for them"
            return Boundary((channel, *tokenizer.encode(FINAL, add_special_tokens=False).ids), end=message)
        if not self.thinks:
            return None
        begin, end = tokenizer.token_to_id(THINK), tokenizer.token_to_id(END_THINK)
        if begin is None or end is None:
            raise ValueError(
                f"structured: begins after {END_THINK}, which is no token of this vocabulary; switch reasoning off"
            )
        return Boundary((end,), opener=begin)

    def parser(self, prompt: str, has_tools: bool) -> Parser:
        """A parser of the text of one answer."""
        inner = TOOL_PARSERS[self.tools]() if has_tools and self.tools else Plain()
        return Think(inner, prompt.rstrip(SPACE).endswith(THINK)) if self.thinks else inner
