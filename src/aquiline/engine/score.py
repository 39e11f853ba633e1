"""Run a target over given text: the residual stream and the features at every position, many documents per forward.

Training takes its features from here, so they are bit for bit the vectors that serving computes. Draws no token and
keeps nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from aquiline.backends.base import Scored, Sizes
from aquiline.engine.model import LoadedModels
from aquiline.types import Int32

PAGE_SIZE = 64
MAX_DOCUMENTS = 256
"""The greatest number of documents in a call. Each may leave most of its last page unused."""


class Scorer:
    """Runs whole documents through loaded models, each in a slot of its own from position 0.

    A call takes at most `max_tokens` tokens and MAX_DOCUMENTS documents."""

    def __init__(self, models: LoadedModels, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        per_slot = -(-max_tokens // PAGE_SIZE)
        self.backend = models.pair.open(Sizes(MAX_DOCUMENTS, per_slot + MAX_DOCUMENTS, PAGE_SIZE, per_slot, max_tokens))

    def __call__(self, documents: Sequence[Int32]) -> Scored:
        """Score documents of at least one token each."""
        lengths = [len(tokens) for tokens in documents]
        assert len(lengths) <= MAX_DOCUMENTS and sum(lengths) <= self.max_tokens and min(lengths) > 0, lengths
        return self.backend.score(documents)

    def close(self) -> None:
        """Give the storage back."""
        self.backend.close()
