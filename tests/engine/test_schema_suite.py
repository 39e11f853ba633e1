"""The public JSON-Schema-Test-Suite: a schema is refused by name, or no value that breaks it is accepted."""

from __future__ import annotations

import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from aquiline.config import Structured
from aquiline.engine.grammar import Grammars
from aquiline.engine.schema import CONSTRAINING, TYPES
from aquiline.models.known_pairs import BUNDLED_TARGET
from aquiline.text.tokenizer import load_tokenizer

pytest.importorskip("xgrammar", reason="not installed: xgrammar")

END = 0
DRAFTS = ("draft2020-12", "draft2019-09", "draft7", "draft6", "draft4")
UNTYPED = {
    "minLength": 2, "maxLength": 2, "pattern": "a", "minimum": 1, "exclusiveMaximum": 1, "multipleOf": 2, "minItems": 1,
    "maxItems": 2, "maxProperties": 1, "patternProperties": {"a": {}}, "propertyNames": {"type": "string"},
}  # fmt: skip

UNSEEN: list[tuple[str, dict[str, Any], Any]] = [
    ("multipleOf", {"type": "number", "multipleOf": 3}, 4), ("multipleOf", {"type": "number", "multipleOf": 1}, 1.5),
    ("multipleOf", {"type": ["integer", "number"], "multipleOf": 3}, 4),
    ("multipleOf", {"type": "integer", "multipleOf": 1025}, 4),
    ("multipleOf", {"type": "integer", "multipleOf": 1.5}, 4),
    ("multipleOf", {"type": "integer", "multipleOf": 3, "minimum": 5}, 7),
    ("format", {"type": "string", "format": "date", "minLength": 20}, "2026-01-01"),
    ("format", {"type": "string", "format": "date", "maxLength": 3}, "2026-01-01"),
    ("format", {"type": "string", "format": "ipv4", "pattern": "a"}, "1.1.1.1"),
    ("pattern", {"type": "string", "pattern": "(?=a)b"}, "b"),
    ("pattern", {"type": "string", "pattern": "(?!b)b"}, "b"),
    ("pattern", {"type": "string", "pattern": "a^b"}, "ab"), ("pattern", {"type": "string", "pattern": "a$b"}, "ab"),
    ("pattern", {"type": "string", "pattern": "x(^a)"}, "xa"),
    ("patternProperties", {"type": "object", "patternProperties": {"a^b": {}}, "additionalProperties": False},
     {"ab": 1}),
    ("patternProperties", {"type": "object", "patternProperties": {"a*": {"type": "null"}, "a+": {}}}, {"a": 1}),
    ("propertyNames", {"type": "object", "propertyNames": {"type": "string", "maxLength": 2}, "properties": {
        "abc": {}}}, {"abc": 1}),
    ("propertyNames", {"type": "object", "propertyNames": {"type": "string", "maxLength": 2}, "patternProperties": {
        "abc": {}}}, {"abc": 1}),
    ("not", {"$ref": "#/components/a", "components": {"a": {"not": {"type": "null"}}}}, None),
    ("uniqueItems", {"$ref": "#/x", "x": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}}, [1, 1]),
    ("oneOf", {"oneOf": [{"const": 1}, {"const": 1.0}]}, 1),
    ("oneOf", {"oneOf": [{"enum": [[1]]}, {"enum": [{"a": 2}, [1.0]]}]}, [1]),
    ("oneOf", {"oneOf": [{"type": ["object", "null"], "properties": {"a": {"const": name}}, "required": ["a"]}
                         for name in "xy"]}, None),
    ("type", {"type": []}, 1), ("type", {"type": 5, "enum": [1]}, 1), ("required", {"required": 5}, 1),
    ("$id", {"properties": {"a": {"$id": "inner", "$defs": {"x": {"type": "null"}}, "properties": {
        "b": {"$ref": "#/$defs/x"}}, "required": ["b"]}}, "required": ["a"], "$defs": {"x": {"type": "string"}}},
     {"a": {"b": "text"}}),
]  # fmt: skip
"""Keywords that xgrammar passes over, by schemas that hold them and values that it takes and that break them."""

BAD: list[Any] = [
    {"allOf": 5}, {"oneOf": [{"type": "object", "required": ["a"]}] * 2}, {"type": [[1]], "enum": [1]}, {"enum": 5},
    {"properties": {"a": 5}}, {"properties": []}, {"required": [[]]}, {"$ref": 5}, {"$ref": "#/$defs/a/b"},
    {"$ref": "#/"}, {"items": [{}]}, {"anyOf": {}}, {"type": "string", "pattern": 5},
    {"type": "number", "minimum": "1"}, 5, None, [],
    {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {
        name: {"type": "object", "properties": {key: {"$ref": f"#/$defs/{name}"} for key in "xy"}, "required": [*"xy"]}
        for name in "ab"}},
    {"oneOf": [{"const": number} for number in range(200)]},
]  # fmt: skip

SOUND: list[tuple[dict[str, Any], Any, Any]] = [
    ({"type": "integer", "multipleOf": 3.0}, 6, 4), ({"type": "string", "pattern": "^a$|^[$^]\\^$"}, "$^", "b"),
    ({"type": "string", "format": "password", "minLength": 3}, "abc", "ab"),
    ({"type": "string", "format": "date"}, "2026-01-01", "today"),
    ({"$ref": "#/components/a", "components": {"a": {"type": "null"}}}, None, 1),
    ({"oneOf": [{"const": 1}, {"const": True}, {"const": "1"}]}, True, False),
    ({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {
        name: {"type": "object", "properties": {"next": {"$ref": f"#/$defs/{name}"}, "is": {"const": name}},
               "required": ["next", "is"]} for name in "ab"} | {"a": {"type": "null"}}}, None, 1),
    ({"$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(200)} | {"a200": {"type": "null"}},
      "$ref": "#/$defs/a0"}, None, 1),
]  # fmt: skip
"""Schemas near those, a value that follows each and one that does not."""

WORDS = st.sampled_from([*CONSTRAINING, "$defs", "uniqueItems", "format", "a"])
TEXTS = st.sampled_from(["a", "#", "#/$defs/a", "date", *TYPES])
SCHEMAS = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-2, 2) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)


@cache
def grammars() -> Grammars:
    tokenizer = load_tokenizer(BUNDLED_TARGET)
    assert tokenizer is not None
    return Grammars(tokenizer, 4096)


def compiled(schema: Any) -> str:
    return grammars().compile(Structured(json=json.dumps(schema)), frozenset({END}))


def takes(grammar: str, value: Any) -> bool:
    """Whether a compiled grammar takes a value, written as answers write it."""
    constraint = grammars().constraint(grammar, frozenset({END}))
    text = json.dumps(value, ensure_ascii=False)
    constraint.accept([*grammars().tokenizer.encode(text, add_special_tokens=False).ids, END])
    return constraint.failure is None


@pytest.mark.parametrize("name", UNTYPED)
def test_a_keyword_that_counts_only_beside_a_type_asks_for_it(name: str) -> None:
    with pytest.raises(ValueError, match=f'{name} at #/anyOf/1: counts only beside a type; add "type": "'):
        compiled({"anyOf": [{"type": "null"}, {name: UNTYPED[name]}]})


@pytest.mark.parametrize(("name", "schema", "value"), UNSEEN)
def test_what_would_be_passed_over_is_refused_by_name(name: str, schema: dict[str, Any], value: Any) -> None:
    assert not Draft202012Validator(schema).is_valid(value) if name not in ("type", "required") else True
    with pytest.raises(ValueError, match=rf"^json: {re.escape(name)} at #"):
        compiled(schema)


@pytest.mark.parametrize("schema", BAD)
def test_what_is_no_schema_or_too_much_is_refused_by_its_place(schema: Any) -> None:
    with pytest.raises(ValueError, match=r"^json: .* at #"):
        compiled(schema)


@pytest.mark.parametrize(("schema", "value", "other"), SOUND)
def test_schemas_near_those_are_followed(schema: dict[str, Any], value: Any, other: Any) -> None:
    grammar = compiled(schema)
    assert takes(grammar, value) and not takes(grammar, other)


@given(schema=SCHEMAS)
@settings(max_examples=150, deadline=None)
def test_any_json_as_a_schema_is_a_grammar_or_refused(schema: Any) -> None:
    try:
        grammar = grammars().compile(Structured(json=json.dumps(schema)), frozenset({END}))
    except ValueError as error:
        assert str(error).startswith(("json", "structured.json")), error
    else:
        assert grammars().constraint(grammar, frozenset({END})).failure is None


@pytest.mark.slow
def test_what_is_accepted_follows_its_schema() -> None:
    root = os.environ.get("AQUILINE_TEST_SCHEMAS")
    if root is None:
        pytest.skip("set AQUILINE_TEST_SCHEMAS to the suite's folder of tests")
    num_taken, wrong = 0, []
    for file in sorted(file for draft in DRAFTS for file in Path(root, draft).glob("*.json")):
        for group in json.loads(file.read_text(encoding="utf-8")):
            try:
                grammar = compiled(group["schema"])
            except ValueError as error:
                assert str(error).startswith(("json", "structured.json")), error
                continue
            num_taken += 1
            wrong += [
                (file.name, group["schema"], test["data"])
                for test in group["tests"]
                if not test["valid"] and takes(grammar, test["data"])
            ]
    assert num_taken > 300 and not wrong, wrong
