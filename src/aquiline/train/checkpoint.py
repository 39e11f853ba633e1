"""Checkpoints of a run: OUT/step-NNNNNNN/ with a draft that can be served and the state that training goes on from.

This module also owns which settings a resumed run must share with the run it continues, and which it may change. With
the same settings and data, a resumed run ends with the weights of the unbroken one, to the bit on one kind of CPU.

A checkpoint is written into a temporary folder, flushed to the disk, listed with sizes and hashes in `complete.json`,
and then put in place by one rename. So earlier checkpoints stay whole if a run is killed or the disk is full. A
checkpoint that was damaged later does not match its hashes: it is skipped with a warning, and the one before is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from aquiline.checks import parse_json
from aquiline.errors import CheckpointError
from aquiline.train.documents import Corpus
from aquiline.train.train_config import TrainConfig

logger = logging.getLogger(__name__)

STATE, MANIFEST = "training.pt", "complete.json"
DRAFT_FILES = ("model.safetensors", "config.json")
MEGABYTE = 1_000_000

COMPARED = (
    "batch_size", "accumulate", "context", "ttt_steps", "late_share", "loss", "loss_on", "replay", "decay", "optimizer",
    "warmup", "clip", "weight_decay", "seed", "ema", "eval_rows", "eval_tokens", "draft_dtype", "keep_fusion",
)  # fmt: skip
"""Fields of TrainConfig stored as they are. Every field stands in one of COMPARED, DERIVED, BUDGET and FREE."""
DERIVED = (
    "lr", "target", "data", "held_out", "draft_vocab_size", "intermediate_size", "num_heads", "num_kv_heads", "capture",
    "draft_window", "rope_scaling",
)  # fmt: skip
"""Fields for which a derived value is stored: the rate used, digests of weights and data, the draft's shape."""
CHANGEABLE = (
    "data", "held_out", "eval_rows", "eval_tokens", "lr", "batch_size", "accumulate", "context", "ttt_steps",
    "late_share", "loss", "loss_on", "replay", "decay", "warmup", "clip", "seed", "draft_dtype",
)  # fmt: skip
"""Fields that --may-differ can name: weights and optimizer state stay valid under another value."""
JUDGED_BY = ("held_out", "eval_rows", "eval_tokens", "ttt_steps", "draft_dtype")
"""Fields that change how drafts are judged: scores from before and after a change cannot be compared."""
BUDGET = ("steps", "tokens", "minutes", "epochs")
"""A changed budget is announced, not refused: the learning rate follows the new budget from the present step on."""
UNSTORED = {"replay": 1.0, "draft_dtype": "bfloat16", "keep_fusion": False}
"""Fields that older checkpoints lack, with the value that their runs had."""
FREE = (
    "out", "init", "norm_feedback", "resume", "may_differ", "log_every", "eval_every", "features", "keep",
    "save_every_minutes", "parallel", "attention", "log",
)  # fmt: skip
"""Fields that the weights do not depend on, except for rounding: `parallel` and `attention` change orders of sums."""


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
        if folders := self._folders():
            raise ValueError(
                f"out={self.out}: holds a run up to {folders[0].name}; continue it with --resume, name another folder, "
                "or delete this one"
            )

    def _folders(self, up_to: float = math.inf) -> list[Path]:
        """Step folders, the newest first."""
        named = ((folder.name.removeprefix("step-"), folder) for folder in self.out.glob("step-*") if folder.is_dir())
        numbered = {int(number): folder for number, folder in named if number.isdigit() and int(number) <= up_to}
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


def corpus_digest(corpus: Corpus) -> str:
    """128 bits of the hash of a corpus: tokens, document boundaries, mask, and rejected tokens if there are any. So a
    corpus without rejected tokens keeps the digest that older checkpoints store."""
    digest = hashlib.sha256()
    for array, kind in ((corpus.tokens, "<i4"), (corpus.starts, "<i8"), (corpus.mask, "?")):
        digest.update(array.astype(kind).tobytes())
    if corpus.rejected.any():
        digest.update(corpus.rejected.tobytes())
    return digest.hexdigest()[:32]


def settings_of(config: TrainConfig, derived: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that its checkpoints store; `derived` has the keys of DERIVED."""
    assert set(derived) == set(DERIVED), set(derived) ^ set(DERIVED)
    return {name: getattr(config, name) for name in (*COMPARED, *BUDGET)} | dict(derived)


def compare_settings(
    stored: Mapping[str, Any], now: Mapping[str, Any], may_differ: tuple[str, ...]
) -> tuple[list[str], bool]:
    """Compare a run's stored settings with those of the command that resumes it: what the user must be told, and
    whether the best score so far can no longer be compared.

    Raises ValueError naming every field that differs and is not in `may_differ`."""
    if unknown := sorted(set(may_differ) - set(CHANGEABLE)):
        raise ValueError(f"may_differ={','.join(unknown)}: what may differ is {', '.join(CHANGEABLE)}")
    before = UNSTORED | dict(stored)
    differing = [name for name in now if name not in before or before[name] != now[name]]
    told = {name: f"{name}: {before.get(name, 'not known')} before, {now[name]} now" for name in differing}
    if refused := [told[name] for name in differing if name not in BUDGET and name not in may_differ]:
        raise ValueError(
            f"--resume: the run had other settings ({'; '.join(refused)}); give the same, or start a new run from its "
            "weights with --init, or name what changes on purpose with --may-differ"
        )
    notices = [f"changed: {told[name]}" for name in differing if name not in BUDGET]
    if budgets := [told[name] for name in differing if name in BUDGET]:
        notices.append(f"budget changed ({'; '.join(budgets)}): the learning rate follows the new one from here on")
    return notices, any(name in JUDGED_BY for name in differing)
