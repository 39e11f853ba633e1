"""What is wrong with an installation or a machine, how bad it is, and what to do: known bad combinations, one by one.

Judges facts alone; reads and measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from aquiline.doctor.facts import Facts

SEVERITIES = ("notice", "warning", "error")
"""notice: good to know; warning: it runs, but not at its best, or figures are unsure; error: it does not run."""
BUSY_CPUS = 0.2
"""CPUs' worth of other work that makes measurements unsure."""
BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
SPINNING = {"OMP_WAIT_POLICY": "active", "KMP_BLOCKTIME": "infinite", "GOMP_SPINCOUNT": "infinite"}


class Finding(NamedTuple):
    """One thing that is not as it should be, and what to do about it."""

    severity: Literal["notice", "warning", "error"]
    what: str
    fix: str


def findings_of(facts: Facts) -> list[Finding]:
    """Every finding, the worst first."""
    found = [finding for judge in (_backend, _kernels, _cores, _openmp, _packages, _memory) for finding in judge(facts)]
    return sorted(found, key=lambda finding: -SEVERITIES.index(finding.severity))


def _backend(facts: Facts) -> Iterator[Finding]:
    """Whether what should run pairs does, or something else, or nothing."""
    compiling = "" if facts.compiler else "install a C++17 compiler (apt-get install g++, or Xcode's tools), then "
    rebuild = f"{compiling}pip install --force-reinstall --no-deps . in aquiline's checkout"
    problem = facts.library.problem
    if facts.environment_problem is not None:
        yield Finding("error", facts.environment_problem, "mend or unset it; its default stands for it here")
    if facts.library.is_fatal and facts.isa != "off":
        fix = "unset AQUILINE_ISA" if facts.isa else f"{rebuild}; until then set AQUILINE_ISA=off, if torch is there"
        yield Finding("error", f"no command can run a model: {problem}", fix)
    elif not facts.is_native:
        why, fix = problem or "AQUILINE_ISA=off", rebuild if problem else "unset AQUILINE_ISA"
        if facts.torch_problem is None:
            slower = "torch runs instead, several times slower, and trees are not bit-exact"
            yield Finding("warning", f"the native library is not used: {why}; {slower}", fix)
        else:
            what = f"nothing can run a model: the native library is not used ({why}), nor torch ({facts.torch_problem})"
            yield Finding("error", what, f"{fix}; or pip install 'aquiline[torch]', which is slower")
    elif facts.newer_source is not None:
        what = f"the native library may be stale: {facts.newer_source} was changed after it was built"
        yield Finding("warning", what, rebuild)


def _kernels(facts: Facts) -> Iterator[Finding]:
    """Whether the kernels are the fastest that this CPU runs, and read their weights through huge pages."""
    isa, isas, cost = facts.library.isa, facts.library.isas, "which costs 10 % or more of a step"
    if facts.is_native and isa != isas[0]:
        what = f"AQUILINE_ISA={isa}: this CPU has {isas[0]}, which gives the same bits sooner"
        yield Finding("warning", what, "unset AQUILINE_ISA")
    if isas[:1] == ("portable",):
        what = "the portable kernels run, several times slower: this CPU has neither AVX2 nor NEON"
        yield Finding("notice", what, "take another machine, or a virtual one that shows its CPU's instruction sets")
    if facts.huge_pages == "never":
        what, fix = "huge pages are off", "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        yield Finding("warning", f"{what}: weights are read through pages of 4 KB, {cost}", fix)
    if facts.variables.get("NUMPY_MADVISE_HUGEPAGE") == "0":
        what = f"NUMPY_MADVISE_HUGEPAGE=0: packed weights get no huge pages, {cost}"
        yield Finding("warning", what, "unset NUMPY_MADVISE_HUGEPAGE")


def _cores(facts: Facts) -> Iterator[Finding]:
    """Whether the threads have CPUs to run on, now and always."""
    quota, allowed, cores = facts.cpu_quota, facts.allowed_cpus, facts.usable_cores
    if quota is not None and quota < 1:
        what = f"the control group grants {quota:g} of a CPU: steps stand still {1 - quota:.0%} of the time, in pauses"
        what += " of tens of milliseconds"
        yield Finding("warning", what, "grant a whole CPU or more (docker run --cpus, Kubernetes' limits.cpu)")
    elif quota is not None and quota < allowed:
        what = f"the control group grants {quota:g} of {allowed} CPUs: {cores} threads run"
        fix = f"grant more to go faster; for training set OMP_NUM_THREADS={cores}, since torch looks at no quota"
        yield Finding("notice", what, fix)
    if allowed < facts.num_cpus:
        what = f"this process may run on {allowed} of {facts.num_cpus} CPUs, by its affinity"
        yield Finding("notice", what, "start it without taskset, or with more CPUs in its cpuset")
    if facts.num_threads is not None and facts.num_threads > cores:
        what = f"AQUILINE_THREADS={facts.num_threads}: of usable cores there are {cores}, and more threads delay them"
        yield Finding("warning", what, "unset AQUILINE_THREADS")
    if facts.busy_cpus >= BUSY_CPUS:
        seen = ", ".join(f"{name} ({pid}) {cpus:.1f}" for name, pid, cpus in facts.busiest)
        what = f"others take {facts.busy_cpus:.1f} of {facts.num_cpus} CPUs right now: {seen or 'not seen from here'}"
        fix = "end or pause them before measuring; where no process is seen, another container or virtual machine is it"
        yield Finding("warning", f"{what}; steps wait for them, and rates are too low", fix)


def _openmp(facts: Facts) -> Iterator[Finding]:
    """Settings of torch's OpenMP that take the cores of the native threads, in processes that use both."""
    for name, value in facts.variables.items() if facts.version("torch") else ():
        what = ""
        if name in BINDING and value.lower() not in ("", "false", "none", "disabled"):
            what = "torch binds the thread that loads it to one core, and native threads started later share that core"
        elif value.lower() == SPINNING.get(name):
            what = "torch's idle threads never sleep, and take the cores of the native threads"
        if what:
            yield Finding("warning", f"{name}={value}: {what}", f"unset {name}")


def _packages(facts: Facts) -> Iterator[Finding]:
    """Packages that are missing or of another version, and the chat model's weights."""
    for package in facts.packages:
        if not package.is_fit and (package.version or not package.extra):
            there = f"{package.version} is installed" if package.version else "is not installed"
            needed, extra = f"{package.name}{package.needed}", f"[{package.extra}]" if package.extra else ""
            what = f"{package.name}: {there}, and aquiline{extra} needs {needed}"
            yield Finding("warning" if extra else "error", what, f"pip install '{needed}'")
    if not facts.packages:
        what = "aquiline is on the path without being installed: what its extras need is not known"
        yield Finding("notice", what, "pip install . in its checkout")
    if facts.default_notice is not None:
        yield Finding("notice", facts.default_notice, "install it to chat; the bundled pair continues Python source")


def _memory(facts: Facts) -> Iterator[Finding]:
    """Whether a container's limit is nearer than the machine's."""
    free, left = facts.machine_free_bytes / 1e9, facts.free_bytes / 1e9
    if left < free:
        what = f"the control group leaves {left:.2f} GB of {free:.1f} GB that are free; who takes more is killed"
        yield Finding("notice", what, "grant more memory for larger models (docker run --memory)")
