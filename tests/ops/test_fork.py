"""A process that forks while its threads compute: the child has the library as the parent has it."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
from tests.conftest import needs_native

from aquiline.backends.cpu import native_weights
from aquiline.backends.cpu.calls import NativeLinear

pytestmark = [
    needs_native,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]

PATIENCE_S = 10
"""A child's work takes milliseconds; one that has not ended after this hangs."""


def status_of(child: int) -> int:
    """Its exit code; -1 if it hangs."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


def test_a_child_forked_while_a_thread_computes_computes_too() -> None:
    """20 forks, nearly all of which meet the other thread inside the library; every child computes the same numbers on
    as many threads, and so does the parent afterwards."""
    rng = np.random.default_rng(0)
    linear = NativeLinear(rng.standard_normal((384, 384), np.float32))
    x = rng.standard_normal((64, 384), np.float32)
    expected, is_over = linear(x), threading.Event()

    def compute() -> None:
        while not is_over.is_set():
            linear(x)

    other = threading.Thread(target=compute)
    other.start()
    try:
        for number in range(20):
            time.sleep(0.002)
            child = os.fork()
            if child == 0:
                is_same = np.array_equal(linear(x), expected) and native_weights.library().num_threads() == 2
                os._exit(0 if is_same else 1)
            assert status_of(child) == 0, f"child {number}: -1 hangs, 1 computes other numbers"
    finally:
        is_over.set()
        other.join()
    assert np.array_equal(linear(x), expected)
