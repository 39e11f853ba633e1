"""A disk that is full after so many bytes of a file, for whoever writes within it."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

MESSAGE = "cannot be written: File too large"


@contextmanager
def full_after(num_bytes: int) -> Iterator[None]:
    """Within it no file of this process grows beyond so many bytes: its write fails, as on a full disk, without a name.

    Python ignores the signal that comes with it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
