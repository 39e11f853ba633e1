"""Conversations out of data rows: `messages` of role and content, ShareGPT's `conversations` of from and value.

Owns which conversations can be trained on; text/chat.py makes tokens of them.
"""

from __future__ import annotations

from typing import Any

from aquiline.text.chat_template import Message

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
