"""Documents end to end: one flat stream of token ids to train on, and one to judge by.

Owns the split; readers.py reads files, packing.py makes batches. A document is held out if the sha256 of its key (its
path, and its index in a file of many) is 0 mod 20. So the split is the same everywhere, and no result influences it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aquiline.train.documents import Document, Rejects, TokenIds, token_ids
from aquiline.train.readers import read_documents
from aquiline.types import Bool, Int32, Int64

__all__ = ["Corpus", "Document", "Rejects", "Split", "TokenIds", "load_split", "read_documents", "token_ids"]

HELD_OUT_MODULUS = 20


@dataclass(frozen=True)
class Corpus:
    """Documents end to end: tokens int32 [n], starts int64 [documents + 1], mask bool [n] of tokens that count,
    rejected bool [n] of tokens that a draft missed when it served."""

    tokens: Int32
    starts: Int64
    mask: Bool
    rejected: Bool

    @property
    def num_documents(self) -> int:
        """How many documents the stream holds."""
        return len(self.starts) - 1

    def num_longer(self, context: int) -> int:
        """How many documents have more than `context` tokens, and are cut to train on."""
        return int((np.diff(self.starts) > context).sum())


def is_held_out(key: str) -> bool:
    """One document in twenty, by the hash of its key."""
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % HELD_OUT_MODULUS == 0


def build_corpus(documents: Iterable[Document]) -> Corpus:
    """Concatenate documents into one stream."""
    none = np.zeros(0, np.bool_)
    tokens, masks, rejected, lengths = [np.zeros(0, np.int32)], [none], [none], [0]
    for document in documents:
        num = len(document.tokens)
        tokens.append(document.tokens.astype(np.int32))
        masks.append(np.ones(num, np.bool_) if document.mask is None else document.mask)
        rejected.append(np.zeros(num, np.bool_) if document.rejected is None else document.rejected)
        lengths.append(num)
    starts = np.cumsum(lengths, dtype=np.int64)
    return Corpus(np.concatenate(tokens), starts, np.concatenate(masks), np.concatenate(rejected))


@dataclass(frozen=True)
class Split:
    """Documents to train on, documents to judge by, and what was rejected."""

    train: Corpus
    held_out: Corpus
    rejects: Rejects


def load_split(data: Iterable[Path], held_out: Iterable[Path], ids: TokenIds, loss_on: str = "answers") -> Split:
    """Read everything. Without held-out paths one document in twenty of the data is held out.

    loss_on: "answers" counts the tokens that the model wrote, by loss masks and chat templates; "all" counts every
    token. Raises ValueError if either side has no document."""
    rejects, held_paths = Rejects(), tuple(held_out)
    sides: dict[bool, list[Document]] = {False: [], True: []}
    for document in read_documents(data, ids, rejects, loss_on):
        sides[not held_paths and is_held_out(document.key)].append(document)
    sides[True] += read_documents(held_paths, ids, rejects, loss_on)
    for side, name in ((False, "training"), (True, "held-out")):
        if not sides[side]:
            hint = "" if held_paths or not side else " (one in 20 is held out by its name: give --held-out PATH)"
            raise ValueError(f"no {name} document left{hint}. Rejected: {rejects or 'none'}")
    return Split(build_corpus(sides[False]), build_corpus(sides[True]), rejects)
