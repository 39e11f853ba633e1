"""The limits of a model on a device, as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from aquiline.bench.tables import NO_FIGURE, Table
from aquiline.bench.theory.bounds import Cell
from aquiline.bench.theory.choice import EXAMPLE_TAU, Grid
from aquiline.bench.theory.links import LINKS
from aquiline.cli.options import wide_console

UPPER_BOUND = "K+1"
BREAK_EVEN = "break-even"


@contextmanager
def shown_stages(is_shown: bool) -> Iterator[Callable[[str], None]]:
    """The function that is told each stage of measuring; it shows the stage on standard error."""
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


def show_limits(found: dict[str, Any], grid: Grid, is_moe: bool) -> None:
    """Print the bytes and FLOPs of a step, and the ideal speed of every chain. found: the JSON of `limits_of`."""
    console, cells = wide_console(), found["cells"]
    for line in _headlines(found, is_moe):
        console.print(line, highlight=False, soft_wrap=True)
    unit, name = (1e9, "GB") if any(cell["memory_bytes"] >= 1e9 for cell in cells) else (1e6, "MB")
    columns = ("context", "batch", "weights", "KV", "GFLOP", "bound", "ms", "tok/s", "memory")
    rows = [_plain_step(cell, unit) for cell in cells]
    console.print(Table(columns, rows, f"one decode step without speculation, {name}").console())
    if found["links"]:
        console.print(_links(found["links"], grid.ranks).console())
    if found["draft"] is None:
        return
    labels = [f"{tau:g}" for tau in grid.taus] or [UPPER_BOUND, f"{EXAMPLE_TAU:g}"]
    chains = [
        [str(cell["context"]), str(cell["batch"]), label, *(_chain(cell, k, label) for k in grid.chains)]
        for cell in cells
        for label in (*labels, BREAK_EVEN)
    ]
    by_chain = ("context", "batch", "tau", *(f"K={chain}" for chain in grid.chains))
    console.print(
        Table(by_chain, chains, "ideal tok/s and speedup: chains of K tokens, tau of them committed").console()
    )


def _links(links: list[dict[str, Any]], ranks: int) -> Table:
    """What ranks send each other in a forward of the target, and how long links take for it."""
    columns = ("mode", "rows", "collectives", "MB sent", *(f"ms, {link.name}" for link in LINKS))
    rows = [
        [
            met["parallel_mode"], f"{met['rows']}", f"{met['collectives']:.0f}", _digits(met["sent_bytes"] / 1e6),
            *map(_digits, met["ms"].values()),
        ]
        for met in links
    ]  # fmt: skip
    notes = [f"{link.name}: {link.source}" for link in LINKS]
    return Table(columns, rows, f"{ranks} ranks, one forward of the target in float32, to each other rank", notes=notes)


def _plain_step(cell: Cell, unit: float) -> list[str]:
    """The row of a decode step without speculation; bytes in `unit`."""
    flops = cell["linear_flops"] + cell["attention_flops"]
    return [
        str(cell["context"]), str(cell["batch"]), _digits(cell["weight_bytes"] / unit),
        _digits(cell["kv_bytes"] / unit), _digits(flops / 1e9), cell["bound"], _digits(cell["step_ms"]),
        _digits(cell["baseline_tokens_per_s"]),
        _digits(cell["memory_bytes"] / unit) + ("!" if cell["fits"] is False else ""),
    ]  # fmt: skip


def _chain(cell: Cell, chain: int, label: str) -> str:
    if label == BREAK_EVEN:
        (tau,) = (found["tau"] for found in cell["break_even"] if found["num_spec_tokens"] == chain)
        return "never" if tau is None else f"tau {tau:.2f}"
    for s in cell["speculative"]:
        tau = UPPER_BOUND if label == UPPER_BOUND and s["is_upper_bound"] else f"{s['tau']:g}"
        if (s["num_spec_tokens"], tau) == (chain, label):
            return f"{_digits(s['tokens_per_s'])} {s['speedup']:.2f}x"
    return NO_FIGURE


def _headlines(found: dict[str, Any], is_moe: bool) -> list[str]:
    target, draft, ceilings = found["target"], found["draft"], found["ceilings"]
    active = f", {_si(target['num_active'], '')} active" if is_moe else ""
    lines = [f"target: {target['family']}, {_model(target, active)} as {target['kv_dtype']}"]
    if draft is not None:
        vocabulary = f", vocabulary {draft['draft_vocab_size']}"
        lines.append(f"draft: {_model(draft, vocabulary=vocabulary)}")
    in_arithmetic = f" in {ceilings['arithmetic']}" if ceilings["arithmetic"] else ""
    lines.append(
        f"device: {ceilings['device']}; reads {_rate(ceilings['bandwidth'], 'B/s')}; "
        f"linears{in_arithmetic} {_rate(ceilings['linear_flops'], 'FLOP/s')}"
    )
    if ceilings["copy"] is not None:
        lines[-1] += f"; copies {_rate(ceilings['copy'], 'B/s')}"
    return lines


def _model(model: dict[str, Any], active: str = "", vocabulary: str = "") -> str:
    """The size of a target or a draft."""
    return (
        f"{_si(model['num_parameters'], '')} parameters{active}, {_si(model['weight_bytes'], 'B')} as "
        f"{model['dtype']}{vocabulary}; KV {model['kv_bytes_per_token']:.0f} bytes per token"
    )


def _rate(figure: dict[str, Any], unit: str) -> str:
    detail = f": {figure['detail']}" if figure["detail"] else ""
    return f"{_si(figure['per_s'], unit)} ({figure['source']}{detail})"


def _digits(value: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _si(value: float, unit: str) -> str:
    """Three digits and a decimal prefix."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
