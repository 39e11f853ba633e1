"""Which tokens a draft can name: chosen by frequency, for a new head or out of an earlier one's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aquiline.types import Int64

DEFAULT_SIZE = 32000
"""Tokens of a draft vocabulary at most, if the settings do not say."""


@dataclass(frozen=True)
class DraftVocabulary:
    """The tokens that get a row of the draft's head: target ids [Vd], strictly ascending, and the share of the counts
    that they cover."""

    ids: Int64
    coverage: float


def choose_vocabulary(counts: Int64, special: tuple[int, ...], size: int | None) -> DraftVocabulary:
    """Every special token, then the most frequent of the rest, ties to the lowest id. Source: FR-Spec, arXiv
    2502.14856.

    Raises ValueError if `size` cannot hold the special tokens or exceeds the target's vocabulary."""
    size = min(len(counts), DEFAULT_SIZE) if size is None else size
    if not len(special) < size <= len(counts):
        raise ValueError(
            f"draft_vocab_size={size}: must exceed the {len(special)} special tokens and not {len(counts)}, the "
            "target's vocabulary"
        )
    ranked = counts.astype(np.int64).copy()
    ranked[list(special)] = np.iinfo(np.int64).max
    ids = np.sort(np.argsort(-ranked, kind="stable")[:size])
    return DraftVocabulary(ids, float(counts[ids].sum() / max(1, counts.sum())))
