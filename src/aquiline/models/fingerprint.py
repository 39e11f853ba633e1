"""What a checkpoint is, told by its bytes: two folders with the same fingerprint write the same text."""

from __future__ import annotations

import hashlib
from pathlib import Path

_PATTERNS = ("*.safetensors", "*.bin", "*.gguf", "*.json", "*.jinja")
_BLOCK_BYTES = 1 << 16
_NUM_BLOCKS = 64


def fingerprint(checkpoint: Path) -> str:
    """A hash, in 32 hex digits, of a checkpoint folder or file: of its weights, configuration, tokenizer and template.

    Files over 4 MiB count with their size and 64 blocks spread evenly over them, so that large models take no time;
    training changes nearly every weight, and therefore such a block."""
    files = [checkpoint] if checkpoint.is_file() else sorted({f for p in _PATTERNS for f in checkpoint.glob(p)})
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{'' if checkpoint.is_file() else file.name} {file.stat().st_size}\n".encode())
        digest.update(_sample(file))
    return digest.hexdigest()[:32]


def _sample(file: Path) -> bytes:
    size = file.stat().st_size
    if size <= _NUM_BLOCKS * _BLOCK_BYTES:
        return file.read_bytes()
    blocks = []
    with file.open("rb") as data:
        for number in range(_NUM_BLOCKS):
            data.seek((size - _BLOCK_BYTES) * number // (_NUM_BLOCKS - 1))
            blocks.append(data.read(_BLOCK_BYTES))
    return b"".join(blocks)
