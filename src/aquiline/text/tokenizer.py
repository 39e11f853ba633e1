"""The tokenizer that comes with a target."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from aquiline.errors import CheckpointError
from aquiline.models.files import is_gguf
from aquiline.text.gguf_tokenizer import gguf_tokenizer


def load_tokenizer(checkpoint: Path) -> Tokenizer | None:
    """The tokenizer.json of a target's directory, or the tokenizer in its GGUF file; None where there is none (token
    ids in, token ids out).

    Raises CheckpointError if it is broken or not supported."""
    if is_gguf(checkpoint):
        return gguf_tokenizer(checkpoint)
    path = checkpoint / "tokenizer.json"
    if not path.exists():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"{path}: not a readable tokenizer ({error}); save it again with save_pretrained"
        ) from None
    tokenizer.no_truncation()  # a file may keep truncation from its training; a prompt is never cut silently
    tokenizer.no_padding()
    return tokenizer
