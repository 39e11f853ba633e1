"""What a checkpoint is, section by section."""

from __future__ import annotations

from rich.text import Text

from aquiline.cli.options import wide_console
from aquiline.models.inspection import Facts, Inspection

NOTHING = "-"
SHARES = ("share", "text", "choices")


def show_inspection(found: Inspection) -> None:
    """Print a line for each section, then what does not fit and what has no effect."""
    console = wide_console()
    console.print(Text(f"{found.kind}: {found.path}", style="bold"), soft_wrap=True)
    for name, facts in found.sections.items():
        console.print(Text(f"  {name:<16} {_line(facts)}"), soft_wrap=True)
    for problem in found.problems:
        console.print(Text(f"does not fit: {problem}", style="red"), soft_wrap=True)
    for notice in found.notices:
        console.print(Text(f"notice: {notice}"), soft_wrap=True)


def _line(facts: Facts) -> str:
    return ", ".join(f"{name} {_shown(name, value)}" for name, value in facts.items())


def _shown(name: str, value: object) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.1%}" if name in SHARES else f"{value:g}"
    if isinstance(value, int):
        return f"{value:,}"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
