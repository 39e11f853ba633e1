"""The whole of `aquiline doctor`: facts, what would run and why, measured rates, which known pairs fit, findings."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from aquiline.backends.cpu.native_pair import configure, resolve_arithmetic
from aquiline.bench.theory.bounds import limits_of
from aquiline.bench.theory.ceilings import GIGA, TERA
from aquiline.bench.theory.choice import Grid, LimitsChoice, StorageChoice
from aquiline.bench.theory.measure import Machine, Measurement, Rate, measure_ceilings
from aquiline.bench.theory.roofline import named_roofline
from aquiline.blocks import PACKED, is_packed
from aquiline.config import EngineConfig, Environment
from aquiline.doctor.facts import Facts, read_facts
from aquiline.doctor.findings import SEVERITIES, Finding, findings_of
from aquiline.errors import CheckpointError
from aquiline.models.counting import read_shape
from aquiline.models.known_pairs import PAIRS

SECONDS = 0.1
"""Seconds of measuring for each rate, up to four times as long while it rises."""


@dataclass(frozen=True)
class Course:
    """What would run a pair, and why. backend: native, torch or nothing; arithmetics: by storage of weights; share: of
    the time, in which a control group's quota lets the threads run."""

    backend: str
    reason: str
    threads: int
    threads_reason: str
    arithmetics: dict[str, str]
    share: float


@dataclass(frozen=True)
class Examination:
    """The outcome. rates: of threads while they run; pairs: of each known pair by its name, the JSON of `_fits`;
    seconds: that it took."""

    facts: Facts
    course: Course
    rates: Measurement
    pairs: dict[str, dict[str, Any]]
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def exit_code(self) -> int:
        """0 for nothing worse than a notice, 1 for a warning, 2 for an error."""
        return max((SEVERITIES.index(finding.severity) for finding in self.findings), default=0)

    def as_dict(self) -> dict[str, Any]:
        """The JSON of `aquiline doctor --json`."""
        found = asdict(self) | {"findings": [finding._asdict() for finding in self.findings]}
        return {"exit_code": self.exit_code} | found


def examine(on_stage: Callable[[str], None]) -> Examination:
    """Examine this machine and installation, in some seconds. on_stage is told the name of each stage as it begins."""
    began = time.perf_counter()
    on_stage("looking")
    facts = read_facts()
    course = course_of(facts)
    if facts.is_native:
        configure(Environment(facts.isa, facts.num_threads))
    machine = Machine(facts.cpu, course.threads, facts.library.isa if facts.is_native else "torch")
    rates = measure_ceilings(machine, lambda stage: on_stage(f"measuring: {stage}"), SECONDS)
    pairs, findings = dict[str, dict[str, Any]](), findings_of(facts)
    for name in [name for name, pair in PAIRS.items() if pair.is_here]:
        try:
            pairs[name] = _fits(name, facts, course, rates)
        except CheckpointError as error:
            findings.insert(0, Finding("error", f"{name}: {error}", "or name another pair, such as --target bundled"))
            continue
        if not pairs[name]["contexts"][0]["num_sequences"]:
            what = f"{name}: {pairs[name]['weight_bytes'] / GIGA:.2f} GB of weights and pages do not fit what is free"
            findings.insert(0, Finding("error", what, "free memory, or take a machine with more"))
    return Examination(facts, course, rates, pairs, tuple(findings), time.perf_counter() - began)


def course_of(facts: Facts) -> Course:
    """What would run a pair."""
    threads, why = facts.num_threads or facts.usable_cores, "one for each core that the process may use"
    if facts.cpu_quota is not None and facts.cpu_quota < facts.allowed_cpus:
        why = "by the control group's quota"
    why = "AQUILINE_THREADS" if facts.num_threads else why
    share = min(1.0, (facts.cpu_quota or threads) / threads)
    if facts.is_native:
        given = f"AQUILINE_ISA={facts.isa}" if facts.isa else f"{facts.library.isa}, the best of this CPU and build"
        storages = ("float32", "bfloat16", "int8", "int4", PACKED)
        arithmetics = {dtype: resolve_arithmetic("auto", dtype) for dtype in storages}
        return Course("native", given, threads, why, arithmetics, share)
    runs = facts.torch_problem is None and (facts.isa == "off" or not facts.library.is_fatal)
    reason = "AQUILINE_ISA=off" if facts.isa == "off" else "the native library cannot be used"
    return Course("torch" if runs else "nothing", reason, threads, why, {"all": "float32"}, share)


def _fits(name: str, facts: Facts, course: Course, rates: Measurement) -> dict[str, Any]:
    """A known pair on this machine: for each context the most sequences whose pages an engine would have beside the
    weights, and the most tok/s of plain decoding, for one sequence and for eight; whether drafting can pay."""
    layers = read_shape(name).body.precision.layers.name
    arithmetic = course.arithmetics.get(PACKED if is_packed(layers) else layers, "float32")
    flops: Rate = getattr(rates, arithmetic)
    device = LimitsChoice(
        arithmetic=arithmetic, bandwidth=rates.read.per_s * course.share / GIGA, flops=flops.per_s * course.share / TERA
    )
    roofline = named_roofline(name, None, StorageChoice(), device, lambda stage: None)
    ceilings = replace(roofline.ceilings, cache_bytes=facts.cache_bytes)
    found = limits_of(replace(roofline, ceilings=ceilings), Grid(batches=(1, 8)))
    models = [found["target"], found["draft"]]
    weight_bytes = sum(model["weight_bytes"] for model in models)
    # The draft's input, made of the target's features, is kept for every token too.
    per_token = sum(model["kv_bytes_per_token"] for model in models) + 4 * roofline.target.body.hidden_size
    for_pages = EngineConfig().cache_fraction * max(0, facts.free_bytes - weight_bytes)
    contexts = [
        {
            "context": one["context"],
            "num_sequences": int(for_pages // (one["context"] * per_token)),
            "tokens_per_s": [cell["baseline_tokens_per_s"] for cell in (one, eight)],
        }
        for one, eight in zip(found["cells"][::2], found["cells"][1::2], strict=True)
    ]
    return {"weight_bytes": weight_bytes, "contexts": contexts, "expectation": found["expectation"]}
