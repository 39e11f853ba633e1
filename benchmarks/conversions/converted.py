"""Converted checkpoints, made once and kept in the user's cache: a directory for each content and form."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from aquiline.backends.torch.decoder import Decoder
from aquiline.backends.torch.eagle import DraftHead
from aquiline.models.files import is_gguf

FORM = 2
"""A version, raised whenever the files written for the same checkpoint change."""
_WEIGHTS = ("*.safetensors", "*.bin", "*.json")


def converted(checkpoints: list[Path], form: str, write: Callable[[Path], None]) -> Path:
    """The directory that `write` filled for these checkpoints in this form, now or in an earlier run.

    A conversion that fails leaves nothing."""
    digest = hashlib.sha256(f"{FORM} {form}".encode())
    for checkpoint in checkpoints:
        for file in _files(checkpoint):
            with file.open("rb") as data:
                digest.update(file.name.encode() + hashlib.file_digest(data, "sha256").digest())
    return cached(f"{form}-{digest.hexdigest()[:24]}", write)


def _files(checkpoint: Path) -> list[Path]:
    """The files on which a conversion of the checkpoint depends."""
    if is_gguf(checkpoint):
        return [checkpoint]
    return sorted({file for pattern in _WEIGHTS for file in checkpoint.glob(pattern)})


def cached(name: str, write: Callable[[Path], None]) -> Path:
    """The directory of that name in the cache, filled by `write` if it is not there."""
    from huggingface_hub import cached_assets_path

    place = cached_assets_path("aquiline", namespace="peers", subfolder="converted") / name
    if not place.exists():
        part = Path(tempfile.mkdtemp(dir=place.parent, prefix=f"{name}."))
        try:
            write(part)
            try:
                part.replace(place)  # other processes see all of it or nothing
            except OSError:  # another process was faster
                if not place.exists():
                    raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return place


def shares_embedding(head: DraftHead, decoder: Decoder) -> bool:
    """Whether a draft's embedding is the target's, rounded to what the draft is stored in."""
    return bool(head.embed.equal(decoder.embed.to(head.embed.dtype)))
