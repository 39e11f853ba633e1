"""What commands share: options of several values (`--contexts 512 1024`), groups with a default command, a console."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

Capture = Annotated[
    str | None,
    typer.Option(help="Target layers whose outputs the draft reads, as 1,4,6. Default: as its checkpoint says."),
]
NormFeedback = Annotated[
    bool | None, typer.Option(help="Feed the draft's normed output back. Default: as its checkpoint says.")
]
Dtype = Annotated[str, typer.Option(help="Storage of weights: bfloat16, float32, int8 or int4.")]
Arithmetic = Annotated[str, typer.Option(help="auto, float32, or bfloat16, the faster where the CPU has AVX512_BF16.")]

PIPE_WIDTH = 140
"""Columns where nobody says how many there are, as in a file; tables would be cut to 80."""


def wide_console() -> Console:
    """Standard output for tables."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


class ListCommand(typer.core.TyperCommand):
    """A command whose repeatable options also take their values in a row, up to the next option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write `--name a b` as `--name a --name b`, which is what the parser below knows."""
        names = {name for param in self.params if getattr(param, "multiple", False) for name in param.opts}
        spread: list[str] = []
        current: str | None = None
        for arg in args:
            if arg.startswith("-"):
                current = arg if arg in names else None
                spread.append(arg)
            elif current is not None and spread[-1] != current:
                spread += [current, arg]
            else:
                spread.append(arg)
        return super().parse_args(ctx, spread)


class DefaultGroup(typer.core.TyperGroup):
    """A group whose command `run` is meant where none is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put `run` before options that follow the group's name."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["run", *args]
        return super().parse_args(ctx, args)
