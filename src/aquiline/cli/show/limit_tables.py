"""What a device allows a model, as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from aquiline.bench.tables import NO_FIGURE, Table
from aquiline.bench.theory.bounds import Cell
from aquiline.bench.theory.choice import Grid
from aquiline.bench.theory.device import Figure
from aquiline.bench.theory.roofline import Roofline
from aquiline.cli.options import wide_console

UPPER_BOUND = "K+1"


@contextmanager
def shown_stages(is_shown: bool) -> Iterator[Callable[[str], None]]:
    """Who is told what is measured, on standard error."""
    console = Console(stderr=True, quiet=not is_shown)
    status = console.status("")

    def show(stage: str) -> None:
        status.update(f"measuring this machine, once: {stage}")
        status.start()
        if not console.is_terminal:
            console.print(f"measuring this machine, once: {stage}")

    try:
        yield show
    finally:
        status.stop()


def show_limits(roofline: Roofline, grid: Grid, cells: list[Cell]) -> None:
    """Print what a step reads and computes, and the ideal speed of every chain."""
    console = wide_console()
    for line in _headlines(roofline):
        console.print(line, highlight=False, soft_wrap=True)
    unit, name = (1e9, "GB") if any(cell.memory_bytes >= 1e9 for cell in cells) else (1e6, "MB")
    columns = ("context", "batch", "weights", "KV", "GFLOP", "bound", "ms", "tok/s", "memory")
    rows = [_plain_step(cell, unit) for cell in cells]
    console.print(Table(columns, rows, f"one decode step without speculation, {name}").console())
    if roofline.draft is None:
        return
    labels = [f"{tau:g}" for tau in grid.taus] or [UPPER_BOUND, "2.5"]
    chains = [
        [str(cell.context), str(cell.batch), label, *(_chain(cell, k, label) for k in grid.chains)]
        for cell in cells
        for label in labels
    ]
    by_chain = ("context", "batch", "tau", *(f"K={chain}" for chain in grid.chains))
    console.print(
        Table(by_chain, chains, "ideal tok/s and speedup: chains of K tokens, tau of them committed").console()
    )


def _plain_step(cell: Cell, unit: float) -> list[str]:
    """The row of a decode step without speculation; bytes in `unit`."""
    cost = cell.step.cost
    return [
        str(cell.context), str(cell.batch), _digits(cost.weight_bytes / unit), _digits(cost.kv_bytes / unit),
        _digits(cost.flops / 1e9), cell.step.bound, _digits(cell.step.seconds * 1e3), _digits(cell.tokens_per_s),
        _digits(cell.memory_bytes / unit) + ("!" if cell.fits is False else ""),
    ]  # fmt: skip


def _chain(cell: Cell, chain: int, label: str) -> str:
    for s in cell.speculative:
        if s.num_spec_tokens == chain and (s.is_upper_bound if label == UPPER_BOUND else f"{s.tau:g}" == label):
            return f"{_digits(s.tokens_per_s)} {s.speedup:.2f}x"
    return NO_FIGURE


def _headlines(roofline: Roofline) -> list[str]:
    target, draft, ceilings = roofline.target, roofline.draft, roofline.ceilings
    active = f", {_si(target.num_active, '')} active" if target.is_moe else ""
    precision = target.precision
    lines = [
        f"target: {target.family}, {_si(target.num_parameters, '')} parameters{active}, "
        f"{_si(target.stored_bytes(precision), 'B')} as {precision.name}; "
        f"KV {target.body.kv_bytes_per_token(precision):.0f} bytes per token as {precision.kv.name}"
    ]
    if draft is not None:
        own = roofline.draft_precision
        lines.append(
            f"draft: {_si(draft.num_parameters, '')} parameters, {_si(draft.stored_bytes(own), 'B')} as {own.name}, "
            f"vocabulary {draft.body.head.n}; KV {draft.body.kv_bytes_per_token(own):.0f} bytes per token"
        )
    in_arithmetic = f" in {ceilings.arithmetic}" if ceilings.arithmetic else ""
    lines.append(
        f"device: {ceilings.device}; reads {_rate(ceilings.bandwidth, 'B/s')}; "
        f"linears{in_arithmetic} {_rate(ceilings.linear_flops, 'FLOP/s')}"
    )
    if ceilings.copy is not None:
        lines[-1] += f"; copies {_rate(ceilings.copy, 'B/s')}"
    return lines


def _rate(figure: Figure, unit: str) -> str:
    detail = f": {figure.detail}" if figure.detail else ""
    return f"{_si(figure.value, unit)} ({figure.source}{detail})"


def _digits(value: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _si(value: float, unit: str) -> str:
    """Three digits and a decimal prefix."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
