"""What comes from outside: JSON is read or refused with a reason, fields are of the types they are declared with."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from tests.json_values import ANY_JSON, nested

from aquiline.checks import MAX_LEVELS, check_fields, is_unicode, parse_json


@given(ANY_JSON)
def test_what_json_writes_is_read(value: Any) -> None:
    text = json.dumps(value)
    assert json.dumps(parse_json(text)) == text == json.dumps(parse_json(text.encode()))


@pytest.mark.parametrize(
    ("levels", "is_read"), [(1, True), (MAX_LEVELS, True), (MAX_LEVELS + 1, False), (10**5, False)]
)
def test_levels_are_bounded(levels: int, is_read: bool) -> None:
    for text in (nested(levels), '{"a":' * levels + "1" + "}" * levels):
        if is_read:
            assert json.dumps(parse_json(text), separators=(",", ":")) == text
        else:
            with pytest.raises(ValueError, match=f"deeper than {MAX_LEVELS} levels"):
                parse_json(text)


def test_many_lists_beside_one_another_are_not_deep() -> None:
    assert len(parse_json("[" + ",".join(["[{}]"] * 1000) + "]")) == 1000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Expecting value"), ("{", "property name"), ("[1,]", "Expecting value"), (b"\xff", "decode byte 0xff"),
        (b"\xed\xa0\x80", "decode byte 0xed"), ("1" * 5000, "limit"),
    ],
)  # fmt: skip
def test_what_is_no_json_is_a_value_error(text: str | bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_json(text)


def test_half_a_surrogate_pair_is_no_text() -> None:
    assert is_unicode("\U0001f600 \u2028") and not is_unicode(json.loads('"\\ud83d"'))


@dataclass(frozen=True)
class Sample:
    whole: int = 1
    number: float = 1.0
    is_on: bool = False
    name: str = "n"
    kind: Literal["a", "b"] = "a"
    place: Path | None = None
    ids: tuple[int, ...] = (1,)
    paths: tuple[tuple[int, ...], ...] = ((1,),)
    shares: dict[int, float] = field(default_factory=dict)


@pytest.mark.parametrize(
    "right",
    [{"number": 2}, {"place": Path("x")}, {"kind": "b"}, {"ids": ()}, {"shares": {1: 2}}, {"paths": ((), (1, 2))}],
)
def test_values_of_the_declared_type(right: dict[str, Any]) -> None:
    check_fields(Sample(**right))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"whole": True}, "whole=True: must be a whole number"),
        ({"whole": 1.0}, "whole=1.0: must be a whole number"),
        ({"number": False}, "number=False: must be a number"),
        ({"number": "1"}, "number='1': must be a number"),
        ({"is_on": 1}, "is_on=1: must be True or False"),
        ({"name": None}, "name=None: must be a text"),
        ({"kind": "c"}, "kind='c': must be one of 'a', 'b'"),
        ({"place": "x"}, "place='x': must be a path or None"),
        ({"ids": [1]}, r"ids=\[1\]: must be a tuple \(in JSON a list\), each item a whole number"),
        ({"ids": (1, True)}, r"ids=\(1, True\): must be a tuple"),
        ({"paths": ((1,), (0.5,))}, r"each item a tuple \(in JSON a list\), each item a whole number"),
        ({"shares": {1: None}}, "must be a dict, each key a whole number and each value a number"),
    ],
)
def test_values_of_another_type(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_fields(Sample(**wrong))
