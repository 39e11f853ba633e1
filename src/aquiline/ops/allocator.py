"""Memory that was freed and that the C library keeps."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any


def give_back() -> None:
    """Give memory that was freed back to the system. glibc keeps as much of it as the largest array that was ever
    freed, which after loading a model may be half the model; other C libraries are left alone."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None
