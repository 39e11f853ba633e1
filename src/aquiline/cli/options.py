"""Options that take several values: `--contexts 512 1024`; groups of commands that have a default one."""

from __future__ import annotations

from typing import Any

import typer


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
