"""The suite for a GPU, end to end over tiny shapes in Triton's interpreter; and what it says without either."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="not installed: triton")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_suite.py"


def suite(out: Path, part: int, *options: str, interpret: str = "1") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--part", str(part), "--out", str(out), *options]
    environment = os.environ | {"TRITON_INTERPRET": interpret}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_cuda_device_one_line_says_so(tmp_path: Path) -> None:
    done = suite(tmp_path / "cells", 1, interpret="0")
    assert done.returncode == 2 and not done.stdout and not (tmp_path / "cells").exists()
    [line] = done.stderr.splitlines()
    assert line.startswith("gpu_suite: device='cuda': torch has no CUDA device here")


@pytest.mark.slow
@pytest.mark.parametrize(("part", "num_cells"), [(1, 6), (2, 5), (3, 8)], ids=["first", "second", "third"])
def test_a_part_is_measured_once(part: int, num_cells: int, tmp_path: Path) -> None:
    first = suite(tmp_path, part, "--tiny")
    assert first.returncode == 0, first.stderr
    cells = {file: file.read_text() for file in tmp_path.glob(f"{part}-*.json")}
    names = {json.loads(text)["cell"] for text in cells.values()}
    assert len(names) == num_cells and all(f"| {name} |" in first.stdout for name in names)
    assert "not measured" not in first.stdout
    lost = min(cells)
    lost.unlink()
    again = suite(tmp_path, part, "--tiny", "--seconds", "-1")
    assert again.returncode == 1 and f"- not measured: {lost.stem}" in again.stdout.splitlines()
    assert {*tmp_path.glob(f"{part}-*.json")} == {*cells} - {lost}
    assert all(file.read_text() == text for file, text in cells.items() if file != lost)
