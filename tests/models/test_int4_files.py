"""A draft in int4 files is, in int4, the draft that it was written from."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from aquiline.blocks import FLOATS
from aquiline.models.files import Tensors
from aquiline.models.int4_files import CODES, Int4Tensors, write_int4
from aquiline.models.known_pairs import PAIRS
from aquiline.ops.quantise import quantise
from aquiline.parity.reference_files import read_tensors

BF16 = FLOATS["bfloat16"]


def written(original: Path, folder: Path) -> Path:
    """A copy of a draft's directory in int4 files."""
    shutil.copytree(original, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    write_int4(original, folder / "model.safetensors")
    return folder


def check_same_codes(original: Path, folder: Path) -> int:
    """Compare every tensor as it serves in int4; the number of matrices that are stored in int4."""
    before, after, num_coded = Tensors(original), Int4Tensors(folder), 0
    assert after.names == before.names
    for name in before.names:
        values, read = before.get(name), after.get(name)
        assert after.shape(name) == values.shape == read.shape and after.dtype(name) == before.dtype(name)
        if name + CODES not in Tensors(folder):
            assert np.array_equal(values, read), name
            continue
        first, again = quantise(name, values, "int4"), quantise(name, read, "int4")
        assert np.array_equal(first.codes, again.codes), name
        assert np.array_equal(first.scales.astype(np.float32), again.scales.astype(np.float32)), name
        num_coded += 1
    return num_coded


def test_the_chat_models_draft(tmp_path: Path) -> None:
    original = PAIRS["smollm2"].draft
    folder = written(original, tmp_path / "draft")
    assert check_same_codes(original, folder) == 9
    assert (folder / "model.safetensors").stat().st_size < 0.3 * (original / "model.safetensors").stat().st_size
    own, judge = Int4Tensors(folder), read_tensors(folder)
    assert sorted(judge) == own.names
    for name in own.names:
        assert np.array_equal(own.get(name), judge[name].astype(own.get(name).dtype)), name


@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-38, 1e-30, 1e-3, 1.0, 1e30]), st.integers(0, 3))
def test_groups_of_any_size_with_ties_and_zeros(seed: int, scale: float, kind: int) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((4, 64)) * scale).astype(np.float32)
    if kind == 1:
        values[:, ::7] = np.abs(values).max(axis=1, keepdims=True)
        values[:, 1::7] = -values[:, ::7][:, : values[:, 1::7].shape[1]]
    elif kind == 2:
        values[:2] = 0
    elif kind == 3:
        values = np.rint(values / scale).astype(np.float32) * np.float32(scale)
    first = quantise("weight", values.astype(BF16), "int4")
    again = quantise("weight", first.dequantised().astype(BF16), "int4")
    assert np.array_equal(first.codes, again.codes)
    assert np.array_equal(first.scales.astype(np.float32), again.scales.astype(np.float32))


def test_half_a_pair_of_codes_is_an_unexpected_tensor(tmp_path: Path) -> None:
    save_file({"fc.weight.int4": np.zeros((2, 16), np.uint8)}, tmp_path / "model.safetensors")
    found = Int4Tensors(tmp_path)
    assert "fc.weight" not in found
    with pytest.raises(KeyError):
        found.get("fc.weight")
