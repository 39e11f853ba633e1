"""The number of green micro runs in a row, kept on disk: three of them open the full gates.

A streak belongs to a key: the commit, the configuration (the models and the micro gates with their limits) and the
device. A result counts once, even if it comes in several files.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aquiline.bench.results.result import Result
from aquiline.config import cache_directory
from aquiline.writing import write_whole

SCHEMA = "aquiline.gates/1"
RUNS_IN_A_ROW = 3


@dataclass(frozen=True)
class Key:
    """The commit, configuration and device that a streak belongs to."""

    commit: str
    configuration: str
    device: str

    @property
    def is_known(self) -> bool:
        """Whether the commit identifies the code that ran. It does not for an installed package, which has no commit,
        or for uncommitted changes."""
        return self.commit != "unknown" and not self.commit.endswith("-dirty")

    def __str__(self) -> str:
        return f"{self.commit} | {self.configuration} | {self.device}"


@dataclass(frozen=True)
class Streak:
    """Green micro runs in a row, and the results that were counted so far, red ones included."""

    green: int = 0
    seen: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recorded:
    """The streak after a run. why_not: why the run was not counted, None if it was."""

    green: int
    why_not: str | None = None


class GateState:
    """Streaks in one file, which several processes may share. Raises ValueError for a file of another kind."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._read()

    def streak(self, key: Key) -> Streak:
        """The streak of a key."""
        found = self._read().get(str(key), {})
        return Streak(found.get("green", 0), tuple(found.get("seen", ())))

    def record(self, key: Key, is_green: bool, results: list[Result]) -> Recorded:
        """Count a micro run; a red one ends the streak. A run is not counted if any of its results was counted before,
        or if its commit does not identify the code that ran."""
        if not key.is_known:
            return Recorded(0, f"commit {key.commit} does not say what ran; commit first, and measure from a checkout")
        hashes = [content_hash(result) for result in results]
        with self._locked():
            streaks, before = self._read(), self.streak(key)
            repeated = sum(found in before.seen for found in hashes)
            if repeated:
                why = f"{repeated} of its {len(hashes)} results were counted before; measure into a new directory"
                return Recorded(before.green, why)
            green = before.green + 1 if is_green else 0
            streaks[str(key)] = {"green": green, "seen": [*before.seen, *hashes]}
            self._write(streaks)
        return Recorded(green)

    def _read(self) -> dict[str, Any]:
        if not self.file.exists():
            return {}
        try:
            parsed = json.loads(self.file.read_text(encoding="utf-8"))
        except ValueError:
            parsed = None
        streaks = parsed.get("streaks") if isinstance(parsed, dict) and parsed.get("schema") == SCHEMA else None
        if not isinstance(streaks, dict) or not all(map(_is_streak, streaks.values())):
            raise ValueError(f"state={str(self.file)!r}: is no file of streaks; delete it to begin anew")
        return streaks

    def _write(self, streaks: dict[str, Any]) -> None:
        text = json.dumps({"schema": SCHEMA, "streaks": streaks}, indent=1) + "\n"
        write_whole(self.file, text, "The streaks are as before")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def content_hash(result: Result) -> str:
    """A hash that identifies a measurement, since two runs never have the same times. The date does not enter it."""
    text = json.dumps({name: value for name, value in result.items() if name != "date"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def default_state() -> Path:
    """The file that keeps streaks unless another one is named."""
    return cache_directory() / "gates.json"


def _is_streak(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    green, seen = value.get("green"), value.get("seen")
    return isinstance(green, int) and green >= 0 and isinstance(seen, list) and all(isinstance(s, str) for s in seen)
