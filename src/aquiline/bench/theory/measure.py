"""Measures what this machine can do: read-only stream, copy, and GEMMs in each arithmetic.

A figure is the rate of the fastest of several implementations, and names that implementation. Each is timed in short
calls, in turns, and the best call counts. Other processes can only add time, so on a busy machine figures are too low,
never too high. `ceilings.py` keeps them.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from aquiline.backends.cpu import calls
from aquiline.backends.cpu.native_pair import configure, missing_reason
from aquiline.backends.cpu.native_weights import PAIRED, paired_arithmetics
from aquiline.blocks import FLOATS
from aquiline.config import Environment
from aquiline.engine.model import cpu_name
from aquiline.ops.control_groups import free_memory
from aquiline.ops.threads import usable_cores
from aquiline.types import Float32

SECONDS = 2.0
"""Seconds of measuring for each of read, copy and the two GEMMs."""
STREAM_BYTES = 256 << 20
NUM_PIECES = 16
WIDTH, GEMM_ROWS, GEMM_CALLS = 1024, 96, 16
Ways = dict[str, Sequence[Callable[[], object]]]
OnStage = Callable[[str], None]


@dataclass(frozen=True)
class Rate:
    """The best rate per second, and the implementation that reached it. Raises ValueError unless it is positive."""

    per_s: float
    by: str

    def __post_init__(self) -> None:
        if not 0 < self.per_s < math.inf:
            raise ValueError(f"per_s={self.per_s}")


@dataclass(frozen=True)
class Machine:
    """The machine and settings that ceilings belong to."""

    cpu: str
    threads: int
    isa: str

    @property
    def key(self) -> str:
        """The machine's name in the cache file."""
        return f"{self.cpu}, {self.threads} threads, {self.isa}"


@dataclass(frozen=True)
class Measurement:
    """Measured rates: read and copy in bytes per second, GEMMs in FLOPs per second by arithmetic. bfloat16 and
    bfloat16_tiles: None if the CPU has no instruction for it; int8: None without the native library.

    load: runnable processes when measuring began; they make figures too low. None if the system does not say."""

    date: str
    load: float | None
    read: Rate
    copy: Rate
    float32: Rate
    bfloat16: Rate | None
    bfloat16_tiles: Rate | None
    int8: Rate | None

    @classmethod
    def of_entry(cls, entry: dict[str, Any]) -> Measurement:
        """What was kept as JSON. Raises KeyError, TypeError or ValueError if it is broken."""
        rates: dict[str, Any] = {name: Rate(**entry[name]) for name in ("read", "copy", "float32")}
        rates |= {name: entry[name] and Rate(**entry[name]) for name in (*PAIRED, "int8")}
        return cls(**entry | rates | {"load": entry["load"] and float(entry["load"])})


def this_machine() -> Machine:
    """This CPU, with the threads and the instruction set that an engine would use."""
    environment = Environment.read()
    if missing_reason(environment) is None:
        configure(environment)
        system = calls.system()
        return Machine(cpu_name(), int(system["threads"]), str(system["isa"]))
    return Machine(cpu_name(), usable_cores(), "torch")


def measure_ceilings(machine: Machine, on_stage: OnStage, seconds: float = SECONDS) -> Measurement:
    """Measure all, `seconds` each; calls on_stage with the name of each before it starts."""
    is_native = machine.isa != "torch"
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    with ThreadPoolExecutor(machine.threads) as pool:
        split = partial(_split, pool, machine.threads)
        on_stage("read-only stream")
        pieces = _pieces()
        read = best_of(_readers(pieces, split, is_native), pieces[0].nbytes, seconds)
        on_stage("copy")
        copiers = [partial(split, np.copyto, to, source) for source, to in zip(pieces[::2], pieces[1::2], strict=True)]
        copy = best_of({"numpy copy": copiers}, 2 * pieces[0].nbytes, seconds)
    rates: dict[str, Rate] = {}
    for arithmetic in _arithmetics(is_native):
        on_stage(f"{arithmetic} GEMM")
        rates[arithmetic] = best_of(_gemms(arithmetic, is_native), 2 * GEMM_ROWS * WIDTH * WIDTH, seconds)
    today = datetime.now(UTC).date().isoformat()
    further = {name: rates.get(name) for name in (*PAIRED, "int8")}
    return Measurement(today, load, read, copy, rates["float32"], **further)


def best_of(ways: Ways, amount: float, seconds: float) -> Rate:
    """The best rate of any call; each call processes `amount`. Measures for `seconds`, and up to four times as long
    while the rate still rises; then each way has been called once at least.

    Each way makes all its calls before the next way's turn: the worker threads of numpy and of the native library spin
    for a moment after a call and would slow the other's next call."""
    best = dict.fromkeys(ways, math.inf)
    deadline = time.perf_counter() + seconds
    limit = deadline + 3 * seconds
    while math.inf in best.values() or time.perf_counter() < deadline:
        for name, each in ways.items():
            for call in each:
                began = time.perf_counter()
                if began > limit and best[name] < math.inf:
                    break
                call()
                ended = time.perf_counter()
                if ended - began < 0.98 * min(best.values()):
                    deadline = min(limit, max(deadline, ended + seconds / 2))
                best[name] = min(best[name], ended - began)
    fastest = min(best, key=lambda name: best[name])
    return Rate(amount / best[fastest], fastest)


def last_level_cache() -> int | None:
    """Bytes of all last-level caches that this process's CPUs use, added up; None if the system does not say."""
    found: dict[tuple[int, str], int] = {}
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    for core in cores:
        for index in Path(f"/sys/devices/system/cpu/cpu{core}/cache").glob("index*"):
            try:
                level, shared, size = (
                    (index / name).read_text().strip() for name in ("level", "shared_cpu_list", "size")
                )
                found[int(level), shared] = int(size.removesuffix("K")) << 10
            except (OSError, ValueError):
                continue
    last = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == last) or None


def _pieces() -> list[Float32]:
    """Buffers that no cache holds together, small enough for calls of a fraction of a millisecond."""
    total = min(max(STREAM_BYTES, 4 * (last_level_cache() or 0)), free_memory() // 4)
    return [np.ones((total // NUM_PIECES // 4 // WIDTH, WIDTH), np.float32) for _ in range(NUM_PIECES)]


def _split(pool: ThreadPoolExecutor, num_threads: int, function: Callable[..., object], *arrays: Float32) -> None:
    """Call a function of numpy on arrays, split by rows between threads; numpy itself runs on one."""
    list(pool.map(function, *(np.array_split(array, num_threads) for array in arrays)))


def _readers(pieces: list[Float32], split: Callable[..., None], is_native: bool) -> Ways:
    ways: Ways = {"numpy maximum": [partial(split, np.max, piece) for piece in pieces]}
    if is_native:
        row = np.ones((1, WIDTH), np.float32)
        ways["native float32 linear of one row"] = [partial(calls.NativeLinear(piece), row) for piece in pieces]
    return ways


def _arithmetics(is_native: bool) -> list[str]:
    """The arithmetics of linears that this machine has instructions for."""
    return ["float32", *paired_arithmetics(), "int8"] if is_native else ["float32"]


def _gemms(arithmetic: str, is_native: bool) -> Ways:
    generator = np.random.default_rng(0)
    weight = generator.standard_normal((WIDTH, WIDTH), np.float32)
    rows = generator.standard_normal((GEMM_ROWS, WIDTH), np.float32)
    ways: Ways = {}
    if arithmetic == "float32":
        ways["numpy matmul"] = [partial(np.matmul, rows, weight.T)] * GEMM_CALLS
    if is_native:
        stored = weight.astype(FLOATS["bfloat16"]) if arithmetic in PAIRED else weight
        linear = calls.NativeLinear(stored, arithmetic=arithmetic, dtype="int8" if arithmetic == "int8" else None)
        ways[f"native linear of {GEMM_ROWS} rows"] = [partial(linear, rows)] * GEMM_CALLS
    return ways
