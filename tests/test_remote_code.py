"""A checkpoint or data set must never bring code that runs: every call that could allow it says that it does not."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LOADERS = ("from_pretrained", "load_dataset")
"""The calls of transformers and datasets that take trust_remote_code."""


def calls(file: Path) -> list[tuple[str, bool]]:
    """FILE:LINE of each call of a loader, and whether it passes trust_remote_code=False."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOADERS:
            said = {k.arg: k.value for k in node.keywords}.get("trust_remote_code")
            is_off = isinstance(said, ast.Constant) and said.value is False
            found.append((f"{file.relative_to(ROOT)}:{node.lineno}", is_off))
    return found


@pytest.mark.parametrize("folder", ["src", "examples", "benchmarks", "tests"])
def test_no_loader_may_run_remote_code(folder: str) -> None:
    found = [call for file in sorted((ROOT / folder).rglob("*.py")) for call in calls(file)]
    assert found, "the loaders have other names now"
    assert [place for place, is_off in found if not is_off] == []
