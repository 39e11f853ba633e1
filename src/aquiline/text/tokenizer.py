"""The tokenizer that comes with a target."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from aquiline.errors import CheckpointError
from aquiline.models.files import is_gguf
from aquiline.text.gguf_tokenizer import gguf_tokenizer


def special_ids(tokenizer: Tokenizer | None, bos: int | None, eos: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """Special tokens of a model, ascending: those that begin and end a text, and the tokenizer's."""
    special = {i for i in (bos, *eos) if i is not None}
    if tokenizer is not None:
        special |= {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return tuple(sorted(i for i in special if i < vocab_size))


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


class Measure(NamedTuple):
    """A bound on the number of tokens of a text. longest: the greatest number of characters of a token, 0 if unknown.
    If tokens consist of bytes, it counts bytes, and the bytes in `dropped` become no token."""

    longest: int
    dropped: bytes | None = None


_LOSSLESS = ("Prepend", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "ByteLevel", "Metaspace", "Digits")
_MAX_COMPOSED = 4
"""The greatest number of characters that a Unicode normal form composes into one, such as an alpha with three marks."""


def least_tokens(tokenizer: Tokenizer, text: str) -> int:
    """The least number of tokens of a text, from its length alone, so that a text that is much too long is refused
    before it is encoded. 0 if there is no bound: a tokenizer that drops characters, or has one token for a run of
    unknown characters, may make few tokens of any text."""
    longest, dropped = _measure(tokenizer)
    if not longest:
        return 0
    size = len(text) if dropped is None else len(text.encode("utf-8", "surrogatepass").translate(None, dropped))
    return -(-size // longest)


@lru_cache(maxsize=4)
def _measure(tokenizer: Tokenizer) -> Measure:
    said = json.loads(tokenizer.to_str())
    model, steps = said["model"], [*_steps(said["normalizer"]), *_steps(said["pre_tokenizer"])]
    takes_space = any(token["lstrip"] or token["rstrip"] for token in said["added_tokens"])
    if model["type"] != "BPE" or takes_space or not all(map(_keeps, steps)):
        return Measure(0)
    vocab = tokenizer.get_vocab()
    longest = max(map(len, vocab)) * (_MAX_COMPOSED if any(step["type"].startswith("NF") for step in steps) else 1)
    has_unknown = model["unk_token"] is not None and not model["fuse_unk"]  # a token for each unknown character
    if any(step["type"] == "ByteLevel" for step in steps):
        missing = [byte for byte, letter in enumerate(_letters()) if letter not in vocab]
        return Measure(longest, b"" if has_unknown else bytes(missing))
    has_bytes = model["byte_fallback"] and all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    return Measure(longest if has_bytes or has_unknown else 0)


def _letters() -> list[str]:
    """The characters by which byte-level vocabularies spell the bytes: printable Latin-1 is itself, the rest follows
    from U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def _steps(said: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A normaliser or pre-tokenizer as its steps, none of which is a sequence."""
    if said is None or said["type"] != "Sequence":
        return [] if said is None else [said]
    parts = said["normalizers"] if "normalizers" in said else said["pretokenizers"]
    return [step for part in parts for step in _steps(part)]


def _keeps(step: dict[str, Any]) -> bool:
    """Whether a step makes texts no shorter, normal forms apart."""
    if step["type"] == "Replace":
        return "String" in step["pattern"] and len(step["content"]) >= len(step["pattern"]["String"])
    if step["type"] == "Split":
        return bool(step["behavior"] != "Removed")
    return step["type"] in _LOSSLESS
