"""The number of threads that compute: one for each physical core that this process may use.

Every phase of a forward ends when its last thread ends. A second thread on a core, or more threads than a container's
CPU quota, therefore only delays the others.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import psutil

ROOT = Path("/")


def usable_cores(root: Path = ROOT) -> int:
    """Physical cores among the CPUs this process may run on, or as many as the quotas of its control groups are worth,
    rounded up, whichever is less; at least 1. `root` is where /proc and /sys are.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst (cpu.max), Documentation/scheduler/sched-bwc.rst (version
    1), Documentation/ABI/stable/sysfs-devices-system-cpu (topology)."""
    if hasattr(os, "sched_getaffinity"):
        cores = len({_siblings(root, cpu) for cpu in os.sched_getaffinity(0)})
    else:
        cores = psutil.cpu_count(logical=False) or 1
    return max(1, math.ceil(min(cores, _quota(root))))


def _siblings(root: Path, cpu: int) -> str:
    """A name for the core of a CPU: the list of CPUs on that core. A CPU without a list counts as a core of its own."""
    return _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)


def _quota(root: Path) -> float:
    """CPUs that the control groups grant; infinite without a limit. A group's limit holds for all groups below it."""
    groups = root / "sys/fs/cgroup"
    quotas = [math.inf]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        folder = groups / controllers if controllers else groups  # version 1 has a tree per set of controllers
        # /proc may name the host's path of the group, while the container sees that group's folder as its root.
        parts = [] if ".." in path else path.strip("/").split("/")
        quotas += [_quota_of(folder.joinpath(*parts[:depth])) for depth in range(len(parts) + 1)]
    return min(quotas)


def _quota_of(group: Path) -> float:
    """Version 2 writes "quota period" or "max period" into one file, version 1 two numbers into two, -1 for none."""
    words = _read(group / "cpu.max").split()
    words = words or [_read(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    try:
        quota, period = (float(word) for word in words)
    except ValueError:  # "max", or no such files
        return math.inf
    return quota / period if quota > 0 and period > 0 else math.inf


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
