"""Where a step's time goes, as a table."""

from __future__ import annotations

from rich.table import Table

from aquiline.bench.suite.profile import Profile
from aquiline.cli.options import wide_console


def show_profile(found: Profile, work: str) -> None:
    """Print every range of the profile with its share of the cycle."""
    s = found.summary
    table = Table(title=f"{s.num_decode_steps} steps, {work}, tau {s.counters.tau:.2f}")
    for column in ("range", "calls", "ms per step", "% of cycle"):
        table.add_column(column, justify="left" if column == "range" else "right")
    for row in found.rows:
        name = f"  {row.name}" if row.is_part else row.name
        table.add_row(name, str(row.calls), f"{row.ms_per_step:.3f}", f"{100 * row.share:.1f}")
    wide_console().print(table)
