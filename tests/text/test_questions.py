"""Every question format from a tiny file of it, broken rows named by their line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aquiline.text.questions import Question, read_questions, read_rows

EAGLE = {"question_id": 81, "category": "writing", "turns": ["Write a post.", "Now shorter."], "reference": ["a", "b"]}


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(tmp_path: Path, *rows: object) -> list[Question]:
    return list(read_questions(write(tmp_path / "q.jsonl", *rows)))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (EAGLE, Question(81, "writing", ("Write a post.", "Now shorter."), "a")),
        ({"turns": ["Only one."], "reference": [["nested"]]}, Question(0, "question", ("Only one.",), "nested")),
        (
            {"id": "c1", "messages": [
                {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Bye"},
                {"role": "assistant", "content": "So long"}]},
            Question("c1", "conversation", ("Hi", "Bye"), "Hello", "Be brief."),
        ),
        (
            {"id": "c2", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
            Question("c2", "conversation", ("Hi",), "Hello"),
        ),
        (
            {"task_id": "HumanEval/0", "prompt": "def f(x):\n", "canonical_solution": "    return x\n", "test": "t"},
            Question("HumanEval/0", "coding", ("def f(x):\n",), "    return x\n"),
        ),
        (
            {"question": "How many?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"},
            Question(0, "math", ("How many?",), "2 + 2 = <<2+2=4>>4\n#### 4"),
        ),
        (
            {"instruction": "Translate.", "input": "Guten Tag", "output": "Good day"},
            Question(0, "instruction", ("Translate.\n\nGuten Tag",), "Good day"),
        ),
        ({"instruction": "Name a fish.", "input": "", "output": ""}, Question(0, "instruction", ("Name a fish.",))),
        ({"prompt": "Once upon"}, Question(0, "text", ("Once upon",))),
        ({"source": "a.py", "text": "import os"}, Question(0, "text", ("import os",))),
        ({"question_id": 5, "prompt": ["One", "Two"], "category": "stem"}, Question(5, "stem", ("One", "Two"))),
    ],
    ids=lambda value: value.category if isinstance(value, Question) else "",
)  # fmt: skip
def test_every_format_is_told_by_its_fields(row: dict[str, object], expected: Question, tmp_path: Path) -> None:
    assert read(tmp_path, row) == [expected]


def test_lists_gzip_and_text_files_hold_the_same_questions(tmp_path: Path) -> None:
    rows = [{"prompt": "One"}, {"prompt": "Zwei\u2028drei"}]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text("\ufeff" + lines.replace("\n", "\n\n"), encoding="utf-8")
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=2))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "d.txt").write_bytes("One\r\n\nZwei\u2028drei\n".encode())
    for name in ("a.jsonl", "b.json", "c.jsonl.gz", "d.txt"):
        assert [q.turns for q in read_questions(tmp_path / name)] == [("One",), ("Zwei\u2028drei",)], name


def test_a_text_file_may_look_like_json(tmp_path: Path) -> None:
    (tmp_path / "q.txt").write_text('[1, 2] continues with\n{"prompt": 1}\n')
    assert [q.turns[0] for q in read_questions(tmp_path / "q.txt")] == ["[1, 2] continues with", '{"prompt": 1}']


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("{broken", "not JSON"),
        ('{"prompt": ' + "[" * 5000 + "]" * 5000 + "}", "not JSON .*deeper than"),
        ('{"prompt": ' + "1" * 5000 + "}", "not JSON .*limit"),
        ("[1]", "JSON list, not an object"),
        ("7", "JSON int, not an object"),
        ({"turns": []}, "turns is empty"),
        ({"turns": ["a", ""]}, r"turns\[1\]=\"\" must be text that is not empty"),
        ({"turns": [3]}, r"turns\[0\]=3"),
        ({"prompt": "  \n"}, "prompt="),
        ('{"prompt": "\\ud800"}', "half a surrogate pair"),
        ({"prompt": None, "title": "x"}, "has the fields 'prompt', 'title'; a question needs turns; conversations"),
        ({"question": "no answer"}, "question and answer"),
        ({"messages": "hi"}, "must be a list of objects"),
        ({"messages": [{"role": "assistant", "content": "Hi"}]}, "no message of a user"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"messages\[0\]="),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]}, r"\[1\] has role 'tool'"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}, r"role 'system'"),
    ],
)  # fmt: skip
def test_a_broken_row_is_named_by_its_line(row: object, why: str, tmp_path: Path) -> None:
    bad = row if isinstance(row, str) else json.dumps(row)
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(EAGLE) + "\n\n" + bad + "\n")
    with pytest.raises(ValueError, match=why) as caught:
        list(read_questions(path))
    assert str(caught.value).startswith(f"{path} line 3: ") and "\n" not in str(caught.value)


def test_a_broken_row_of_a_list_is_named_by_its_place(tmp_path: Path) -> None:
    path = tmp_path / "q.json"
    path.write_text(json.dumps([EAGLE, {"turns": []}]))
    with pytest.raises(ValueError, match=r"q\.json row 2: turns is empty"):
        list(read_questions(path))


def test_rows_are_read_past_those_that_are_broken(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"prompt": "One", "source": "a"}\n{broken\n{"prompt": ""}\n{"prompt": "Four"}\n')
    first, *broken, last = read_rows(path)
    assert first.value == {"prompt": "One", "source": "a"}
    assert [row.question(7).turns for row in (first, last)] == [("One",), ("Four",)] and last.question(7).id == 7
    for row, number in zip(broken, (2, 3), strict=True):
        with pytest.raises(ValueError, match=rf"line {number}: "):
            row.question(0)


def test_files_without_questions_are_refused(tmp_path: Path) -> None:
    for name, data in (("a.jsonl", b""), ("b.jsonl", b"\n\n"), ("c.json", b"[]"), ("d.txt", b"\n")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match="holds no question"):
            list(read_questions(tmp_path / name))
    for name, data in (
        ("e.jsonl", b"\xff\xfe\x00"),
        ("f.jsonl.gz", b"\x1f\x8bnot gzip"),
        ("g", gzip.compress(b"x" * 99)[:-9]),
        ("h.jsonl.gz", gzip.compress(b"x" * 99)[:12] + b"\xff" * 40),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match="not UTF-8 text, plain or gzipped"):
            list(read_questions(tmp_path / name))


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)


@given(st.lists(st.lists(TEXT, min_size=1, max_size=3), min_size=1, max_size=4), st.booleans())
def test_whatever_text_turns_hold_comes_back(
    tmp_path_factory: pytest.TempPathFactory, conversations: list[list[str]], is_ascii: bool
) -> None:
    path = tmp_path_factory.mktemp("any") / "q.jsonl"
    rows = [json.dumps({"turns": turns}, ensure_ascii=is_ascii) for turns in conversations]
    path.write_bytes("\n".join(rows).encode())
    questions = list(read_questions(path))
    assert [list(q.turns) for q in questions] == conversations
    assert [q.id for q in questions] == list(range(len(conversations)))
