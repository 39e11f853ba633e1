"""The `aquiline` command. Commands parse, call and print; each imports what it needs when it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import typer

from aquiline.cli import bench
from aquiline.cli.chat import chat
from aquiline.cli.compare import compare
from aquiline.cli.demo import demo
from aquiline.cli.eval import evaluate
from aquiline.cli.gate import gate
from aquiline.cli.generate import generate
from aquiline.cli.limits import limits
from aquiline.cli.options import ListCommand
from aquiline.cli.profile import profile
from aquiline.cli.regenerate import regenerate
from aquiline.cli.report import report
from aquiline.cli.serve import serve
from aquiline.cli.train import train
from aquiline.errors import AquilineError


class CommandGroup(typer.core.TyperGroup):
    """Turns errors a user can mend into one line on stderr and exit code 2."""

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


app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="EAGLE-3 speculative decoding: the same text, faster. `aquiline demo` shows it on the bundled pair.",
)
bench.register(app)
COMMANDS: dict[str, Callable[..., None]] = {
    "chat": chat, "compare": compare, "demo": demo, "eval": evaluate, "gate": gate, "generate": generate,
    "limits": limits, "profile": profile, "regenerate": regenerate, "report": report, "serve": serve,
    "train": train,
}  # fmt: skip
for name, command in COMMANDS.items():
    app.command(name, cls=ListCommand)(command)
