"""A draft before and after its vocabulary was pruned, as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence

from aquiline.bench.suite.pruning import ServedDraft
from aquiline.bench.tables import Table
from aquiline.cli.options import wide_console
from aquiline.engine.coverage import TextChoices
from aquiline.types import Int64

Row = dict[str, str | int | float]


def pruning_rows(ids: dict[str, Int64], held_out: TextChoices, served: Sequence[ServedDraft]) -> list[Row]:
    """A row per draft: its vocabulary's size and coverage, and what it gave where it was served."""
    figures = {each.label: {"tau": each.tau, "tokens_per_s": each.tokens_per_s} for each in served}
    return [
        {"draft": label, "tokens": len(own), **held_out.coverage(own), **figures.get(label, {})}
        for label, own in ids.items()
    ]  # fmt: skip


def show_pruning(rows: Sequence[Row], out: str, as_json: bool) -> None:
    """Print the rows; figures that were not measured have no column."""
    if as_json:
        print(json.dumps({"out": out, "rows": rows}))
        return
    cells = [
        {
            "draft": str(row["draft"]),
            "tokens": f"{row['tokens']:,}",
            "of the text": f"{row['text']:.1%}",
            "of the target's choices": f"{row['choices']:.1%}",
            **({"tau": f"{row['tau']:.3f}", "tok/s": f"{row['tokens_per_s']:.1f}"} if "tau" in row else {}),
        }
        for row in rows
    ]
    wide_console().print(Table.of_cells(cells, title=out).console())
