"""`aquiline limits`: what a decode step of any model must read and compute, and the tok/s that a device allows."""

from __future__ import annotations

import inspect
import json
from typing import Annotated

import typer

from aquiline.bench.theory.choice import Grid, LimitsChoice, StorageChoice
from aquiline.cli.fields import with_options
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
    grid: Grid,
    storage: StorageChoice,
    device: LimitsChoice,
    as_json: AsJson = False,
) -> None:
    """Print what a decode step of a model must read and compute, and the tok/s that a device allows at best.

    Options of several values take them in a row, after MODEL: --context 512 2048.
    """

    from aquiline.bench.theory.bounds import limits_of
    from aquiline.bench.theory.roofline import named_roofline
    from aquiline.cli.show.limit_tables import show_limits, shown_stages
    from aquiline.models.known_pairs import default_notice

    if model is None:
        tell(default_notice())
    with shown_stages(is_shown=not as_json) as on_stage:
        roofline = named_roofline(model, draft, storage, device, on_stage)
    found = limits_of(roofline, grid)
    if as_json:
        print(json.dumps(found))
        return
    show_limits(found, grid, roofline.target.is_moe)
    print(f"Expect: {found['expectation']}")
    for remark in found["notes"]:
        print(f"note: {remark}")


limits.__doc__ = f"{inspect.getdoc(limits)}\n{EXAMPLES}"
