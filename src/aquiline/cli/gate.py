"""`aquiline gate`: what results must reach, asked of a directory of them; the exit code says it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from aquiline.cli.options import AsJson


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
    as_json: AsJson = False,
) -> None:
    """Ask the gates of results: which limit was missed, and by how much.

    A gate is asked if DIR has results of its model in its profile; one that then finds none of its own fails. Full
    gates open after three green micro runs in a row, each in a directory of its own, at one commit on one device.

    Exits with 0 if all is green, with 1 if a gate is red, with 2 if results were refused or no gate was asked.

    Examples:

      aquiline bench --target bundled --out results/ --scenario baseline --num-spec-tokens 3 --temperature 0 0.8

      aquiline gate results/

      aquiline gate results/ --set cpu-micro-greedy.min_speedup=1.3 --json

      aquiline gate results/ --parity results-of-another-engine/
    """

    from aquiline.bench.gates.rules import BUILT_IN, override, read_gates
    from aquiline.bench.gates.state import GateState, default_state
    from aquiline.bench.gates.verdicts import GateRequest, ask
    from aquiline.bench.results.result import read_results
    from aquiline.cli.show.verdict_tables import show_report

    rules = override(read_gates(gates or BUILT_IN), limits or [])
    request = GateRequest(level, tuple(only or ()), read_results(parity) if parity is not None else None)
    report = ask(rules, read_results(directory), request, GateState(state or default_state()))
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        show_report(report)
    raise typer.Exit(report.exit_code)
