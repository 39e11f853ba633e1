"""An evaluation in the terminal: a bar while it runs, tables of speed and acceptance, a plot in a file."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from aquiline.bench.eval.eval_plot import plot_evaluation
from aquiline.bench.eval.eval_report import EvalReport, cells, title
from aquiline.bench.eval.evaluate import Evaluation
from aquiline.bench.eval.figures import Evaluated, Figures
from aquiline.bench.tables import Table
from aquiline.cli.options import wide_console

SPEED = ("setting", "s/text", "tok/s", "", "speedup [95 %]", "with prefill")
DRAFTS = ("setting", "tau", "calls/token", "accepted", "by position", "repeated")
BAR = 10
"""Characters of the longest bar."""


def run_shown(evaluation: Evaluation, is_shown: bool) -> Evaluated:
    """Run an evaluation, with a bar where somebody looks."""
    columns = (TextColumn("evaluating"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    is_shown = is_shown and console.is_terminal
    with Progress(*columns, console=console, disable=not is_shown, transient=True) as progress:
        task, total = progress.add_task("", total=None), evaluation.num_tokens  # to and fro until the first text
        evaluation.on_progress = lambda num_tokens: progress.update(task, total=total, advance=num_tokens)
        return evaluation.run()


def plot_or_say_why(report: EvalReport, out: Path) -> None:
    """Write eval.png where matplotlib is."""
    try:
        plot_evaluation(report, out / "eval.png")
    except (ValueError, OSError) as error:
        print(f"aquiline: {out / 'eval.png'} was not written: {error}", file=sys.stderr)


def show_evaluation(report: EvalReport) -> None:
    """Print speed and acceptance by length and by category."""
    console = wide_console()
    facts, found = report.facts, report.found
    console.print(f"{facts.dataset}: {len(found.questions)} questions; {facts}\n", soft_wrap=True)
    for groups in filter(None, (found.groups, found.by_category)):
        for table in _tables(groups):
            console.print(table.console())
    for taught in found.teacher_forced:
        console.print(report.teacher_table(taught).console())
    console.print("repeated: share of 8-grams that stood earlier in the same text; loops flatter every drafter\n")
    for line in report.notes():
        console.print(line, soft_wrap=True, markup=False)


def _tables(groups: list[list[Figures]]) -> list[Table]:
    """Speed, with a bar for each setting, and acceptance: a table of each, with the groups under headings."""
    headings: dict[int, str] = {}
    lines: list[dict[str, str]] = []
    for group in groups:
        headings[len(lines)] = title(group)
        top = max(f.decode_tokens_per_s for f in group)
        lines += [cells(f) | {"": _bar(f.decode_tokens_per_s / top if top else 0.0)} for f in group]
    return [
        Table.of_cells([{name: line[name] for name in columns} for line in lines], headings=headings)
        for columns in (SPEED, DRAFTS)
    ]


def _bar(share: float) -> str:
    return "█" * round(BAR * share) + "░" * (BAR - round(BAR * share))
