"""Every example that a help text or the README shows is one the command line takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from typer.main import get_command

from aquiline.cli.main import app

README = Path(__file__).parents[2] / "README.md"


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command below a group, by its full name."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def examples(text: str) -> list[list[str]]:
    """The arguments of every `aquiline ...` in lines of shell, also behind a pipe and before a redirection."""
    found = []
    for line in text.splitlines():
        if re.match(r"\s*(aquiline |[a-z]+ .*\| aquiline )", line):
            words = shlex.split(line, comments=True)
            end = words.index(">") if ">" in words else len(words)
            found.append(words[words.index("aquiline") + 1 : end])
    return found


def parsed(arguments: list[str]) -> list[dict[str, Any]]:
    """What each command that would run is called with; none of them runs."""
    root, calls = get_command(app), list[dict[str, Any]]()
    for _, command in commands(root):
        command.callback = lambda **given: calls.append(given)
    result = CliRunner().invoke(root, arguments)
    assert result.exit_code == 0, f"aquiline {shlex.join(arguments)}\n{result.output}{result.exception or ''}"
    return calls


HELPS = {name: command.help or "" for name, command in commands(get_command(app))}


@pytest.mark.parametrize("name", HELPS)
def test_the_examples_of_every_help_are_taken(name: str) -> None:
    shown = examples(HELPS[name])
    assert shown, "its help shows no example"
    for arguments in shown:
        assert len(parsed(arguments)) == 1


def test_the_examples_of_the_readme_are_taken() -> None:
    blocks = re.findall(r"```sh\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    shown = [arguments for block in blocks for arguments in examples(block)]
    assert len(shown) >= 10
    for arguments in shown:
        assert len(parsed(arguments)) == 1


def test_what_is_taken_is_what_was_meant() -> None:
    (train,) = parsed(shlex.split("train --target T --data ./src ./docs --out ./draft --minutes 45"))
    assert train["data"] == [Path("src"), Path("docs")] and train["minutes"] == 45 and train["target"] == Path("T")
    with pytest.raises(AssertionError, match="--no-such-option"):
        parsed(["train", "--no-such-option"])
