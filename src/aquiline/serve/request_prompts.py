"""What clients send as prompts and messages, as token ids: the tokenizer and the chat template of the target.

All of it runs in the HTTP process, most of it in a thread: `Service.apart`. What cannot fit into a context is refused
by its length, before it is encoded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

from tokenizers import Tokenizer

from aquiline.serve.admission import read_json
from aquiline.serve.api_errors import ApiError, bad_request
from aquiline.serve.protocol import ChatMessage, ContentPart, Prediction, Tool
from aquiline.text.chat_template import ChatTemplate, Message
from aquiline.text.harmony import CHANNEL, GAP
from aquiline.text.parsers import CALL, END_CALL
from aquiline.text.tokenizer import least_tokens

ENCODER = json.JSONEncoder(separators=(",", ":"))

GENERIC_TOOLS = f"""You can call these functions:
%s
To call one, write its name and its arguments as JSON:
{CALL}
{{"name": "...", "arguments": {{...}}}}
{END_CALL}"""
"""What a system message says of tools where the template has no form for them."""


class Prompts:
    """The tokenizer and chat template that the server's target comes with. is_generic: the template knows no tools, so
    the system message describes them."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.tokenizer, self.template = tokenizer, template
        self.is_harmony = CHANNEL in (template.source or "")
        self.is_generic = False

    def text(self, text: str, most: int, special: bool = True, name: str = "prompt") -> list[int]:
        """Token ids of a text; special: with the tokens that the tokenizer puts around one. Raises ApiError naming the
        field for no text, and for one whose length says that it becomes more than `most` tokens."""
        if (least := least_tokens(self.tokenizer, text)) > most:
            raise ApiError(
                400, f"{_context(most)} However, the {name} has {len(text)} characters, which are at least {least} "
                f"tokens. Please reduce the length of the {name}.", name, "context_length_exceeded",
            )  # fmt: skip
        try:  # a batch, as the tokenizer lets other threads run meanwhile, which it does not for a single text
            ids: list[int] = self.tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
        except TypeError:
            raise bad_request(f"{name}: holds half a surrogate pair, which is no text", name) from None
        return ids

    def completions(self, prompts: Sequence[str | list[int]], most: int) -> list[list[int]]:
        """Token ids of every prompt of a completion request, each of which may have `most` tokens."""
        return [self.text(each, most) if isinstance(each, str) else each for each in prompts]

    def chat(
        self,
        messages: Sequence[ChatMessage],
        most: int,
        tools: Sequence[Tool] | None = None,
        options: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> tuple[str, list[int]]:
        """A conversation as text and as token ids, `most` of them at most. Raises ApiError and ValueError where the
        template refuses it."""
        given = dict(options or {})
        described = [tool.model_dump(exclude_none=True) for tool in tools or ()]
        if described and not self.is_generic:
            given["tools"] = described
        template = self.template.with_options(given)
        told = [_message(message, place) for place, message in enumerate(messages)]
        if self.is_generic:
            told = _with_tools([*map(_with_calls, told)], described)
        text = template.render([_with_thinking(m) for m in told] if self.is_harmony else told, add_generation_prompt)
        if not text:
            raise bad_request("messages: hold no text", "messages")
        return text, self.text(text, most, special=not template.has_template, name="messages")

    def prediction(self, prediction: Prediction | None, most: int) -> tuple[int, ...]:
        """Token ids of the output that a caller expects. Raises ApiError for more than `most`: none is as long."""
        if prediction is None:
            return ()
        ids = self.text(_text(prediction.content, "prediction"), most, special=False, name="prediction")
        if len(ids) > most:
            told = f"{_context(most)} However, the prediction has {len(ids)} tokens."
            raise bad_request(f"prediction: {told} Please reduce its length.", "prediction")
        return tuple(ids)


def several(prompt: str | list[str] | list[int] | list[list[int]]) -> Sequence[str | list[int]]:
    """The prompts of a completion request. Raises ApiError where one is empty, or there is none."""
    prompts: Any = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
    if not prompts or not all(prompts):  # of an empty text a tokenizer may still make BOS
        raise bad_request("prompt: is empty; give at least one character or token", "prompt")
    return cast("list[str | list[int]]", prompts)


def _context(most: int) -> str:
    return f"This model's maximum context length is {most} tokens."


def _with_thinking(message: Message) -> Message:
    """A message as Harmony's templates take it: `thinking` is what replies call reasoning_content. They refuse a call
    that has both content and thinking, so a preamble joins the thinking, as which they would write it anyway."""
    given = dict(message)
    reasoning = given.pop("reasoning_content", None)
    if given["role"] == "assistant" and isinstance(reasoning, str) and reasoning:
        given.setdefault("thinking", reasoning)
    thinking = given.get("thinking")
    if given.get("tool_calls") and isinstance(thinking, str) and thinking and given["content"]:
        given |= {"thinking": thinking + GAP + given["content"], "content": ""}
    return given


def _with_tools(messages: list[Message], tools: list[dict[str, Any]]) -> list[Message]:
    """Messages of which the first, the system's, describes tools."""
    if not tools:
        return messages
    described = GENERIC_TOOLS % "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": described}, *messages]
    return [{**messages[0], "content": f"{messages[0]['content']}\n\n{described}"}, *messages[1:]]


def _with_calls(message: Message) -> Message:
    """A message whose calls of tools, or what a tool told, are text, for templates that know neither."""
    given = dict(message)
    calls = [
        f"{CALL}\n{json.dumps({k: call['function'][k] for k in ('name', 'arguments')}, ensure_ascii=False)}\n{END_CALL}"
        for call in given.pop("tool_calls", None) or ()
    ]
    given["content"] = "\n".join([*filter(None, [given["content"]]), *calls])
    if given["role"] == "tool":
        given |= {"role": "user", "content": f"<tool_response>\n{given['content']}\n</tool_response>"}
    return given


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
                call["function"]["arguments"] = read_json((arguments or "{}").encode("utf-8", "surrogatepass"))
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


@lru_cache(maxsize=2**16)
def token_text(tokenizer: Tokenizer, token: int) -> str:
    """One token as text, a special one too; bytes that are no whole character show as U+FFFD."""
    text: str = tokenizer.decode([token], skip_special_tokens=False)
    return text


def dumps(value: object) -> bytes:
    """JSON in one line. Not ASCII is escaped, so that half a surrogate pair that a client sent can be sent back."""
    return ENCODER.encode(value).encode()
