"""What gates said of results, as tables."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from aquiline.bench.gates.judge import Check, Judgement
from aquiline.bench.gates.verdicts import Outcome, Report
from aquiline.cli.options import wide_console

STYLES = {"green": "green", "red": "bold red", "refused": "bold yellow"}


def show_report(report: Report) -> None:
    """Print every outcome: its verdict, its limits and what was measured."""
    console = wide_console()
    for outcome in report.outcomes:
        console.print(
            Text.assemble(
                f"{outcome.model}, {outcome.profile} profile, {outcome.level} gates: ",
                (outcome.verdict.upper(), STYLES[outcome.verdict]),
            )
        )
        if outcome.judgements:
            console.print(_table(outcome))
        for line in _lines(outcome):
            console.print(Text(f"  {line}"), soft_wrap=True)
    if report.idle:
        names = ", ".join(f"{gate.name} ({gate.model})" for gate in report.idle)
        console.print(Text(f"not asked, no result of the model in the profile: {names}"), soft_wrap=True)
    if not report.outcomes:
        console.print(Text("no gate was asked: nothing is shown to hold", style=STYLES["refused"]))


def _table(outcome: Outcome) -> Table:
    table = Table()
    for column in ("gate", "setting", "limit", "measured", "margin", ""):
        table.add_column(column, justify="right" if column in ("limit", "measured", "margin") else "left")
    for judgement in outcome.judgements:
        names = [judgement.gate.name, judgement.result["setting"]["name"] if judgement.result is not None else "-"]
        for check in judgement.checks:
            verdict = "green" if check.is_held else "red"
            table.add_row(*map(Text, [*names, *_cells(check)]), Text(verdict, STYLES[verdict]))
            names = ["", ""]
        if not judgement.checks:
            table.add_row(*map(Text, [*names, "", "", ""]), Text(judgement.verdict, STYLES[judgement.verdict]))
    return table


def _cells(check: Check) -> list[str]:
    limit = f"{check.limit} {check.threshold:g}"
    if check.measured is None or check.margin is None:
        return [limit, "not measured", "-"]
    return [limit, f"{check.measured:.6g}", f"{check.margin:+.3g} ({check.margin / check.threshold:+.1%})"]


def _lines(outcome: Outcome) -> list[str]:
    lines = [f"refused: {reason}" for reason in outcome.refusals]
    for judgement in outcome.judgements:
        lines += _about(judgement)
    return lines + ([f"streak: {outcome.streak}"] if outcome.streak else [])


def _about(judgement: Judgement) -> list[str]:
    gate, result = judgement.gate, judgement.result
    lines = [f"{gate.name}: refused: {reason}" for reason in judgement.refusals]
    if gate.changed:
        lines.append(f"{gate.name}: not the file's own limit: {', '.join(gate.changed)}")
    if result is not None:
        ideal = f"{judgement.ideal:.2f}x at this tau" if judgement.ideal is not None else "not measured"
        lines.append(
            f"{gate.name}: {gate.model}, {gate.select}; ideal {ideal}; "
            f"{result['throughput_tokens_per_sec']['median']:.0f} tok/s, "
            f"{result['scenario']['repeated_share']:.0%} of the text repeats itself"
        )
    elif not judgement.refusals:
        lines.append(f"{gate.name}: no result of {gate.select}; run `{gate.command}`")
    return lines
