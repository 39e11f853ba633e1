"""The questions of a benchmark: a named data set, a file or one of the hub, all of it or a sample."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from aquiline.bench.data.sources import locate
from aquiline.settings import setting
from aquiline.text.questions import Question, read_questions

DATA = "Questions"
"""The heading under which settings are listed."""


@dataclass(frozen=True)
class Sample:
    """Questions as a user names them: those of a data set, or `count` of them."""

    dataset: str | None = setting(
        None, "mt_bench, gsm8k, humaneval, alpaca, spec_bench, a JSONL, JSON or .txt file, or "
        "hf://datasets/OWNER/NAME/FILE. Default: the bundled held-out prompts.", DATA,
    )  # fmt: skip
    count: int | None = setting(None, "Exactly so many questions, the first. Default: all.", DATA)
    sample_seed: int | None = setting(None, "With --count: a sample by this seed.", DATA)

    def __post_init__(self) -> None:
        if self.sample_seed is not None and self.count is None:
            raise ValueError(f"sample_seed={self.sample_seed}: samples --count questions; give --count")

    def questions(self, default: Path) -> list[Question]:
        """The questions, of `default` where no data set is named. Raises ValueError as load_questions does."""
        return load_questions(self.dataset or default, self.count, self.sample_seed)


def load_questions(source: str | Path, count: int | None = None, seed: int | None = None) -> list[Question]:
    """The questions of mt_bench, gsm8k, humaneval, alpaca, spec_bench, a file, or hf://datasets/OWNER/NAME/FILE.

    Without a count all of them; with one exactly so many: the first, or with a seed a sample, in the file's order.
    Raises ValueError for a count there is not, a broken row (naming its line) and a file that cannot be had."""
    if count is not None and count < 1:
        raise ValueError(f"count={count}: must be at least 1; leave it out for every question")
    questions = list(read_questions(locate(source)))
    if count is None:
        return questions
    if count > len(questions):
        raise ValueError(f"count={count}: {source} holds {len(questions)} questions; ask for at most that many")
    if seed is None:
        return questions[:count]
    return [questions[i] for i in sorted(random.Random(seed).sample(range(len(questions)), count))]
