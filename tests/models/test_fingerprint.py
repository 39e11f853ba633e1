"""A fingerprint tells checkpoints apart by their bytes, and by nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints import write_target

from aquiline.models.fingerprint import fingerprint


def test_copies_are_equal_and_everything_else_differs(tmp_path: Path) -> None:
    write_target(tmp_path / "a")
    found = fingerprint(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "README.md").write_text("no part of the model")
    assert fingerprint(tmp_path / "b") == found == fingerprint(tmp_path / "a") and len(found) == 32
    (tmp_path / "b" / "chat_template.jinja").write_text("{{ messages }}")
    write_target(tmp_path / "c", seed=1)
    single = fingerprint(tmp_path / "a" / "model.safetensors")
    shutil.copy(tmp_path / "a" / "model.safetensors", tmp_path / "renamed.bin")
    assert single == fingerprint(tmp_path / "renamed.bin"), "a file is what it holds"
    assert len({found, fingerprint(tmp_path / "b"), fingerprint(tmp_path / "c"), single}) == 4


@pytest.mark.parametrize("place", [0.0, 0.37, 1.0])
def test_a_block_of_a_large_file_counts(place: float, tmp_path: Path) -> None:
    """Weights over 4 MiB are sampled: a changed tensor of a sixty-fourth of the file or more is always seen."""
    save_file({"w": torch.zeros(3, 1 << 20)}, tmp_path / "model.safetensors")
    found = fingerprint(tmp_path)
    weight = load_file(tmp_path / "model.safetensors")["w"].flatten()
    size = len(weight) // 63
    begin = int(place * (len(weight) - size))
    weight[begin : begin + size] += 1
    save_file({"w": weight.view(3, -1)}, tmp_path / "model.safetensors")
    assert fingerprint(tmp_path) != found
