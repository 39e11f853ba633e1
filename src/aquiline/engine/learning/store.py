"""The folder of a draft that learns from what it serves. Server and trainer read and write it with this module.

    DIR/pair.json             the pair that the folder belongs to: settings of PairConfig, and what identifies it
    DIR/served/NNNNNN.jsonl   answered requests, a line each (`Served`); the last segment is the one that grows
    DIR/generations/NNNN/     a draft checkpoint with learning.json (`Generation`); appears whole, by a rename
    DIR/state.json            which generation serves (`ServingState`); replaced whole
    DIR/lock                  held by the process that serves
    DIR/replay, unfinished, learner.json  the trainer's own (train/learner)

Generation 0 is the draft as it was shipped, and has no folder. Files hold token ids of users' texts: folders have the
mode 0700, files 0600.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from aquiline.checks import parse_json
from aquiline.writing import check_place, write_whole

NUM_SEGMENTS = 16
"""Segments that the bound in bytes is divided by: so much of it is dropped at once."""

LEARNING = "learning.json"


class Served(NamedTuple):
    """An answered request. tokens: prompt and output, of which the first num_prompt are the prompt; rejected: indices
    of tokens at which the draft model's token was another one; temperature: that it was drawn at."""

    tokens: list[int]
    num_prompt: int
    rejected: list[int]
    temperature: float = 0.0


Place = tuple[int, int]
"""Where a served request stands: the number of its segment, and its line from 0."""


@dataclass(frozen=True)
class Generation:
    """What learning.json says of a generation's draft. parent: the generation that its training began from; tokens:
    served tokens that it was trained on; tau_before, tau_after: simulated tau of the parent and of it on the held-out
    tail of what was served, and interval, of the ratio of the two; old_before, old_after: those of the shipped draft
    and of it on the sample of what that was shipped for, greedily or sampled, where it keeps less; accepted: whether
    the judge let it serve; share: that of the trained weights in it, the rest are its parent's."""

    generation: int
    parent: int
    tokens: int
    tau_before: float
    tau_after: float
    interval: tuple[float, float]
    old_before: float
    old_after: float
    accepted: bool
    share: float = 1.0


@dataclass(frozen=True)
class ServingState:
    """serving: the generation whose draft serves; rolled_back: generations that must not serve again."""

    serving: int = 0
    rolled_back: tuple[int, ...] = ()


class LearningStore:
    """A folder DIR, which is made if it does not exist. Raises OSError naming a place that cannot be written."""

    def __init__(self, folder: Path) -> None:
        check_place(folder, is_folder=True)
        self.folder, self.served_folder, self.generations_folder = folder, folder / "served", folder / "generations"
        for each in (folder, self.served_folder, self.generations_folder):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
            each.chmod(0o700)

    def lock(self) -> IO[str]:
        """Hold the folder for a process that serves, until the returned file is closed. Raises OSError if another
        process holds it."""
        file = open(self.folder / "lock", "w", encoding="utf-8", opener=private)  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise OSError(f"learn={str(self.folder)!r}: another process serves with it; name another folder") from None
        return file

    @property
    def pair(self) -> dict[str, Any]:
        """What `claim` wrote; empty before."""
        return _read(self.folder / "pair.json") or {}

    def claim(self, pair: dict[str, Any], identity: dict[str, str]) -> None:
        """Make the folder one of this pair. pair: the settings that name it; identity: what its checkpoints are. Raises
        ValueError if it belongs to another pair."""
        known = self.pair
        if known and known["identity"] != identity:
            raise ValueError(
                f"learn={str(self.folder)!r}: belongs to another pair, of target {known['target']!r} and draft "
                f"{known['draft']!r}; name another folder"
            )
        told = parse_json(json.dumps(pair | {"identity": identity}))
        if known != told:  # an engine that starts again on a full disk has nothing to write
            self._write("pair.json", told)

    def segments(self) -> list[Path]:
        """Segments of served requests, the oldest first."""
        return sorted(self.served_folder.glob("*.jsonl"))

    def served(self) -> Iterator[Served]:
        """The requests that are kept, the oldest first. Lines that a full disk or a kill has cut are left out, and a
        segment that is dropped meanwhile ends where it is read."""
        return (served for _, served in self.placed())

    def placed(self, after: Place = (0, 0)) -> Iterator[tuple[Place, Served]]:
        """The same with the place of each, and only those behind a place."""
        for segment in self.segments():
            number = int(segment.stem)
            if number < after[0]:
                continue
            with suppress(FileNotFoundError), segment.open("rb") as lines:
                for index, line in enumerate(lines):
                    with suppress(ValueError, TypeError):
                        if (number, index) > after:
                            yield (number, index), Served(**parse_json(line))

    def generations(self) -> list[Generation]:
        """The generations that are there, by number."""
        found = [_read(path / LEARNING) for path in sorted(self.generations_folder.glob("[0-9]*"))]
        return [Generation(**told | {"interval": tuple(told["interval"])}) for told in found if told is not None]

    def checkpoint(self, generation: int) -> Path:
        """Where a generation's draft is."""
        return self.generations_folder / f"{generation:04d}"

    def has_weights(self, generation: int) -> bool:
        """Whether a generation's draft is still there: a refused one has none, and an old one loses it."""
        return (self.checkpoint(generation) / "model.safetensors").is_file()

    def state(self) -> ServingState:
        """Which generation serves."""
        told = _read(self.folder / "state.json") or {}
        return ServingState(told.get("serving", 0), tuple(told.get("rolled_back", ())))

    def serving(self) -> Generation | None:
        """What is told of the generation that serves; None of the draft as it was shipped."""
        number = self.state().serving
        return next((found for found in self.generations() if found.generation == number), None)

    def write_state(self, state: ServingState) -> None:
        """Say which generation serves from now on; a server that runs follows. Raises OSError."""
        self._write("state.json", asdict(state))

    def _write(self, name: str, told: dict[str, Any]) -> None:
        write_whole(self.folder / name, json.dumps(told) + "\n", "What was there is unchanged")
        (self.folder / name).chmod(0o600)


def write_learning(checkpoint: Path, told: Generation) -> None:
    """Write learning.json into a checkpoint that is not in its place yet. Raises OSError."""
    write_whole(checkpoint / LEARNING, json.dumps(asdict(told)) + "\n", "The generation is not there yet")


class ServedWriter:
    """Appends served requests to the segments of a store, which take max_bytes at most: then the oldest one goes."""

    def __init__(self, store: LearningStore, max_bytes: int) -> None:
        self.store, self.max_bytes = store, max_bytes

    def add(self, served: Served) -> None:
        """Append a request. Raises OSError, for example on a full disk."""
        line = json.dumps(served._asdict(), separators=(",", ":")).encode() + b"\n"
        if len(line) > self.max_bytes // NUM_SEGMENTS:
            return
        segments = self.store.segments()
        self._drop(segments, len(line))
        last = segments[-1] if segments else None
        if last is None or last.stat().st_size + len(line) > self.max_bytes // NUM_SEGMENTS:
            number = 1 if last is None else int(last.stem) + 1
            last = self.store.served_folder / f"{number:06d}.jsonl"
        with open(last, "ab", opener=private) as file:
            file.write(line)

    def _drop(self, segments: list[Path], num_bytes: int) -> None:
        """Remove the oldest segments until so many bytes more fit."""
        sizes = [segment.stat().st_size for segment in segments]
        while segments and sum(sizes) + num_bytes > self.max_bytes:
            segments.pop(0).unlink()
            sizes.pop(0)


def private(path: str, flags: int) -> int:
    """Open a file that its owner alone may read."""
    return os.open(path, flags, 0o600)


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON object; None where there is none."""
    try:
        told = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    return told if isinstance(told, dict) else None
