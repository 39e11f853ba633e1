"""Schemas, expressions and grammars for tests, and whether a text follows them."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema

from aquiline.config import Structured

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "long tag"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
}
TREE: dict[str, Any] = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "left": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["value", "left"],
}
SHAPES: dict[str, Any] = {
    "oneOf": [
        {
            "type": "object",
            "properties": {"kind": {"const": kind}, "size": {"type": "number"}},
            "required": ["kind", "size"],
        }
        for kind in ("circle", "square")
    ]
}
VALUES: list[dict[str, Any]] = [
    {"type": "boolean"}, {"type": "null"}, {"enum": [1, "two", None, {"three": [3]}]}, {"const": {"a": [1, 2]}},
    {"type": "integer", "minimum": 10, "maximum": 99}, {"type": "string", "minLength": 2, "maxLength": 6},
    {"type": "string", "pattern": "^[a-c]{2,5}$"}, {"type": ["integer", "null"]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"enum": ["x", "y"]}], "items": False, "minItems": 2},
]  # fmt: skip
SCHEMAS: list[dict[str, Any]] = [PERSON, TREE, SHAPES, *VALUES] + [
    {"type": "object", "properties": {name: value, "other": {"type": "boolean"}}, "required": [name, "other"]}
    for name in ("item", "a long name of a property", "é")
    for value in VALUES
]
EXPRESSIONS = [
    r"yes|no", r"[0-9]{4}-[0-9]{2}-[0-9]{2}", r"(GET|POST) /[a-z]{1,8}", r"x", r"begin [a-z]+ end", r"[A-Z][a-z]{2,9}!",
    r"(ab|cd){2,4}", r"0x[0-9a-f]{2,8}", r"\+?[1-9][0-9]{2,6}", r"- [a-z ]{3,20}\n",
]  # fmt: skip
CHOICES = [("one",), ("true", "false", "null"), ("a", "ab", "abc"), ("é", "e"), ("import os", "import sys")]
LISTS = 'root ::= "[" item ("," item)* "]"\nitem ::= [0-9]{1,2} | root'

STRUCTURED = [
    *(Structured(json=schema) for schema in SCHEMAS),
    *(Structured(regex=expression) for expression in EXPRESSIONS),
    *(Structured(choice=texts) for texts in CHOICES),
    Structured(grammar=LISTS),
    Structured(structural_tag={"type": "structural_tag", "format": {"type": "const_string", "value": "exactly this"}}),
]


def follows(text: str, structured: Structured) -> bool:
    """Whether a whole text follows a schema, an expression or a choice; for other grammars whether it looks so."""
    [(name, value)] = structured.given.items()
    if name == "json":
        return jsonschema.Draft202012Validator(json.loads(value)).is_valid(json.loads(text))
    if name == "regex":
        return re.fullmatch(value, text) is not None
    if name == "choice":
        return text in value
    return text == "exactly this" if name == "structural_tag" else json.loads(text) is not None
