"""Answer files as EAGLE's own script reads them: its arithmetic, written anew here, gives the speeds that went in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.conftest import tiny_llm
from tests.disk import MESSAGE, full_after
from tokenizers import Tokenizer

from aquiline.bench.eval.answers import AnsweredText, EagleAnswers, TurnRun, answer_row
from aquiline.config import SamplingParams
from aquiline.metrics import Counters, mean
from aquiline.models.known_pairs import BUNDLED_TARGET
from aquiline.spec.registry import drafting_named
from aquiline.text.questions import Question

TWO_TURNS = Question(81, "writing", ("Write.", "Shorter."))
ONE_TURN = Question("HumanEval/0", "coding", ("def f():",))


def answered(text: str, num_tokens: int, num_steps: int, seconds: float) -> TurnRun:
    """A run that wrote so many tokens in so many steps."""
    written = AnsweredText(0.0, 64, 0, 0, [1], [7] * num_tokens, text, "stop")
    return TurnRun(written, "chain-3", 0, 0.0, 0.0, 1e3 * seconds, Counters(num_steps=num_steps))


def eagle_speed(path: Path) -> float:
    """What speed.py makes of a speculative run: the mean over questions of tokens per second, first choice only."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    choices = [row["choices"][0] for row in rows]
    return mean([sum(choice["new_tokens"]) / sum(choice["wall_time"]) for choice in choices])


def eagle_baseline_speed(path: Path, tokenizer: Tokenizer) -> float:
    """What it makes of a baseline: the same, with the tokens counted anew from the text, less BOS."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    choices = [row["choices"][0] for row in rows]
    counts = [sum(len(tokenizer.encode(text).ids) - 1 for text in choice["turns"]) for choice in choices]
    return mean([count / sum(choice["wall_time"]) for count, choice in zip(counts, choices, strict=True)])


def test_eagles_arithmetic_gives_the_speeds_that_went_in(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(BUNDLED_TARGET / "tokenizer.json"))
    texts = ["import os\nimport sys\n", "def f(x):\n    return x\n", "print(1)\n"]
    lengths = [len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]
    first, second, third = (
        answered(t, n, n - 1, s) for t, n, s in zip(texts, lengths, (0.5, 0.25, 0.125), strict=True)
    )
    path = tmp_path / "deep" / "answers.jsonl"
    answers = EagleAnswers(path, "toy-temperature-0.0")
    answers.add(TWO_TURNS, [first, second], [second, first])
    answers.add(ONE_TURN, [third])
    expected = ((lengths[0] + lengths[1]) / 0.75 + lengths[2] / 0.125) / 2
    assert eagle_speed(path) == pytest.approx(expected)
    assert eagle_baseline_speed(path, tokenizer) == pytest.approx(expected), "no stop tokens here, so both agree"


def test_a_row_has_eagles_fields_in_eagles_types() -> None:
    turns = [answered("a", 8, 3, 0.5), answered("b", 4, 2, 0.25)]
    row = json.loads(json.dumps(answer_row(TWO_TURNS, [turns], "toy")))
    assert row.pop("answer_id") and row.pop("tstamp") > 1.7e9
    choice = {"index": 0, "turns": ["a", "b"], "idxs": [3, 2], "new_tokens": [8, 4], "wall_time": [0.5, 0.25]}
    assert row == {"question_id": 81, "category": "writing", "model_id": "toy", "choices": [choice]}


def test_rows_are_on_disk_before_the_run_ends_and_an_older_file_goes(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text("from an older run\n")
    EagleAnswers(path, "toy").add(ONE_TURN, [answered("a", 1, 0, 0.1)])
    assert [json.loads(line)["question_id"] for line in path.read_text().splitlines()] == ["HumanEval/0"]


def test_every_turn_needs_its_answer(tmp_path: Path) -> None:
    answers = EagleAnswers(tmp_path / "answers.jsonl", "toy")
    with pytest.raises(AssertionError):
        answers.add(TWO_TURNS, [answered("a", 1, 0, 0.1)] * 2, [answered("a", 1, 0, 0.1)])


@pytest.mark.parametrize("drafter", ["none", "chain"])
def test_idxs_and_new_tokens_of_a_real_run_give_its_tau(drafter: str) -> None:
    output = (
        tiny_llm()
        .run([[5, 6, 7]], SamplingParams(max_tokens=20, ignore_eos=True), drafting=drafting_named(drafter))
        .outputs[0]
    )
    turn = answered(output.text, len(output.token_ids), output.metrics.num_steps, 1.0)
    (choice,) = json.loads(json.dumps(answer_row(ONE_TURN, [[turn]], "toy")))["choices"]
    assert (choice["new_tokens"][0] - 1) / choice["idxs"][0] == output.metrics.tau, (
        "the prompt's forward gave one token"
    )


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    told = rf"answers\.jsonl: {MESSAGE}\. Rows before it are whole"
    answers = EagleAnswers(tmp_path / "answers.jsonl", "toy")
    with full_after(100), pytest.raises(OSError, match=told):
        answers.add(ONE_TURN, [answered("a", 1, 0, 0.1)])
