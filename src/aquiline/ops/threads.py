"""The number of threads that compute: one for each physical core that this process may use.

Every phase of a forward ends when its last thread ends. A second thread on a core, or more threads than a container's
CPU quota, therefore only delays the others.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import psutil

from aquiline.ops.control_groups import ROOT, cpu_quota, read


def usable_cores(root: Path = ROOT) -> int:
    """Physical cores among the CPUs this process may run on, or as many as the quotas of its control groups are worth,
    rounded up, whichever is less; at least 1. `root` is where /proc and /sys are.

    Source: Linux, Documentation/ABI/stable/sysfs-devices-system-cpu (topology)."""
    if hasattr(os, "sched_getaffinity"):
        cores = len({_siblings(root, cpu) for cpu in os.sched_getaffinity(0)})
    else:
        cores = psutil.cpu_count(logical=False) or 1
    return max(1, math.ceil(min(cores, cpu_quota(root))))


def _siblings(root: Path, cpu: int) -> str:
    """A name for the core of a CPU: the list of CPUs on that core. A CPU without a list counts as a core of its own."""
    return read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)
