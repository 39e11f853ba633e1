"""Answers in the Harmony format of gpt-oss models: messages, each with a header that names its channel.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

The markers are found by their token ids, because a text may hold "<|end|>" as letters. Owns the markers, the headers
and what becomes of a message that cannot be read. The chat template renders the prompt.
Source: openai/harmony, docs/format.md; the recipient behind the role is how the template of openai/gpt-oss-20b has it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import NamedTuple

from tokenizers import Tokenizer

from aquiline.checks import parse_json, shown
from aquiline.text.detokenizer import Detokenizer, skipped_tokens
from aquiline.text.parsers import Call, Channel, Part, Read, Text
from aquiline.types import FinishReason

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
FINAL = "final"
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)

CHANNELS: dict[str, Channel] = {"analysis": "reasoning", "commentary": "content", FINAL: "content"}
"""Where the text of a channel goes. A commentary without recipient is a preamble to calls, which users read."""

ROLE, RECIPIENT, FUNCTIONS = "assistant", "to=", "functions."

BEGUN = re.compile(rf"{ROLE}(\s+(t(o(=\S*(\s+\S*)?)?)?)?)?")
"""A header up to its channel, as far as it may have come."""

MAX_HEADER_TOKENS = 128
"""Text is no header after this many tokens, so that an answer without markers is not held back to its end. Names of
functions have 64 characters at most in OpenAI's interface."""

GAP = "\n\n"
"""Written between two messages whose texts go to the same place."""


class HeaderSpan(NamedTuple):
    """A marker of a header and the tokens after it, up to the next marker."""

    marker: str
    ids: list[int]


@dataclass(eq=False)
class HarmonyMessage:
    """The message whose body is being written. function: the one that it calls; header: the tokens of its header."""

    detokenizer: Detokenizer
    channel: Channel = "content"
    function: str | None = None
    header: list[int] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)  # of a call, which is told when it is whole
    has_text: bool = False


class Harmony:
    """Reads one answer in the Harmony format: analysis is reasoning, final is content, a commentary to a function is a
    call, any other commentary is content. The first message's header begins in the prompt.

    A message that cannot be read comes out as content: its header (without the role) and its body as the tokenizer
    decodes them. `problem` says what was wrong with the first such message. Stop strings are looked for in the body of
    each message by itself. thinks: False gives out analysis as content; has_tools: functions may be called."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: tuple[int, ...],
        stop: tuple[str, ...] = (),
        thinks: bool = True,
        has_tools: bool = False,
    ) -> None:
        self.tokenizer, self.stop, self.thinks, self.has_tools = tokenizer, stop, thinks, has_tools
        self.markers = {tokenizer.token_to_id(marker): marker for marker in MARKERS}
        self.skipped = skipped_tokens(tokenizer)
        # At most one of the two is there, and neither between messages.
        self.header: list[HeaderSpan] | None = None
        self.message: HarmonyMessage | None = None
        self.parts: list[Part] = []
        self.written: set[Channel] = set()  # where text went to
        self.num_pending = 0  # tokens of the answer that may turn out to be reasoning: those of an open header
        self.is_empty = True  # no token has come
        self.is_stopped = False  # by a stop string
        self.problem: str | None = None
        self._begin(prompt_ids)

    def take(self, token_ids: list[int], finish_reason: FinishReason | None) -> Read:
        """The parts that the next tokens of the answer made certain. finish_reason: why the answer ends with these
        tokens, apart from stop strings; with "stop" the last token is a stop token, which has no text."""
        self.parts, num_tokens, num_reasoning = [], 0, 0
        self.is_empty = self.is_empty and not token_ids
        for token in token_ids:
            num_tokens += 1
            self.num_pending += 1
            is_hidden = finish_reason == "stop" and num_tokens == len(token_ids) and token not in self.markers
            was_reasoning = self._is_reasoning
            if not is_hidden:
                self._take(token)
            if was_reasoning or self._is_reasoning:
                num_reasoning += self.num_pending
            if was_reasoning or self.header is None:
                self.num_pending = 0
            if self.is_stopped:
                finish_reason = "stop"
                break
        if finish_reason is not None:
            self._end()
            finish_reason = "stop" if self.is_stopped else finish_reason  # in a header that came out as text
        return Read(num_tokens, self.parts, num_reasoning, finish_reason)

    @property
    def _is_reasoning(self) -> bool:
        return self.message is not None and self.message.channel == "reasoning"

    def _begin(self, prompt_ids: tuple[int, ...]) -> None:
        """Read the header that the prompt ends in, up to its <|message|> if that is there too."""
        starts = [place for place, token in enumerate(prompt_ids) if self.markers.get(token) == START]
        tail = prompt_ids[starts[-1] :] if starts else ()
        markers = [self.markers.get(token) for token in tail]
        if not set(ENDS).isdisjoint(markers):
            return
        for token in tail[: markers.index(MESSAGE) + 1 if MESSAGE in markers else len(tail)]:
            self._take(token)
        self.parts, self.problem = [], None  # a prompt's text is not told

    def _take(self, token: int) -> None:
        """A marker, or a token of a header or of a body."""
        marker = self.markers.get(token)
        if marker is not None:
            self._mark(marker)
        elif token in self.skipped:
            return
        elif self.header is not None:
            self.header[-1].ids.append(token)
            if not self._may_be_header(self.header):
                self._open_unread(self.header, "text stands where a header should")
        else:
            if self.message is None:
                self._open_unread([], "text stands between messages")
            self._write([token])

    def _mark(self, marker: str) -> None:
        """A marker. Inside a body <|message|> and <|constrain|> mean nothing; <|start|> and <|channel|> end it."""
        if marker == START:
            self._end()
            self.header = [HeaderSpan(START, [])]
        elif marker == CHANNEL and self.header is None:
            self._end()
            self.header = [HeaderSpan(CHANNEL, [])]
        elif marker in (CHANNEL, CONSTRAIN):
            if self.header is not None:
                self.header.append(HeaderSpan(marker, []))
        elif marker in ENDS:
            self._end()
        elif self.message is None:
            self._open(self.header or [])

    def _may_be_header(self, header: list[HeaderSpan]) -> bool:
        """Whether a header may begin so. Its channel is judged when it is whole."""
        if sum(len(span.ids) for span in header) > MAX_HEADER_TOKENS:
            return False
        first, *others = header
        if others or first.marker != START:
            return True
        text = self._decode(first.ids)
        return ROLE.startswith(text) or BEGUN.fullmatch(text) is not None

    def _open(self, header: list[HeaderSpan]) -> None:
        """The body begins whose header this is."""
        message = self._read(header)
        if message is None:
            told = shown(self._decode(self._ids(header)))
            self._open_unread(header, f"the header {told} names no channel and no function that may be called")
        else:
            self.header, self.message = None, message

    def _open_unread(self, header: list[HeaderSpan], problem: str) -> None:
        """A message begins whose header says nothing: the header's text is the first of its content."""
        self.problem = self.problem or problem
        self.header, self.message = None, HarmonyMessage(self._detokenizer())
        self._write(self._ids(header))

    def _read(self, header: list[HeaderSpan]) -> HarmonyMessage | None:
        """The message that a header describes; None if it describes none."""
        words = {span.marker: self._decode(span.ids).split() for span in header}
        role, channel = words.get(START, [ROLE]), words.get(CHANNEL, [])
        others = role[1:] + channel[1:]
        recipients = [word for word in others if word.startswith(RECIPIENT)]
        num_types = len(others) - len(recipients) + len(words.get(CONSTRAIN, []))  # "json", with and without a marker
        if len(words) < len(header) or role[:1] != [ROLE] or len(recipients) > 1 or num_types > 1:
            return None
        kind = CHANNELS.get(channel[0]) if channel else None
        if not recipients:
            if kind is None:
                return None
            return HarmonyMessage(self._detokenizer(), kind if self.thinks else "content")
        name = recipients[0].removeprefix(RECIPIENT + FUNCTIONS)
        is_known = self.has_tools and name not in ("", recipients[0]) and (kind is not None or not channel)
        return HarmonyMessage(self._detokenizer(), "content", name, self._ids(header)) if is_known else None

    def _write(self, token_ids: list[int]) -> None:
        """Tokens of the body."""
        assert self.message is not None
        detokenizer = self.message.detokenizer
        self._tell(detokenizer.add(token_ids))
        self.is_stopped = detokenizer.num_until_stop is not None

    def _tell(self, text: str) -> None:
        """Text of the body that became final."""
        message = self.message
        assert message is not None
        if message.function is not None:
            message.arguments.append(text)
        elif text:
            if not message.has_text and message.channel in self.written:
                text = GAP + text
            message.has_text = True
            self.written.add(message.channel)
            self.parts.append(Text(message.channel, text))

    def _end(self) -> None:
        """End the header or the body that is open."""
        if self.header is not None and not self.is_empty:
            self._open_unread(self.header, "a header has no message")
        if self.message is not None:
            self._tell(self.message.detokenizer.finish())
            if self.message.function is not None:
                self._call(self.message, self.message.function)
        self.header = self.message = None

    def _call(self, message: HarmonyMessage, function: str) -> None:
        """A call whose arguments are there, or a message that only looked like one."""
        text = "".join(message.arguments)
        try:
            value = parse_json(text.strip() or "{}", is_strict=True)
        except ValueError:
            value = None
        if isinstance(value, dict):
            self.parts.append(Call(function, json.dumps(value, ensure_ascii=False)))
            return
        self.problem = self.problem or f"the arguments of a call of {shown(function)} are no JSON object"
        message.function = None
        self._tell(self._decode(message.header) + text)

    def _ids(self, header: list[HeaderSpan]) -> list[int]:
        """The tokens of a header without the role."""
        ids = [token for span in header for token in span.ids]
        if header and header[0].marker == START:
            for num in range(1, len(ids) + 1):
                if self._decode(ids[:num]) == ROLE:
                    return ids[num:]
        return ids

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _detokenizer(self) -> Detokenizer:
        return Detokenizer(self.tokenizer, (), self.stop)


def missing_markers(tokenizer: Tokenizer | None) -> list[str]:
    """The markers that a vocabulary lacks."""
    return [marker for marker in MARKERS if tokenizer is None or tokenizer.token_to_id(marker) is None]
