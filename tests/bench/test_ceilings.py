"""What this machine can do, measured for real in a fraction of the time; the cache file and all that can be wrong."""

from __future__ import annotations

import json
import logging
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from aquiline.backends.cpu import calls, native_weights
from aquiline.bench.theory import ceilings, measure
from aquiline.bench.theory.ceilings import DATASHEETS, Ceilings, ceilings_of
from aquiline.bench.theory.choice import LimitsChoice
from aquiline.bench.theory.measure import Machine, best_of, last_level_cache, measure_ceilings, this_machine
from aquiline.config import cache_directory

STAGES = ["read-only stream", "copy", "float32 GEMM"]
IS_NATIVE = calls.missing_reason() is None
HAS_DOT = IS_NATIVE and native_weights.has_bf16_dot()
HAS_TILES = IS_NATIVE and native_weights.fastest_bf16() == "bfloat16_tiles"
KNOWN: dict[str, Any] = {
    "date": "2026-01-31", "load": 0.0, "read": {"per_s": 5e10, "by": "a"}, "copy": {"per_s": 4e10, "by": "b"},
    "float32": {"per_s": 2e11, "by": "c"}, "bfloat16": None, "bfloat16_tiles": None,
    "int8": None,
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache file of a fresh user whose measurements are short."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measure, "measure_ceilings", partial(measure_ceilings, seconds=0.02))
    return tmp_path / "aquiline" / "ceilings.json"


def measured(choice: LimitsChoice = LimitsChoice()) -> tuple[Ceilings, list[str]]:
    stages: list[str] = []
    return ceilings_of(choice, "bfloat16", stages.append), stages


def keep(file: Path, entry: object, key: str | None = None) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({key or this_machine().key: entry}))


def test_a_measurement_is_a_measurement() -> None:
    threads, stages = torch.get_num_threads(), list[str]()
    found = measure_ceilings(this_machine(), stages.append, seconds=0.1)
    further = ["bfloat16"] * HAS_DOT + ["bfloat16_tiles"] * HAS_TILES + ["int8"] * IS_NATIVE
    assert stages == STAGES + [f"{name} GEMM" for name in further]
    assert [name for name in ("bfloat16", "bfloat16_tiles", "int8") if getattr(found, name) is not None] == further
    assert torch.get_num_threads() == threads
    # what any machine of the last fifteen years and of the next ten does, busy or not
    assert 2e8 < found.read.per_s < 2e12 and 2e8 < found.copy.per_s < 4e12 and 1e9 < found.float32.per_s < 1e14
    assert "numpy" in found.read.by or "native" in found.read.by


def test_the_pieces_are_larger_than_the_caches_together() -> None:
    pieces = measure._pieces()
    assert len({piece.ctypes.data for piece in pieces}) == 16
    assert sum(piece.nbytes for piece in pieces) >= min(measure.STREAM_BYTES, 4 * (last_level_cache() or 0))


def test_the_fastest_way_counts_and_is_named() -> None:
    found = best_of({"slow": [partial(time.sleep, 0.02)], "fast": [partial(time.sleep, 0.002)] * 3}, 10.0, 0.1)
    assert found.by == "fast" and 10 / 0.02 < found.per_s <= 10 / 0.002


def test_measured_once_then_read(file: Path) -> None:
    first, stages = measured()
    assert stages[: len(STAGES)] == STAGES and list(json.loads(file.read_text())) == [this_machine().key]
    assert measured() == (first, [])
    assert first.bandwidth.source == first.linear_flops.source == "measured" and first.arithmetic == "float32"
    again, stages = measured(LimitsChoice(remeasure=True))
    assert stages and again.device == first.device


def test_what_is_in_the_file_is_used(file: Path) -> None:
    keep(file, KNOWN)
    found, stages = measured()
    assert not stages and found.bandwidth.per_s == 5e10 and found.linear_flops.per_s == 2e11 and not found.remark
    assert found.bandwidth.detail == "a, 2026-01-31" and found.copy is not None and found.copy.per_s == 4e10
    keep(file, KNOWN | {"load": 99.0})
    assert "load of 99.0" in measured()[0].remark and "--remeasure" in measured()[0].remark


def test_linears_and_attention_share_an_arithmetic(file: Path) -> None:
    for arithmetic in ("bfloat16", "bfloat16_tiles"):
        keep(file, KNOWN | {arithmetic: {"per_s": 4e11, "by": "d"}})
        found, _ = measured(LimitsChoice(arithmetic=arithmetic))
        assert found.linear_flops.per_s == found.attention_flops.per_s == 4e11
    found, _ = measured(LimitsChoice(arithmetic="float32"))
    assert found.linear_flops.per_s == found.attention_flops.per_s == 2e11
    keep(file, KNOWN | {"int8": {"per_s": 8e11, "by": "e"}})
    found, _ = measured(LimitsChoice(arithmetic="int8"))
    assert found.linear_flops.per_s == 8e11 and found.attention_flops.per_s == 2e11, "attention is float32 beside it"
    keep(file, KNOWN)
    lacks = {"bfloat16": "AVX512_BF16", "bfloat16_tiles": "AMX", "int8": "the native library"}
    for arithmetic, lacking in lacks.items():
        with pytest.raises(ValueError, match=f"arithmetic='{arithmetic}': this CPU or build lacks {lacking}"):
            measured(LimitsChoice(arithmetic=arithmetic))


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param("{", id="cut off"),
        pytest.param("[1]", id="a list"),
        pytest.param("", id="empty"),
        pytest.param(b"\xff\xfe", id="no text"),
        pytest.param(7, id="no entry"),
        pytest.param({"date": "2026-01-31"}, id="fields missing"),
        pytest.param(KNOWN | {"copy": None}, id="no rate"),
        pytest.param(KNOWN | {"read": {"per_s": -1.0, "by": "a"}}, id="negative"),
        pytest.param(KNOWN | {"read": {"per_s": "fast", "by": "a"}}, id="no number"),
    ],
)
def test_a_broken_cache_is_measured_again_with_a_warning(
    broken: Any, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if isinstance(broken, str | bytes):
        file.parent.mkdir()
        file.write_bytes(broken if isinstance(broken, bytes) else broken.encode())
    else:
        keep(file, broken)
    with caplog.at_level(logging.WARNING, logger=ceilings.__name__):
        found, stages = measured()
    assert stages and found.bandwidth.per_s > 0
    assert len(caplog.records) == 1 and "broken" in caplog.text and "measuring again" in caplog.text
    assert measured() == (found, []), "it was mended"


def test_other_machines_stay_in_the_file(file: Path) -> None:
    keep(file, KNOWN, "another CPU, 64 threads, avx512")
    _, stages = measured()
    entries = json.loads(file.read_text())
    assert stages and len(entries) == 2 and entries["another CPU, 64 threads, avx512"] == KNOWN
    names = {Machine("cpu", 2, "avx512").key, Machine("cpu", 4, "avx512").key, Machine("cpu", 2, "avx2").key}
    assert len(names) == 3, "threads and instruction set tell machines apart"


def test_a_cache_that_cannot_be_written_only_warns(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.parent.write_text("a file where the directory should be")
    with caplog.at_level(logging.WARNING, logger=ceilings.__name__):
        found, stages = measured()
    assert stages and found.bandwidth.per_s > 0 and "cannot be kept" in caplog.text


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "aquiline"
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_directory() == Path.home() / ".cache" / "aquiline"


def test_figures_never_lose_their_source(file: Path) -> None:
    keep(file, KNOWN)
    mixed, stages = measured(LimitsChoice(bandwidth=80))
    assert (mixed.bandwidth.source, mixed.linear_flops.source) == ("given", "measured") and not stages
    assert mixed.bandwidth.per_s == 80e9
    file.unlink()
    given, stages = measured(LimitsChoice(device="cpu", bandwidth=80, flops=0.5))
    assert not stages and not file.exists(), "nothing is measured that is not used"
    assert given.linear_flops.per_s == given.attention_flops.per_s == 0.5e12
    assert given.device == this_machine().key and given.cache_bytes == last_level_cache()
    alone, _ = measured(LimitsChoice(bandwidth=80, flops=0.5))
    assert alone.device == "given figures" and alone.cache_bytes is None
    h100, _ = measured(LimitsChoice(device="h100", flops=800))
    assert (h100.bandwidth.source, h100.linear_flops.source) == ("datasheet", "given")
    h100, _ = measured(LimitsChoice(device="h100", bandwidth=3000))
    assert (h100.bandwidth.per_s, h100.linear_flops.source) == (3e12, "datasheet")


def test_datasheets_say_so_and_where_from(file: Path) -> None:
    for name, sheet in DATASHEETS.items():
        found, stages = measured(LimitsChoice(device=name))
        assert not stages and not file.exists() and found.arithmetic == "bfloat16"
        assert found.bandwidth.source == found.linear_flops.source == "datasheet"
        assert found.bandwidth.detail == sheet.source and found.memory_bytes == sheet.memory_gb * 1e9
    h100 = ceilings_of(LimitsChoice(device="h100"), "bfloat16", print)
    assert (h100.bandwidth.per_s, h100.linear_flops.per_s) == (3.35e12, 989.4e12)
    assert ceilings_of(LimitsChoice(device="h100"), "float32", print).linear_flops.per_s == pytest.approx(66.9e12)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"device": "h1000"}, "device='h1000': must be cpu or one of a100"),
        ({"device": "b200", "arithmetic": "float32"}, "arithmetic='float32': no published figure for b200"),
        ({"device": "h100", "arithmetic": "fp8"}, "arithmetic='fp8'"),
        ({"arithmetic": "fp8"}, "arithmetic='fp8'"),
        ({"bandwidth": 0.0}, "bandwidth=0: must be a positive number"),
        ({"bandwidth": 10.0, "flops": -1.0}, "flops=-1"),
        ({"flops": float("nan")}, "flops=nan"),
    ],
    ids=str,
)
def test_bad_choices_are_named(fields: dict[str, Any], named: str, file: Path) -> None:
    with pytest.raises(ValueError, match=named):
        measured(LimitsChoice(**fields))
    assert not file.exists()


def test_the_last_level_is_the_largest_cache() -> None:
    found = last_level_cache()
    assert found is None or found >= 256 << 10
