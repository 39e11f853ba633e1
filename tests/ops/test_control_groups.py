"""The memory that control groups leave, read from trees of files as containers have them. Quotas: test_threads.py."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from tests.ops.test_threads import system

from aquiline.ops.control_groups import free_memory

AVAILABLE = 8_000
UNLIMITED = "9223372036854771712"


def files(folder: str, most: object, used: int, cached: int, is_first_version: bool = False) -> dict[str, str]:
    """The files of one group."""
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_first_version else ("memory.max", "memory.current")
    cache = "total_inactive_file" if is_first_version else "inactive_file"
    stat = f"anon 1\nactive_file 77\n{cache} {cached}"
    return {f"{folder}{names[0]}": str(most), f"{folder}{names[1]}": str(used), f"{folder}memory.stat": stat}


@pytest.mark.parametrize(
    ("groups", "written", "expected"),
    [
        ("", {}, AVAILABLE),
        ("0::/", files("", "max", 500, 0), AVAILABLE),
        ("0::/", files("", 5_000, 3_000, 0), 2_000),
        ("0::/", files("", 5_000, 3_000, 1_200), 3_200),
        ("0::/", files("", 50_000, 3_000, 0), AVAILABLE),
        ("0::/", files("", 5_000, 6_000, 0), 0),
        ("0::/a/b", files("a/b/", "max", 1, 0) | files("a/", 4_000, 1_000, 0), 3_000),
        ("0::/a", files("b/", 4_000, 1_000, 0), AVAILABLE),
        ("4:memory:/x", files("memory/x/", 6_000, 2_000, 500, True) | files("memory/", UNLIMITED, 1, 0, True), 4_500),
        ("4:cpu:/x", files("cpu/x/", 6_000, 2_000, 500, True), AVAILABLE),
        ("0::/", {"memory.max": "5000"}, AVAILABLE),
    ],
)  # fmt: skip
def test_the_nearest_limit_is_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, written: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": AVAILABLE}))
    tree = {"proc/self/cgroup": groups} | {f"sys/fs/cgroup/{name}": text for name, text in written.items()}
    assert free_memory(system(tmp_path, tree)) == expected
