"""`aquiline tune` where nothing can be timed. What it does on a device: tests/gpu/test_tuning.py."""

from __future__ import annotations

import sys

import pytest
import torch
from typer.testing import CliRunner

from aquiline.cli.main import app


def tune(*arguments: str) -> list[str]:
    """What the command says on stderr as it refuses."""
    done = CliRunner().invoke(app, ["tune", *arguments])
    assert done.exit_code == 2 and not done.stdout
    return done.stderr.splitlines()


def test_without_a_cuda_device_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="not installed: triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", "cuda:1", "cpu"):
        assert tune("all", "--device", device) == [
            f"aquiline: device={device!r}: tiles are timed on a CUDA device, and torch has none of this name here"
        ]


def test_without_triton_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name for name in sys.modules if name.startswith(("triton", "aquiline.ops.triton", "aquiline.bench.suite"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert tune("gemm") == ["aquiline: device='cuda': triton is not installed; pip install torch triton"]


def test_a_batch_of_none_is_refused() -> None:
    assert tune("--batch", "0") == ["aquiline: batch=(0,): must be at least 1 each"]
