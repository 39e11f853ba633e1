"""Documents as token ids: from text, JSONL and .bin files to one flat stream with a held-out split.

Owns reading and what may go wrong in it; knows nothing of batches. A document is held out when the sha256 of its key
(path, and index within a file of many) is 0 mod 20, so the split is the same everywhere and no result influences it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from aquiline.text.tokenizer import load_tokenizer
from aquiline.types import Bool, Int32, Int64

TEXT_SUFFIXES = (".py", ".txt", ".md")
HELD_OUT_MODULUS = 20


@dataclass(frozen=True)
class Document:
    """One document; mask None counts every token."""

    key: str
    tokens: NDArray[np.integer]
    mask: Bool | None = None


@dataclass(frozen=True)
class Corpus:
    """Documents end to end: tokens int32 [n], starts int64 [documents + 1], mask bool [n] of tokens that count."""

    tokens: Int32
    starts: Int64
    mask: Bool

    @property
    def num_documents(self) -> int:
        """How many documents the stream holds."""
        return len(self.starts) - 1


@dataclass
class Rejects:
    """What was not used, by reason, with the first example of each."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, where: str) -> None:
        """Count one row or file that was not used."""
        self.counts[reason] += 1
        self.examples.setdefault(reason, where)

    def __str__(self) -> str:
        return "; ".join(f"{n} x {reason} (first: {self.examples[reason]})" for reason, n in self.counts.items())


@dataclass(frozen=True)
class TokenIds:
    """What reading needs of the target: its tokenizer (None if it has none), vocabulary and boundary ids.

    bos is put first where the tokenizer adds none; boundary starts a document in .bin files."""

    vocab_size: int
    boundary: int | None
    bos: int | None
    tokenizer: Tokenizer | None
    special: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Token ids of one document."""
        if self.tokenizer is None:
            raise ValueError("the target has no tokenizer: give token ids (.bin or JSONL with input_ids)")
        ids: list[int] = self.tokenizer.encode(text).ids
        return [self.bos, *ids] if self.bos is not None and ids[:1] != [self.bos] else ids


def token_ids(target: Path, vocab_size: int, bos: int | None, eos: tuple[int, ...]) -> TokenIds:
    """Read the target's tokenizer; bos and eos come from its config."""
    tokenizer = load_tokenizer(target)
    special = {i for i in (bos, *eos) if i is not None}
    if tokenizer is not None:
        special |= {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    boundary = bos if bos is not None else (eos[0] if eos else None)
    return TokenIds(vocab_size, boundary, bos, tokenizer, tuple(sorted(i for i in special if i < vocab_size)))


def read_documents(paths: Iterable[Path], ids: TokenIds, rejects: Rejects) -> Iterator[Document]:
    """Every usable document under the paths. Raises ValueError for a path that does not exist or has a wrong suffix."""
    for path in paths:
        if not path.exists():
            raise ValueError(f"data path {path} does not exist")
        if path.is_dir():
            files = sorted(p for p in path.rglob("*") if p.suffix in (*TEXT_SUFFIXES, ".jsonl", ".bin"))
            if not files:
                raise ValueError(f"{path} holds no .py, .txt, .md, .jsonl or .bin file")
            for file in files:
                yield from _read_file(file, file.relative_to(path).as_posix(), ids, rejects)
        elif path.suffix in (*TEXT_SUFFIXES, ".jsonl", ".bin"):
            yield from _read_file(path, path.name, ids, rejects)
        else:
            raise ValueError(f"{path}: suffix must be one of .py .txt .md .jsonl .bin")


def _read_file(path: Path, key: str, ids: TokenIds, rejects: Rejects) -> Iterator[Document]:
    reader = {".bin": _read_bin, ".jsonl": _read_jsonl}.get(path.suffix, _read_text)
    for document in reader(path, key, ids, rejects):
        tokens = document.tokens
        if len(tokens) < 3:
            rejects.add("fewer than 3 tokens", document.key)
        elif tokens.min() < 0 or tokens.max() >= ids.vocab_size:
            rejects.add(f"token id outside [0, {ids.vocab_size})", document.key)
        elif document.mask is not None and not document.mask[2:].any():
            rejects.add("no token counted by its loss mask", document.key)
        else:
            yield document


def _read_text(path: Path, key: str, ids: TokenIds, rejects: Rejects) -> Iterator[Document]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        rejects.add(f"unreadable ({type(error).__name__})", key)
        return
    yield Document(key, np.array(ids.encode(text), dtype=np.int32))


def _read_bin(path: Path, key: str, ids: TokenIds, rejects: Rejects) -> Iterator[Document]:
    if ids.boundary is None:
        raise ValueError(f"{path}: .bin documents split at the target's bos or eos id, and it names neither; use JSONL")
    if ids.vocab_size > 1 << 16:
        raise ValueError(f"{path}: .bin holds uint16 and the target has {ids.vocab_size} tokens; use JSONL input_ids")
    stream = np.fromfile(path, dtype=np.uint16)
    starts = np.unique(np.concatenate(([0], np.flatnonzero(stream == ids.boundary))))
    for index, tokens in enumerate(np.split(stream, starts[1:])):
        yield Document(f"{key}:{index}", tokens)


def _read_jsonl(path: Path, key: str, ids: TokenIds, rejects: Rejects) -> Iterator[Document]:
    with path.open("rb") as lines:
        for index, line in enumerate(lines):
            if not line.strip():
                continue
            try:
                yield _parse_row(line, f"{key}:{index}", ids)
            except (json.JSONDecodeError, UnicodeDecodeError):
                rejects.add("not JSON", f"{key}:{index}")
            except _BadRowError as error:
                rejects.add(str(error), f"{key}:{index}")


class _BadRowError(Exception):
    """Why one row cannot be used."""


def _parse_row(line: bytes, key: str, ids: TokenIds) -> Document:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise _BadRowError("not an object")
    if isinstance(row.get("text"), str):
        return Document(key, np.array(ids.encode(row["text"]), dtype=np.int32))
    tokens = row.get("input_ids")
    if not isinstance(tokens, list) or not all(type(t) is int and -1 < t < 1 << 31 for t in tokens):
        raise _BadRowError('neither "text" nor integer "input_ids"')
    mask = row.get("loss_mask")
    if mask is None:
        return Document(key, np.array(tokens, dtype=np.int32))
    if not isinstance(mask, list) or len(mask) != len(tokens) or not all(m in (0, 1) for m in mask):
        raise _BadRowError("loss_mask is not a list of 0 and 1 as long as input_ids")
    return Document(key, np.array(tokens, dtype=np.int32), np.array(mask, dtype=np.bool_))


def is_held_out(key: str) -> bool:
    """One document in twenty, by the hash of its key."""
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % HELD_OUT_MODULUS == 0


def build_corpus(documents: Iterable[Document]) -> Corpus:
    """Concatenate documents into one stream."""
    tokens, masks, lengths = [], [], [0]
    for document in documents:
        tokens.append(document.tokens.astype(np.int32))
        masks.append(np.ones(len(document.tokens), np.bool_) if document.mask is None else document.mask)
        lengths.append(len(document.tokens))
    if not tokens:
        return Corpus(np.zeros(0, np.int32), np.zeros(1, np.int64), np.zeros(0, np.bool_))
    return Corpus(np.concatenate(tokens), np.cumsum(lengths, dtype=np.int64), np.concatenate(masks))


@dataclass(frozen=True)
class Split:
    """Documents to train on, documents to judge by, and what was rejected."""

    train: Corpus
    held_out: Corpus
    rejects: Rejects


def load_split(data: Iterable[Path], held_out: Iterable[Path], ids: TokenIds) -> Split:
    """Read everything. Without held-out paths one document in twenty of the data is held out.

    Raises ValueError if either side is left without a document."""
    rejects, held_paths = Rejects(), tuple(held_out)
    sides: dict[bool, list[Document]] = {False: [], True: []}
    for document in read_documents(data, ids, rejects):
        sides[not held_paths and is_held_out(document.key)].append(document)
    sides[True] += read_documents(held_paths, ids, rejects)
    for side, name in ((False, "training"), (True, "held-out")):
        if not sides[side]:
            hint = "" if held_paths or not side else " (one in 20 is held out by its name: give --held-out PATH)"
            raise ValueError(f"no {name} document left{hint}. Rejected: {rejects or 'none'}")
    return Split(build_corpus(sides[False]), build_corpus(sides[True]), rejects)
