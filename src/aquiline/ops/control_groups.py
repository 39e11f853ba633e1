"""The CPU time and the memory that the control groups of this process grant, as a container's limits do.

Source: Linux, Documentation/admin-guide/cgroup-v2.rst (cpu.max, memory.max, memory.current, memory.stat),
Documentation/scheduler/sched-bwc.rst and Documentation/admin-guide/cgroup-v1/memory.rst (version 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path("/")


def cpu_quota(root: Path = ROOT) -> float:
    """CPUs that the control groups grant, such as 0.5; infinite without a limit. `root` is where /proc and /sys are."""
    return min((_quota_of(group) for group in _groups(root, "cpu")), default=math.inf)


def free_memory(root: Path = ROOT) -> int:
    """Bytes that this process can still take: of the machine's free memory, or of what the limits of its control groups
    leave, whichever is less. Cached files count as free, since the kernel drops them first."""
    left = min((_memory_left(group) for group in _groups(root, "memory")), default=math.inf)
    return max(0, int(min(psutil.virtual_memory().available, left)))


def read(file: Path) -> str:
    """The text of a small file of the kernel; empty if there is none."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the groups that this process is in, for one controller. A group's limit holds for all groups below
    it."""
    groups = root / "sys/fs/cgroup"
    for line in read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        folder = groups / controllers if controllers else groups  # version 1 has a tree per set of controllers
        # /proc may name the host's path of the group, while the container sees that group's folder as its root.
        parts = [] if ".." in path else path.strip("/").split("/")
        yield from (folder.joinpath(*parts[:depth]) for depth in range(len(parts) + 1))


def _quota_of(group: Path) -> float:
    """Version 2 writes "quota period" or "max period" into one file, version 1 two numbers into two, -1 for none."""
    words = read(group / "cpu.max").split()
    words = words or [read(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    try:
        quota, period = (float(word) for word in words)
    except ValueError:  # "max", or no such files
        return math.inf
    return quota / period if quota > 0 and period > 0 else math.inf


def _memory_left(group: Path) -> float:
    """Version 1 has other names for the same figures, and a number near 2^63 for no limit."""
    for limit, usage, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        most, used = read(group / limit), read(group / usage)
        if most.isdecimal() and used.isdecimal():
            stat = dict(line.split(maxsplit=1) for line in read(group / "memory.stat").splitlines())
            return int(most) - int(used) + int(stat.get(cached, 0))
    return math.inf
