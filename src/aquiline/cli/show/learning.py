"""The table of `aquiline learn`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from aquiline.cli.options import wide_console
from aquiline.engine.learning.store import Generation, ServingState


def show_generations(pair: dict[str, Any], state: ServingState, known: Sequence[Generation]) -> None:
    """Print one row per generation: what it learnt from, how it was judged, and what became of it."""
    title = (
        f"{pair['target']}: generation {state.serving} serves"
        if state.serving
        else f"{pair['target']}: the shipped draft serves"
    )
    table = Table(title=title)
    for name in ("generation", "from", "served tokens", "tau", "after", "ratio", "old tau", "after", ""):
        table.add_column(name, justify="right")
    for each in known:
        low, high = each.interval
        table.add_row(
            str(each.generation), str(each.parent), f"{each.tokens:,}", f"{each.tau_before:.2f}",
            f"{each.tau_after:.2f}", f"{each.tau_after / each.tau_before:.3f} [{low:.3f}, {high:.3f}]",
            f"{each.old_before:.2f}", f"{each.old_after:.2f}", _fate(each, state),
        )  # fmt: skip
    wide_console().print(table)


def _fate(each: Generation, state: ServingState) -> str:
    if each.generation == state.serving:
        return "serves"
    if each.generation in state.rolled_back:
        return "rolled back"
    return "served" if each.accepted else "refused"
