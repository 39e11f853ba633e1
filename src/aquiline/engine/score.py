"""What a target says of given text: its residual stream and features at every position, many documents to a forward.

Training takes its features from here, so that they are the vectors serving computes, to the bit. Owns the keys of the
documents in flight; samples nothing and keeps nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from aquiline.engine.model import LoadedModels
from aquiline.types import Float32, Int32, Rows

PAGE_SIZE = 64
MAX_DOCUMENTS = 256
"""Documents of one call: each may leave most of a page unused."""


class Scored(NamedTuple):
    """Positions of all documents one after the other: hidden [n, H], the residual stream before the final norm, and
    features [n, C * H]. Both are buffers that the next call overwrites."""

    hidden: Float32
    features: Float32


class Scorer:
    """Runs whole documents through loaded models, each in a slot of its own from position 0.

    A call takes at most `max_tokens` tokens (no more than the models were loaded for) and MAX_DOCUMENTS documents."""

    def __init__(self, models: LoadedModels, max_tokens: int) -> None:
        assert max_tokens <= models.max_rows, (max_tokens, models.max_rows)
        self.models, self.max_tokens = models, max_tokens
        pages_per_slot = -(-max_tokens // PAGE_SIZE)
        self.kv = models.new_target_kv(pages_per_slot + MAX_DOCUMENTS, PAGE_SIZE)
        self.rows = Rows(max_tokens, 1, np.zeros((MAX_DOCUMENTS, pages_per_slot), np.int32))

    def __call__(self, documents: Sequence[Int32]) -> Scored:
        """Score documents of at least one token each."""
        lengths = [len(tokens) for tokens in documents]
        num = sum(lengths)
        assert len(lengths) <= MAX_DOCUMENTS and num <= self.max_tokens and min(lengths) > 0, lengths
        rows, page = self.rows, 0
        rows.num = num
        for slot, length in enumerate(lengths):
            used = -(-length // PAGE_SIZE)
            rows.page_table[slot, :used] = np.arange(page, page + used)
            page += used
        positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
        rows.tokens[:num] = np.concatenate(documents)
        rows.positions[:num] = rows.write[:num] = positions
        rows.slots[:num] = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        rows.context_len[:num] = positions + 1
        target = self.models.target
        target.forward(rows, self.kv)
        return Scored(target.hidden[:num], target.features[:num])
