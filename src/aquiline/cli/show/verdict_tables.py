"""Verdicts of gates as tables."""

from __future__ import annotations

from rich.text import Text

from aquiline.bench.gates.rules import Gate
from aquiline.bench.gates.verdicts import Check, Judgement, Outcome, Report
from aquiline.bench.results.speedups import Results
from aquiline.bench.tables import NO_FIGURE, Table
from aquiline.cli.options import wide_console

STYLES = {"green": "green", "red": "bold red", "refused": "bold yellow"}


def show_report(report: Report, gates: list[Gate], results: Results) -> None:
    """Print every outcome: its verdict, its limits and what was measured. gates and results: those of the report."""
    console = wide_console()
    by_name = {gate.name: gate for gate in gates}
    for outcome in report.outcomes:
        title = f"{outcome.model}, {outcome.profile} profile, {outcome.level} gates: "
        console.print(Text.assemble(title, (outcome.verdict.upper(), STYLES[outcome.verdict])))
        if outcome.gates:
            console.print(_table(outcome).console())
        lines = [f"refused: {reason}" for reason in outcome.refusals]
        for judgement in outcome.gates:
            lines += [f"{judgement.name}: {line}" for line in _about(judgement, by_name[judgement.name], results)]
        lines += [f"streak: {outcome.streak}"] if outcome.streak else []
        for line in lines:
            console.print(Text(f"  {line}"), soft_wrap=True)
    if report.not_asked:
        names = ", ".join(f"{name} ({by_name[name].model})" for name in report.not_asked)
        console.print(Text(f"not asked, no result of the model in the profile: {names}"), soft_wrap=True)
    if not report.outcomes:
        console.print(Text("no gate was asked: nothing is shown to hold", style=STYLES["refused"]))


def _table(outcome: Outcome) -> Table:
    rows = []
    for judgement in outcome.gates:
        names = [judgement.name, judgement.setting or NO_FIGURE]
        for check in judgement.checks:
            rows.append([*names, *_cells(check), "green" if check.is_held else "red"])
            names = ["", ""]
        if not judgement.checks:
            rows.append([*names, "", "", "", judgement.verdict])
    marked = frozenset(number for number, row in enumerate(rows) if row[-1] != "green")
    return Table(("gate", "setting", "limit", "measured", "margin", "verdict"), rows, marked=marked)


def _cells(check: Check) -> list[str]:
    limit = f"{check.limit} {check.threshold:g}"
    if check.measured is None or check.margin is None:
        return [limit, "not measured", NO_FIGURE]
    return [limit, f"{check.measured:.6g}", f"{check.margin:+.3g} ({check.margin / check.threshold:+.1%})"]


def _about(judgement: Judgement, gate: Gate, results: Results) -> list[str]:
    lines = [f"refused: {reason}" for reason in judgement.refusals]
    if gate.changed:
        lines.append(f"not the file's own limit: {', '.join(gate.changed)}")
    if judgement.file is not None:
        result, ideal = results[judgement.file], judgement.ideal_speedup
        lines.append(
            f"{gate.model}, {gate.work}; ideal {'not measured' if ideal is None else f'{ideal:.2f}x at this tau'}; "
            f"{result['throughput_tokens_per_sec']['median']:.0f} tok/s, "
            f"{result['scenario']['repeated_share']:.0%} of the text repeats itself"
        )
    elif not judgement.refusals:
        lines.append(f"no result of {gate.work}; run `{gate.command}`")
    return lines
