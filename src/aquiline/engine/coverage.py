"""Which tokens a text has, and which a target chooses behind each of them: what a draft's vocabulary has to cover."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from aquiline.config import PairConfig
from aquiline.engine.encode import encode_prompt
from aquiline.engine.model import LoadedModels, ResolvedPair
from aquiline.engine.score import Scorer
from aquiline.spec.drafting import NoDraft
from aquiline.text.tokenizer import special_ids
from aquiline.types import Int32, Int64

PIECE = 512
"""Tokens of a text that a target reads at once, each piece from position 0."""
HELD_OUT = 5
"""One piece in this many is held out, where a vocabulary is chosen on the others."""


@dataclass(frozen=True, eq=False)
class TextChoices:
    """The tokens int32 [n] of a text, and what the target chooses behind each of them, int32 [n].

    special: tokens that a draft's vocabulary must have."""

    ids: Int32
    choices: Int32
    vocab_size: int
    special: tuple[int, ...]

    def coverage(self, vocabulary: Int64) -> dict[str, float]:
        """The shares of the text's tokens and of the choices that a vocabulary of these target ids names."""
        return {
            "text": float(np.isin(self.ids, vocabulary).mean()),
            "choices": float(np.isin(self.choices, vocabulary).mean()),
        }

    @property
    def weights(self) -> Int64:
        """By what tokens are ranked, int64 [V]: how often each is chosen; how often it is in the text breaks ties."""
        chosen, seen = (np.bincount(each, minlength=self.vocab_size) for each in (self.choices, self.ids))
        ranked: Int64 = chosen * (len(self.ids) + 1) + seen
        return ranked

    def split(self) -> tuple[TextChoices, TextChoices]:
        """The pieces that a vocabulary is chosen on, and those held out; both are all of a text with too few pieces."""
        is_held = np.arange(len(self.ids)) // PIECE % HELD_OUT == HELD_OUT - 1
        if not is_held.any():
            return self, self
        first, held = (replace(self, ids=self.ids[own], choices=self.choices[own]) for own in (~is_held, is_held))
        return first, held


def read_text(file: Path) -> str:
    """A text file whole. Raises ValueError for an empty file and for one that is not UTF-8."""
    try:
        text = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"text={str(file)!r}: is not UTF-8 ({error}); name a text file") from None
    if not text.strip():
        raise ValueError(f"text={str(file)!r}: is empty; name a file with some pages of text")
    return text


def text_choices(pair: PairConfig, text: str) -> TextChoices:
    """A text read by a pair's target, which is loaded for it. Raises as ResolvedPair does; ValueError without a
    tokenizer."""
    return choices_of(ResolvedPair.of(pair, NoDraft()).load(), text)


def choices_of(models: LoadedModels, text: str) -> TextChoices:
    """The same with loaded models."""
    ids, size, config = np.array(encode_prompt(models, text), np.int32), models.vocab_size, models.target_config
    scorer = Scorer(models, PIECE)
    found = [scorer([ids[start : start + PIECE]]).best.copy() for start in range(0, len(ids), PIECE)]
    scorer.close()
    special = special_ids(models.tokenizer, config.bos_token_id, config.eos_token_ids, size)
    return TextChoices(ids, np.concatenate(found), size, special)
