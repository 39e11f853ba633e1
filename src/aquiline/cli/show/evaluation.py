"""An evaluation in the terminal: a bar while it runs, tables of speed and acceptance, a plot in a file."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from aquiline.bench.eval.eval_plan import Evaluated
from aquiline.bench.eval.eval_plot import plot_evaluation
from aquiline.bench.eval.eval_report import EvalFacts, cells, groups, notes, teacher_table
from aquiline.bench.eval.evaluate import Evaluation
from aquiline.bench.eval.figures import Figures, Tables
from aquiline.cli.options import wide_console

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


def plot_or_say_why(found: Evaluated, derived: Tables, facts: EvalFacts, out: Path) -> None:
    """Write eval.png where matplotlib is."""
    headline = f"{facts.dataset}, {len(found.questions)} questions: {facts}"
    try:
        plot_evaluation(found, derived, headline, out / "eval.png")
    except (ValueError, OSError) as error:
        print(f"aquiline: {out / 'eval.png'} was not written: {error}", file=sys.stderr)


def show_evaluation(found: Evaluated, derived: Tables, facts: EvalFacts) -> None:
    """Print speed and acceptance by length and by category."""
    console = wide_console()
    console.print(f"{facts.dataset}: {len(found.questions)} questions; {facts}\n", soft_wrap=True)
    for table in _tables(groups(derived), "length"):
        console.print(table)
    for table in _tables(derived.by_category, "category"):
        console.print(table)
    for taught in found.teacher_forced:
        console.print(teacher_table(found, taught).console())
    console.print("repeated: share of 8-grams that stood earlier in the same text; loops flatter every drafter\n")
    for line in notes(found, derived):
        console.print(line, soft_wrap=True, markup=False)


def _tables(groups: list[list[Figures]], by: str) -> list[Table]:
    """Speed and acceptance of groups, a section each."""
    speed = ("setting", "s/text", "tok/s", "", "speedup [95 %]", "with prefill")
    drafts = ("setting", "tau", "calls/token", "accepted", "by position", "repeated")
    made = []
    for columns in (speed, drafts) if groups else ():
        table = Table("temp", by, title_justify="left")
        for column in columns:
            table.add_column(column, justify="left" if column in ("setting", "", "by position") else "right")
        for group in groups:
            top = max(f.decode_tokens_per_s for f in group)
            first = group[0]
            where = [
                "all" if first.temperature is None else f"{first.temperature:g}",
                str((first.length if by == "length" else first.category) or "all"),
            ]
            for f in group:
                row = cells(f) | {"": _bar(f.decode_tokens_per_s / top if top else 0.0)}
                table.add_row(*where, *(row[column] for column in columns))
                where = ["", ""]
            table.add_section()
        made.append(table)
    return made


def _bar(share: float) -> str:
    return "█" * round(BAR * share) + "░" * (BAR - round(BAR * share))
