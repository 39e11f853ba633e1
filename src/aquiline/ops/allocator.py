"""How the C library keeps freed memory. glibc only: others are left alone."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -3, -4, -8
"""The numbers by which mallopt knows its parameters (malloc.h)."""

LARGE_BYTES = 2**18
"""From this size on, memory is not kept where it is given back at once."""


def give_back() -> None:
    """Give memory that was freed back to the system. glibc keeps up to the size of the largest array that was ever
    freed, which may be half of a model after loading it."""
    if (trim := _of_libc("malloc_trim")) is not None:
        trim(0)


def keep_memory() -> None:
    """Keep what is freed from now on. Otherwise page faults take most of a training step (measured)."""
    _set({M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1, M_TOP_PAD: 2**28})


def share_memory() -> None:
    """Let threads that begin from now on share what is freed, and give large pieces back at once. Otherwise each of
    several threads keeps as much as the largest piece of its work took, and a process grows with every thread that has
    met one."""
    _set({M_ARENA_MAX: 1, M_MMAP_THRESHOLD: LARGE_BYTES, M_TRIM_THRESHOLD: LARGE_BYTES})


def _set(parameters: dict[int, int]) -> None:
    if (mallopt := _of_libc("mallopt")) is not None:
        for number, value in parameters.items():
            mallopt(number, value)


@cache
def _of_libc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
