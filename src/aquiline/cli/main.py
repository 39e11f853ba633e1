"""The `aquiline` command. Commands parse, call and print; a command's module is imported when the command is asked for,
and imports what it needs when it runs."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from typing import Any

import typer

from aquiline.cli.options import ListCommand
from aquiline.errors import AquilineError

COMMANDS = {
    "bench": "bench:commands", "chat": "chat:chat", "compare": "compare:compare", "convert": "convert:convert",
    "demo": "demo:demo", "doctor": "doctor:doctor", "eval": "eval:evaluate", "gate": "gate:gate",
    "generate": "generate:generate", "inspect": "inspect:inspect", "learn": "learn:learn", "limits": "limits:limits",
    "parity": "parity:parity", "profile": "profile:profile", "regenerate": "regenerate:regenerate",
    "report": "report:report", "serve": "serve:serve", "train": "train:train", "tune": "tune:tune",
    "vocab": "vocab:vocab",
}  # fmt: skip
"""By name: the module in this package, and the function or group of commands in it."""


@cache
def command_of(name: str) -> Any:
    """One of COMMANDS as click knows it; imports its module."""
    module, _, attribute = COMMANDS[name].partition(":")
    offered = getattr(import_module(f"aquiline.cli.{module}"), attribute)
    if not isinstance(offered, typer.Typer):
        alone = typer.Typer(add_completion=False)
        alone.command(name, cls=ListCommand)(offered)
        offered = alone
    command = typer.main.get_command(offered)
    command.name = name
    return command


class CommandGroup(typer.core.TyperGroup):
    """The commands, loaded by name. Turns errors a user can mend into one line on stderr and exit code 2."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name; None if there is none."""
        return command_of(cmd_name) if cmd_name in COMMANDS else None

    def invoke(self, ctx: Any) -> object:
        """Run a command; ValueError, AquilineError and OSError carry their own explanation."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # what stays in the buffer would fail when Python ends, which prints a traceback
            return result
        except BrokenPipeError:  # whoever read the output has enough of it, as `head` does; click ends silently
            raise
        except (ValueError, AquilineError, OSError) as error:
            print(f"aquiline: {error}", file=sys.stderr)
            raise typer.Exit(2) from None


app = typer.Typer(cls=CommandGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def aquiline() -> None:
    """EAGLE-3 speculative decoding: the same text, faster. `aquiline demo` shows it on the bundled pair."""
