"""Skips are few, named and meant: a listed reason each, and no reason that nobody gives."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.skips import REASONS, known

TESTS = Path(__file__).parent
SKIPPING = {"skip", "skipif", "importorskip"}


def reasons() -> Iterator[tuple[Path, str]]:
    """How the reason of every skip in the tests begins, up to what is only known when it is given."""
    for file in TESTS.rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            if not isinstance(call, ast.Call) or getattr(call.func, "attr", "") not in SKIPPING:
                continue
            given = [keyword.value for keyword in call.keywords if keyword.arg == "reason"]
            assert given or call.func.attr == "skip", f"{file}:{call.lineno}: give a reason"  # type: ignore[attr-defined]
            reason = (given or call.args)[0]
            parts = reason.values if isinstance(reason, ast.JoinedStr) else [reason]
            assert isinstance(parts[0], ast.Constant), f"{file}:{call.lineno}: begin the reason with words"
            yield file, str(parts[0].value)


def test_every_skip_has_a_listed_reason_and_every_listed_reason_a_skip() -> None:
    found = list(reasons())
    assert len(found) > 10
    unlisted = [(file.name, start) for file, start in found if known(start) is None]
    assert not unlisted, f"say in tests/skips.py what would run them: {unlisted}"
    given = {known(start) for _, start in found}
    assert given == set(REASONS), f"nobody gives these reasons any more: {set(REASONS) - given}"


def test_the_longest_entry_is_meant() -> None:
    assert known("this CPU has avx2, portable") == "this CPU has "
    assert known("this CPU has no AVX512_BF16") == "this CPU has no AVX512_BF16"
    assert known("flaky today") is None
