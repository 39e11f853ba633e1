"""Convert prompts, conversations and predictions to token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from aquiline.config import SamplingParams
from aquiline.engine.model import LoadedModels
from aquiline.text.chat_template import ChatTemplate, Message
from aquiline.text.parsing import Parsing

Conversations = Sequence[Message] | Sequence[Sequence[Message]]
"""One conversation, a list of {"role": ..., "content": text}, or a list of conversations."""


def encode_prompt(models: LoadedModels, prompt: str | Iterable[int] | int) -> list[int]:
    """Token ids of a prompt. A text gets the special tokens that the tokenizer puts around it; ids are checked and
    copied. Raises ValueError for an empty text, a text without a tokenizer, and ids that are not whole numbers."""
    if isinstance(prompt, int):
        raise ValueError(f"prompts=[{prompt}, ...]: token ids come as a list per prompt; write [[{prompt}, ...]]")
    if not isinstance(prompt, str):
        return _whole_numbers("token_ids", prompt)
    if not prompt:  # a tokenizer that adds BOS would make a token of it
        raise ValueError("prompt='': is empty; give at least one character, or token ids")
    return _ids(models, "prompt", prompt, is_begun=True)


def encode_prediction(models: LoadedModels, prediction: str | Iterable[int] | None) -> list[int]:
    """Token ids of an expected output. A text gets no special tokens. Text and ids may be empty, and None means no
    prediction.

    Raises ValueError as `encode_prompt` does."""
    if isinstance(prediction, str):
        return _ids(models, "prediction", prediction, is_begun=False) if prediction else []
    if prediction is not None and not isinstance(prediction, Iterable):
        raise ValueError(f"prediction={prediction!r}: must be a text, a list of token ids, or None")
    return _whole_numbers("prediction", () if prediction is None else prediction)


def encode_chats(template: ChatTemplate, messages: Conversations) -> list[list[int]]:
    """Token ids that ask for the next answer of one conversation or of each of several. Raises ValueError for anything
    that is not a conversation, and for messages that the template refuses."""
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"messages={messages!r}: must be a list of messages, or a list of such lists")
    several = [messages] if isinstance(messages[0], Mapping) else messages
    return [template.encode(_checked(own, f"messages[{i}]")) for i, own in enumerate(several)]


def ending_with(template: ChatTemplate, sampling: SamplingParams, parsing: Parsing | None = None) -> SamplingParams:
    """The same sampling for an answer: it also stops at the token that ends a turn, and a grammar begins after the
    reasoning. parsing: how the answer is read, by default as the template says."""
    structured = sampling.structured
    if structured is not None and structured.boundary is None and template.tokenizer is not None:
        parsing = parsing or Parsing.of(template.source, template.tokenizer)
        structured = replace(structured, boundary=parsing.boundary(template.tokenizer))
    return replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *template.end_ids), structured=structured)


def _checked(conversation: object, name: str) -> list[Message]:
    """The messages, each with a text. A message of the model that only calls tools gets an empty one."""
    if not isinstance(conversation, list | tuple) or not conversation:
        raise ValueError(f"{name}={conversation!r}: must be a list of messages that is not empty")
    checked: list[Message] = []
    for place, message in enumerate(conversation):
        given = message if isinstance(message, Mapping) else {}
        content = given.get("content")
        is_text = isinstance(content, str) or (content is None and given.get("tool_calls"))
        if not isinstance(given.get("role"), str) or not is_text:
            raise ValueError(f"{name}[{place}]={message!r}: must be a dict with role and content, both texts")
        checked.append({**given, "content": content or ""})
    return checked


def _ids(models: LoadedModels, name: str, text: str, is_begun: bool) -> list[int]:
    """Token ids of a text; is_begun: with the special tokens that begin and end a text."""
    if models.tokenizer is None:
        raise ValueError(f"{name}={text[:40]!r}: the target has no tokenizer.json; pass token ids")
    try:
        ids: list[int] = models.tokenizer.encode(text, add_special_tokens=is_begun).ids
    except TypeError:  # lone surrogates: bytes that were no UTF-8
        raise ValueError(f"{name}={text[:40]!r}: holds bytes that are not UTF-8") from None
    return ids


def _whole_numbers(name: str, ids: Iterable[int]) -> list[int]:
    given = list(ids)
    bad = [token for token in given if type(token) is bool or not isinstance(token, int | np.integer)]
    if bad:
        raise ValueError(f"{name}: {bad[0]!r} is among them; each must be a whole number")
    return [int(token) for token in given]
