"""`aquiline doctor`: what this installation has, what would run on it, and what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from aquiline.cli.options import AsJson, wide_console

if TYPE_CHECKING:
    from aquiline.doctor.examination import Examination

STYLES = {"notice": "", "warning": "yellow", "error": "bold red"}
WORST = ("fine", "it runs, but not at its best", "it does not run")


def doctor(*, as_json: AsJson = False) -> None:
    """Look at this machine and this installation, in a few seconds: what runs, how fast it can be, what is wrong.

    Needs no model and no network, and works where the native library or torch is missing or broken.

    Exits with 0 if nothing is wrong, with 1 if something costs speed or makes figures unsure, with 2 if nothing runs.

    Examples:

      aquiline doctor

      aquiline doctor --json
    """
    from rich.console import Console

    from aquiline.doctor.examination import examine

    with Console(stderr=True, quiet=as_json).status("looking") as status:
        found = examine(status.update)
    if as_json:
        print(json.dumps(found.as_dict()))
    else:
        _show(found)
    raise typer.Exit(found.exit_code)


def _show(found: Examination) -> None:
    """Print what was found, and last what is wrong."""
    from rich.text import Text

    console = wide_console()
    for name, line in _lines(found):
        console.print(Text.assemble((f"{name:<13}", "bold"), line), soft_wrap=True)
    for finding in found.findings:
        told = Text.assemble((finding.severity, STYLES[finding.severity]), f": {finding.what}\n  -> {finding.fix}")
        console.print(told, soft_wrap=True)
    console.print(f"{WORST[found.exit_code]} (exit code {found.exit_code}, {found.seconds:.1f} s)", style="bold")


def _lines(found: Examination) -> Iterator[tuple[str, str]]:
    """The facts, each with its name: the machine, the software, what runs, and how fast."""
    from aquiline.bench.theory.choice import ARITHMETICS
    from aquiline.doctor.facts import LACKING

    has, course, rates = found.facts, found.course, found.rates
    quota = "no quota" if has.cpu_quota is None else f"a quota of {has.cpu_quota:g} CPUs"
    free = f"{has.free_bytes / 1e9:.1f} GB free for this process"
    yield "CPU", f"{has.cpu}; last-level cache {(has.cache_bytes or 0) / 2**20:.0f} MiB"
    yield "instructions", " ".join(has.features) or "not known"
    yield "cores", f"{has.num_cpus} CPUs, {has.allowed_cpus} by affinity, {quota}: {has.usable_cores} usable"
    yield "memory", f"{has.memory_bytes / 1e9:.1f} GB, {free}; huge pages: {has.huge_pages or 'not known'}"
    yield "library", has.library.problem or f"sound, with kernels for {', '.join(has.library.isas)}"
    yield "compiler", has.compiler or "none; only building the library needs one"
    for name in ("torch", "transformers"):
        yield name, has.version(name) or "not installed"
    for extra, lacking in LACKING.items():
        missing = [package.name for package in has.packages if package.extra == extra and package.version is None]
        yield f"[{extra}]", f"{', '.join(missing) or 'nothing'} missing; for {lacking}"
    yield "runs", f"{course.backend} ({course.reason}), threads: {course.threads}, {course.threads_reason}"
    arithmetic = ", ".join(f"{arithmetic} over {storage}" for storage, arithmetic in course.arithmetics.items())
    yield "arithmetic", f"{arithmetic} weights"
    when = "" if course.share == 1 else f"; while the quota lets threads run, {course.share:.0%} of the time"
    yield "reads", f"{rates.read.per_s / 1e9:.1f} GB/s, copies {rates.copy.per_s / 1e9:.1f}{when}"
    products = {name: getattr(rates, name) for name in ARITHMETICS}
    told = ", ".join(f"{name} {rate.per_s / 1e12:.2f}" for name, rate in products.items() if rate is not None)
    yield "multiplies", f"{told} TFLOP/s{when}"
    for name, pair in found.pairs.items():
        yield name, f"{pair['weight_bytes'] / 1e6:.0f} MB; {pair['expectation']}"
        for fit in pair["contexts"]:
            one, eight = fit["tokens_per_s"]
            fits = f"context {fit['context']}: {fit['num_sequences']} sequences fit; without drafts at best {one:.0f}"
            yield "", f"{fits} tok/s alone, {eight:.0f} for eight together"
