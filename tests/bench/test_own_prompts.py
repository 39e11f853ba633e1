"""The project's own prompts: twelve for the demo, 120 held out, 72 learnt beside traffic; none twice, all shipped."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path

import aquiline
from aquiline.bench.data.datasets import Question, load_questions

PACKAGE = Path(aquiline.__file__).resolve().parent
DEMO = PACKAGE / "data" / "prompts" / "demo.jsonl"
HELD_OUT = PACKAGE / "data" / "prompts" / "held_out.jsonl"
REPLAY = PACKAGE / "data" / "prompts" / "replay.jsonl"
PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
CATEGORIES = (
    "writing", "roleplay", "reasoning", "maths", "code", "extraction",
    "science", "history", "summary", "translation", "reading", "small-talk",
)  # fmt: skip


def opening(question: Question) -> str:
    """The first turn without its case, punctuation and spacing, so that a trivial change makes no new prompt."""
    return " ".join(re.findall(r"\w+", question.turns[0].casefold()))


def test_the_demo_has_one_prompt_of_each_category() -> None:
    assert tuple(question.category for question in load_questions(DEMO)) == CATEGORIES


def test_ten_prompts_of_each_category_are_held_out() -> None:
    questions = load_questions(HELD_OUT)
    assert Counter(question.category for question in questions) == dict.fromkeys(CATEGORIES, 10)
    two_turns = Counter(question.category for question in questions if len(question.turns) == 2)
    assert sum(two_turns.values()) == len(two_turns) == 8, "second turns belong to eight different categories"
    assert {len(question.turns) for question in questions} == {1, 2}


def test_six_prompts_of_each_category_are_replayed() -> None:
    assert Counter(question.category for question in load_questions(REPLAY)) == dict.fromkeys(CATEGORIES, 6)


def test_no_prompt_and_no_id_occurs_twice_in_all_files() -> None:
    """So a draft is never evaluated on a prompt that it has trained on."""
    questions = load_questions(DEMO) + load_questions(HELD_OUT) + load_questions(REPLAY)
    for what in (opening, lambda question: question.id):
        assert [key for key, count in Counter(map(what, questions)).items() if count > 1] == []


def test_the_package_data_names_all_files() -> None:
    patterns = tomllib.loads(PYPROJECT.read_text())["tool"]["setuptools"]["package-data"]["aquiline"]
    shipped = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    assert {DEMO, HELD_OUT, REPLAY} <= shipped
