"""Checkpoints of a run: OUT/step-NNNNNNN/ with a draft that can be served and the state that training goes on from.

A checkpoint is written into a temporary folder, flushed to the disk, listed with sizes and hashes in `complete.json`,
and then put in place by one rename. So earlier checkpoints stay whole if a run is killed or the disk is full. A
checkpoint that was damaged later does not match its hashes: it is skipped with a warning, and the one before is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from aquiline.checks import parse_json
from aquiline.errors import CheckpointError

logger = logging.getLogger(__name__)

STATE, MANIFEST = "training.pt", "complete.json"
DRAFT_FILES = ("model.safetensors", "config.json")
MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read: its folder, and the state that training goes on from."""

    folder: Path
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints of the run in `out`; the newest `keep` of them are kept."""

    def __init__(self, out: Path, keep: int) -> None:
        self.out, self.keep = out, keep

    def save(self, step: int, write_draft: Callable[[Path], None], state: dict[str, Any]) -> Path:
        """Write the checkpoint of a step; write_draft(folder) writes the draft's own files. Returns the folder.

        Raises CheckpointError if the checkpoint cannot be written; earlier checkpoints are then unchanged."""
        place = self.out / f"step-{step:07d}"
        if place.exists():
            if damage(place) is None:
                return place
            shutil.rmtree(place)
        for stale in self.out.glob(".step-*.tmp"):  # of a run that was killed while it wrote
            shutil.rmtree(stale, ignore_errors=True)
        temporary = self.out / f".{place.name}.tmp"
        with self._whole_or_nothing(place, temporary):
            temporary.mkdir(parents=True)
            write_draft(temporary)
            with (temporary / STATE).open("wb") as file:
                torch.save(state, file)
            seal(temporary)
            temporary.rename(place)
            _flush(self.out)
        for old in self._folders(up_to=step)[self.keep :]:
            shutil.rmtree(old, ignore_errors=True)
        return place

    def publish(self, folder: Path) -> None:
        """Copy a checkpoint's draft into OUT itself. Raises CheckpointError if that fails; the draft in OUT is then
        unchanged."""
        temporary = self.out / ".best.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        with self._whole_or_nothing(self.out, temporary):
            temporary.mkdir()
            for name in DRAFT_FILES:
                shutil.copyfile(folder / name, temporary / name)
                _flush(temporary / name)
            for name in DRAFT_FILES:
                (temporary / name).replace(self.out / name)
            temporary.rmdir()
            _flush(self.out)

    def newest(self) -> Checkpoint:
        """The newest checkpoint that is whole; damaged ones are skipped with a warning. Raises CheckpointError if
        there is none."""
        skipped = []
        for folder in self._folders():
            why = damage(folder)
            if why is None:
                state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
                return Checkpoint(folder, state)
            logger.warning("%s is skipped: %s", folder, why)
            skipped.append(f"{folder.name}: {why}")
        found = "; ".join(skipped) or "it holds none"
        raise CheckpointError(f"--resume: {self.out} has no whole checkpoint ({found}); start without --resume")

    def refuse_to_overwrite(self) -> None:
        """Raises ValueError if OUT holds checkpoints: a new run would mix with the old one."""
        folders = self._folders()
        if folders:
            raise ValueError(
                f"out={self.out}: holds a run up to {folders[0].name}; continue it with --resume, name another folder, "
                "or delete this one"
            )

    def _folders(self, up_to: int | None = None) -> list[Path]:
        """Step folders, the newest first."""
        numbered = {}
        for folder in self.out.glob("step-*"):
            number = folder.name.removeprefix("step-")
            if number.isdigit() and folder.is_dir() and (up_to is None or int(number) <= up_to):
                numbered[int(number)] = folder
        return [numbered[number] for number in sorted(numbered, reverse=True)]

    @contextlib.contextmanager
    def _whole_or_nothing(self, place: Path, temporary: Path) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError, SafetensorError) as error:  # torch.save has its own for a short write
            free = shutil.disk_usage(self.out).free  # asked before the temporary folder is removed
            is_full = any(sign in str(error) for sign in ("No space left", "os error 28")) or free < MEGABYTE
            told = f"the disk is full, {free / MEGABYTE:.1f} MB are free" if is_full else str(error)
            shutil.rmtree(temporary, ignore_errors=True)
            before = next((f"{f.name} is whole" for f in self._folders()), "there is none before it")
            raise CheckpointError(
                f"{place}: the checkpoint cannot be written ({told}); {before}. Free disk space and go on with --resume"
            ) from error


def seal(folder: Path) -> None:
    """Flush every file of a folder to the disk and list it, with size and hash, in complete.json."""
    files = {}
    for file in sorted(folder.iterdir()):
        _flush(file)
        files[file.name] = {"bytes": file.stat().st_size, "sha256": _digest(file)}
    (folder / MANIFEST).write_text(json.dumps(files, indent=2) + "\n", encoding="utf-8")
    _flush(folder / MANIFEST)
    _flush(folder)


def damage(folder: Path) -> str | None:
    """The fault of a sealed folder; None if it is whole."""
    try:
        files = parse_json((folder / MANIFEST).read_text(encoding="utf-8"))
        listed = [(name, told["bytes"], told["sha256"]) for name, told in files.items()]
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return f"{MANIFEST} is missing or broken"
    if not listed or any(Path(name).name != name for name, _, _ in listed):
        return f"{MANIFEST} is missing or broken"
    for name, num_bytes, digest in listed:
        file = folder / name
        size = file.stat().st_size if file.is_file() else 0
        if size != num_bytes:
            return f"{name} has {size} of {num_bytes} bytes"
        if _digest(file) != digest:
            return f"{name} is not what was written"
    return None


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
