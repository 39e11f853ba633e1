"""Fields of a checkpoint's JSON files, each of the kind and in the range it must have; null stands for an absent one.

Every function raises CheckpointError naming file, field, value and what it must be. Knows no family and no format.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aquiline.errors import CheckpointError

Raw = dict[str, Any]

MAX_COUNT = 2**31 - 1
"""Kernels count in int32."""
MAX_LAYERS = 4096
"""A bound on num_hidden_layers: a broken config must not fill the memory before the tensors are looked for."""
MAX_EXPERTS = 1 << 18
"""A bound on the experts of all layers, likewise."""
SMALLEST, LARGEST = 1e-30, 1e30
"""Bounds of numbers that are divisors, powers or arguments of a logarithm. A number within them fits float32, and its
square fits a Python float."""


def count(raw: Raw, file: Path, name: str, default: int | None = None, *, least: int = 1, most: int = MAX_COUNT) -> int:
    """A whole number from `least` to `most`; `default` stands in for one that is absent."""
    value = raw.get(name)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"{file}: {name} is missing")
    if type(value) is not int or not least <= value <= most:
        kind = "a positive integer" if least == 1 else f"an integer from {least} on"
        raise CheckpointError(f"{file}: {name}={value!r} must be {kind}, at most {most}")
    return value


def flag(raw: Raw, file: Path, name: str, default: bool = False) -> bool:
    """True or false; `default` stands in for one that is absent."""
    value = flag_or_none(raw, file, name)
    return default if value is None else value


def flag_or_none(raw: Raw, file: Path, name: str) -> bool | None:
    """True or false; None for one that is absent, where that says something else than false."""
    value = raw.get(name)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{file}: {name}={value!r} must be true or false")
    return value


def nested(raw: Raw, file: Path, name: str) -> Raw:
    """An object inside the config; an empty one for one that is absent."""
    value = raw.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: {name}={value!r} must be an object")
    return value


def texts(raw: Raw, file: Path, name: str) -> list[str]:
    """A list of texts; an empty one for one that is absent."""
    value = raw.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise CheckpointError(f"{file}: {name}={value!r} must be a list of texts")
    return value


def token_ids(raw: Raw, file: Path, name: str, vocab_size: int = MAX_COUNT) -> tuple[int, ...]:
    """One token id below vocab_size, a list of them, or none."""
    value = raw.get(name)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        below = "" if vocab_size == MAX_COUNT else f" below vocab_size={vocab_size}"
        raise CheckpointError(f"{file}: {name}={value!r} must be a token id{below} or a list of them")
    return tuple(ids)


def number(value: object, file: Path, name: str, *, may_be_zero: bool = False) -> float:
    """A value of the JSON as a float between SMALLEST and LARGEST; 0 too if may_be_zero."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and (SMALLEST <= value <= LARGEST or (may_be_zero and value == 0)):  # type: ignore[operator]
        return float(value)  # type: ignore[arg-type]
    zero = "0 or " if may_be_zero else ""
    raise CheckpointError(f"{file}: {name}={value!r} must be {zero}a number from {SMALLEST:g} to {LARGEST:g}")
