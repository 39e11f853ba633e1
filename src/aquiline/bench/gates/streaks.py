"""Streaks of green micro runs, kept on disk: three runs in a row open the full gates.

A streak belongs to a key: the commit, the configuration (the models and the micro gates with their limits) and the
device. A result counts once, even if it comes in several files.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from pathlib import Path
from typing import Any

from aquiline.bench.gates.rules import COUNT, object_of
from aquiline.bench.results.integrity import schema_problems
from aquiline.bench.results.result import Result
from aquiline.config import cache_directory
from aquiline.writing import write_whole

KIND = "aquiline.gates/1"
STREAK = object_of({"green": COUNT, "seen": {"type": "array", "items": {"type": "string"}}})
"""green: the green runs in a row; seen: hashes of the results that were counted so far, red ones included."""
STREAKS = object_of({"schema": {"const": KIND}, "streaks": {"type": "object", "additionalProperties": STREAK}})
NO_STREAK: dict[str, Any] = {"green": 0, "seen": []}


class Streaks:
    """The streaks of one file by their keys; several processes may share the file.

    Raises ValueError for a file of another kind. Without a file it is one in the user's cache."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file or cache_directory() / "gates.json"
        self._read()

    def green(self, key: str) -> int:
        """The number of green micro runs in a row."""
        return int(self._read().get(key, NO_STREAK)["green"])

    def record(self, key: str, is_green: bool, results: list[Result]) -> tuple[int, str]:
        """Count a micro run; a red one ends the streak. A run is not counted if any of its results was counted before.

        Returns the green runs in a row, and why this run was not counted; empty if it was."""
        hashes = [content_hash(result) for result in results]
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            streaks = self._read()
            before = streaks.get(key, NO_STREAK)
            repeated = sum(found in before["seen"] for found in hashes)
            if repeated:
                why = f"{repeated} of its {len(hashes)} results were counted before; measure into a new directory"
                return before["green"], why
            green = before["green"] + 1 if is_green else 0
            streaks[key] = {"green": green, "seen": [*before["seen"], *hashes]}
            text = json.dumps({"schema": KIND, "streaks": streaks}, indent=1) + "\n"
            write_whole(self.file, text, "The streaks are as before")
        return green, ""

    def _read(self) -> dict[str, Any]:
        if not self.file.exists():
            return {}
        try:
            parsed = json.loads(self.file.read_text(encoding="utf-8"))
        except ValueError:
            parsed = None
        if schema_problems(parsed, STREAKS, "streaks"):
            raise ValueError(f"state={str(self.file)!r}: is no file of streaks; delete it to begin anew")
        return dict(parsed["streaks"])


def content_hash(result: Result) -> str:
    """A hash that identifies a measurement, since two runs never have the same times. The date does not enter it."""
    text = json.dumps({name: value for name, value in result.items() if name != "date"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
