"""What an engine would find on this machine: processor, memory, packages, the native library, other processes.

Says nothing about what the facts mean. The native library is tried in a process of its own, because loading a file that
was cut off kills the process that loads it.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from signal import Signals
from typing import Any

import numpy as np
import psutil
from packaging.requirements import Requirement

from aquiline.backends.cpu import calls, native
from aquiline.backends.cpu.native_pair import configure
from aquiline.backends.cpu.native_weights import library
from aquiline.bench.theory.measure import last_level_cache
from aquiline.config import Environment
from aquiline.engine.model import cpu_name
from aquiline.errors import NativeError
from aquiline.models.known_pairs import default_notice
from aquiline.ops.control_groups import ROOT, cpu_quota, free_memory, read
from aquiline.ops.threads import usable_cores

FEATURES = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx_vnni", "avx512_bf16",
    "amx_int8", "asimd", "asimddp",
)  # fmt: skip
"""Instruction sets, as the kernel names them, that inference can gain from."""
LACKING = {
    "serve": "aquiline serve",
    "torch": "the torch path: GPUs, widths that are no multiples of 16, machines without the native library",
    "transformers": "aquiline.transformers, for transformers' generate",
    "grammar": "structured output: schemas, regular expressions, grammars",
    "train": "aquiline train; plots of eval, demo and report",
    "log": "training logs for TensorBoard and Weights & Biases",
    "ray": "several engines as replicas on Ray Serve",
    "docs": "make docs, the site of this project",
    "peers": "aquiline compare with transformers, OpenVINO GenAI and llama.cpp",
}
"""By extra: what does not work without its packages."""
TRIAL_S = 4.0
"""The most seconds that a child process may take to load a library."""
WATCHED_S = 0.3
"""Seconds for which other processes are watched."""
SOURCES = Path(__file__).resolve().parents[3] / "csrc"
"""The native library's sources, in a checkout."""


@dataclass(frozen=True)
class Package:
    """A package that an extra needs, or aquiline itself where `extra` is empty. version None: it is not installed."""

    name: str
    extra: str
    needed: str
    version: str | None
    is_fit: bool


@dataclass(frozen=True)
class LibraryTrial:
    """The native library as a child process met it. problem: why it cannot be used, None if it can; is_fatal: whether
    no command runs then, and torch cannot take over."""

    problem: str | None
    is_fatal: bool = False
    isa: str = "torch"
    isas: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """All facts. usable_cores: by affinity, physical cores and quota; cpu_quota: in CPUs, None for no limit;
    free_bytes: what this process can take of the machine_free_bytes; newer_source: a source of the library that was
    changed after it was built; torch_problem: why torch cannot be imported, tried where torch would run; variables: of
    the environment, by which other libraries choose threads and pages; busy_cpus: CPUs' worth of work of others, and
    what the hypervisor took; busiest: other processes' names, ids and CPUs; default_notice: why the chat model is not
    the default pair."""

    cpu: str
    features: tuple[str, ...]
    num_cpus: int
    allowed_cpus: int
    cpu_quota: float | None
    usable_cores: int
    cache_bytes: int | None
    memory_bytes: int
    machine_free_bytes: int
    free_bytes: int
    huge_pages: str | None
    packages: tuple[Package, ...]
    library: LibraryTrial
    newer_source: str | None
    compiler: str | None
    isa: str | None
    num_threads: int | None
    environment_problem: str | None
    torch_problem: str | None
    variables: dict[str, str]
    busy_cpus: float
    busiest: tuple[tuple[str, int, float], ...]
    default_notice: str | None

    @property
    def is_native(self) -> bool:
        """Whether the native library runs pairs."""
        return self.library.problem is None and self.isa != "off"

    def version(self, name: str) -> str | None:
        """The version of an installed package; None if there is none."""
        return next((package.version for package in self.packages if package.name == name), None)


def read_facts(root: Path = ROOT) -> Facts:
    """Look at everything; takes about a second. `root` is where /proc and /sys are."""
    busy_cpus, busiest = other_work()
    environment, problem = Environment(None, None), None
    try:
        environment = Environment.read()
    except ValueError as error:
        problem = str(error)
    trial = try_library_apart(environment)
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", read(root / "proc/cpuinfo"), re.MULTILINE)
    huge_pages = re.search(r"\[(\w+)\]", read(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    compiler = os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++"
    num_cpus, quota, memory = os.cpu_count() or 1, cpu_quota(root), psutil.virtual_memory()
    variables = {name: value for name, value in os.environ.items() if re.match("(OMP|GOMP|KMP|NUMPY)_", name)}
    return Facts(
        cpu=cpu_name(), features=tuple(name for name in FEATURES if flags and name in flags[1].split()),
        num_cpus=num_cpus, cpu_quota=None if math.isinf(quota) else quota, usable_cores=usable_cores(root),
        allowed_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else num_cpus,
        cache_bytes=last_level_cache(), memory_bytes=memory.total, machine_free_bytes=memory.available,
        free_bytes=free_memory(root), huge_pages=huge_pages[1] if huge_pages else None, packages=read_packages(),
        library=trial, newer_source=_newer_source(), compiler=shutil.which(compiler.split()[0]), isa=environment.isa,
        num_threads=environment.num_threads, environment_problem=problem,
        torch_problem=_torch_problem() if trial.problem or environment.isa == "off" else None, variables=variables,
        busy_cpus=busy_cpus, busiest=busiest, default_notice=default_notice(),
    )  # fmt: skip


def read_packages() -> tuple[Package, ...]:
    """The packages that aquiline needs, for itself and for each extra of LACKING; none where it is not installed but
    only on the path."""
    try:
        needed = [Requirement(text) for text in metadata.requires("aquiline") or ()]
    except metadata.PackageNotFoundError:
        return ()
    found = []
    for each in needed:
        is_core = each.marker is None or each.marker.evaluate({"extra": ""})
        for extra in ("",) if is_core else LACKING:
            if is_core or (each.marker is not None and each.marker.evaluate({"extra": extra})):
                installed = next(iter(metadata.distributions(name=each.name)), None)
                version = None if installed is None else installed.version
                is_fit = version is not None and each.specifier.contains(version, prereleases=True)
                found.append(Package(each.name, extra, str(each.specifier), version, is_fit))
    return tuple(found)


def try_library_apart(environment: Environment) -> LibraryTrial:
    """Load the native library and multiply with it, in a child process with these settings."""
    settings = {"AQUILINE_ISA": environment.isa or "", "AQUILINE_THREADS": str(environment.num_threads or "")}
    try:
        code, said = _apart("from aquiline.doctor import facts; facts.try_library()", settings)
    except subprocess.TimeoutExpired:
        code, said = 1, f"does not load within {TRIAL_S:.0f} s"
    if code != 0:
        told = f"loading it kills the process ({Signals(-code).name})" if code < 0 else said
        return LibraryTrial(f"{native.LIBRARY_PATH}: {told}", is_fatal=code < 0)
    found = json.loads(said)
    return LibraryTrial(**found | {"isas": tuple(found.get("isas", ()))})


def try_library() -> None:
    """Print the fields of a LibraryTrial as JSON, after a product in float32 and one in int8. A child process runs
    this."""
    environment, found = Environment.read(), dict[str, Any](problem=calls.missing_reason())
    if found["problem"] is None:
        try:
            configure(Environment(None, 1) if environment.isa == "off" else environment)
            for dtype in (None, "int8"):
                weight = np.ones((32, 64), np.float32)
                calls.NativeLinear(weight, arithmetic=dtype or "float32", dtype=dtype)(weight)
            loaded = library()
            found |= {"isa": loaded.isa(), "isas": loaded.available_isas()}
        except NativeError as error:
            found |= {"problem": f"AQUILINE_ISA={environment.isa}: {error}", "is_fatal": True}
    print(json.dumps(found))


def other_work() -> tuple[float, tuple[tuple[str, int, float], ...]]:
    """Watch the machine for WATCHED_S: CPUs' worth of work, and names, ids and CPUs of the busiest other processes."""
    processes, found = [each for each in psutil.process_iter() if each.pid != os.getpid()], []
    for process in processes:
        with suppress(psutil.Error):  # it has ended, or may not be looked at
            process.cpu_percent()  # which begins to count
    busy = psutil.cpu_percent(WATCHED_S) / 100 * (os.cpu_count() or 1)
    for process in processes:
        with suppress(psutil.Error):
            found.append((process.name(), process.pid, process.cpu_percent() / 100))
    return busy, tuple(sorted((each for each in found if each[2] >= 0.05), key=lambda each: -each[2])[:3])


def _torch_problem() -> str | None:
    """Why torch cannot be imported; None if it can, or if it is still at it when TRIAL_S have passed."""
    try:
        code, said = _apart("import torch")
    except subprocess.TimeoutExpired:
        return None
    return said or f"exit code {code}" if code else None


def _apart(code: str, settings: dict[str, str] | None = None) -> tuple[int, str]:
    """The exit code of Python code in a child process, and the last line that it printed, of its errors if it failed.
    Raises TimeoutExpired after TRIAL_S."""
    at = f"import sys; sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r}); "
    done = subprocess.run(
        [sys.executable, "-P", "-c", at + code], capture_output=True, encoding="utf-8", errors="replace",
        timeout=TRIAL_S, env=os.environ | (settings or {}),
    )  # fmt: skip
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    return done.returncode, lines[-1] if lines else ""


def _newer_source() -> str | None:
    """A source of the library that was changed after the library was built; None outside a checkout."""
    built = native.LIBRARY_PATH.stat().st_mtime if native.LIBRARY_PATH.exists() else math.inf
    newer = [file for file in sorted(SOURCES.glob("*/*")) if file.stat().st_mtime > built]
    return str(newer[0].relative_to(SOURCES.parent)) if newer else None
