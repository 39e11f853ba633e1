"""Questions to put to a model: one type, read from every format that prompts and benchmarks come in.

Owns the formats and the errors of a row; knows nothing of models, templates or the network. A row's fields tell its
format, so a file may have any name:

    turns                    EAGLE's, FastChat's and Spec-Bench's files: question_id, category, turns, reference
    conversations, messages  chats: {role | from, content | value}; the user's messages are asked, the answers are not
    task_id, prompt          HumanEval
    instruction              Alpaca: instruction, input, output
    question, answer         GSM8K
    prompt, text             plain text, or a list of turns

Files are JSONL, one JSON list, or .txt with a question per line; any of them may be gzipped.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aquiline.checks import is_unicode, parse_json

_GZIP = b"\x1f\x8b"
ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "model": "assistant", "system": "system", "developer": "developer", "tool": "tool", "observation": "tool",
}  # fmt: skip
"""Names of roles in public data sets, and what chat templates call them."""
_USER_ROLES = tuple(name for name, role in ROLES.items() if role == "user")
_MODEL_ROLES = (*(name for name, role in ROLES.items() if role == "assistant"), "bard", "bing")
"""Roles whose messages are the turns of a question, and roles of answers, which are left out."""


@dataclass(frozen=True)
class Question:
    """The turns of a user; each turn is asked after the model's answer to the turn before.

    id: the file's own, or the row's index. reference: the answer to the first turn, if the file has one. system: the
    system message before the conversation, if it has one."""

    id: int | str
    category: str
    turns: tuple[str, ...]
    reference: str | None = None
    system: str | None = None


@dataclass(frozen=True)
class QuestionRow:
    """A row of a file and where it stands. line: the JSON that `value` parses; None if `known` holds the value."""

    where: str
    line: str | None = None
    known: object = None

    @property
    def value(self) -> object:
        """The row's value. Raises ValueError naming the row if it is not JSON."""
        return self.known if self.line is None else _parse(self.line, self.where)

    def question(self, index: int) -> Question:
        """The row's question; `index` becomes its id if the row has none. Raises ValueError naming the row and its
        fault."""
        value = self.value
        try:
            return _question(value, index)
        except ValueError as error:
            raise ValueError(f"{self.where}: {error}") from None


def read_questions(path: Path) -> Iterator[Question]:
    """Every question of one file. Raises ValueError naming the first broken row, or the file if it holds none."""
    for index, row in enumerate(read_rows(path)):
        yield row.question(index)


def read_rows(path: Path) -> Iterator[QuestionRow]:
    """Every row of one file, without a check of its fields. Raises ValueError naming a file without rows or text."""
    row = None
    for row in _rows(path):
        yield row
    if row is None:
        raise ValueError(f"{path}: holds no question")


def _rows(path: Path) -> Iterator[QuestionRow]:
    data = path.read_bytes()
    try:
        text = (gzip.decompress(data) if data.startswith(_GZIP) else data).decode("utf-8-sig")
    except (UnicodeDecodeError, EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path}: not UTF-8 text, plain or gzipped ({error})") from None
    if text.lstrip().startswith("[") and ".txt" not in path.suffixes:
        for number, value in enumerate(_parse(text, str(path)), 1):
            yield QuestionRow(f"{path} row {number}", known=value)
        return
    # Not splitlines: JSON strings may hold U+2028 and other characters that it takes for line ends.
    for number, line in enumerate(text.split("\n"), 1):
        where = f"{path} line {number}"
        if line.strip():
            yield (
                QuestionRow(where, known={"text": line.rstrip("\r")})
                if ".txt" in path.suffixes
                else QuestionRow(where, line)
            )


def _parse(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error}); give one object per line, or one list of objects") from None


def _question(row: object, index: int) -> Question:
    if not isinstance(row, dict):
        raise ValueError(f"holds a JSON {type(row).__name__}, not an object")
    for fields, read in _FORMATS.items():
        if all(row.get(name) is not None for name in fields):
            parts = read(row)
            break
    else:
        known = "; ".join(" and ".join(fields) for fields in _FORMATS)
        raise ValueError(f"has the fields {', '.join(map(repr, row)) or 'none'}; a question needs {known}")
    found = next((row[name] for name in ("question_id", "id", "task_id") if row.get(name) is not None), index)
    category = row.get("category")
    return Question(
        id=found if type(found) is int else str(found),
        category=parts.category if category is None else str(category),
        turns=parts.turns,
        reference=parts.reference,
        system=parts.system,
    )


@dataclass(frozen=True)
class _Parts:
    category: str
    turns: tuple[str, ...]
    reference: str | None = None
    system: str | None = None


def _turns(row: dict[str, Any]) -> _Parts:
    return _Parts("question", _texts(row["turns"], "turns"), _first_text(row.get("reference")))


def _plain(name: str) -> Callable[[dict[str, Any]], _Parts]:
    return lambda row: _Parts("text", _texts(row[name], name), _first_text(row.get("reference")))


def _humaneval(row: dict[str, Any]) -> _Parts:
    return _Parts("coding", (_text(row["prompt"], "prompt"),), _first_text(row.get("canonical_solution")))


def _gsm8k(row: dict[str, Any]) -> _Parts:
    return _Parts("math", (_text(row["question"], "question"),), _text(str(row["answer"]), "answer"))


def _alpaca(row: dict[str, Any]) -> _Parts:
    turn = _text(row["instruction"], "instruction")
    if row.get("input"):
        turn += "\n\n" + _text(row["input"], "input")
    return _Parts("instruction", (turn,), _first_text(row.get("output")))


def _chat(name: str) -> Callable[[dict[str, Any]], _Parts]:
    def read(row: dict[str, Any]) -> _Parts:
        messages = row[name]
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise ValueError(f"{name} must be a list of objects with role and content, or from and value")
        turns: list[str] = []
        system = reference = None
        for place, message in enumerate(messages):
            role = message.get("role", message.get("from"))
            content = message.get("content", message.get("value"))
            if role in _USER_ROLES:
                turns.append(_text(content, f"{name}[{place}]"))
            elif role == "system" and place == 0:
                system = _text(content, f"{name}[{place}]")
            elif role not in _MODEL_ROLES:
                raise ValueError(f"{name}[{place}] has role {role!r}; read are one leading system, user and assistant")
            elif len(turns) == 1 and reference is None:
                reference = _first_text(content)
        if not turns:
            raise ValueError(f"{name} holds no message of a user")
        return _Parts("conversation", tuple(turns), reference, system)

    return read


_FORMATS: dict[tuple[str, ...], Callable[[dict[str, Any]], _Parts]] = {
    ("turns",): _turns,
    ("conversations",): _chat("conversations"),
    ("messages",): _chat("messages"),
    ("task_id", "prompt"): _humaneval,
    ("instruction",): _alpaca,
    ("question", "answer"): _gsm8k,
    ("prompt",): _plain("prompt"),
    ("text",): _plain("text"),
}
"""How to read a row, by its required fields. The first entry whose fields the row has reads the row."""


def _texts(value: object, name: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        return (_text(value, name),)
    if not value:
        raise ValueError(f"{name} is empty")
    return tuple(_text(item, f"{name}[{place}]") for place, item in enumerate(value))


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name}={json.dumps(value)[:40]} must be text that is not empty")
    if not is_unicode(value):
        raise ValueError(f"{name} holds half a surrogate pair, which is no text")
    return value


def _first_text(value: object) -> str | None:
    """The first text of a reference. Question files write a text, a list of answers by turn, or a list of lists."""
    while isinstance(value, list) and value:
        value = value[0]
    return value if isinstance(value, str) and value else None
