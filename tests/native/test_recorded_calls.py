"""Recorded calls give the same bits in a plain C++ program: on this machine, and on emulated CPUs of 64-bit Arm."""

from __future__ import annotations

import os
import shutil
import subprocess
from ctypes import addressof, byref, memset, sizeof
from pathlib import Path

import pytest
from tests.conftest import engine_config, from_modules, needs_native, tiny_pair
from tests.native import build, cases

from aquiline.backends.cpu import native
from aquiline.config import Environment, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.model import Loading
from aquiline.spec.match_events import MatchEvents

HOST_COMPILER = os.environ.get("CXX", "c++")

pytestmark = [
    needs_native,
    pytest.mark.rare,
    pytest.mark.skipif(shutil.which(HOST_COMPILER.split()[0]) is None, reason="native library: no compiler for tests"),
]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The file of calls, and how many."""
    file = tmp_path_factory.mktemp("calls") / "calls.bin"
    return file, build.record(file)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    """replay.cpp for this machine."""
    file = tmp_path_factory.mktemp("replay") / "replay"
    return str(build.replayer(HOST_COMPILER, native.LIBRARY_PATH, file))


def test_every_instruction_set_here_repeats_the_recorded_calls(recorded: tuple[Path, int], program: str) -> None:
    library = native.load()
    assert library is not None
    file, count = recorded
    found = build.replay([program], file)
    isas = library.available_isas()
    assert found == {(isas[0], 2): count, **{(isa, 1): count for isa in isas}} and count > 500


def test_another_bit_is_noticed(recorded: tuple[Path, int], program: str, tmp_path: Path) -> None:
    """The last byte that a call left in memory, changed."""
    content = bytearray(recorded[0].read_bytes())
    expected = b"aq_gumbel"
    at = content.rindex(expected) + len(expected) + 8 + 4 * 12 + 4 + 20  # arguments, the change's place and size
    content[at] ^= 1
    (tmp_path / "calls.bin").write_bytes(content)
    done = subprocess.run([program, str(tmp_path / "calls.bin")], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "elementwise, call" in done.stderr and "aq_gumbel: byte 0 of" in done.stderr


def test_times_leave_nothing_where_other_memory_comes_to_lie(program: str, tmp_path: Path) -> None:
    """An index's estimates, all zero, where steps had left their times; a replay's times are others."""
    with cases.recording(tmp_path / "calls.bin") as recorder:
        models = from_modules(*tiny_pair(), None, Loading("int4", "int8"), Environment(None, 1))
        llm = LLM.from_models(models, engine_config(num_continuous_decode_steps=8))
        batch, events = llm.engine.backend._batch, MatchEvents()  # type: ignore[attr-defined]
        batch._make_room(8)
        llm.run([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
        times = batch.seconds
        assert sizeof(times) == 8 * len(events.estimates) and any(times)
        llm.close()
        memset(times, 0, sizeof(times))
        counts = (each.buffer_info()[0] for each in (events.trials, events.hits))
        recorder.close_index(recorder.open_index(1, byref(native.AqMatchEvents(*counts, addressof(times)))))
    assert set(build.replay([program], tmp_path / "calls.bin").values()) == {recorder.num_calls}


@pytest.mark.slow
@pytest.mark.skipif(build.missing() is not None, reason=f"no build for Arm: {build.missing()}")
def test_arm_repeats_the_recorded_calls(recorded: tuple[Path, int], tmp_path: Path) -> None:
    file, count = recorded
    for cpu, found in build.replay_on_arm(tmp_path, file).items():
        isas = build.CPUS[cpu]
        assert found == {(isas[0], 2): count, **{(isa, 1): count for isa in isas}}, cpu
