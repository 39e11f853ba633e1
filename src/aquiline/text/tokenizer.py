"""The tokenizer that comes with a target."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from aquiline.errors import CheckpointError


def load_tokenizer(directory: Path) -> Tokenizer | None:
    """The target's tokenizer.json; None where there is none (token ids in, token ids out).

    Raises CheckpointError if the file is broken."""
    path = directory / "tokenizer.json"
    if not path.exists():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"{path}: not a readable tokenizer ({error}); save it again with save_pretrained"
        ) from None
    tokenizer.no_truncation()  # a setting of somebody's training run; a prompt is never cut in silence
    tokenizer.no_padding()
    return tokenizer
