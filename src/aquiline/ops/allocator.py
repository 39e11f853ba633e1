"""Return freed memory that the C library keeps to the system."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any


def give_back() -> None:
    """Give memory that was freed back to the system. glibc keeps up to the size of the largest array that was ever
    freed, which may be half of a model after loading it. Other C libraries are left alone."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None
