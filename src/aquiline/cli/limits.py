"""`aquiline limits`: what a decode step of any model must read and compute, and the tok/s that a device allows."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from aquiline.bench.theory.choice import Grid, LimitsChoice, StorageChoice, grid_of
from aquiline.cli.fields import Fields, Given, with_options
from aquiline.cli.options import AsJson, tell

EXAMPLES = """
Examples:

  aquiline limits

  aquiline limits Qwen/Qwen3-8B --device h100 --context 8192 32768 --batch 1 4 --num-spec-tokens 3 5 --tau 2.5

  aquiline limits ./target/config.json --draft ./draft --bandwidth 3000 --flops 800 --json

  aquiline limits ./target --draft none --dtype int8
"""


@with_options
def limits(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Directory, config.json or hub id; only the config is read. Default: the pair that generate runs."
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(help="EAGLE-3 draft, or none. Default: a known pair's own; for other models a typical head."),
    ] = None,
    *,
    grid: Annotated[Given[Grid], Fields(is_partial=True)],
    storage: StorageChoice,
    device: LimitsChoice,
    as_json: AsJson = False,
) -> None:
    """Print what a decode step of a model must read and compute, and the tok/s that a device allows at best.

    Options of several values take them in a row, behind MODEL: --context 512 2048.
    """

    from aquiline.bench.theory.bounds import costs_of, describe, expectation, notes, tabulate
    from aquiline.bench.theory.chosen import pair_of
    from aquiline.cli.show.limit_tables import show_limits, shown_stages
    from aquiline.models.known_pairs import default_notice

    if model is None:
        tell(default_notice())
    pair = pair_of(model, draft, storage)
    tabulated = grid_of(grid, pair.target.max_positions)
    with shown_stages(is_shown=not as_json) as on_stage:
        roofline = pair.roofline(device, on_stage)
    cells = tabulate(roofline, tabulated)
    remarks, expected = notes(roofline, cells), expectation(costs_of(roofline, min(tabulated.contexts)))
    if as_json:
        rows = {"cells": [cell.as_dict() for cell in cells], "notes": remarks, "expectation": expected}
        print(json.dumps(describe(roofline) | rows))
        return
    show_limits(roofline, tabulated, cells)
    print(f"Expect: {expected}")
    for remark in remarks:
        print(f"note: {remark}")


limits.__doc__ = f"{limits.__doc__}\n{EXAMPLES}"
