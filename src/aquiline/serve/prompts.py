"""What clients send as prompts and messages, as token ids: the tokenizer and the chat template of the target.

All of it runs in the HTTP process.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from aquiline.checks import parse_json
from aquiline.serve.errors import bad_request
from aquiline.serve.protocol import ChatMessage, ContentPart, Prediction, Tool
from aquiline.text.chat import ChatTemplate, Message


class Prompts:
    """The tokenizer and chat template that the server's target comes with."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.tokenizer, self.template = tokenizer, template

    def text(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text; special: with the tokens that the tokenizer puts around one."""
        try:
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special).ids
        except TypeError:
            raise bad_request("prompt: holds half a surrogate pair, which is no text", "prompt") from None
        return ids

    def completions(self, prompt: str | list[str] | list[int] | list[list[int]]) -> list[list[int]]:
        """Token ids of every prompt of a completion request."""
        several: list[Any] = [prompt] if isinstance(prompt, str) else list(prompt)
        if several and isinstance(several[0], int):
            several = [several]
        if not several or not all(several):  # of an empty text a tokenizer may still make BOS
            raise bad_request("prompt: is empty; give at least one character or token", "prompt")
        return [self.text(each) if isinstance(each, str) else list(each) for each in several]

    def chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] | None = None,
        options: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> tuple[str, list[int]]:
        """A conversation as text and as token ids. Raises ApiError and ValueError where the template refuses it."""
        given = dict(options or {})
        if tools:
            given["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
        template = self.template.with_options(given)
        text = template.render(
            [_message(message, place) for place, message in enumerate(messages)], add_generation_prompt
        )
        if not text:
            raise bad_request("messages: hold no text", "messages")
        return text, self.text(text, special=not template.has_template)

    def prediction(self, prediction: Prediction | None) -> tuple[int, ...]:
        """Token ids of the output that a caller expects."""
        if prediction is None:
            return ()
        return tuple(self.text(_text(prediction.content, "prediction"), special=False))


def _message(message: ChatMessage, place: int) -> Message:
    """A message as templates take it: content is one text, arguments of calls are objects."""
    where = f"messages.{place}"
    given = message.model_dump(exclude_none=True)
    given["role"] = "system" if message.role == "developer" else message.role
    given["content"] = _text(message.content or "", where)
    for index, call in enumerate(given.get("tool_calls", [])):
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            try:
                call["function"]["arguments"] = parse_json(arguments or "{}")
            except ValueError as error:
                name = f"{where}.tool_calls.{index}.function.arguments"
                raise bad_request(f"{name}: is not JSON ({error})", name) from None
    return given


def _text(content: str | list[ContentPart], where: str) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.text is None or part.type not in ("text", "input_text", "output_text"):
            raise bad_request(
                f"{where}: a part of type {part.type[:40]!r} is not supported; the model reads text", where
            )
    return "\n".join(part.text or "" for part in content)


def num_chars(prompt: object) -> int:
    """Characters of the texts in a prompt or in a message's content."""
    if isinstance(prompt, list):
        return sum(map(num_chars, prompt))
    text = prompt.text if isinstance(prompt, ContentPart) else prompt
    return len(text) if isinstance(text, str) else 0


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """One token as text, a special one too; bytes that are no whole character show as U+FFFD."""
    text: str = tokenizer.decode([token], skip_special_tokens=False)
    return text


def dumps(value: object) -> bytes:
    """JSON in one line. Not ASCII is escaped, so that half a surrogate pair that a client sent can be sent back."""
    return json.dumps(value, separators=(",", ":")).encode()
