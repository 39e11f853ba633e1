"""Text that shows who wrote each token, in colour, or in brackets where there are no colours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from aquiline.engine.chat_session import AttributedText
from aquiline.types import Source

COLOURS: dict[Source, str] = {"draft": "green", "lookup": "cyan", "target": ""}
BRACKETS: dict[Source, tuple[str, str]] = {"draft": ("«", "»"), "lookup": ("‹", "›"), "target": ("", "")}
NAMES: dict[Source, str] = {"draft": "the draft", "lookup": "copied from earlier text", "target": "the target"}


def has_colours(console: Console) -> bool:
    """Whether output has colours: on a terminal with colours, unless NO_COLOR forbids them."""
    return console.color_system is not None and not console.no_color


def legend(console: Console, shares: dict[Source, float] | None = None) -> Text:
    """One line that names the mark of each writer, with the shares of the tokens if they are given."""
    text = Text("written by ")
    for place, (source, name) in enumerate(NAMES.items()):
        before, after = ("", "") if has_colours(console) else BRACKETS[source]
        text.append(", " if place else "")
        text.append(f"{before}{name}{after}", style=COLOURS[source])
        text.append(f" {shares[source]:.0%}" if shares is not None else "")
    return text.append("; the target checked every token")


def coloured(console: Console, pieces: Iterable[AttributedText]) -> Text:
    """A text with its writers marked."""
    text = Text()
    if has_colours(console):
        for piece in pieces:
            text.append(piece.text, style=COLOURS[piece.source])
        return text
    for source, run in groupby(pieces, key=lambda piece: piece.source):
        text.append(_bracketed("".join(piece.text for piece in run), source))
    return text


def shares_of(sources: Sequence[Source]) -> dict[Source, float]:
    """The share of tokens by each writer."""
    return {source: sources.count(source) / max(1, len(sources)) for source in NAMES}


def _bracketed(text: str, source: Source) -> str:
    """A text of one writer in brackets. White space around the text stays outside."""
    inner = text.strip()
    if not inner:
        return text
    before, after = BRACKETS[source]
    start = text.index(inner)
    return text[:start] + before + inner + after + text[start + len(inner) :]
