"""What reading data yields and needs: documents of token ids, alone or end to end in one stream, the target's
tokenizer, a count of unused rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from aquiline.text.chat_template import ChatTemplate
from aquiline.text.tokenizer import load_tokenizer
from aquiline.types import Bool, Int32, Int64


@dataclass(frozen=True)
class Document:
    """One document: token ids [n] and a mask bool [n] of those that count; None counts every token.

    rejected bool [n]: tokens that a draft missed when it served; None where that is not known. `key` names where it
    came from. Documents of one conversation share their key."""

    key: str
    tokens: NDArray[np.integer]
    mask: Bool | None = None
    rejected: Bool | None = None


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


@dataclass
class Rejects:
    """Rows and files that were not used: a count for each reason, and the first example of each."""

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
    """What reading needs of the target: its tokenizer (None if it has none), vocabulary, boundary ids, chat template.

    bos: put first where the tokenizer adds none. boundary: the id that begins a document in .bin files."""

    vocab_size: int
    boundary: int | None
    bos: int | None
    tokenizer: Tokenizer | None
    special: tuple[int, ...]
    template: ChatTemplate | None = None

    def encode(self, text: str) -> list[int]:
        """Token ids of one document."""
        if self.tokenizer is None:
            raise ValueError("the target has no tokenizer: give token ids (.bin or JSONL with input_ids)")
        ids: list[int] = self.tokenizer.encode(text).ids
        return [self.bos, *ids] if self.bos is not None and ids[:1] != [self.bos] else ids


def token_ids(target: Path, vocab_size: int, bos: int | None, eos: tuple[int, ...]) -> TokenIds:
    """Read the target's tokenizer and chat template; bos and eos come from its config.

    Raises CheckpointError if either is broken."""
    tokenizer = load_tokenizer(target)
    special = {i for i in (bos, *eos) if i is not None}
    if tokenizer is not None:
        special |= {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    boundary = bos if bos is not None else (eos[0] if eos else None)
    template = ChatTemplate.load(target, tokenizer)
    return TokenIds(vocab_size, boundary, bos, tokenizer, tuple(sorted(i for i in special if i < vocab_size)), template)
