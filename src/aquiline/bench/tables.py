"""A table of figures, rendered as Markdown for files and for a terminal by rich. Every command that prints figures
makes this value; `page.html` of the report renders the same value as HTML.

The first column names the row and stands at the left; all others stand at the right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table as RichTable

NO_FIGURE = "-"
"""A cell without a figure."""


@dataclass(frozen=True)
class Table:
    """Rows of cells under named columns.

    facts: a line that holds for all rows; notes: lines below the table; marked: numbers of the rows to show in red."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    facts: str = ""
    notes: Sequence[str] = ()
    marked: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), (self.columns, self.rows)

    def without_empty_columns(self) -> Table:
        """The table without the columns that have no figure in any row."""
        used = [i for i in range(len(self.columns)) if any(row[i] != NO_FIGURE for row in self.rows)]
        rows = [[row[i] for i in used] for row in self.rows]
        return Table([self.columns[i] for i in used], rows, self.title, self.facts, self.notes, self.marked)

    def markdown(self) -> str:
        """The table as Markdown: title, facts, grid, notes. Bars and line ends in cells cannot break it."""
        rule = ["---", *["---:"] * (len(self.columns) - 1)]
        grid = [f"| {' | '.join(map(escape, line))} |" for line in (self.columns, rule, *self.rows)]
        notes = "\n".join(f"- {escape(note)}" for note in self.notes)
        title = f"### {escape(self.title)}" if self.title else ""
        return "\n\n".join(part for part in (title, escape(self.facts), "\n".join(grid), notes) if part) + "\n"

    def console(self) -> RichTable:
        """The table for a rich console; its facts and notes are the caption."""
        from rich.table import Table as RichTable
        from rich.text import Text

        caption = Text("\n".join(line for line in (self.facts, *self.notes) if line))
        grid = RichTable(title=Text(self.title) if self.title else None, caption=caption, caption_justify="left")
        for place, column in enumerate(self.columns):
            grid.add_column(column, justify="right" if place else "left")
        for number, row in enumerate(self.rows):
            grid.add_row(*map(Text, row), style="red" if number in self.marked else None)
        return grid


def escape(text: str) -> str:
    """A text whose bars and line ends cannot break a Markdown table; names may come from result files."""
    return " ".join(text.replace("|", "\\|").split())
