"""A table of figures, rendered as Markdown for files and by rich for a terminal; report/page.html renders it as HTML.
Every command that prints figures makes this value.

The first column names the row and stands at the left; all others stand at the right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table as RichTable

NO_FIGURE = "-"
"""A cell without a figure."""


@dataclass(frozen=True)
class Table:
    """Rows of cells under named columns.

    facts: a line that holds for all rows; notes: lines below the table; marked: numbers of the rows to show in red;
    headings: titles of groups of rows, by the number of the group's first row."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    facts: str = ""
    notes: Sequence[str] = ()
    marked: frozenset[int] = frozenset()
    headings: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), (self.columns, self.rows)

    @classmethod
    def of_cells(cls, lines: Sequence[Mapping[str, str]], **about: Any) -> Table:
        """The table of lines whose cells have the names of their columns. A column without a figure is left out."""
        columns = [
            name for name in dict.fromkeys(chain.from_iterable(lines))
            if any(line.get(name, NO_FIGURE) != NO_FIGURE for line in lines)
        ]  # fmt: skip
        return cls(columns, [[line.get(name, NO_FIGURE) for name in columns] for line in lines], **about)

    def markdown(self) -> str:
        """The table as Markdown: title, facts, grid, notes. Bars and line ends in cells cannot break it."""
        rule = ["---", *["---:"] * (len(self.columns) - 1)]
        lines: list[Sequence[str]] = [self.columns, rule]
        for number, row in enumerate(self.rows):
            if number in self.headings:
                lines.append([f"**{self.headings[number]}**", *[""] * (len(self.columns) - 1)])
            lines.append(row)
        grid = "\n".join(f"| {' | '.join(map(escape, line))} |" for line in lines)
        notes = "\n".join(f"- {escape(note)}" for note in self.notes)
        title = f"### {escape(self.title)}" if self.title else ""
        return "\n\n".join(filter(None, (title, escape(self.facts), grid, notes))) + "\n"

    def console(self) -> RichTable:
        """The table for a rich console; its facts and notes are the caption."""
        from rich.table import Table as RichTable
        from rich.text import Text

        caption = Text("\n".join(line for line in (self.facts, *self.notes) if line))
        grid = RichTable(title=Text(self.title) if self.title else None, caption=caption, caption_justify="left")
        for place, column in enumerate(self.columns):
            grid.add_column(column, justify="right" if place else "left")
        for number, row in enumerate(self.rows):
            if number in self.headings:
                grid.add_section()
                grid.add_row(Text(self.headings[number], style="bold"))
            grid.add_row(*map(Text, row), style="red" if number in self.marked else None)
        return grid


def cell(value: object, form: str = "{}") -> str:
    """A value as a cell in the form that str.format takes; a dash for None."""
    return NO_FIGURE if value is None else form.format(value)


def percent(share: float | None) -> str:
    """A share as a cell."""
    return cell(share, "{:.0%}")


def escape(text: str) -> str:
    """A text whose bars and line ends cannot break a Markdown table; names may come from result files."""
    return " ".join(text.replace("|", "\\|").split())
