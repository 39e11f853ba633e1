"""What one generation learns from and is judged by: the newest served requests and the replay, split.

The newest requests are held out, so that a draft is judged by traffic that came after what it was trained on. The next
generation trains on them. Loads no torch: the process waits with this module alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from aquiline.engine.learning.store import LearningStore, Place, Served
from aquiline.writing import writing

ROUND_TOKENS = 4096
"""Answered tokens from which on a new generation is trained."""
WINDOW_TOKENS = 65536
"""Answered tokens that a generation trains on: the newest ones."""
HELD_OUT = 1 / 5
"""Share of a generation's requests that judge it: the newest ones, and no more than MOST_TEXTS."""
LEAST_TEXTS, MOST_TEXTS = 12, 48
"""How many held-out requests judge a draft. With fewer than LEAST_TEXTS the learner waits for more traffic."""
KEPT = "The learner goes on from the last checkpoint when there is room; the server is not concerned"


def num_answered(requests: Sequence[Served]) -> int:
    """Tokens of answers in some requests."""
    return sum(len(each.tokens) - each.num_prompt for each in requests)


@dataclass(frozen=True)
class Lesson:
    """train, held_out: served requests, the oldest first. num_new: answered tokens that came after the last lesson;
    last: the place of the newest request."""

    train: list[Served]
    held_out: list[Served]
    num_new: int
    last: Place

    @property
    def is_enough(self) -> bool:
        """Whether a generation can be trained and judged."""
        return self.num_new >= ROUND_TOKENS and len(self.held_out) >= LEAST_TEXTS and bool(self.train)


def read_lesson(store: LearningStore, after: Place) -> Lesson:
    """The newest traffic of a store. after: the place up to which an earlier lesson has read."""
    placed = [(place, each) for place, each in store.placed() if len(each.tokens) - each.num_prompt > 1]
    newest = [each for _, each in reversed(placed)]
    sizes = accumulate(len(each.tokens) - each.num_prompt for each in newest)
    window = newest[: sum(size <= WINDOW_TOKENS for size in sizes)][::-1]
    num_held = min(MOST_TEXTS, round(HELD_OUT * len(window)))
    cut = len(window) - num_held
    num_new = num_answered([each for place, each in placed if place > after])
    return Lesson(window[:cut], window[cut:], num_new, placed[-1][0] if placed else after)


def write_rows(path: Path, requests: Sequence[Served]) -> None:
    """Write requests as rows that training reads, in which the answers count. Raises OSError."""
    with writing(path, KEPT), path.open("w", encoding="utf-8") as file:
        for each in requests:
            marks = np.zeros((2, len(each.tokens)), int)
            marks[0, each.num_prompt :] = 1
            marks[1, each.rejected] = 1
            mask, rejected = marks.tolist()
            file.write(json.dumps({"token_ids": each.tokens, "loss_mask": mask, "rejected": rejected}) + "\n")
