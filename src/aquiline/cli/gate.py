"""`aquiline gate`: which limits the results of a directory hold; the exit code is the verdict."""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from aquiline.cli.fields import with_options
from aquiline.cli.options import AsJson, wide_console
from aquiline.settings import name_of, setting

EXAMPLES = """
Examples:

  aquiline bench --target bundled --out results/ --scenario baseline --num-spec-tokens 3 --temperature 0 0.8

  aquiline gate results/

  aquiline gate results/ --set cpu-micro-greedy.min_speedup=1.3 --json

  aquiline gate results/ --parity results-of-another-engine/

  aquiline gate compared/ --over-peers 1.0
"""


@dataclass(frozen=True)
class GateChoice:
    """Which gates are asked, with which limits."""

    level: str = setting("micro", "micro, full or all.")
    gates: Path | None = setting(None, "YAML of gates. Default: those in the package.")
    limits: tuple[str, ...] = setting((), "Replace a limit: NAME.min_speedup=1.5. May be repeated.", name="set")
    only: tuple[str, ...] = setting((), "Ask this gate alone, results or not. May be repeated.")
    parity: Path | None = setting(
        None, "Another engine's results of the same work; tau must be as near as max_tau_gap."
    )
    over_peers: float | None = setting(
        None, "Of results of `aquiline compare --out`: ours at least so many times as fast as each other engine's; "
        "pass, fail or not decided. Gates are not asked.",
    )  # fmt: skip
    peer_tau_gap: float = setting(0.1, "With --over-peers: how far tau may be from an engine's that drafts as much.")
    state: Path | None = setting(None, "File of green streaks. Default: ~/.cache/aquiline/gates.json.")

    def __post_init__(self) -> None:
        given = {name_of(field) for field in fields(self) if getattr(self, field.name) != field.default}
        beside = {"over_peers", "peer_tau_gap"}
        if self.over_peers is None and "peer_tau_gap" in given:
            raise ValueError(f"peer_tau_gap={self.peer_tau_gap}: goes with over_peers; name that ratio too")
        if self.over_peers is not None and (unused := sorted(given - beside)):
            raise ValueError(f"over_peers={self.over_peers}: asks no gates; leave out {', '.join(unused)}")


@with_options
def gate(
    directory: Annotated[Path, typer.Argument(help="Results, as `aquiline bench --out` writes them.", metavar="DIR")],
    *,
    choice: GateChoice,
    as_json: AsJson = False,
) -> None:
    """Ask the gates of results: which limit was missed, and by how much.

    A gate is asked if DIR has results of its model in its profile; one that then finds none of its own fails. Full
    gates open after three green micro runs in a row, each in a directory of its own, at one commit on one device.

    Exits with 0 if all is green, with 1 if a gate is red, with 2 if results were refused or no gate was asked. With
    --over-peers: 0 if every limit is passed, 1 if one is failed, 2 if one is not decided.
    """
    if choice.over_peers is not None:
        raise typer.Exit(_beside_peers(directory, choice.over_peers, choice.peer_tau_gap, as_json))
    from aquiline.bench.gates.rules import BUILT_IN, override, read_gates
    from aquiline.bench.gates.verdicts import Streaks, ask
    from aquiline.bench.results.result import read_results
    from aquiline.cli.show.verdict_tables import show_report

    rules = override(read_gates(choice.gates or BUILT_IN), choice.limits)
    peers = read_results(choice.parity) if choice.parity is not None else None
    results = read_results(directory)
    report = ask(rules, results, Streaks(choice.state), choice.level, choice.only, peers)
    if as_json:
        print(json.dumps(asdict(report)))
    else:
        show_report(report, rules, results)
    raise typer.Exit(report.exit_code)


def _beside_peers(directory: Path, least: float, most_gap: float, as_json: bool) -> int:
    """Print the verdict beside every other engine's setting; returns the exit code."""
    from aquiline.bench.gates.beside import beside_peers, exit_code_of
    from aquiline.bench.results.result import read_results
    from aquiline.bench.tables import Table

    checks = beside_peers(read_results(directory), least, most_gap)
    exit_code = exit_code_of(checks)
    if as_json:
        print(json.dumps({"exit_code": exit_code, "checks": [asdict(check) for check in checks]}))
        return exit_code
    rows = [[c.theirs, c.ours, c.limit, c.measured, c.verdict, c.why] for c in checks]
    marked = frozenset(number for number, check in enumerate(checks) if check.verdict == "fail")
    columns = ("their setting", "ours", "limit", "measured", "verdict", "because")
    wide_console().print(Table(columns, rows, "ours beside other engines", marked=marked).console())
    return exit_code


gate.__doc__ = f"{inspect.getdoc(gate)}\n{EXAMPLES}"
