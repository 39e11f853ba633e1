"""What a field of settings says of itself: one sentence, a heading, and its form where somebody writes it as text.

It stands beside the field, as metadata of its dataclass. Nothing here knows a command line: cli/fields.py makes options
of what is said here, and a field that says nothing cannot become one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
_KEY = "about"


@dataclass(frozen=True)
class About:
    """What a field says. panel: the heading it is listed under. name: what a user calls it, where that is not the
    field's name. parse: makes the value of one text; parse_item: one item of a tuple or a dict (a pair) of one text;
    without them the type says how. is_option False: for Python and JSON alone."""

    help: str
    panel: str | None = None
    name: str = ""
    parse: Callable[[str], Any] | None = None
    parse_item: Callable[[str], Any] | None = None
    is_option: bool = True


def about(help: str, panel: str | None = None, **form: Any) -> dict[str, About]:
    """The metadata of a field; `form` are further fields of About."""
    return {_KEY: About(help, panel, **form)}


def setting(default: T, help: str, panel: str | None = None, **form: Any) -> T:
    """A field of a dataclass with its default; its type is that of the default, as type checkers have it of field()."""
    return field(default=default, metadata=about(help, panel, **form))


def about_of(owner: Field[Any]) -> About | None:
    """What a field says of itself; None if nothing."""
    return owner.metadata.get(_KEY)


def name_of(owner: Field[Any]) -> str:
    """What a user calls a field."""
    found = about_of(owner)
    return found.name if found is not None and found.name else owner.name
