"""The ctypes mirror beside the library and its header: a stale library says so instead of crashing."""

from __future__ import annotations

import re
import shutil
from ctypes import Structure, c_int32, c_int64, sizeof
from pathlib import Path

import pytest
from tests.conftest import needs_native

from aquiline.backends.cpu import native
from aquiline.spec.match_events import MatchEvents
from aquiline.types import SAMPLING

CSRC = Path(__file__).parents[1] / "csrc"


def test_the_header_names_this_mirror() -> None:
    """Runs without a library too: where the two differ, a built library is refused and nothing native is tested."""
    (header,) = CSRC.rglob("aquiline.h")
    found = re.search(r"#define AQ_ABI (0x[0-9a-f]{8})u", header.read_text())
    assert found is not None and int(found[1], 16) == native.abi(), (
        f"aquiline.h or its mirror changed: write {native.abi():#010x}u as AQ_ABI and rebuild the library"
    )


def test_sampling_is_the_same_to_numpy_and_ctypes() -> None:
    assert SAMPLING.names is not None and SAMPLING.fields is not None
    fields = {name: SAMPLING.fields[name][1] for name in SAMPLING.names}
    assert fields == {name: getattr(native.AqSampling, name).offset for name, _ in native.AqSampling._fields_}
    assert SAMPLING.itemsize == sizeof(native.AqSampling)


def test_cells_of_matches_are_as_many_to_both() -> None:
    """The library writes to as many as it knows."""
    found = re.search(r"AQ_MATCH_CELLS = (\d+)", (CSRC / "lookup" / "lookup.h").read_text())
    assert found is not None and {int(found[1])} == {len(a) for a in vars(MatchEvents()).values()}


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The library under another name: each path is loaded once per process."""
    return Path(shutil.copy(native.LIBRARY_PATH, tmp_path / "_native.so"))


@needs_native
def test_a_library_of_this_version_is_loaded(copied: Path) -> None:
    loaded = native.load_from(copied)
    assert loaded.library is not None and loaded.reason is None


@needs_native
def test_a_struct_of_another_size_is_refused(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = [*native.AqKV._fields_, ("more", c_int64)]
    longer = type("AqKV", (Structure,), {"_fields_": fields})
    structs = tuple(longer if struct is native.AqKV else struct for struct in native.STRUCTS)
    monkeypatch.setattr(native, "STRUCTS", structs)
    loaded = native.load_from(copied)
    assert loaded.library is None and loaded.reason is not None
    assert "AqKV takes 56 bytes there and 64 here; reinstall aquiline to rebuild it" in loaded.reason


@needs_native
def test_a_field_of_another_type_and_another_signature_are_refused(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = [(name, c_int32 if name == "eps" else kind) for name, kind in native.AqFusion._fields_]
    other = type("AqFusion", (Structure,), {"_fields_": fields})
    structs = tuple(other if struct is native.AqFusion else struct for struct in native.STRUCTS)
    with monkeypatch.context() as patch:
        patch.setattr(native, "STRUCTS", structs)
        assert "was built from another version: its interface is" in native.load_from(copied).reason
    monkeypatch.setitem(native._CHECKED, "aq_draw", [c_int32])
    again = Path(shutil.copy(copied, tmp_path / "again.so"))
    assert f"and {native.abi():#010x} here; reinstall aquiline" in native.load_from(again).reason


@needs_native
def test_formats_are_the_librarys(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "FORMATS", (*native.FORMATS[:-1], "float8"))
    assert "storage format 28 is b'bfloat16_tiles' there and 'float8' here" in native.load_from(copied).reason
