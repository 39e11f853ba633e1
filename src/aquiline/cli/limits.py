"""`aquiline limits`: what a decode step of any model must read and compute, and the tok/s that a device allows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from aquiline.cli.options import wide_console

if TYPE_CHECKING:
    from rich.console import Console

    from aquiline.bench.theory.ceilings import Choice
    from aquiline.bench.theory.device import Ceilings, Figure
    from aquiline.bench.theory.limits import Cell, Grid
    from aquiline.bench.theory.roofline import Roofline
    from aquiline.bench.theory.shapes import DraftShape, ModelShape

DEVICE, STORAGE = "Device", "Storage"
UPPER_BOUND = "K+1"

EXAMPLES = """
Examples:

  aquiline limits

  aquiline limits ./Llama-3.1-8B --device h100 --context 8192 32768 --batch 1 4 --num-spec-tokens 3 5 --tau 2.5

  aquiline limits ./gpt-oss-120b/config.json --draft ./head --bandwidth 3000 --flops 800 --json

  aquiline limits ./target --draft none --dtype int8
"""


def limits(
    model: Annotated[
        str | None,
        typer.Argument(help="Directory, config.json or hub id; only the config is read. Default: the bundled pair."),
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="EAGLE-3 draft, or none. Default: the bundled one; for MODEL, a typical head.")
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option(help="Cached tokens per sequence. Default: 512 2048 8192.")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Sequences. Default: 1 4 8.")] = None,
    num_spec_tokens: Annotated[list[int] | None, typer.Option(help="Chain lengths K. Default: 2 3 4 5.")] = None,
    tau: Annotated[
        list[float] | None, typer.Option(help="Tokens committed a step. Default: the most a chain can, and 2.5.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Weights: float32, bfloat16, float16, fp8, int8, int4 or mxfp4. Default: as the config says.",
            rich_help_panel=STORAGE,
        ),
    ] = None,
    draft_dtype: Annotated[
        str | None,
        typer.Option(
            help="The draft's. Default: bfloat16, or as the target where that is not quantised.",
            rich_help_panel=STORAGE,
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(help="Keys and values: float32, bfloat16, float16 or fp8.", rich_help_panel=STORAGE),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu, measured once and cached; or by datasheet a100, h100, h200, b200, l4, l40s, rtx3090, rtx4090, "
            "rtx5090, mi300x. Default: cpu.",
            rich_help_panel=DEVICE,
        ),
    ] = None,
    arithmetic: Annotated[
        str | None,
        typer.Option(help="float32 or bfloat16. Default: float32 on a CPU, else bfloat16.", rich_help_panel=DEVICE),
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(help="GB/s, in the place of the device's.", rich_help_panel=DEVICE)
    ] = None,
    flops: Annotated[
        float | None, typer.Option(help="TFLOP/s, in the place of the device's.", rich_help_panel=DEVICE)
    ] = None,
    remeasure: Annotated[
        bool, typer.Option("--remeasure", help="Measure the CPU again.", rich_help_panel=DEVICE)
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print what a decode step of a model must read and compute, and the tok/s that a device allows at best.

    Options of several values take them in a row, behind MODEL: --context 512 2048.
    """

    from aquiline.bench.theory.ceilings import Choice
    from aquiline.bench.theory.configs import read_shape
    from aquiline.bench.theory.limits import Grid, describe, notes, tabulate
    from aquiline.bench.theory.roofline import Roofline
    from aquiline.bench.theory.shapes import precision_of
    from aquiline.engine.bundled import BUNDLED_TARGET

    target = read_shape(model or BUNDLED_TARGET, dtype, kv_dtype)
    head = _draft(model, draft, target)
    precision = precision_of(draft_dtype or target.precision.plain.name, kv_dtype)
    longest = target.max_positions
    contexts = context or [c for c in (512, 2048, 8192) if longest is None or c <= longest] or [longest or 1]
    grid = Grid(tuple(contexts), tuple(batch or (1, 4, 8)), tuple(num_spec_tokens or (2, 3, 4, 5)), tuple(tau or ()))
    choice = Choice(device, arithmetic, bandwidth, flops, remeasure)
    roofline = Roofline(target, head, precision, _ceilings(choice, target.precision.plain.name, quiet=as_json))
    cells = tabulate(roofline, grid)
    remarks = notes(roofline, cells)
    if as_json:
        rows = {"cells": [cell.as_dict() for cell in cells], "notes": remarks}
        print(json.dumps(describe(roofline) | rows))
        return
    _show(wide_console(), roofline, grid, cells)
    for remark in remarks:
        print(f"note: {remark}")


limits.__doc__ = f"{limits.__doc__}\n{EXAMPLES}"


def _draft(model: str | None, draft: str | None, target: ModelShape) -> DraftShape | None:
    from aquiline.bench.theory.configs import assumed_draft, read_draft_shape
    from aquiline.engine.bundled import BUNDLED_DRAFT

    if draft == "none":
        return None
    if draft is not None:
        return read_draft_shape(draft, target)
    return assumed_draft(target) if model is not None else read_draft_shape(BUNDLED_DRAFT, target)


def _ceilings(choice: Choice, dtype: str, *, quiet: bool) -> Ceilings:
    from rich.console import Console

    from aquiline.bench.theory.ceilings import ceilings_of

    console = Console(stderr=True, quiet=quiet)
    status = console.status("")

    def show(stage: str) -> None:
        status.update(f"measuring this machine, once: {stage}")
        status.start()
        if not console.is_terminal:
            console.print(f"measuring this machine, once: {stage}")

    try:
        return ceilings_of(choice, dtype, show)
    finally:
        status.stop()


def _show(console: Console, roofline: Roofline, grid: Grid, cells: list[Cell]) -> None:
    from rich.table import Table

    for line in _headlines(roofline):
        console.print(line, highlight=False, soft_wrap=True)
    unit, name = (1e9, "GB") if any(cell.memory_bytes >= 1e9 for cell in cells) else (1e6, "MB")
    table = Table(title=f"one decode step without speculation, {name}")
    for column in ("context", "batch", "weights", "KV", "GFLOP", "bound", "ms", "tok/s", "memory"):
        table.add_column(column, justify="left" if column == "bound" else "right", no_wrap=True)
    for cell in cells:
        cost = cell.step.cost
        table.add_row(
            str(cell.context), str(cell.batch), _digits(cost.weight_bytes / unit), _digits(cost.kv_bytes / unit),
            _digits(cost.flops / 1e9), cell.step.bound, _digits(cell.step.seconds * 1e3), _digits(cell.tokens_per_s),
            _digits(cell.memory_bytes / unit) + ("!" if cell.fits is False else ""),
        )  # fmt: skip
    console.print(table)
    if roofline.draft is None:
        return
    table = Table(title="ideal tok/s and speedup: chains of K tokens, tau of them committed")
    for column in ("context", "batch", "tau", *(f"K={chain}" for chain in grid.chains)):
        table.add_column(column, justify="right", no_wrap=True)
    for cell in cells:
        for label in [f"{tau:g}" for tau in grid.taus] or [UPPER_BOUND, "2.5"]:
            table.add_row(str(cell.context), str(cell.batch), label, *(_chain(cell, k, label) for k in grid.chains))
    console.print(table)


def _chain(cell: Cell, chain: int, label: str) -> str:
    for s in cell.speculative:
        if s.num_spec_tokens == chain and (s.is_upper_bound if label == UPPER_BOUND else f"{s.tau:g}" == label):
            return f"{_digits(s.tokens_per_s)} {s.speedup:.2f}x"
    return "-"


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
