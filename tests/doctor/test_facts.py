"""What a machine and an installation hold: recorded files of the kernel, and libraries that are missing or broken."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import needs_native
from tests.ops.test_threads import system

import aquiline
from aquiline.backends.cpu import native
from aquiline.doctor import facts
from aquiline.doctor.facts import LACKING, read_facts, read_packages

PACKAGE = Path(aquiline.__file__).parent
TRY = """
import json, sys
sys.path.insert(0, sys.argv[1])
from dataclasses import asdict
from aquiline.config import Environment
from aquiline.doctor import facts
print(json.dumps(asdict(facts.try_library_apart(Environment.read())) | {"newer": facts._newer_source()}))
"""


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the package's source, as a checkout has it, without a library."""
    ignored = shutil.ignore_patterns("*.so", "data", "__pycache__", "train", "serve")
    shutil.copytree(PACKAGE, tmp_path / "src" / "aquiline", ignore=ignored)
    return tmp_path / "src" / "aquiline"


def tried(package: Path, **settings: str) -> dict[str, Any]:
    """The trial of the copy's library, in a process of its own, which survives it."""
    environment = os.environ | {"AQUILINE_ISA": ""} | settings
    done = subprocess.run(
        [sys.executable, "-c", TRY, str(package.parent)], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_recorded_container_of_half_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    recorded = {
        "proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "50000 100000",
        "proc/cpuinfo": "processor : 0\nflags\t\t: fpu avx2 fma sse2 avx512f\n\nprocessor : 1\nflags\t\t: fpu",
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]",
        "sys/fs/cgroup/memory.max": "1000000", "sys/fs/cgroup/memory.current": "400000",
    }  # fmt: skip
    found = read_facts(system(tmp_path, recorded))
    assert (found.num_cpus, found.allowed_cpus, found.cpu_quota, found.usable_cores) == (8, 4, 0.5, 1)
    assert found.features == ("avx2", "fma", "avx512f") and found.huge_pages == "never"
    assert found.free_bytes == 600_000 < found.machine_free_bytes < found.memory_bytes


def test_settings_that_are_wrong_are_told_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AQUILINE_THREADS", "many")
    monkeypatch.setenv("AQUILINE_ISA", "portable")
    monkeypatch.setenv("OMP_PLACES", "cores")
    found = read_facts(system(tmp_path, {}))
    assert found.environment_problem == "AQUILINE_THREADS='many': must be >= 1" and found.num_threads is None
    assert found.isa is None and found.variables["OMP_PLACES"] == "cores" and found.features == ()
    assert found.cpu_quota is None and found.huge_pages is None


def test_every_extra_that_needs_packages_says_what_it_is_for() -> None:
    found = read_packages()
    declared = {
        extra for text in metadata.requires("aquiline") or () for extra in re.findall(r'extra == "(\w+)"', text)
    }
    assert set(LACKING) == declared - {"dev"} == {package.extra for package in found} - {""}
    numpy = next(package for package in found if package.name == "numpy")
    assert (numpy.extra, numpy.version, numpy.is_fit) == ("", metadata.version("numpy"), True)


def test_a_package_of_another_version_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ["numpy>=99", 'torch<3,>=2; extra == "torch"', 'no-such-package; extra == "serve"', "x; sys_platform=='z'"]
    monkeypatch.setattr(metadata, "requires", lambda name: needed)
    numpy, *_, missing = sorted(read_packages(), key=lambda package: package.extra != "")
    assert (numpy.needed, numpy.is_fit, numpy.version is None) == (">=99", False, False)
    by_name = {package.name: package for package in read_packages()}
    assert by_name["no-such-package"].version is None and not by_name["no-such-package"].is_fit
    assert by_name["torch"].extra == "torch" and "x" not in by_name and missing.extra


@pytest.mark.rare
@needs_native
def test_a_library_that_is_missing_cut_off_or_of_another_version_is_told_without_dying(copied: Path) -> None:
    library = copied / "_native.so"
    found = tried(copied)
    assert "does not exist" in found["problem"] and not found["is_fatal"] and found["newer"] is None
    whole = native.LIBRARY_PATH.read_bytes()
    library.write_bytes(whole[: len(whole) // 2])
    found = tried(copied)
    assert found["is_fatal"] and "loading it kills the process (SIG" in found["problem"]
    library.write_bytes(bytes(4096))
    found = tried(copied)
    assert "cannot be loaded" in found["problem"] and not found["is_fatal"]
    library.write_bytes(whole)
    found = tried(copied)
    assert found["problem"] is None and found["isa"] == found["isas"][0] and "portable" in found["isas"]
    mirror = copied / "backends" / "cpu" / "native.py"
    mirror.write_text(mirror.read_text().replace('"aq_close_batch": [_P]', '"aq_close_batch": [_P, _I]'))
    assert "was built from another version" in tried(copied)["problem"]


@needs_native
def test_instruction_sets_are_tried_as_they_are_named() -> None:
    found = facts.try_library_apart(facts.Environment("portable", 1))
    assert found.problem is None and found.isa == "portable"
    other = "neon" if "avx2" in found.isas or found.isas[0] == "portable" else "avx2"
    found = facts.try_library_apart(facts.Environment(other, 1))
    assert found.is_fatal and found.problem is not None and found.problem.startswith(f"AQUILINE_ISA={other}: ")
    found = facts.try_library_apart(facts.Environment("off", None))
    assert found.problem is None, "the library is sound, used or not"


@needs_native
def test_a_source_that_was_changed_later_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "csrc" / "kernels").mkdir(parents=True)
    for name, age in (("old.h", -100), ("new.h", 100)):
        file = tmp_path / "csrc" / "kernels" / name
        file.touch()
        os.utime(file, (0, native.LIBRARY_PATH.stat().st_mtime + age))
    monkeypatch.setattr(facts, "SOURCES", tmp_path / "csrc")
    assert facts._newer_source() == "csrc/kernels/new.h"


def test_other_processes_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "WATCHED_S", 0.5)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        total, found = facts.other_work()
    finally:
        busy.kill()
        busy.wait()
    assert busy.pid in {pid for _, pid, _ in found} or min(cpus for *_, cpus in found) > 0.3, "of the three busiest"
    assert total > 0 and all(cpus >= 0.05 for _, _, cpus in found) and os.getpid() not in {pid for _, pid, _ in found}
    assert [cpus for *_, cpus in found] == sorted((cpus for *_, cpus in found), reverse=True)
