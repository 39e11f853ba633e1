"""The output of a regeneration: one row per finished conversation, only ever appended to, and the settings beside it.

A run that was killed leaves whole rows and perhaps the beginning of another. The next run drops that beginning, reads
the ids of the whole rows, and refuses a file that was written under other settings.
"""

from __future__ import annotations

import fcntl
import json
import sys
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aquiline.checks import parse_json
from aquiline.writing import resume_lines, write_whole, writing


@dataclass
class Tally:
    """Sums over conversations: answers, their tokens (stop tokens included) and how they ended."""

    num_conversations: int = 0
    num_answers: int = 0
    num_answer_tokens: int = 0
    num_tokens: int = 0  # prompts and templates included
    finish_reasons: Counter[str] = field(default_factory=Counter)

    def add(self, row: dict[str, Any]) -> None:
        """Count one row of the output."""
        self.num_conversations += 1
        self.num_answers += len(row["finish_reasons"])
        self.num_answer_tokens += sum(row["loss_mask"])
        self.num_tokens += len(row["token_ids"])
        self.finish_reasons.update(row["finish_reasons"])

    @property
    def mean_answer_tokens(self) -> float:
        """Mean tokens of an answer; 0 without answers."""
        return self.num_answer_tokens / self.num_answers if self.num_answers else 0.0

    def as_dict(self) -> dict[str, object]:
        """The sums as JSON."""
        return vars(self) | {"mean_answer_tokens": round(self.mean_answer_tokens, 1)}


def check_settings(path: Path, settings: dict[str, Any], are_all: bool = False) -> None:
    """Compare settings with those that rows in `path` were written under; are_all: there may be no others. Raises
    ValueError naming the first that differs; a file without rows fits any."""
    meta = path.with_name(path.name + ".meta.json")
    if not path.exists() or path.stat().st_size == 0:
        return
    try:
        before = parse_json(meta.read_text(encoding="utf-8"))
        assert isinstance(before, dict)
    except (OSError, ValueError, AssertionError):
        raise ValueError(
            f"out={str(path)!r}: {meta.name} beside it, which says how it was written, is missing or broken; choose "
            "another --out"
        ) from None
    now: dict[str, Any] = json.loads(json.dumps(settings))  # tuples become lists, as in the file
    for name in now | (before if are_all else {}):
        if before.get(name) != now.get(name):
            raise ValueError(
                f"{name}={json.dumps(now.get(name))}: {path} was written with {json.dumps(before.get(name))}; take "
                "that again, or choose another --out"
            )


class AnswerFile:
    """Rows with ids in `path`, written under `settings`, which are stored in PATH.meta.json.

    ids: those of the rows in the file; total and by_temperature: sums over these rows. Use it in a with statement.
    Raises ValueError, and changes nothing, if another run writes the file, if the file was written under other
    settings, or if it holds anything else."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.meta = path, path.with_name(path.name + ".meta.json")
        self.settings = settings
        self.ids: set[int] = set()
        self.total = Tally()
        self.by_temperature: dict[float, Tally] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        try:
            self._take()
        except BaseException:
            self._file.close()
            raise

    def _take(self) -> None:
        """Lock the file, read what it holds, and make it ready for appending."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the lock ends with the process
        except BlockingIOError:
            raise ValueError(f"out={str(self.path)!r}: another run writes it; wait, or choose another --out") from None
        num_bytes = self.path.stat().st_size
        if num_bytes == 0:
            write_whole(self.meta, json.dumps(self.settings, indent=2) + "\n", "No answer is lost")
            return
        check_settings(self.path, self.settings, are_all=True)
        resume_lines(self.path, self._take_row)
        if self.path.stat().st_size < num_bytes:
            print(f"aquiline: {self.path}: the last row was cut and is dropped; it is written again", file=sys.stderr)

    def add(self, row: dict[str, Any]) -> None:
        """Append a row; it is in the file when this returns. Raises OSError if the disk is full."""
        with self._writing():
            self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
            self._file.flush()
        self._count(row)

    def _count(self, row: dict[str, Any]) -> None:
        self.ids.add(row["id"])
        self.total.add(row)
        self.by_temperature.setdefault(row["temperature"], Tally()).add(row)

    def _take_row(self, index: int, line: bytes) -> None:
        """Count a row of an earlier run. Raises ValueError for a line that is no such row."""
        try:
            row = parse_json(line)
            is_new = row["id"] not in self.ids
            self._count(row)
        except (ValueError, KeyError, TypeError):
            is_new = False
        if not is_new:
            raise ValueError(
                f"out={str(self.path)!r}: line {index + 1} is no row of this command, or the second of its id; choose "
                "another --out"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._writing():
            self._file.close()

    def _writing(self) -> AbstractContextManager[None]:
        return writing(self.path, "Its whole rows stay; with room on the disk the same command goes on after them")
