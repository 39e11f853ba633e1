"""A comparison of stages as a table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict

import numpy as np

from aquiline.bench.tables import NO_FIGURE, Table, percent
from aquiline.cli.options import wide_console
from aquiline.parity.run import Parity
from aquiline.parity.stage_figures import StageFigures
from aquiline.types import Float32

COLUMNS = (
    "stage", "rows", "prompt / decode / tree", "mean diff", "max diff", "least cosine", "relative", "argmax", "top-5",
)  # fmt: skip


def show_parity(found: Parity) -> None:
    """Print a row for each stage, what could not be seen, and what was found."""
    console = wide_console()
    names = ("path", "dtype", "draft_dtype", "arithmetic")
    facts = ", ".join(f"{name} {value}" for name, value in found.seen.system.items() if name in names)
    marked = frozenset(number for number, stage in enumerate(found.stages) if not stage.is_good)
    rows = [_cells(stage, found) for stage in found.stages]
    console.print(Table(COLUMNS, rows, facts=facts, notes=_unseen(found.unseen), marked=marked).console())
    for finding in found.findings:
        causes = "not looked for beside a dump"
        if finding.causes is not None:
            causes = "; or ".join(finding.causes) or "unknown: no known mistake explains it"
        print(f"{finding.stage} differs from position {finding.position} ({finding.phase}) on. Cause: {causes}")
    if found.is_good:
        print(f"all stages agree ({len(found.stages)})")


def _cells(stage: StageFigures, found: Parity) -> list[str]:
    phases = [found.seen.record.phase(row) for row in stage.rows]
    counts = " / ".join(str(phases.count(name)) for name in ("prompt", "decode", "tree"))
    f = stage.figures
    figures = [_figure(np.mean, f.mean), _figure(np.max, f.max), _figure(np.min, f.cosine, "{:.5f}")]
    shares = [percent(_number(np.mean, each)) for each in (f.argmax, f.top5)]
    return [stage.stage, str(len(stage.rows)), counts, *figures, _figure(np.max, f.relative), *shares]


def _number(of: Callable[[Float32], object], values: Float32) -> float | None:
    found = float(of(values))  # type: ignore[arg-type]
    return None if math.isnan(found) else found


def _figure(of: Callable[[Float32], object], values: Float32, form: str = "{:.2g}") -> str:
    found = _number(of, values)
    return NO_FIGURE if found is None else form.format(found)


def _unseen(unseen: dict[str, str]) -> list[str]:
    """A line for each reason."""
    stages = {reason: [s for s, why in unseen.items() if why == reason] for reason in unseen.values()}
    return [f"not all seen: {', '.join(names)} ({reason})" for reason, names in stages.items()]


def as_dict(found: Parity) -> dict[str, object]:
    """The whole comparison in plain values, its figures by stage and row."""
    tolerances = {name: asdict(tolerance) for name, tolerance in found.seen.tolerances.items()}
    return {
        "passed": found.is_good, "findings": [asdict(finding) for finding in found.findings],
        "system": found.seen.system, "tolerances": tolerances, "unseen": found.unseen,
        "stages": [_stage(stage, found) for stage in found.stages],
    }  # fmt: skip


def _stage(stage: StageFigures, found: Parity) -> dict[str, object]:
    columns = {name: _finite(values.tolist()) for name, values in vars(stage.figures).items()}
    rows = [
        {"position": row.position, "depth": row.depth, "phase": found.seen.record.phase(row)}
        | {name: values[number] for name, values in columns.items()}
        for number, row in enumerate(stage.rows)
    ]  # fmt: skip
    return {"stage": stage.stage, "passed": stage.is_good, "rows": rows}


def _finite(values: Iterable[float]) -> list[float | None]:
    """JSON has no number for what means nothing."""
    return [value if math.isfinite(value) else None for value in values]
