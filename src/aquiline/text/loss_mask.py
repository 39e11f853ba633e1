"""The loss mask of a conversation: which tokens the model itself would have written.

Owns the search for answers in rendered text and the mapping from characters to tokens; chat_template.py renders the
text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from aquiline.types import Bool, Int32

Message = Mapping[str, Any]
"""One message: "role", "content", and whatever else a template reads ("reasoning_content", "tool_calls")."""

Render = Callable[[Sequence[Message], bool], str]
"""Messages and add_generation_prompt to text."""


@dataclass(frozen=True)
class MaskedTokens:
    """Token ids int32 [n] of a conversation; mask bool [n] is true where the model itself would have written."""

    ids: Int32
    mask: Bool


@dataclass(frozen=True)
class AnswerSpan:
    """Characters [start, end) of a text."""

    start: int
    end: int


@dataclass(frozen=True)
class Rendered:
    """The first num_messages messages of a conversation as text. Each span of `answers` is one answer and everything
    that the template writes after it."""

    text: str
    num_messages: int
    answers: list[AnswerSpan] = field(default_factory=list)


def find_answers(render: Render, messages: Sequence[Message], name: str) -> list[Rendered]:
    """Texts that together hold every answer once, each as the model would have written it, the longest text first.

    An answer is the text between the end of the generation prompt of the conversation before it and the end of the
    conversation with it. If the whole conversation begins with that text, the answer is found there. Some templates
    rewrite an answer once more turns follow (they drop its reasoning, or write another end of turn). The model never
    wrote the rewritten form, so such an answer is found in a text of its own, the conversation up to it.

    Raises ValueError naming template and message where a conversation with an answer does not continue its generation
    prompt, or where the answer is not in it."""
    found = [Rendered(render(messages, False), len(messages))]
    for place in reversed(range(len(messages))):
        if messages[place]["role"] != "assistant":
            continue
        before, through = render(messages[:place], True), render(messages[: place + 1], False)
        where = f"{name}: message {place + 1}, an answer"
        if not through.startswith(before):
            raise ValueError(f"{where}: does not continue its generation prompt, which ends {before[-40:]!r}")
        span = AnswerSpan(len(before), len(through))
        header = render(messages[:place], False)
        turn = through[len(header) if through.startswith(header) else span.start :]  # prompts may open the reasoning
        if _letters(messages[place]["content"]) not in _letters(turn):
            raise ValueError(f"{where}: the template does not write it as it was given")
        home = next((text for text in found if text.text.startswith(through)), None)
        if home is None:
            home = Rendered(through, place + 1)
            found.append(home)
        home.answers.append(span)
    return found


def find_marked(
    render: Render, messages: Sequence[Message], marked: str, marks: tuple[str, str], name: str
) -> Rendered:
    """The answers that a template marks itself; `marked` is its text with a mark of one character around each.

    The text of the generation prompt is cut off a marked answer, because some templates mark the role's header too.
    Raises ValueError if the template does more with a marked text than write it, or marks nothing."""
    plain = render(messages, False)
    pieces = marked.replace(marks[1], marks[0]).split(marks[0])
    ends = np.cumsum([len(piece) for piece in pieces])
    if "".join(pieces) != plain or len(pieces) % 2 == 0:
        raise ValueError(f"{name}: changes what stands in its generation blocks; answers cannot be found by them")
    starts = [int(begin) for begin in ends[:-1:2]]
    for place, message in enumerate(messages):
        before = render(messages[:place], True) if message["role"] == "assistant" else ""
        if before and plain.startswith(before):
            starts = [
                len(before) if start < len(before) <= end else start
                for start, end in zip(starts, ends[1::2], strict=True)
            ]
    if not starts:
        raise ValueError(f"{name}: has generation blocks, but writes none of these messages in one")
    spans = [AnswerSpan(start, int(end)) for start, end in zip(starts, ends[1::2], strict=True)]
    return Rendered(plain, len(messages), spans)


def mask_tokens(
    tokenizer: Tokenizer, rendered: Rendered, special: frozenset[int], head: Sequence[int] = ()
) -> MaskedTokens:
    """The tokens `head` and one encoding of the text, its answers masked up to and with the token that ends the turn.

    `special` are the ids that can end a turn. A token that crosses the border of an answer is not counted: the model,
    which starts after its prompt, would not have written it. `tokenizer` adds nothing and gives the offsets of its
    tokens untrimmed (see `exact_offsets`)."""
    encoding = tokenizer.encode(rendered.text, add_special_tokens=False)
    ids = np.array(encoding.ids, np.int32)
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
    mask = np.zeros(len(ids), np.bool_)
    for span in rendered.answers:
        inside = np.flatnonzero((offsets[:, 0] >= span.start) & (offsets[:, 1] <= span.end))
        num = len(inside)
        for place in reversed(range(len(inside))):
            token = inside[place]
            if int(ids[token]) in special:
                num = place + 1  # of several ending tokens the model writes the first one only
            elif rendered.text[slice(*offsets[token])].strip():
                break
            elif num == place + 1:
                num = place
        mask[inside[:num]] = True
    return MaskedTokens(
        np.concatenate([np.array(head, np.int32), ids]), np.concatenate([np.zeros(len(head), np.bool_), mask])
    )


def exact_offsets(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer without its post-processor, which may trim the spaces off a token's offsets. Both share one
    model: a vocabulary of 49,152 tokens takes 30 MB and 0.1 s to copy."""
    other = Tokenizer(tokenizer.model)
    other.normalizer, other.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
    added = tokenizer.get_added_tokens_decoder()
    other.add_tokens([added[i] for i in sorted(added)])
    return other


def _letters(text: str) -> str:
    """A text without white space. Templates trim and rearrange white space around reasoning, so texts are compared
    without it."""
    return "".join(text.split())
