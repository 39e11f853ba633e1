"""Every bad combination is named with its severity and a way out, and a sound machine has none."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import needs_native

from aquiline.doctor.examination import course_of
from aquiline.doctor.facts import Facts, LibraryTrial, Package
from aquiline.doctor.findings import findings_of
from aquiline.models import known_pairs

LIBRARY = LibraryTrial(None, False, "avx512", ("avx512", "avx2", "portable"))
TORCH = Package("torch", "torch", ">=2.11", "2.13", True)
NUMPY = Package("numpy", "", ">=1.26", "2.0", True)
SOUND = Facts(
    cpu="Some CPU", features=("avx2",), num_cpus=8, allowed_cpus=8, cpu_quota=None, usable_cores=4, cache_bytes=1 << 25,
    memory_bytes=16 << 30, machine_free_bytes=8 << 30, free_bytes=8 << 30, huge_pages="madvise",
    packages=(NUMPY, TORCH), library=LIBRARY, newer_source=None, compiler="/usr/bin/c++", isa=None, num_threads=None,
    environment_problem=None, torch_problem=None, variables={}, busy_cpus=0.05, busiest=(),
    default_notice=None,
)  # fmt: skip
MISSING, KILLS = LibraryTrial("a/_native.so does not exist"), LibraryTrial("a/_native.so: SIGBUS", is_fatal=True)


def test_a_sound_machine_has_no_findings() -> None:
    assert findings_of(SOUND) == []
    fine = {"OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "passive", "OMP_PROC_BIND": "false", "KMP_BLOCKTIME": "0"}
    assert findings_of(replace(SOUND, variables=fine, num_threads=4, cpu_quota=8.0, busy_cpus=0.19)) == []


BAD: list[tuple[dict[str, Any], str, str, str]] = [
    ({"environment_problem": "AQUILINE_ISA='x': choose"}, "error", "AQUILINE_ISA='x'", "unset"),
    ({"library": MISSING}, "warning", "does not exist; torch runs instead", "pip install"),
    ({"library": MISSING, "compiler": None}, "warning", "does not exist", "install a C++17 compiler"),
    ({"library": MISSING, "torch_problem": "No module"}, "error", "nor torch (No module)", "'aquiline[torch]'"),
    ({"library": KILLS}, "error", "no command can run a model: a/_native.so: SIGBUS", "AQUILINE_ISA=off"),
    ({"library": KILLS, "isa": "neon"}, "error", "no command can run a model", "unset AQUILINE_ISA"),
    ({"library": KILLS, "isa": "off"}, "warning", "torch runs instead", "pip install"),
    ({"isa": "off"}, "warning", "AQUILINE_ISA=off; torch runs", "unset AQUILINE_ISA"),
    ({"isa": "off", "torch_problem": "none"}, "error", "nothing can run a model", "'aquiline[torch]'"),
    ({"newer_source": "csrc/a.h"}, "warning", "may be stale: csrc/a.h", "pip install"),
    ({"library": replace(LIBRARY, isa="avx2")}, "warning", "this CPU has avx512", "unset AQUILINE_ISA"),
    ({"library": LibraryTrial(None, False, "portable", ("portable",))}, "notice", "portable kernels", "machine"),
    ({"library": LibraryTrial(None, False, "portable", ("portable", "amx_twin"))}, "notice", "portable ker", "machine"),
    ({"huge_pages": "never"}, "warning", "huge pages are off", "echo madvise"),
    ({"variables": {"NUMPY_MADVISE_HUGEPAGE": "0"}}, "warning", "NUMPY_MADVISE_HUGEPAGE=0", "unset"),
    ({"cpu_quota": 0.5, "usable_cores": 1}, "warning", "grants 0.5 of a CPU: steps stand still 50%", "--cpus"),
    ({"cpu_quota": 2.0, "usable_cores": 2}, "notice", "grants 2 of 8 CPUs: 2 threads", "OMP_NUM_THREADS=2"),
    ({"allowed_cpus": 1}, "notice", "may run on 1 of 8 CPUs", "taskset"),
    ({"num_threads": 5}, "warning", "AQUILINE_THREADS=5: of usable cores there are 4", "unset AQUILINE_THREADS"),
    ({"busy_cpus": 1.5, "busiest": (("gcc", 7, 1.4),)}, "warning", "1.5 of 8 CPUs right now: gcc (7) 1.4", "pause"),
    ({"busy_cpus": 0.2}, "warning", "not seen from here", "virtual machine"),
    ({"variables": {"OMP_PROC_BIND": "close"}}, "warning", "binds the thread", "unset OMP_PROC_BIND"),
    ({"variables": {"GOMP_CPU_AFFINITY": "0-3"}}, "warning", "binds the thread", "unset GOMP_CPU_AFFINITY"),
    ({"variables": {"OMP_WAIT_POLICY": "ACTIVE"}}, "warning", "never sleep", "unset OMP_WAIT_POLICY"),
    ({"packages": (replace(TORCH, version="1.0", is_fit=False),)}, "warning", "torch: 1.0 is installed", "torch>="),
    ({"packages": (replace(NUMPY, version=None, is_fit=False),)}, "error", "numpy: is not installed", "numpy>="),
    ({"packages": ()}, "notice", "without being installed", "pip install ."),
    ({"default_notice": "no chat model"}, "notice", "no chat model", "install it to chat"),
    ({"free_bytes": 1 << 30}, "notice", "leaves 1.07 GB of 8.6 GB", "--memory"),
]  # fmt: skip
"""Facts that are not as they should be, and of the finding its severity and parts of what it says."""
PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"


@pytest.mark.parametrize(("fields", "severity", "what", "fix"), BAD, ids=str)
def test_each_bad_combination_is_named_with_a_way_out(
    fields: dict[str, Any], severity: str, what: str, fix: str
) -> None:
    (found,) = findings_of(replace(SOUND, **fields))
    assert found.severity == severity and what in found.what and fix in found.fix


def test_the_page_of_troubles_has_every_finding_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_pairs, "default_name", lambda: "bundled")
    real = {"default_notice": known_pairs.default_notice()}
    bad = [real if "default_notice" in fields else fields for fields, *_ in BAD]
    found = [finding for fields in bad for finding in findings_of(replace(SOUND, **fields))]
    rows = re.findall(r"^\| ([a-z, ]+) \| `(.+?)` \| .+ \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    told = {re.compile(".*".join(map(re.escape, what.split("…")))): severity for severity, what in rows}
    for finding in found:
        fitting = [severity for pattern, severity in told.items() if pattern.match(finding.what)]
        assert any(finding.severity in severity for severity in fitting), finding
    for pattern, severity in told.items():
        assert any(pattern.match(finding.what) and finding.severity in severity for finding in found), pattern.pattern


def test_what_may_be_missing_is_no_finding() -> None:
    without = replace(TORCH, version=None, is_fit=False)
    spins = {"OMP_WAIT_POLICY": "active", "OMP_PROC_BIND": "true"}
    assert findings_of(replace(SOUND, packages=(NUMPY, without), variables=spins)) == [], "OpenMP comes with torch"


def test_the_worst_comes_first() -> None:
    found = findings_of(replace(SOUND, allowed_cpus=4, huge_pages="never", environment_problem="x"))
    assert [finding.severity for finding in found] == ["error", "warning", "notice"]


@needs_native
def test_what_runs_and_why() -> None:
    course = course_of(SOUND)
    assert (course.backend, course.threads, course.share) == ("native", 4, 1.0) and "best of this CPU" in course.reason
    assert course.arithmetics["packed"] == course.arithmetics["int4"] == "int8"
    assert course.arithmetics["float32"] == "float32"
    course = course_of(replace(SOUND, isa="avx2", num_threads=3))
    assert (course.threads, course.threads_reason, course.reason) == (3, "AQUILINE_THREADS", "AQUILINE_ISA=avx2")
    course = course_of(replace(SOUND, cpu_quota=0.5, usable_cores=1))
    assert (course.threads, course.share) == (1, 0.5) and "quota" in course.threads_reason
    course = course_of(replace(SOUND, cpu_quota=6.0))
    assert course.share == 1.0


@pytest.mark.parametrize(
    ("fields", "backend"),
    [
        ({"library": MISSING}, "torch"),
        ({"library": MISSING, "torch_problem": "none"}, "nothing"),
        ({"library": KILLS}, "nothing"),
        ({"library": KILLS, "isa": "off"}, "torch"),
        ({"isa": "off"}, "torch"),
    ],
    ids=str,
)  # fmt: skip
def test_what_takes_over(fields: dict[str, Any], backend: str) -> None:
    course = course_of(replace(SOUND, **fields))
    assert course.backend == backend and course.arithmetics == {"all": "float32"}
