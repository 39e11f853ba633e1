"""`aquiline report`: a directory of results as one page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def report(
    directory: Annotated[Path, typer.Argument(help="Results of `aquiline bench`, one JSON each.", metavar="DIR")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Page to write.")] = Path("report.html"),
) -> None:
    """Write benchmark results as one HTML page of plots and tables that opens offline. Plots need `aquiline[train]`.

    Machines, targets and ways to compute have a section each; simulated acceptance, random weights and the CPU profile
    are marked wherever they apply. Broken results are refused.

    Examples:

      aquiline report results/

      aquiline report results/ -o report.html
    """
    from aquiline.bench.plots import what_is_missing
    from aquiline.bench.report.page import write_report
    from aquiline.bench.results.result import read_results

    results = read_results(directory)
    write_report(results, out)
    missing = what_is_missing()
    if missing is not None:
        print(f"aquiline: {out} has no plots: {missing}", file=sys.stderr)
    print(f"{out}: {len(results)} results")
