"""Options from dataclasses: a command takes settings among its parameters, and their fields are its options.

    @with_options
    def chat(sampling: Annotated[SamplingParams, Fields(defaults={"max_tokens": 1024})], as_json: ...) -> None: ...

Every field becomes an option by its type and by what it says of itself (settings.py). A field that is not given on the
command line has the command's default, else the dataclass's own. `DraftingChoice` has the fields of every way to draft.
What is neither a dataclass nor `Given` stays as typer has it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from types import GenericAlias, NoneType, UnionType
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import typer

from aquiline.settings import about_of, name_of
from aquiline.spec.drafting import DRAFTING
from aquiline.spec.registry import DRAFTINGS, DraftingChoice

T = TypeVar("T")
CONTEXT = "ctx"


@dataclass(frozen=True)
class Fields:
    """Which fields of a dataclass are options of a command: those in `only`, or all but those in `without`; and this
    command's defaults, where they are not the dataclass's. is_partial: fields without a default may be left out."""

    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    is_partial: bool = False


class Given(dict[str, Any], Generic[T]):
    """The fields of a dataclass T that stand on the command line, by their names: for a command that has values of its
    own for the others, and calls T itself."""


@dataclass(frozen=True)
class _Option:
    """One option and the field whose value it gives."""

    field: str
    parameter: inspect.Parameter
    convert: Callable[[Any], Any]


@dataclass(frozen=True)
class _Group:
    """The options of one parameter of a command."""

    options: list[_Option]
    build: Callable[[dict[str, Any]], Any]

    def take(self, values: dict[str, Any], given: set[str]) -> Any:
        """The parameter's value; removes its options from `values`."""
        found = {}
        for option in self.options:
            value = values.pop(option.parameter.name)
            if option.parameter.name in given:
                found[option.field] = option.convert(value)
        return self.build(found)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer is to see it: an option for every field of its dataclasses.

    Raises ValueError when the command is defined: for a field that says nothing of itself, a name that no field has,
    and two options of one name."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, _Group] = {}
    shown = [_keyword(CONTEXT, typer.Context)]
    for name, parameter in inspect.signature(command).parameters.items():
        group = _group_of(hints[name])
        if group is None:
            shown.append(_keyword(name, hints[name], parameter.default))
        else:
            groups[name] = group
            shown += [option.parameter for option in group.options]
    names = [parameter.name for parameter in shown]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{command.__name__}: two options are called {', '.join(twice)}")

    @wraps(command)
    def run(**values: Any) -> None:
        ctx = values.pop(CONTEXT)
        given = {name for name in values if _is_given(ctx, name)}
        built = {name: group.take(values, given) for name, group in groups.items()}
        command(**values, **built)

    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return run


def _is_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _keyword(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _group_of(hint: Any) -> _Group | None:
    """The options of a parameter by its annotation; None if it is one of typer's."""
    kind, which = hint, Fields()
    if get_origin(hint) is Annotated:
        kind, *extras = get_args(hint)
        which = next((extra for extra in extras if isinstance(extra, Fields)), which)
    if kind is DraftingChoice:
        return _drafting_group()
    owner = get_args(kind)[0] if get_origin(kind) is Given else kind
    if not (isinstance(owner, type) and is_dataclass(owner)):
        return None
    declared, options = get_type_hints(owner), []
    for each in _chosen(owner, which):
        default = which.defaults.get(each.name, _default_of(each))
        if default is MISSING and which.is_partial:
            default = None
        options.append(_option_of(each, declared[each.name], default))
    make = owner if owner is kind else Given
    return _Group(options, lambda values: make(**{**which.defaults, **values}))


def _chosen(owner: type[Any], which: Fields) -> list[Field[Any]]:
    """The fields of a dataclass that are options."""
    by_name = {each.name: each for each in fields(owner)}
    unknown = [name for name in (*which.only, *which.without, *which.defaults) if name not in by_name]
    if unknown:
        raise ValueError(f"{owner.__name__}: has no field {', '.join(unknown)}")
    names = which.only or [name for name in by_name if name not in which.without]
    told = {name: about_of(by_name[name]) for name in names}
    silent = [name for name, said in told.items() if said is None or not said.help]
    if silent:
        raise ValueError(f"{owner.__name__}: {', '.join(silent)}: say nothing of themselves; see settings.py")
    return [by_name[name] for name, said in told.items() if said is not None and said.is_option]


def _default_of(each: Field[Any]) -> Any:
    return each.default_factory() if each.default_factory is not MISSING else each.default


def _option_of(each: Field[Any], declared: Any, default: Any, told: Any = None) -> _Option:
    """An option for a field: a flag for a bool, a row of values for a tuple or a dict, else one value.

    told: the default that the help says, where the option itself has none."""
    said, name = about_of(each), name_of(each)
    assert said is not None, each.name
    value, is_optional = _without_none(declared)
    help_text, words = said.help, f"--{name.replace('_', '-')}"
    kind: Any
    convert: Callable[[Any], Any]
    if said.parse is not None:
        kind, convert, default = str, said.parse, default if default is MISSING else None
    elif get_origin(value) in (tuple, dict):
        kind = GenericAlias(list, str if said.parse_item is not None else _item_of(value, each.name))
        convert = partial(_collected, get_origin(value), said.parse_item)
        if default is not MISSING:
            told, default = default or None, None
    else:
        kind, convert = _plain(value, each.name), _same
        if kind is bool and (is_optional or default is True):
            words += f"/--no-{words[2:]}"
    if get_origin(value) is Literal:
        help_text += f" One of {', '.join(get_args(value))}."
    if told is not None and told is not MISSING:
        help_text += f" Default: {' '.join(map(_shown, told)) if isinstance(told, tuple) else _shown(told)}."
    info = typer.Option(words, help=help_text, rich_help_panel=said.panel)
    kind = kind | None if default is None else kind
    empty = inspect.Parameter.empty if default is MISSING else default
    return _Option(each.name, _keyword(name, Annotated[kind, info], empty), convert)


def _collected(collection: Callable[[Any], Any], item: Callable[[str], Any] | None, values: list[Any]) -> Any:
    return collection(values if item is None else map(item, values))


def _drafting_group() -> _Group:
    """The name of a way to draft and the fields of all of them, each once, by the names that users call them."""
    said = f"{_listed(list(DRAFTINGS))}. Default: adaptive; none for a target without a draft."
    info = typer.Option("--drafter", help=said, rich_help_panel=DRAFTING)
    options = {"drafter": _Option("drafter", _keyword("drafter", Annotated[str | None, info], None), _same)}
    for kind in DRAFTINGS.values():
        for each in _chosen(kind, Fields()):
            option = _option_of(each, get_type_hints(kind)[each.name], None, told=_default_of(each))
            name = option.parameter.name
            first = options.setdefault(name, _Option(name, option.parameter, option.convert))
            if get_args(first.parameter.annotation)[0] != get_args(option.parameter.annotation)[0]:
                raise ValueError(f"{kind.__name__}: {name} has another type than the option of another way to draft")
    return _Group(list(options.values()), lambda given: DraftingChoice(given.pop("drafter", None), given))


def _without_none(declared: Any) -> tuple[Any, bool]:
    """A type without its None, and whether it had one."""
    if get_origin(declared) not in (Union, UnionType):
        return declared, False
    kinds = [kind for kind in get_args(declared) if kind is not NoneType]
    return (kinds[0], True) if len(kinds) == 1 else (declared, False)


def _item_of(collection: Any, name: str) -> Any:
    """The type of one item of a tuple of any length."""
    kind, *rest = get_args(collection)
    return _plain(kind if rest == [Ellipsis] else collection, name)


def _plain(kind: Any, name: str) -> Any:
    """The type of one value on a command line."""
    if get_origin(kind) is Literal:
        return str
    if kind not in (bool, int, float, str, Path):
        raise ValueError(f"{name}: no option can be made of {kind}; give it a parse or parse_item, or is_option=False")
    return kind


def _same(value: Any) -> Any:
    return value


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
