"""What the C library keeps, by the size of a process of its own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FREED_MB = """
import psutil
from aquiline.ops.allocator import share_memory
share_memory()
size = psutil.Process().memory_info().rss
large = b"x" * 2**24
del large  # by default glibc takes pieces of this size from the heap from now on
large = b"x" * 2**24
behind = [b"x" * 1000 for _ in range(1000)]  # so that the heap does not end with it
del large
print((psutil.Process().memory_info().rss - size) / 2**20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this system has no glibc")
def test_a_large_piece_is_given_back_at_once() -> None:
    told = subprocess.run([sys.executable, "-c", FREED_MB], capture_output=True, text=True, check=True)
    assert float(told.stdout) < 8
