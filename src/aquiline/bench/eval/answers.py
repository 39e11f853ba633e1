"""Answers as EAGLE's evaluation writes them: one JSON row per question, which its own speed.py can read.

*Source*: SafeAILab/EAGLE@12c417d, eagle/evaluation/gen_ea_answer_llama3chat.py, and @2320d52, speed.py.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from aquiline.text.questions import Question
from aquiline.writing import writing

KEPT = "Rows before it are whole"


@dataclass(frozen=True)
class TurnAnswer:
    """The model's answer to one turn. text: without the stop token; num_tokens: with it; num_steps: decode steps;
    seconds: the wall time of the whole answer, its prompt included, as in EAGLE's `wall_time`."""

    text: str
    num_tokens: int
    num_steps: int
    seconds: float


def answer_row(question: Question, choices: Sequence[Sequence[TurnAnswer]], model_id: str) -> dict[str, object]:
    """One row of an answer file. A choice is one sampled conversation: its answers turn by turn.

    `idxs` is the index of a turn's last target forward, counted from the prompt's, which is 0; so it is the number of
    decode steps. `category` stands in Spec-Bench's rows, not in EAGLE's. Raises ValueError unless every choice answers
    every turn."""
    for index, turns in enumerate(choices):
        if len(turns) != len(question.turns):
            raise ValueError(
                f"choices[{index}]: {len(turns)} answers to question {question.id!r}, which has {len(question.turns)} "
                "turns; answer each of them"
            )
    return {
        "question_id": question.id,
        "category": question.category,
        "answer_id": uuid.uuid4().hex,
        "model_id": model_id,
        "choices": [
            {
                "index": index,
                "turns": [turn.text for turn in turns],
                "idxs": [turn.num_steps for turn in turns],
                "new_tokens": [turn.num_tokens for turn in turns],
                "wall_time": [turn.seconds for turn in turns],
            }
            for index, turns in enumerate(choices)
        ],
        "tstamp": time.time(),
    }


class EagleAnswers:
    """A new answer file. A row is written as soon as it is added, so that a run cut short keeps its rows.

    Use it in a with statement. Replaces an older file of that path."""

    def __init__(self, path: Path, model_id: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.model_id = path, model_id
        self._file = path.open("w", encoding="utf-8")

    def add(self, question: Question, *choices: Sequence[TurnAnswer]) -> None:
        """Write one question's row; see `answer_row`."""
        with writing(self.path, KEPT):
            self._file.write(json.dumps(answer_row(question, choices, self.model_id)) + "\n")
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with writing(self.path, KEPT):
            self._file.close()
