"""Checks of what comes from outside: JSON that can be read, text that can be written, settings of their declared types.

Whether a value is in range is its owner's to say; here it is only a value of the right kind.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

MAX_LEVELS = 100
"""Lists and objects of JSON that may stand in one another: what reads, shows or writes them by recursion gets that far.
Python's own limit depends on its version and on what called the parser."""

LONGEST_SHOWN = 120
"""Characters of a value that an error shows; what is wrong with it comes behind."""

_NAMES = {
    int: "a whole number", float: "a number", bool: "True or False", str: "a text", NoneType: "None", Path: "a path",
}  # fmt: skip


def shown(value: object) -> str:
    """A value as an error shows it: cut where it is long, so that what is said of it can be read."""
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def parse_json(text: str | bytes, is_strict: bool = False) -> Any:
    """What a JSON text says; bytes are UTF-8. is_strict: refuse NaN, Infinity and numbers too large for a float, which
    could not be written as JSON again; files of checkpoints have them.

    Raises ValueError saying what is wrong: no UTF-8, no JSON, a number too long, or more than MAX_LEVELS levels."""
    told = f"it nests lists and objects deeper than {MAX_LEVELS} levels"
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite) if is_strict else json.loads(text)
    except RecursionError:
        raise ValueError(told) from None
    if text.count("[") + text.count("{") > MAX_LEVELS and isinstance(value, list | dict) and _is_deep(value):
        raise ValueError(told)
    return value


def _refuse(number: str) -> float:
    raise ValueError(f"{number[:40]} is no number of JSON; write null, or a finite number")


def _finite(number: str) -> float:
    value = float(number)
    return value if math.isfinite(value) else _refuse(number)


def is_unicode(text: str) -> bool:
    """Whether a text can be written: JSON's escapes may leave half a surrogate pair in it, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_fields(settings: object) -> None:
    """Raise ValueError naming the first field of a dataclass whose value is not of the type it is declared with.

    An int stands for a float, a bool for neither. Literals, unions, tuple[X, ...] and dict[K, V] are looked into."""
    assert is_dataclass(settings) and not isinstance(settings, type), settings
    for name, (declared, is_right) in _declared(type(settings)).items():
        value = getattr(settings, name)
        if not is_right(value):
            raise ValueError(f"{name}={shown(value)}: must be {_described(declared)}")


@lru_cache
def _declared(kind: type) -> dict[str, tuple[Any, Callable[[Any], bool]]]:
    """The type of each field and its test. Tests are made once: each request of a client has fields."""
    hints = get_type_hints(kind)
    return {field.name: (hints[field.name], _test_of(hints[field.name])) for field in fields(kind)}


def _test_of(declared: Any) -> Callable[[Any], bool]:
    origin, args = get_origin(declared), get_args(declared)
    if origin is Literal:
        return args.__contains__
    inner = [_test_of(arg) for arg in args if arg is not Ellipsis]
    if origin in (Union, UnionType):
        return lambda value: any(test(value) for test in inner)
    if origin is tuple:
        return lambda value: isinstance(value, tuple) and all(map(inner[0], value))
    if origin is dict:
        return lambda value: (
            isinstance(value, dict) and all(map(inner[0], value)) and all(map(inner[1], value.values()))
        )
    if declared in (int, float):
        kinds = int | float if declared is float else int
        return lambda value: isinstance(value, kinds) and not isinstance(value, bool)
    return lambda value: isinstance(value, declared)


def _described(declared: Any) -> str:
    origin, args = get_origin(declared), get_args(declared)
    if origin in (Union, UnionType):
        return " or ".join(_described(arg) for arg in args)
    if origin is Literal:
        return f"one of {', '.join(map(repr, args))}"
    if origin is tuple:
        return f"a tuple (in JSON a list), each item {_described(args[0])}"
    if origin is dict:
        return f"a dict, each key {_described(args[0])} and each value {_described(args[1])}"
    return _NAMES.get(declared) or f"a {declared.__name__}"


def _is_deep(value: list[Any] | dict[str, Any]) -> bool:
    level: list[Any] = [value]
    for _ in range(MAX_LEVELS):
        insides = [outer.values() if isinstance(outer, dict) else outer for outer in level]
        level = [inner for inside in insides for inner in inside if isinstance(inner, list | dict)]
        if not level:
            return False
    return True
