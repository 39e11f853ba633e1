"""Options from dataclasses: types, defaults, what is given, ways to draft, rows of values; no field is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import pytest
import typer
from tests.cli.test_examples import commands
from typer.main import get_command
from typer.testing import CliRunner, Result

from aquiline.cli.bench import bench
from aquiline.cli.fields import Fields, Given, with_options
from aquiline.cli.main import COMMANDS, app
from aquiline.cli.options import ListCommand
from aquiline.config import SamplingParams
from aquiline.settings import about, about_of, name_of, setting
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.drafting import Chain, Drafting, Dynamic, NoDraft
from aquiline.spec.registry import DRAFTINGS, DraftingChoice

EVERY = dict(commands(get_command(app)))


def function_of(name: str) -> Any:
    """The function behind a command that is no group."""
    module, _, attribute = COMMANDS[name].partition(":")
    return getattr(import_module(f"aquiline.cli.{module}"), attribute)


def parse_pair(text: str) -> tuple[str, int]:
    """An entry of `table` from NAME=NUMBER."""
    name, _, number = text.partition("=")
    if not number.isdigit():
        raise ValueError(f"table={text!r}: must be NAME=NUMBER")
    return name, int(number)


@dataclass(frozen=True)
class Made:
    """A field of every kind."""

    folder: Path = field(metadata=about("Required."))
    count: int = setting(3, "A number.", "Numbers")
    share: float | None = setting(None, "A share.", "Numbers")
    is_fast: bool = setting(False, "A flag.")
    is_exact: bool = setting(True, "A flag that is on.")
    is_open: bool | None = setting(None, "A flag that nobody has decided.")
    sizes: tuple[int, ...] = setting((1, 2), "Several.", name="size")
    files: tuple[Path, ...] = setting((), "Several.")
    table: dict[str, int] = field(default_factory=dict, metadata=about("NAME=NUMBER.", parse_item=parse_pair))
    layers: tuple[int, ...] | None = setting(None, "As 1,2.", parse=lambda text: tuple(map(int, text.split(","))))
    kind: Literal["small", "large"] = setting("small", "A kind.")
    inner: object = setting(None, "Python alone.", is_option=False)


@dataclass(frozen=True)
class Silent:
    """A field that says nothing of itself."""

    told: int = setting(1, "One.")
    untold: int = 2


@dataclass(frozen=True)
class Odd:
    """A field that no option can be made of."""

    mixed: int | str = setting(1, "A number or a name.")


@dataclass(frozen=True)
class Echo(Drafting):
    """A way to draft that nobody knew of when the command line was written."""

    name: ClassVar[str] = "echo"
    needs_draft_model: ClassVar[bool] = False
    window: int = setting(4, "Echo: tokens to match.", "Drafting", name="echo_window")


def typed(command: Callable[..., None], *args: object) -> Result:
    """The command with its arguments, as a user types it."""
    made = typer.Typer(pretty_exceptions_enable=False)
    made.command(cls=ListCommand)(command)
    return CliRunner().invoke(made, [str(arg) for arg in args])


def built(*args: object) -> Made:
    seen: list[Made] = []

    @with_options
    def command(made: Made, *, loud: Annotated[bool, typer.Option("--loud")] = False) -> None:
        seen.append(made)

    result = typed(command, *args)
    assert result.exit_code == 0, result.output
    return seen[0]


def test_a_field_that_is_not_given_has_its_own_default() -> None:
    assert built("--folder", "here") == Made(Path("here"))


def test_every_kind_of_field_is_given_by_its_type() -> None:
    assert built(
        *("--folder", "a", "--count", 5, "--share", 1, "--is-fast", "--no-is-exact", "--no-is-open", "--size", 7, 8),
        *("--files", "x", "--files", "y", "--table", "a=1", "b=2", "--layers", "3,4", "--kind", "large", "--loud"),
    ) == Made(Path("a"), 5, 1.0, True, False, False, (7, 8), (Path("x"), Path("y")), {"a": 1, "b": 2}, (3, 4), "large")


def test_what_is_required_or_unknown_is_refused() -> None:
    for args, named in (
        ((), "--folder"), (("--folder", "a", "--inner", 1), "--inner"), (("--folder", "a", "--no-is-fast"), "fast"),
        (("--folder", "a", "--sizes", 1), "--size"), (("--folder", "a", "--count", "x"), "--count"),
    ):  # fmt: skip
        result = typed(with_options(takes_made), *args)
        assert result.exit_code == 2 and named in result.output, result.output
    wrong = typed(with_options(takes_made), "--folder", "a", "--table", "a")
    assert isinstance(wrong.exception, ValueError) and str(wrong.exception) == "table='a': must be NAME=NUMBER"


def takes_made(made: Made) -> None:
    """Nothing."""


def test_help_says_what_the_field_says_and_its_default() -> None:
    made = typer.Typer()
    made.command()(with_options(takes_made))
    shown = {name: each for each in get_command(made).params for name in each.opts}  # type: ignore[attr-defined]
    assert shown["--count"].help == "A number." and shown["--count"].rich_help_panel == "Numbers"
    assert shown["--count"].default == 3 and shown["--folder"].required and not shown["--share"].required
    assert shown["--size"].help == "Several. Default: 1 2." and shown["--files"].help == "Several."
    assert shown["--kind"].help == "A kind. One of small, large."


def test_given_is_what_stands_on_the_command_line() -> None:
    seen: list[Any] = []

    @with_options
    def command(made: Annotated[Given[Made], Fields(is_partial=True)]) -> None:
        seen.append(made)

    for args in ((), ("--count", 3), ("--no-is-open", "--size", 4)):
        assert typed(command, *args).exit_code == 0
    assert seen == [{}, {"count": 3}, {"is_open": False, "sizes": (4,)}], "a default that is typed is given"


def test_a_command_chooses_fields_and_has_its_own_defaults() -> None:
    seen: list[Made] = []

    @with_options
    def command(made: Annotated[Made, Fields(only=("folder", "count"), defaults={"count": 9, "share": 0.5})]) -> None:
        seen.append(made)

    assert typed(command, "--folder", "a").exit_code == 0
    assert typed(command, "--folder", "a", "--count", 3).exit_code == 0
    assert typed(command, "--folder", "a", "--share", 3).exit_code == 2
    assert seen == [Made(Path("a"), 9, 0.5), Made(Path("a"), 3, 0.5)]


def test_no_field_is_dropped_in_silence() -> None:
    def silent(made: Silent) -> None: ...
    def told(made: Annotated[Silent, Fields(without=("untold",))]) -> None: ...
    def misspelt(made: Annotated[Made, Fields(only=("cuont",))]) -> None: ...
    def odd(made: Odd) -> None: ...
    def twice(made: Made, count: Annotated[int, typer.Option()] = 1) -> None: ...

    with_options(told)
    for command, message in (
        (silent, "Silent: untold: say nothing"), (misspelt, "Made: has no field cuont"),
        (odd, "mixed: no option can be made of int"), (twice, "two options are called count"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            with_options(command)


def choices(*args: object) -> DraftingChoice:
    seen: list[DraftingChoice] = []

    @with_options
    def command(drafting: DraftingChoice, sampling: SamplingParams) -> None:
        seen.append(drafting)

    result = typed(command, *args)
    assert result.exit_code == 0, result.output
    return seen[0]


def test_a_way_to_draft_is_named_and_shaped() -> None:
    assert choices().value("chain") == Chain() and choices().value("none") == NoDraft()
    chosen = choices("--drafter", "chain", "--num-spec-tokens", 5, "--depth", 2, "--top-k", 9)
    assert chosen.value("none") == Chain(5) and chosen.without_effect(Chain(5)) == ["depth"]
    assert choices("--num-spec-tokens", 5).value("adaptive") == Chain(5), "the field says which way is meant"
    assert choices("--depth", 1).value("adaptive") == Dynamic(1)
    assert choices("--top-k", 9).value("adaptive") == Adaptive()
    with pytest.raises(ValueError, match="drafter='oracle': must be one of none, adaptive, chain"):
        choices("--drafter", "oracle").value("none")


def test_a_new_way_to_draft_has_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRAFTINGS, Echo.name, Echo)
    chosen = choices("--drafter", "echo", "--echo-window", 7, "--num-nodes", 4)
    assert chosen.value("none") == Echo(7) and chosen.without_effect(Echo(7)) == ["num_nodes"]
    assert choices("--drafter", "echo").value("none") == Echo()


def test_every_option_of_every_command_says_what_it_is() -> None:
    for name, command in EVERY.items():
        for param in command.params:
            assert param.help and param.help.strip()[-1] in ".)", f"aquiline {name}: {param.name}: {param.help}"


@pytest.mark.parametrize(
    "command",
    [*(function_of(name) for name in COMMANDS if name != "bench"), bench],
    ids=lambda command: command.__name__,
)
def test_every_field_that_a_command_takes_is_an_option(command: Any) -> None:
    """Or the command names it as one that it does not take."""
    taken = {param.name for param in get_command(alone(command)).params}  # type: ignore[attr-defined]
    for hint in settings_of(command):
        kind, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        which = extras[0] if extras else Fields()
        owner = get_args(kind)[0] if get_origin(kind) is Given else kind
        for each in fields(owner):
            said = about_of(each)
            left_out = each.name not in which.only if which.only else each.name in which.without
            assert left_out or (said is not None and said.help), f"{owner.__name__}.{each.name}"
            assert left_out or said is None or (name_of(each) in taken) == said.is_option


def alone(command: Callable[..., None]) -> typer.Typer:
    one = typer.Typer()
    one.command()(command)
    return one


def settings_of(command: Any) -> Iterator[Any]:
    """The annotations of a command's parameters that are dataclasses."""
    for hint in get_type_hints(getattr(command, "__wrapped__", command), include_extras=True).values():
        kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        owner = get_args(kind)[0] if get_origin(kind) is Given else kind
        if isinstance(owner, type) and is_dataclass(owner) and owner is not DraftingChoice:
            yield hint


def test_generate_takes_all_of_sampling() -> None:
    taken = {param.name for param in EVERY["generate"].params}
    assert {f.name for f in fields(SamplingParams)} - {"structured"} | {"json_schema", "regex", "grammar"} <= taken
    result = CliRunner().invoke(app, ["generate", "--prompt", "x", "--min-tokens", "9", "--max-tokens", "8"])
    assert result.exit_code == 2 and result.stderr == "aquiline: min_tokens=9: must be in [0, max_tokens=8]\n"
    result = CliRunner().invoke(app, ["generate", "--prompt", "x", "--bad-words", "a", ""])
    assert result.exit_code == 2 and result.stderr.startswith("aquiline: bad_words=('a', ''): a text must not be empty")


ROWS = [
    (name, param) for name, command in EVERY.items() for param in command.params if getattr(param, "multiple", False)
]


@pytest.mark.parametrize(("name", "param"), ROWS, ids=lambda value: getattr(value, "name", value))
def test_several_values_stand_in_a_row_or_apart(name: str, param: Any) -> None:
    command = EVERY[name]
    needed = [p for p in command.params if p.required and p is not param]
    options = [word for p in needed if p.param_type_name == "option" for word in (p.opts[0], "given")]
    arguments = ["DIR" for p in needed if p.param_type_name == "argument"]
    word = param.opts[0]
    taken = [
        command.make_context(name, [*before, word, *values, *behind, *options]).params
        for before, values, behind in (
            (arguments, ["1", "2", "3"], []), (arguments, ["1", word, "2", "3"], []), ([], ["1", "2", "3"], arguments),
        )
    ]  # fmt: skip
    assert [len(each[param.name]) for each in taken] == [3, 3, 3] and taken[0] == taken[1] == taken[2]


def test_lists_of_gate_leave_the_directory_alone() -> None:
    """What could be typed before gate took rows still means the same."""
    gate = EVERY["gate"]
    for args in (
        ["--only", "a", "DIR"],
        ["--only", "a", "--set", "b=1", "DIR"],
        ["DIR", "--only", "a", "--set", "b=1"],
    ):
        taken = gate.make_context("gate", args).params
        assert taken["directory"] == Path("DIR") and list(taken["only"]) == ["a"]
    taken = gate.make_context("gate", ["--only", "a", "DIR", "--json"]).params
    assert taken["directory"] == Path("DIR") and taken["as_json"]
