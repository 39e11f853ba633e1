"""The time of a step by stage, and the choices of adaptive drafting, as tables."""

from __future__ import annotations

from rich.console import Console

from aquiline.bench.suite.stages import RANGES, Profile
from aquiline.bench.tables import NO_FIGURE, Table
from aquiline.cli.options import wide_console
from aquiline.ledger import Ledger


def show_profile(found: Profile, work: str) -> None:
    """Print every range of the profile with its share of the cycle, and the choices of adaptive drafting."""
    s = found.summary
    rows = [
        [
            "  " * row["is_part"] + row["name"],
            str(row["calls"]),
            f"{row['ms_per_step']:.3f}",
            f"{100 * row['share']:.1f}",
        ]
        for row in found.rows
    ]
    title = f"{s.num_decode_steps} steps, {work}, tau {s.counters.tau:.2f}"
    console = wide_console()
    console.print(Table(("range", "calls", "ms per step", "% of cycle"), rows, title).console())
    if [row["name"] for row in found.rows] == [RANGES["host"]]:
        console.print(f"the {found.system['path']} path does not time its stages: {RANGES['host']} is the whole step")
    if s.choices.num_chosen:
        _show_choices(s.choices, console)


def _show_choices(choices: Ledger, console: Console) -> None:
    """Print the choices of adaptive drafting, and how well it predicted their time and acceptance."""
    total, rows = sum(choices.steps.values()), []
    for source, count in choices.steps.items():
        nodes = choices.nodes[source]
        accepted = f"{100 * choices.accepted[source] / nodes:.0f}" if nodes else NO_FIGURE
        rows.append([source, f"{100 * count / total:.0f}", str(nodes), accepted])
    columns = ("source", "% of choices", "verified tokens", "% accepted")
    console.print(Table(columns, rows, "What adaptive drafting chose, of each sequence and step").console())
    took = "not timed"
    if timed := choices.num_timed:
        took = f"foretold {choices.expected_ms / timed:.3f} ms, took {choices.measured_ms / timed:.3f}"
    foretold, right, verified = sum(choices.foretold), sum(choices.right), max(1, sum(choices.verified))
    console.print(
        f"step: {took}; verified tokens: foretold {foretold / verified:.0%} accepted, came {right / verified:.0%}; "
        f"choosing took {choices.choosing_ms / choices.num_chosen * 1e3:.0f} us a step"
    )
