"""Which tokens a text has, and which a target chooses behind each of them: what a draft's vocabulary has to cover."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aquiline.config import Environment
from aquiline.engine.encode import encode_prompt
from aquiline.engine.model import LoadedModels, Loading, load_models
from aquiline.engine.score import Scorer
from aquiline.text.tokenizer import special_ids
from aquiline.types import Int64

PIECE = 512
"""Tokens of a text that a target reads at once, each piece from position 0."""
MOST_CHOICES = 16384
"""Positions of a text at most at which a target chooses."""


@dataclass(frozen=True, eq=False)
class TokenCounts:
    """How often each token of the target's vocabulary stands in a text, and is the target's choice; int64 [V] both.

    special: tokens that a draft's vocabulary must have."""

    text: Int64
    choices: Int64
    special: tuple[int, ...]

    def coverage(self, ids: Int64) -> dict[str, float]:
        """The shares of the text's tokens and of the choices that a vocabulary of these target ids names."""
        found = {"text": self.text, "choices": self.choices}
        return {name: float(counts[ids].sum() / max(1, counts.sum())) for name, counts in found.items()}

    @property
    def weights(self) -> Int64:
        """By what tokens are ranked: how often each is chosen; how often it is in the text breaks ties."""
        ties: Int64 = self.choices * (int(self.text.sum()) + 1) + self.text
        return ties


def read_text(file: Path) -> str:
    """A text file whole. Raises ValueError for an empty file and for one that is not UTF-8."""
    try:
        text = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"text={str(file)!r}: is not UTF-8 ({error}); name a text file") from None
    if not text.strip():
        raise ValueError(f"text={str(file)!r}: is empty; name a file with some pages of text")
    return text


def count_tokens(target: str | Path, text: str) -> TokenCounts:
    """Counts over a text with a target that is loaded for it. Raises as load_models; ValueError without a tokenizer."""
    return counts_of(load_models(target, None, Loading(), Environment.read()), text)


def counts_of(models: LoadedModels, text: str) -> TokenCounts:
    """The same with loaded models; the choices are those of the first MOST_CHOICES positions."""
    ids, size = np.array(encode_prompt(models, text), np.int32), models.vocab_size
    scorer = Scorer(models, PIECE)
    chosen = []
    for start in range(0, min(len(ids), MOST_CHOICES), PIECE):
        chosen.append(scorer([ids[start : start + PIECE]]).best.copy())
    scorer.close()
    config = models.target_config
    special = special_ids(models.tokenizer, config.bos_token_id, config.eos_token_ids, size)
    counted = [np.bincount(each, minlength=size) for each in (ids, np.concatenate(chosen))]
    return TokenCounts(counted[0], counted[1], special)
