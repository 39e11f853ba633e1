"""The questions of a benchmark: a named data set, a file or one of the hub, all of it or a sample."""

from __future__ import annotations

import random
from pathlib import Path

from aquiline.bench.data.sources import locate
from aquiline.text.questions import Question, read_questions


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
