"""What travels to a machine with a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import gpu_bundle


def test_the_tracked_tree_fits_beside_its_wheels(tmp_path: Path) -> None:
    gpu_bundle.copy_tracked(tmp_path)
    assert (tmp_path / "src" / "aquiline" / "config.py").is_file()
    assert not (tmp_path / "src" / "aquiline" / "data" / "smollm2" / "draft").exists()
    wheels = 15 * 2**20  # as they were in November 2026, and some more
    with (tmp_path / "wheels").open("wb") as file:
        file.truncate(wheels)
    assert gpu_bundle.size_problem(tmp_path) == ""


def test_what_is_too_large_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_bundle, "MOST_BYTES", 2**20)
    for name, size in (("small", 10), ("large", 2**21)):
        (tmp_path / name).write_bytes(bytes(size))
    assert gpu_bundle.size_problem(tmp_path).startswith("the bundle has 2.0 MiB of 1; leave more out: large 2.0, small")
