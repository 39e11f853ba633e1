"""What a result's commit says: the source that ran, and whether anybody else has it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.results import CHAIN, changed, measured

from aquiline.bench.results.result import commit_of, is_dirty, require_published
from aquiline.bench.results.table import summary
from aquiline.errors import ResultError


def git(where: Path, *arguments: str) -> str:
    who = ["-c", "user.name=A", "-c", "user.email=a@b"]
    return subprocess.run(
        ["git", "-C", str(where), *who, *arguments], check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A committed source tree."""
    package = tmp_path / "src" / "package"
    for name in ("src/package/__init__.py", "csrc/a.cpp", "setup.py", "pyproject.toml", "results/a.json", "README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("first\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return package


@pytest.mark.parametrize(
    ("name", "is_changed"),
    [
        ("src/package/__init__.py", True), ("src/package/new.py", True), ("csrc/a.cpp", True), ("pyproject.toml", True),
        ("results/a.json", False), ("README.md", False), ("results/new.json", False),
    ],
)  # fmt: skip
def test_changes_of_the_source_count_and_those_of_results_do_not(name: str, is_changed: bool, package: Path) -> None:
    """Results are written while others are still to be measured."""
    root = package.parents[1]
    clean = commit_of(package)
    assert clean == git(root, "rev-parse", "--short=12", "HEAD").strip()
    (root / name).write_text("second\n")
    assert commit_of(package) == clean + "-dirty" * is_changed


def test_outside_a_repository_nothing_is_known(tmp_path: Path) -> None:
    assert commit_of(tmp_path) == "unknown"


def test_results_of_uncommitted_changes_are_not_published() -> None:
    clean = measured()
    require_published(clean)
    assert "chain" in summary(clean)
    dirty = clean | {CHAIN: changed(clean[CHAIN], commit="0123456789ab-dirty")}
    assert [is_dirty(result) for result in (clean[CHAIN], dirty[CHAIN])] == [False, True]
    with pytest.raises(ResultError, match=rf"(?s){CHAIN}: commit: '0123456789ab-dirty' has changes.*commit the source"):
        summary(dirty)
