"""The runner of mutants itself: it must see the dead, the living, and those that it cannot judge."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.mutants.run import LISTED, ROOT, Mutant, problems, read, run

SOURCE = "def double(x):\n    return x + x\n\n\ndef half(x):\n    return x / 2\n"
TEST = "from thing import double\n\n\ndef test_double():\n    assert double(3) == 6\n"
DEAD = Mutant("dead", "src/thing.py", "return x + x", "return x", ("tests/test_thing.py",))
ALIVE = Mutant("alive", "src/thing.py", "return x / 2", "return x", ("tests/test_thing.py",))
BROKEN = Mutant("broken", "src/thing.py", "return x + x", "return x +", ("tests/test_thing.py",))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in (("src/thing.py", SOURCE), ("tests/test_thing.py", TEST)):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.rare
def test_the_dead_the_living_and_the_broken_are_told_apart(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([DEAD, ALIVE], root, jobs=2) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["killed", "survived"]
    assert lines[-1] == "1 killed, 1 survived, 0 error"
    assert run([BROKEN], root) == 2
    assert "pytest ends with 2" in capsys.readouterr().out
    assert (root / "src" / "thing.py").read_text() == SOURCE, "mutants live in copies"


@pytest.mark.parametrize(
    ("mutant", "said"),
    [
        (Mutant("gone", "src/thing.py", "return y", "return x", DEAD.tests), "gone: `before` stands 0 times"),
        (Mutant("twice", "src/thing.py", "return x", "return y", DEAD.tests), "twice: `before` stands 2 times"),
        (Mutant("no file", "src/gone.py", "a", "b", DEAD.tests), "no file: `before` stands 0 times in src/gone.py"),
        (Mutant("no test", "src/thing.py", "x / 2", "x", ("tests/gone.py",)), "no test: there is no tests/gone.py"),
        (Mutant("same", "src/thing.py", "x / 2", "x / 2", DEAD.tests), "same: changes nothing"),
    ],
    ids=lambda value: value.name if isinstance(value, Mutant) else "",
)
def test_a_mutant_that_does_not_match_is_an_error(
    mutant: Mutant, said: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([DEAD, mutant], root) == 2
    assert said in capsys.readouterr().out


def test_tests_that_fail_anyway_kill_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "tests" / "test_thing.py").write_text(TEST.replace("6", "7"))
    assert run([DEAD], root) == 2
    assert "the tests do not pass without any mutant" in capsys.readouterr().out


def test_the_list_can_be_read() -> None:
    mutants = read(LISTED)
    assert problems(mutants, ROOT) == [], "code that changes takes its mutants along"
    assert len(mutants) >= 40 and {m.file.split("/")[0] for m in mutants} == {"src", "csrc"}
