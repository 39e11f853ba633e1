"""Rows of a fixed length out of documents: a plan per epoch, batches by step number, with the target's views of them.

Everything follows from (seed, epoch, step), so a resumed run sees the batches that the unbroken run would have seen. A
document longer than a row is cut into equal pieces, the same in every epoch, so that the target's views of a piece can
be cached. Pieces are packed by best fit. To the model a piece is a document: its positions start at 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from aquiline.train.documents import Corpus, Document, build_corpus
from aquiline.train.losses import TargetBatch
from aquiline.train.teacher import Views
from aquiline.train.ttt import TokenBatch
from aquiline.types import Int32


@dataclass(frozen=True)
class RowPiece:
    """Tokens [start, start + length) of the corpus stream."""

    start: int
    length: int


def cut(corpus: Corpus, context: int, shortest: int) -> list[RowPiece]:
    """Pieces of at most `context` tokens, none across documents, none under `shortest` or without a token that
    counts. Pieces of a document differ by one token at most. No row predicts a piece's first two tokens."""
    pieces, counted = [], np.concatenate(([0], np.cumsum(corpus.mask)))
    for start, end in zip(corpus.starts[:-1].tolist(), corpus.starts[1:].tolist(), strict=True):
        num = -(-(end - start) // context)
        edges = [start + (end - start) * i // num for i in range(num + 1)]
        pieces += [RowPiece(a, b - a) for a, b in itertools.pairwise(edges)]
    return [p for p in pieces if p.length >= shortest and counted[p.start + p.length] > counted[p.start + 2]]


def pack(pieces: list[RowPiece], context: int) -> list[list[RowPiece]]:
    """Rows of pieces that fit `context`: longest first, each into the row whose gap it fills best."""
    rows: list[list[RowPiece]] = []
    by_gap: list[list[int]] = [[] for _ in range(context + 1)]
    gaps_in_use = np.zeros(context + 1, np.bool_)
    for piece in sorted(pieces, key=lambda p: -p.length):
        fitting = np.flatnonzero(gaps_in_use[piece.length :])
        if len(fitting):
            gap = int(fitting[0]) + piece.length
            row = by_gap[gap].pop()
            gaps_in_use[gap] = bool(by_gap[gap])
            rows[row].append(piece)
        else:
            gap, row = context, len(rows)
            rows.append([piece])
        by_gap[gap - piece.length].append(row)
        gaps_in_use[gap - piece.length] = gap > piece.length
    return rows


def documents_of(corpus: Corpus, rows: list[list[RowPiece]]) -> list[Int32]:
    """The token ids of the pieces in some rows, in order."""
    return [corpus.tokens[p.start : p.start + p.length] for row in rows for p in row]


def gather(corpus: Corpus, rows: list[list[RowPiece]], context: int, device: torch.device | str) -> TokenBatch:
    """The batch of the given rows. Positions that no piece fills are padding, with document -1."""
    tokens, positions = np.zeros((2, len(rows), context), np.int64)
    document = np.full((len(rows), context), -1, np.int64)
    mask, rejected = np.zeros((2, len(rows), context), np.bool_)
    for b, row in enumerate(rows):
        at = 0
        for d, piece in enumerate(row):
            here, there = slice(at, at + piece.length), slice(piece.start, piece.start + piece.length)
            tokens[b, here], mask[b, here] = corpus.tokens[there], corpus.mask[there]
            rejected[b, here] = corpus.rejected[there]
            positions[b, here], document[b, here] = np.arange(piece.length), d
            at += piece.length
    arrays = (tokens, document, positions, mask, rejected)
    return TokenBatch(*(torch.from_numpy(x).to(device) for x in arrays))


class Batches:
    """Rows of step number `step` of an endless run over the corpus, shuffled and packed anew in every epoch."""

    def __init__(self, corpus: Corpus, context: int, batch_size: int, num_steps: int, seed: int) -> None:
        self.corpus, self.context, self.batch_size, self.seed = corpus, context, batch_size, seed
        shortest = num_steps + 3
        self.pieces = cut(corpus, context, shortest)
        if not self.pieces:
            needed = f"ttt_steps + 3 = {shortest} tokens and one that counts after its second"
            raise ValueError(f"no training document has {needed}")
        self.epoch, self.first_step = -1, 0
        self.rows: list[list[RowPiece]] = []
        self._plan(0)
        self.steps_in_first_epoch = self.num_batches

    @property
    def num_batches(self) -> int:
        """Batches of the current epoch; the last one is filled up from the epoch's start."""
        return -(-len(self.rows) // self.batch_size)

    def _plan(self, epoch: int) -> None:
        rng = np.random.default_rng((self.seed, epoch))
        shuffled = [self.pieces[i] for i in rng.permutation(len(self.pieces))]
        rows = pack(shuffled, self.context)
        self.rows, self.epoch = [rows[i] for i in rng.permutation(len(rows))], epoch

    def at(self, step: int) -> list[list[RowPiece]]:
        """Rows of a step; steps may be asked for in any order, ascending is cheap."""
        if step < self.first_step:
            self.first_step = 0
            self._plan(0)
        while step >= self.first_step + self.num_batches:
            self.first_step += self.num_batches
            self._plan(self.epoch + 1)
        begin = (step - self.first_step) * self.batch_size
        return [self.rows[i % len(self.rows)] for i in range(begin, begin + self.batch_size)]


class Batch(NamedTuple):
    """Packed rows of tokens, and what the target computed over them."""

    tokens: TokenBatch
    target: TargetBatch


class Assembler:
    """Makes batches: looks up the target's views of documents and spreads them over the packed rows.

    scale [C * H]: multiplies the features (teacher.py, feature_scale). vocab int64 [Vd]: the target ids of the draft
    vocabulary. head [V, H]: the target's output matrix."""

    def __init__(self, views: Views, scale: Tensor, vocab: Tensor, head: Tensor, device: str) -> None:
        self.views, self.scale, self.device = views, scale.to(device), device
        self.whole_head = head
        self.head = head[vocab.to(head.device)].to(device)
        self.is_inside = torch.zeros(head.shape[0], dtype=torch.bool)
        self.is_inside[vocab.cpu()] = True

    def packed(self, corpus: Corpus, rows: list[list[RowPiece]], context: int) -> Batch:
        """A batch of rows that are packed with pieces of a corpus."""
        batch = gather(corpus, rows, context, self.device)
        at = (batch.document.flatten() >= 0).cpu().nonzero().squeeze(1)  # pieces fill rows in order, from the left
        views = self.views.of(documents_of(corpus, rows))

        def spread(parts: Sequence[Tensor]) -> Tensor:
            values = torch.cat(list(parts))
            return values.new_zeros(batch.tokens.numel(), *values.shape[1:]).index_copy_(0, at, values).to(self.device)

        features, hidden, lse, best = map(spread, zip(*views, strict=True))
        scaled = features.float().mul_(self.scale).view(*batch.tokens.shape, -1)
        in_vocab = self.is_inside.to(self.device)[best.long()].view_as(batch.tokens)
        return Batch(batch, TargetBatch(scaled, hidden, lse, self.head, in_vocab))

    def single(self, documents: Sequence[Int32], first_counted: Sequence[int], width: int) -> Batch:
        """A batch with one document in each row of `width` positions. first_counted: the index of each document's first
        token that counts."""
        pairs = zip(documents, first_counted, strict=True)
        corpus = build_corpus(Document("", tokens, np.arange(len(tokens)) >= first) for tokens, first in pairs)
        rows = [[RowPiece(start, stop - start)] for start, stop in itertools.pairwise(corpus.starts.tolist())]
        return self.packed(corpus, rows, width)
