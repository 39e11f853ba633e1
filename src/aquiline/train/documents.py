"""Documents of token ids, alone or end to end in one stream, and which of them a row of data gives.

A row holds token ids with a loss mask, a conversation, or plain text. A conversation is `messages` of role and content,
or ShareGPT's `conversations` of from and value. This module owns which rows can be trained on; text/loss_mask.py makes
tokens of conversations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from aquiline.checks import is_unicode
from aquiline.text.chat_template import ChatTemplate, MaskedTokens, Message
from aquiline.text.questions import ROLES
from aquiline.text.tokenizer import load_tokenizer, special_ids
from aquiline.types import Bool, Int32, Int64


@dataclass(frozen=True)
class Document:
    """One document: token ids [n] and a mask bool [n] of those that count; None counts every token.

    rejected bool [n]: tokens that a draft missed when it served; None where that is not known. `key` names where it
    came from. Documents of one conversation share their key."""

    key: str
    tokens: NDArray[np.integer]
    mask: Bool | None = None
    rejected: Bool | None = None


@dataclass(frozen=True)
class Corpus:
    """Documents end to end: tokens int32 [n], starts int64 [documents + 1], mask bool [n] of tokens that count,
    rejected bool [n] of tokens that a draft missed when it served."""

    tokens: Int32
    starts: Int64
    mask: Bool
    rejected: Bool

    @property
    def num_documents(self) -> int:
        """How many documents the stream holds."""
        return len(self.starts) - 1


def build_corpus(documents: Iterable[Document]) -> Corpus:
    """Concatenate documents into one stream."""
    none = np.zeros(0, np.bool_)
    tokens, masks, rejected, lengths = [np.zeros(0, np.int32)], [none], [none], [0]
    for document in documents:
        num = len(document.tokens)
        tokens.append(document.tokens.astype(np.int32))
        masks.append(np.ones(num, np.bool_) if document.mask is None else document.mask)
        rejected.append(np.zeros(num, np.bool_) if document.rejected is None else document.rejected)
        lengths.append(num)
    starts = np.cumsum(lengths, dtype=np.int64)
    return Corpus(np.concatenate(tokens), starts, np.concatenate(masks), np.concatenate(rejected))


@dataclass
class Rejects:
    """Rows and files that were not used: a count for each reason, and the first example of each."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, where: str) -> None:
        """Count one row or file that was not used."""
        self.counts[reason] += 1
        self.examples.setdefault(reason, where)

    def __str__(self) -> str:
        return "; ".join(f"{n} x {reason} (first: {self.examples[reason]})" for reason, n in self.counts.items())


class RowError(Exception):
    """Why a row cannot be used. Rows with the same fault have the same message, so that faults can be counted."""


def messages_of(row: dict[str, Any]) -> list[Message] | None:
    """The conversation of a row as messages with role and content; other fields of a message are kept. None if the row
    has no conversation.

    Raises RowError unless every user turn is answered, every answer follows a turn of the user or of a tool, and the
    last message is an answer."""
    turns = row.get("messages", row.get("conversations"))
    if turns is None:
        return None
    if not isinstance(turns, list) or not turns:
        raise RowError("its messages are no list, or an empty one")
    messages = [_message(turn) for turn in turns]
    roles = [message["role"] for message in messages]
    for before, role in zip([None, *roles], [*roles, None], strict=True):
        if before == "user" and role != "assistant":
            raise RowError("a user turn without an answer")
        if role == "assistant" and before not in ("user", "tool"):
            raise RowError("an answer that no turn of the user comes before")
    if roles[-1] != "assistant":
        raise RowError("its last message is no answer")
    return messages


def _message(turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise RowError("a message that is no object")
    name, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(content, str):
        raise RowError("a message whose content is no text")
    if not isinstance(name, str) or name.lower() not in ROLES:
        raise RowError(f"a message of the unknown role {str(name)[:20]!r}")
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    return rest | {"role": ROLES[name.lower()], "content": content}


@dataclass(frozen=True)
class RowReader:
    """Reads rows for one target, by its tokenizer (None if it has none), chat template, vocabulary and boundary ids.

    bos: put first where the tokenizer adds none. boundary: the id that begins a document in .bin files. loss_on:
    "answers" counts the tokens that the model wrote, by loss masks and chat templates; "all" counts every token."""

    vocab_size: int
    boundary: int | None
    bos: int | None
    tokenizer: Tokenizer | None
    special: tuple[int, ...]
    template: ChatTemplate | None = None
    loss_on: str = "answers"

    def documents(self, row: object, key: str) -> list[Document]:
        """The documents of a row: one, or several for a conversation whose template rewrites earlier answers.

        A row with ids and a loss mask is taken as it is. Otherwise the first of these counts: a conversation, ids, a
        text. Raises RowError for a row that cannot be used, ValueError if the target can use no row of that kind."""
        if not isinstance(row, dict):
            raise RowError("not an object")
        tokens = row.get("input_ids", row.get("token_ids"))
        if tokens is not None and row.get("loss_mask") is not None:
            ids = _checked(tokens)
            mask, rejected = (_flags(row, name, len(ids)) for name in ("loss_mask", "rejected"))
            return [Document(key, ids, None if self.loss_on == "all" else mask, rejected)]
        messages = messages_of(row)
        if messages is not None:
            return self._conversation(messages, key)
        if tokens is not None:
            return [Document(key, _checked(tokens))]
        if isinstance(row.get("text"), str):
            if not is_unicode(row["text"]):
                raise RowError("its text holds half a surrogate pair")
            return [Document(key, np.array(self.encode(row["text"]), dtype=np.int32))]
        raise RowError('none of "messages", "conversations", "text", "input_ids", "token_ids"')

    def _conversation(self, messages: list[Message], key: str) -> list[Document]:
        template = self.template
        if template is None or template.tokenizer is None or not template.has_template:
            raise ValueError(f"{key}: is a conversation, and the target has no chat template; give text or token ids")
        try:
            if self.loss_on == "all":
                return [Document(key, np.array(template.encode(messages, add_generation_prompt=False), np.int32))]
            found: list[MaskedTokens] = template.encode_answers(messages)
        except ValueError as error:
            raise RowError("a conversation that the chat template does not take", str(error)) from None
        return [Document(key, part.ids, part.mask) for part in found]

    def encode(self, text: str) -> list[int]:
        """Token ids of one document."""
        if self.tokenizer is None:
            raise ValueError("the target has no tokenizer: give token ids (.bin or JSONL with input_ids)")
        ids: list[int] = self.tokenizer.encode(text).ids
        return [self.bos, *ids] if self.bos is not None and ids[:1] != [self.bos] else ids


def row_reader(
    target: Path, vocab_size: int, bos: int | None, eos: tuple[int, ...], loss_on: str = "answers"
) -> RowReader:
    """Read the target's tokenizer and chat template; bos and eos come from its config.

    Raises CheckpointError if either is broken."""
    tokenizer = load_tokenizer(target)
    boundary = bos if bos is not None else (eos[0] if eos else None)
    template = ChatTemplate.load(target, tokenizer)
    special = special_ids(tokenizer, bos, eos, vocab_size)
    return RowReader(vocab_size, boundary, bos, tokenizer, special, template, loss_on)


def _flags(row: dict[str, Any], name: str, length: int) -> Bool | None:
    """A field of one flag per token id; None if the row lacks it."""
    flags = row.get(name)
    if flags is None:
        return None
    if not isinstance(flags, list) or len(flags) != length or not all(flag in (0, 1) for flag in flags):
        raise RowError(f"{name} is not a list of 0 and 1 as long as the token ids")
    return np.array(flags, dtype=np.bool_)


def _checked(tokens: Any) -> NDArray[np.int32]:
    if not isinstance(tokens, list) or not all(type(t) is int and -1 < t < 1 << 31 for t in tokens):
        raise RowError("token ids are not a list of integers")
    return np.array(tokens, dtype=np.int32)
