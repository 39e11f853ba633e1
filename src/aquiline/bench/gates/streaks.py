"""Streaks of green micro runs, kept on disk: three runs in a row open the full gates.

A streak belongs to the commit, the configuration (the models and the micro gates with their limits) and the device. A
result counts once, even if it comes in several files.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from pathlib import Path
from typing import Any

from aquiline.bench.gates.rules import SCHEMA
from aquiline.bench.results.integrity import schema_problems
from aquiline.bench.results.result import Result, is_dirty
from aquiline.config import cache_directory
from aquiline.writing import write_whole

RUNS_IN_A_ROW = 3
NO_STREAK: dict[str, Any] = {"green": 0, "seen": []}


class Streaks:
    """The streaks of one file; several processes may share it. Raises ValueError for a file of another kind."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file or cache_directory() / "gates.json"
        self._read()

    def green(self, key: str) -> int:
        """The number of green micro runs in a row."""
        return int(self._read().get(key, NO_STREAK)["green"])

    def record(self, key: str, is_green: bool, results: list[Result]) -> str:
        """Count a micro run, and say the streak; a red run ends it. A run is not counted if any of its results was
        counted before, or if its commit does not identify the code that ran."""
        hashes, commit = list(map(content_hash, results)), results[0]["commit"]
        if commit == "unknown" or is_dirty(results[0]):
            return _said(0, f"commit {commit} does not say what ran; commit first, and measure from a checkout")
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            streaks = self._read()
            before = streaks.get(key, NO_STREAK)
            if repeated := sum(found in before["seen"] for found in hashes):
                why = f"{repeated} of its {len(hashes)} results were counted before; measure into a new directory"
                return _said(before["green"], why)
            streaks[key] = {"green": before["green"] + 1 if is_green else 0, "seen": [*before["seen"], *hashes]}
            text = json.dumps({"schema": "aquiline.gates/1", "streaks": streaks}, indent=1) + "\n"
            write_whole(self.file, text, "The streaks are as before")
        return _said(streaks[key]["green"])

    def _read(self) -> dict[str, Any]:
        if not self.file.exists():
            return {}
        try:
            parsed = json.loads(self.file.read_text(encoding="utf-8"))
        except ValueError:
            parsed = None
        if schema_problems(parsed, SCHEMA["$defs"]["streaks"], "streaks"):
            raise ValueError(f"state={str(self.file)!r}: is no file of streaks; delete it to begin anew")
        return dict(parsed["streaks"])


def _said(green: int, why: str = "") -> str:
    """A streak in words. why: the reason why the run at hand was not counted."""
    return f"{green} of {RUNS_IN_A_ROW} green micro runs in a row{f' (this run is not counted: {why})' if why else ''}"


def content_hash(result: Result) -> str:
    """A hash that identifies a measurement, since two runs never have the same times. The date does not enter it."""
    text = json.dumps({name: value for name, value in result.items() if name != "date"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
