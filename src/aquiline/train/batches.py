"""Batches as the loss takes them: packed tokens and the target's views of them, on the training device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from aquiline.train.documents import Corpus
from aquiline.train.features import Views
from aquiline.train.head_loss import TargetRows
from aquiline.train.packing import RowPiece, gather
from aquiline.train.ttt import TargetBatch, TokenBatch
from aquiline.types import Int32


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
        documents = [corpus.tokens[p.start : p.start + p.length] for row in rows for p in row]
        return self._beside(gather(corpus, rows, context, self.device), documents)

    def single(self, documents: Sequence[Int32], first_counted: Sequence[int], width: int) -> Batch:
        """A batch with one document in each row of `width` positions. first_counted: the index of each document's first
        token that counts."""
        starts = torch.tensor([0, *(len(tokens) for tokens in documents)]).cumsum(0).numpy()
        tokens = torch.cat([torch.from_numpy(tokens) for tokens in documents])
        mask = torch.cat([torch.arange(len(t)) >= n for t, n in zip(documents, first_counted, strict=True)])
        corpus = Corpus(tokens.numpy(), starts, mask.numpy(), np.zeros(len(tokens), np.bool_))
        rows = [[RowPiece(int(a), int(b - a))] for a, b in itertools.pairwise(starts)]
        return self._beside(gather(corpus, rows, width, self.device), documents)

    def _beside(self, tokens: TokenBatch, documents: Sequence[Int32]) -> Batch:
        B, T = tokens.tokens.shape
        views = self.views.of(documents)
        at = (tokens.document.flatten() >= 0).cpu().nonzero().squeeze(1)  # pieces fill rows in order, from the left

        def spread(name: str) -> Tensor:
            values = torch.cat([getattr(view, name) for view in views])
            return values.new_zeros(B * T, *values.shape[1:]).index_copy_(0, at, values).to(self.device)

        features = spread("features").float().mul_(self.scale).view(B, T, -1)
        best = spread("best").view(B, T)
        rows = TargetRows(spread("hidden"), spread("lse"), self.head)
        return Batch(tokens, TargetBatch(features, rows, self.is_inside.to(self.device)[best.long()]))
