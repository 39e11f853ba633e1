"""`aquiline gate`: what results must reach, asked of a directory of them; the exit code says it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aquiline.cli.options import wide_console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from aquiline.bench.gates.gate import Outcome, Report
    from aquiline.bench.gates.judge import Check, Judgement

STYLES = {"green": "green", "red": "bold red", "refused": "bold yellow"}


def gate(
    directory: Annotated[Path, typer.Argument(help="Results, as `aquiline bench --out` writes them.", metavar="DIR")],
    level: Annotated[str, typer.Option(help="micro, full or all.")] = "micro",
    gates: Annotated[Path | None, typer.Option(help="YAML of gates. Default: those in the package.")] = None,
    limits: Annotated[
        list[str] | None, typer.Option("--set", help="Replace a limit: NAME.min_speedup=1.5. May be repeated.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Ask this gate alone, results or not. May be repeated.")
    ] = None,
    parity: Annotated[
        Path | None, typer.Option(help="Another engine's results of the same work; tau must be as near as max_tau_gap.")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="File of green streaks. Default: ~/.cache/aquiline/gates.json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Ask the gates of results: which limit was missed, and by how much.

    A gate is asked if DIR has results of its model in its profile; one that then finds none of its own fails. Full
    gates open after three green micro runs in a row, each in a directory of its own, at one commit on one device.

    Exits with 0 if all is green, with 1 if a gate is red, with 2 if results were refused or no gate was asked.

    Examples:

      aquiline bench --out results/ --scenario baseline --num-spec-tokens 3 --temperature 0 0.8

      aquiline gate results/

      aquiline gate results/ --set cpu-micro-greedy.min_speedup=1.3 --json

      aquiline gate results/ --parity results-of-another-engine/
    """

    from aquiline.bench.gates.gate import Request, ask
    from aquiline.bench.gates.rules import BUILT_IN, override, read_gates
    from aquiline.bench.gates.state import GateState, default_state
    from aquiline.bench.results.result import read_results

    rules = override(read_gates(gates or BUILT_IN), limits or [])
    request = Request(level, tuple(only or ()), read_results(parity) if parity is not None else None)
    report = ask(rules, read_results(directory), request, GateState(state or default_state()))
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        _show(wide_console(), report)
    raise typer.Exit(report.exit_code)


def _show(console: Console, report: Report) -> None:
    from rich.text import Text

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
    from rich.table import Table
    from rich.text import Text

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
