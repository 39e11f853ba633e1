"""What commands share beside fields.py: options of several values in a row (`--contexts 512 1024`), groups with a
default command, the way to draft that was chosen, a console."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aquiline.cli.fields import Given
from aquiline.config import PairConfig, SamplingParams, Structured

if TYPE_CHECKING:
    from rich.console import Console

    from aquiline.spec.drafting import Drafting
    from aquiline.spec.registry import DraftingChoice

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

PIPE_WIDTH = 140
"""Columns where nobody says how many there are, as in a file; tables would be cut to 80."""


def wide_console() -> Console:
    """Standard output for tables."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def chosen(choice: DraftingChoice, pair: PairConfig) -> Drafting:
    """The way to draft that the options say, by default the pair's; names on stderr what has no effect."""
    from aquiline.models.known_pairs import checkpoints

    drafting = choice.value("none" if checkpoints(pair.target, pair.draft).draft is None else "adaptive")
    for name in choice.without_effect(drafting):
        tell(f"--{name.replace('_', '-')} has no effect with drafter {drafting.name}")
    return drafting


def following(sampling: SamplingParams, given: Given[Structured]) -> SamplingParams:
    """The same sampling for a text that follows what stands on the command line, if anything does. Raises ValueError
    for what cannot be followed, before a model is loaded."""
    if not given:
        return sampling
    from aquiline.engine.grammar import check_structured

    structured = Structured(**given)
    check_structured(structured)
    return replace(sampling, structured=structured)


def tell(notice: str | None) -> None:
    """Say a line on stderr, if there is one."""
    if notice is not None:
        print(f"aquiline: {notice}", file=sys.stderr)


def named(pair: PairConfig) -> PairConfig:
    """The same pair by its name, where a command was given no target; says on stderr which one runs if it is not the
    one that is meant to."""
    from aquiline.models.known_pairs import default_name, default_notice

    if pair.target is not None:
        return pair
    tell(default_notice())
    return replace(pair, target=default_name())


class ListCommand(typer.core.TyperCommand):
    """A command whose repeatable options also take their values in a row, up to the next option.

    A required argument that stands nowhere else is the end of the last row: `--only NAME DIR`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write `--name a b` as `--name a --name b`, which is what the parser below knows."""
        options = [param for param in self.params if param.param_type_name == "option"]
        several = {name for param in options if getattr(param, "multiple", False) for name in param.opts}
        valued = {name for param in options if not getattr(param, "is_flag", False) for name in param.opts}
        missing = sum(param.required for param in self.params if param.param_type_name == "argument")
        spread: list[str] = []
        repeats: list[int] = []  # where an option was written again
        row: str | None = None
        is_value = False
        for arg in args:
            if is_value:
                is_value = False
            elif arg.startswith("-"):
                row, is_value = arg if arg in several else None, arg in valued
            elif row is not None:
                repeats.append(len(spread))
                spread.append(row)
            else:
                missing -= 1
            spread.append(arg)
        for place in reversed(repeats[len(repeats) - max(0, missing) :]):
            del spread[place]
        return super().parse_args(ctx, spread)


class DefaultGroup(typer.core.TyperGroup):
    """A group whose command `run` is meant where none is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put `run` before options that follow the group's name."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["run", *args]
        return super().parse_args(ctx, args)
