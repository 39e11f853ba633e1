"""Who wrote a text, in colours and in brackets."""

from __future__ import annotations

import io

from rich.console import Console

from aquiline.cli.show.writers import coloured, has_colours, legend, shares_of
from aquiline.engine.chat_session import AttributedText
from aquiline.types import Source

WRITTEN: list[tuple[str, Source]] = [
    ("The", "target"), (" sky", "draft"), (" is", "draft"), ("\n", "draft"), ("blue", "lookup"), (" ", "draft"),
    (".", "target"),
]  # fmt: skip
PIECES = [AttributedText(text, source) for text, source in WRITTEN]


def console(*, terminal: bool, no_color: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, color_system="standard" if terminal else None,
                   no_color=no_color, width=200)  # fmt: skip


def printed(on: Console) -> str:
    assert isinstance(on.file, io.StringIO)
    on.print(coloured(on, PIECES), soft_wrap=True)
    return on.file.getvalue().removesuffix("\n")


def test_brackets_where_there_are_no_colours() -> None:
    """One pair around all that one writer wrote in a row, white space outside."""
    for on in (console(terminal=False), console(terminal=True, no_color=True)):
        assert not has_colours(on) and printed(on) == "The «sky is»\n‹blue› ."
        assert "«the draft»" in legend(on).plain and "‹copied from earlier text›" in legend(on).plain


def test_colours_where_there_are_some() -> None:
    on = console(terminal=True)
    text = printed(on)
    assert "\x1b[32m sky" in text and "\x1b[36mblue" in text and "«" not in text
    assert (
        "«the draft»" not in legend(on).plain and "the draft, copied from earlier text, the target" in legend(on).plain
    )


def test_shares_stand_in_the_legend() -> None:
    shares = shares_of([piece.source for piece in PIECES])
    assert shares == {"draft": 4 / 7, "lookup": 1 / 7, "target": 2 / 7}
    told = legend(console(terminal=True), shares).plain
    assert (
        told == "written by the draft 57%, copied from earlier text 14%, the target 29%; the target checked every token"
    )
    assert shares_of([]) == {"draft": 0, "lookup": 0, "target": 0}
