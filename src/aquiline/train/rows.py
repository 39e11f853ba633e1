"""Documents out of one row of data: token ids with a loss mask, a conversation, or plain text.

A conversation is `messages` of role and content, or ShareGPT's `conversations` of from and value. This module owns
which rows can be trained on; text/loss_mask.py makes tokens of conversations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aquiline.checks import is_unicode
from aquiline.text.chat_template import MaskedTokens, Message
from aquiline.train.documents import Document, TokenIds
from aquiline.types import Bool

ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "model": "assistant", "system": "system", "developer": "developer", "tool": "tool", "observation": "tool",
}  # fmt: skip
"""Names of roles in public data sets, and what chat templates call them."""


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
    """Reads rows for one target. loss_on: "answers" counts the tokens that the model wrote, by loss masks and chat
    templates; "all" counts every token of every row."""

    ids: TokenIds
    loss_on: str = "answers"

    def documents(self, row: object, key: str) -> list[Document]:
        """The documents of a row: one, or several for a conversation whose template rewrites earlier answers.

        A row with ids and a loss mask is taken as it is. Otherwise the first of these counts: a conversation, ids, a
        text. Raises RowError for a row that cannot be used, ValueError if the target can use no row of that kind."""
        if not isinstance(row, dict):
            raise RowError("not an object")
        tokens = row.get("input_ids", row.get("token_ids"))
        if tokens is not None and row.get("loss_mask") is not None:
            return [self._masked(row, _checked(tokens), key)]
        messages = messages_of(row)
        if messages is not None:
            return self._conversation(messages, key)
        if tokens is not None:
            return [Document(key, _checked(tokens))]
        if isinstance(row.get("text"), str):
            if not is_unicode(row["text"]):
                raise RowError("its text holds half a surrogate pair")
            return [Document(key, np.array(self.ids.encode(row["text"]), dtype=np.int32))]
        raise RowError('none of "messages", "conversations", "text", "input_ids", "token_ids"')

    def _masked(self, row: dict[str, Any], ids: NDArray[np.int32], key: str) -> Document:
        mask = _flags(row, "loss_mask", len(ids))
        return Document(key, ids, None if self.loss_on == "all" else mask, _flags(row, "rejected", len(ids)))

    def _conversation(self, messages: list[Message], key: str) -> list[Document]:
        template = self.ids.template
        if template is None or template.tokenizer is None or not template.has_template:
            raise ValueError(f"{key}: is a conversation, and the target has no chat template; give text or token ids")
        try:
            if self.loss_on == "all":
                return [Document(key, np.array(template.encode(messages, add_generation_prompt=False), np.int32))]
            found: list[MaskedTokens] = template.encode_answers(messages)
        except ValueError as error:
            raise RowError("a conversation that the chat template does not take", str(error)) from None
        return [Document(key, part.ids, part.mask) for part in found]


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
