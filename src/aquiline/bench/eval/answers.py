"""Answers of an evaluation with their times, the number that one states as its result, and answers as EAGLE's
evaluation writes them: one JSON row per question, which its own speed.py can read.

*Source*: SafeAILab/EAGLE@12c417d, eagle/evaluation/gen_ea_answer_llama3chat.py, and @2320d52, speed.py.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path

from aquiline.metrics import Counters, repeated_share
from aquiline.text.questions import Question
from aquiline.writing import writing

_DIGITS = r"(?>\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<!\.)\.\d+)"
# A minus counts as a sign only where no operand precedes it: 10-5 holds 10 and 5.
_NUMBER = rf"(?P<sign>(?<![\w)\].])[-−])?(?:[$€£](?P<minus>[-−])?)?(?P<value>{_DIGITS})(?P<over>/[1-9]\d*)?"
_OPENING = r"[\s*_`$€£(\[{\"']*"
_MARKERS = (
    # The data set's own. "#### 1. First step" is a heading, not an answer.
    re.compile(rf"####{_OPENING}{_NUMBER}(?![.):][*_]*[ \t]+\S)"),
    re.compile(rf"\\boxed\{{{_OPENING}(?:\\text\{{)?{_NUMBER}"),
    re.compile(rf"\banswer\b(?:\s+is\b[*_]*\s*[:=]?|[*_]*\s*[:=]){_OPENING}{_NUMBER}", re.IGNORECASE),
)
_ANY = re.compile(_NUMBER)
_LATEX = ((r"\$", "$"), ("{,}", ","), (r"\,", ""), (r"\!", ""))


@dataclass(frozen=True)
class AnsweredText:
    """The answer to one turn, the same at every setting. question: its place among the questions."""

    temperature: float
    length: int
    question: int
    turn: int
    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str

    @cached_property
    def repeated_share(self) -> float:
        """The share of 8-grams that stood earlier in the text."""
        return repeated_share(self.token_ids)


@dataclass(frozen=True)
class TurnRun:
    """One setting writing one text once, by the wall clock: prefill_ms to its first token, decode_ms from there on,
    total_ms to its end. Of texts that were written together, prefill_ms and decode_ms are equal shares of the time to
    the first token of any of them, and of the time from there on."""

    text: AnsweredText
    setting: str
    repeat: int
    prefill_ms: float
    decode_ms: float
    total_ms: float
    counters: Counters


@dataclass(frozen=True)
class Unfit:
    """A turn that was not run because prompt and length do not fit; the turns after it were not run either."""

    question: int
    turn: int
    length: int
    temperature: float
    reason: str

    def as_dict(self) -> dict[str, object]:
        """The fields that do not need the questions."""
        return {name: value for name, value in vars(self).items() if name != "question"}


def answer_row(question: Question, choices: Sequence[Sequence[TurnRun]], model_id: str) -> dict[str, object]:
    """One row of an answer file. A choice is one sampled conversation: its runs turn by turn.

    `idxs` is the index of a turn's last target forward, counted from the prompt's, which is 0; so it is the number of
    decode steps. `new_tokens` counts the stop token, which `turns` leave out. `wall_time` includes the prompt.
    `category` stands in Spec-Bench's rows, not in EAGLE's."""
    return {
        "question_id": question.id,
        "category": question.category,
        "answer_id": uuid.uuid4().hex,
        "model_id": model_id,
        "choices": [
            {
                "index": index,
                "turns": [run.text.text for run in runs],
                "idxs": [run.counters.num_steps for run in runs],
                "new_tokens": [len(run.text.token_ids) for run in runs],
                "wall_time": [run.total_ms / 1e3 for run in runs],
            }
            for index, runs in enumerate(choices)
        ],
        "tstamp": time.time(),
    }


class EagleAnswers:
    """A new answer file, in place of an older one. A row is written as soon as it is added, so that a run cut short
    keeps its rows."""

    def __init__(self, path: Path, model_id: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("", encoding="utf-8")
        self.path, self.model_id = path, model_id

    def add(self, question: Question, *choices: Sequence[TurnRun]) -> None:
        """Write one question's row; see `answer_row`."""
        assert all(len(runs) == len(question.turns) for runs in choices), (question, choices)
        row = json.dumps(answer_row(question, choices, self.model_id)) + "\n"
        with writing(self.path, "Rows before it are whole"), self.path.open("a", encoding="utf-8") as file:
            file.write(row)


def final_number(answer: str) -> Fraction | None:
    """The number an answer states as its result, None if it holds no number.

    In this order: after the first ####, in the last \\boxed{}, right after the last "answer is" or "answer:", the last
    number of the text. Thousands separators, currency signs and LaTeX around digits do not count. The value is exact,
    so that 18, 18.00 and $18 are one number.
    *Source*: openai/grade-school-math@3101c7d, dataset.py (the first #### counts); the other three are for models that
    were not shown that format."""
    for written, plain in _LATEX:
        answer = answer.replace(written, plain)
    marked, boxed, said = (list(marker.finditer(answer)) for marker in _MARKERS)
    matches = marked[:1] or boxed[-1:] or said[-1:] or list(_ANY.finditer(answer))[-1:]
    return _value(matches[0]) if matches else None


def _value(match: re.Match[str]) -> Fraction:
    value = Fraction(match["value"].replace(",", ""))
    if match["over"]:
        value /= int(match["over"][1:])
    return -value if match["sign"] or match["minus"] else value
