"""`aquiline bench`: the scenarios, and `aquiline bench table`: their results as tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from aquiline.bench.suite.suite_plan import Plan, RandomWeights
from aquiline.cli.fields import Fields, with_options
from aquiline.cli.options import DefaultGroup, ListCommand, named, wide_console
from aquiline.config import PairConfig

PAIR = Fields(only=("target", "draft", "dtype", "draft_dtype", "arithmetic", "kv_dtype"))


@with_options
def bench(
    out: Annotated[Path, typer.Option(help="Directory of results, one JSON each; what is there is not run again.")],
    *,
    plan: Plan,
    pair: Annotated[PairConfig, PAIR],
    random: RandomWeights,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as one JSON list.")] = False,
) -> None:
    """Measure scenarios, baseline and chains in turn, another first in every round, and write one JSON per setting.

    Contexts are real tokens of real text, prefilled once per scenario; every setting's output equals the baseline's. On
    the cpu profile the pair runs up to 2K, and random weights with a simulated acceptance length 8K to 64K.

    Examples:

      aquiline bench --out results/

      aquiline bench --out results/ --scenario single batch --num-spec-tokens 2 3 --temperature 0 0.8

      aquiline bench --out results/ --contexts 512 2048 --batches 1 4 --micro-steps 64

      aquiline bench table results/ --older results-of-last-week/
    """
    from aquiline.bench.suite.scenarios import sources_of
    from aquiline.bench.suite.suite import run_suite
    from aquiline.cli.show.results import line_of, shown_progress

    source, random_source = sources_of(pair if random.random_weights is not None else named(pair), random)
    found = []
    with shown_progress() as (progress, console):
        for result in run_suite(plan, source, random_source, out, progress):
            found.append(result)
            if not as_json:
                console.print(line_of(result), soft_wrap=True)
    if as_json:
        print(json.dumps(found))
    if progress.skipped:
        raise typer.Exit(1)


def table(
    directory: Annotated[Path, typer.Argument(help="Directory of results.")],
    older: Annotated[Path | None, typer.Option(help="Mark regressions against the results of this directory.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    short: Annotated[
        bool, typer.Option("--short", help="Markdown of one row per scenario; only results of committed source.")
    ] = False,
) -> None:
    """Tabulate results: speed, tau and share of the ideal by setting, one table per scenario and machine.

    Exits with 1 if something became slower than the older results beyond their noise.

    Examples:

      aquiline bench table results/

      aquiline bench table results/ --markdown > results.md

      aquiline bench table results/ --older results-of-last-week/
    """

    from aquiline.bench.results.result import read_results
    from aquiline.bench.results.table import report, summary

    found, before = read_results(directory), read_results(older) if older is not None else None
    tables = report(found, before)
    if short:
        print(summary(found), end="")
    elif markdown:
        print(tables.markdown())
    else:
        wide_console().print(tables.console())
    if tables.regressions:
        raise typer.Exit(1)


commands = typer.Typer(cls=DefaultGroup, help="Measure scenarios (run, the default) and tabulate results (table).")
commands.command("run", cls=ListCommand)(bench)
commands.command("table", cls=ListCommand)(table)
