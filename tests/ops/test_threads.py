"""As many threads as cores that the process may use: by its affinity, its control groups, and AQUILINE_THREADS."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.conftest import needs_native

from aquiline.ops.threads import usable_cores

needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")

BOUND = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from aquiline.backends.cpu import native_weights
from aquiline.backends.cpu.native_pair import configure
from aquiline.config import Environment
for variable in ("", "2"):
    os.environ["AQUILINE_THREADS"] = variable
    configure(Environment.read())
    print(native_weights.library().num_threads())
"""


def system(root: Path, files: dict[str, str], siblings: dict[int, str] | None = None) -> Path:
    """A tree with the files of /proc and /sys that matter; every CPU is a core unless said otherwise."""
    cores = siblings or {cpu: str(cpu) for cpu in range(8)}
    topology = {f"sys/devices/system/cpu/cpu{c}/topology/thread_siblings_list": s for c, s in cores.items()}
    for name, text in (topology | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


V2, V1 = "0::", "4:cpu,cpuacct:"


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("", {}, 8),
        (f"{V2}/", {"cpu.max": "max 100000"}, 8),
        (f"{V2}/", {"cpu.max": "200000 100000"}, 2),
        (f"{V2}/", {"cpu.max": "250000 100000"}, 3),
        (f"{V2}/", {"cpu.max": "10000 100000"}, 1),
        (f"{V2}/", {"cpu.max": "6400000 100000"}, 8),
        (f"{V2}/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3),
        (f"{V2}/a/b", {"a/b/cpu.max": "200000 100000", "a/cpu.max": "300000 100000"}, 2),
        (f"{V2}/a", {"b/cpu.max": "200000 100000"}, 8),
        (f"{V2}/../..", {"cpu.max": "500000 100000"}, 5),
        (f"{V2}/", {"cpu.max": "unheard of"}, 8),
        (f"{V1}/", {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 8),
        (f"{V1}/", {"cpu,cpuacct/cpu.cfs_quota_us": "150000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 2),
        # A container's group: the host's path, mounted as its root.
        (f"{V1}/docker/1f", {"cpu,cpuacct/cpu.cfs_quota_us": "50000", "cpu,cpuacct/cpu.cfs_period_us": "50000"}, 1),
        ("3:memory:/\n4:cpu:/x\n" + V2, {"cpu/x/cpu.cfs_quota_us": "40000", "cpu/x/cpu.cfs_period_us": "10000"}, 4),
        ("3:cpuset:/", {"cpuset/cpu.cfs_quota_us": "40000", "cpuset/cpu.cfs_period_us": "10000"}, 8),
    ],
)  # fmt: skip
def test_quotas_of_control_groups(tmp_path: Path, groups: str, files: dict[str, str], expected: int) -> None:
    written = {"proc/self/cgroup": groups} | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    assert usable_cores(system(tmp_path, written)) == expected


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize(
    ("siblings", "expected"),
    [({c: f"{c % 4},{c % 4 + 4}" for c in range(8)}, 4), ({c: f"{c // 2 * 2}-{c // 2 * 2 + 1}" for c in range(8)}, 4)],
)
def test_two_threads_of_a_core_are_one(tmp_path: Path, siblings: dict[int, str], expected: int) -> None:
    assert usable_cores(system(tmp_path, {}, siblings)) == expected


@needs_affinity
def test_this_machine_gives_no_more_than_its_cores() -> None:
    allowed = len(os.sched_getaffinity(0))
    assert 1 <= usable_cores() <= min(allowed, psutil.cpu_count(logical=False) or allowed)


@needs_affinity
@needs_native
def test_a_process_bound_to_one_cpu_computes_on_one_thread() -> None:
    """A second worker would spin on the same CPU, in the way of the first. AQUILINE_THREADS has the last word."""
    done = subprocess.run([sys.executable, "-c", BOUND], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["1", "2"]), done.stderr
