"""Counts of questions are honoured or refused, and a seed draws a sample."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aquiline.bench.data.datasets import load_questions


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_count_is_honoured_or_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", *({"id": i, "prompt": f"p{i}"} for i in range(5)))
    assert [q.id for q in load_questions(path)] == [0, 1, 2, 3, 4]
    assert [q.id for q in load_questions(path, 3)] == [0, 1, 2]
    with pytest.raises(ValueError, match=r"count=6: .* holds 5 questions"):
        load_questions(path, 6)
    with pytest.raises(ValueError, match="count=0"):
        load_questions(path, 0)


def test_a_seed_draws_a_sample_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", *({"id": i, "prompt": f"p{i}"} for i in range(40)))
    samples = {seed: [q.id for q in load_questions(path, 10, seed)] for seed in range(4)}
    for seed, ids in samples.items():
        assert len(set(ids)) == 10 and ids == sorted(ids)  # type: ignore[type-var]
        assert [q.id for q in load_questions(path, 10, seed)] == ids
    assert len({tuple(ids) for ids in samples.values()}) == 4
    assert [q.id for q in load_questions(path, 40, 1)] == list(range(40))
