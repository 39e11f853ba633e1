"""Which JSON schemas a grammar expresses. xgrammar passes over some keywords in silence, and its answers would then not
follow the schema; here these are refused by name, with the place where they stand."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

from aquiline.checks import parse_json, shown

REFUSED = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas",
    "dependencies", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
"""Keywords that no grammar here expresses."""

WHOLE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Keywords beside which no other keyword counts."""

LENGTHS = ("minLength", "maxLength")

RANGE = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

CONSTRAINING = (
    *WHOLE, *LENGTHS, *RANGE, "type", "properties", "required", "additionalProperties", "patternProperties",
    "propertyNames", "minProperties", "maxProperties", "items", "prefixItems", "minItems", "maxItems", "pattern",
    "multipleOf", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip

OF_TYPE = {
    "minLength": "string", "maxLength": "string", "pattern": "string", "minimum": "number", "maximum": "number",
    "exclusiveMinimum": "number", "exclusiveMaximum": "number", "multipleOf": "integer", "minItems": "array",
    "maxItems": "array", "minProperties": "object", "maxProperties": "object", "patternProperties": "object",
    "propertyNames": "object",
}  # fmt: skip
"""Keywords that do not count where no type is named, and the type that they are for."""

BESIDE = {
    "pattern": LENGTHS, "patternProperties": ("properties",), "propertyNames": ("properties", "patternProperties"),
    "multipleOf": RANGE, "format": (*LENGTHS, "pattern"),
}  # fmt: skip
"""Keywords, and those beside which one of the two does not count."""

FORMATS = (
    "email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference",
    "uri-template", "json-pointer", "relative-json-pointer",
)  # fmt: skip
"""Formats that are followed."""

MAX_MULTIPLE = 1024
"""The largest `multipleOf`."""

MAX_PAIRS = 8192
"""Pairs of schemas that are compared for all `oneOf` together."""

TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
    "object": (dict,), "array": (list,),
}  # fmt: skip

VALUES = {
    **dict.fromkeys(("pattern", "format", "$ref"), ("string",)),
    **dict.fromkeys((*RANGE, "multipleOf"), ("number",)),
    **dict.fromkeys((*LENGTHS, "minItems", "maxItems", "minProperties", "maxProperties"), ("integer",)),
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), ("object",)),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems", "enum", "required"), ("array",)),
    "type": ("string", "array"),
}
"""The types of keywords' values. Where a value is a schema, it is checked as one."""

PATTERN = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\(\?<?[=!]|.", re.DOTALL)
"""A character of an expression, a class of them, or the beginning of an assertion."""


def check_schema(text: str) -> None:
    """Raises ValueError naming the first keyword of a JSON schema that a grammar does not express, and its place."""
    try:
        root = parse_json(text, is_strict=True)
    except ValueError as error:
        raise ValueError(f"json={shown(text)}: is not JSON ({error})") from None
    parts, seen, choices = [("#", root)], set[int](), list[tuple[str, list[Any]]]()
    for place, schema in parts:  # which grow on the way
        if id(schema) in seen or isinstance(schema, bool):
            continue
        if not isinstance(schema, dict):
            raise _refusal(place, shown(schema), "is no schema; a schema is an object, true or false")
        seen.add(id(schema))
        _check_values(schema, place)
        _check_together(schema, place)
        _check_supported(schema, place)
        if (reference := schema.get("$ref", "#")) != "#":
            parts.append((reference, _named(reference, root, place)))
        choices.append((place, schema.get("oneOf", [])))
        parts += [(f"{place}/{step}", inner) for step, inner in _parts(schema)]
    comparison = _Comparison(root)
    for place, schemas in choices:
        for one, other in itertools.combinations(schemas, 2):
            if not comparison.are_apart(one, other):
                why = "two of its schemas may both hold; use anyOf, or types that differ"
                raise _refusal(place, "oneOf", why if comparison.num_left else "has too many schemas; use anyOf")


def pattern_fault(pattern: str) -> str | None:
    """What an expression holds that xgrammar passes over: an assertion, or an anchor that is not at its end."""
    found = PATTERN.findall(pattern)
    depth = 0
    for before, token, after in zip(["|", *found], found, [*found[1:], "|"], strict=False):
        if token[:2] == "(?" and len(token) > 2:
            return f"{token}...) is not supported; leave it out"
        is_inside = (token == "^" and before not in "^|") or (token == "$" and after not in "$|")
        if is_inside or (depth and token in "^$") or token in (r"\A", r"\Z", r"\z", r"\G"):
            return f"{token} is supported only as ^ at the beginning and $ at the end; leave it out"
        depth += (token == "(") - (token == ")")
    return None


def _check_values(schema: dict[str, Any], place: str) -> None:
    """Refuse keywords that are not supported, and values of a wrong type."""
    for name in REFUSED:
        if name in schema:
            raise _refusal(place, name, "is not supported; leave it out")
    for name, kinds in VALUES.items():
        if name in schema and not _is_of(schema[name], kinds):
            raise _refusal(place, name, f"{shown(schema[name])} must be of type {' or '.join(kinds)}")
    for name in ("type", "required"):
        if not all(isinstance(value, str) for value in schema.get(name, ())):
            raise _refusal(place, name, f"{shown(schema[name])} must hold names")
    if schema.get("type") == []:
        raise _refusal(place, "type", "[] names no type")


def _check_together(schema: dict[str, Any], place: str) -> None:
    """Refuse keywords that stand beside one that takes no notice of them."""
    given = [name for name in CONSTRAINING if name in schema]
    whole = [name for name in WHOLE if name in schema]
    for name in given if whole else ():
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        is_kept = name == "type" and values is not None and all(_is_of(value, schema["type"]) for value in values)
        if name != whole[0] and not is_kept:
            raise _refusal(place, name, f"is not supported beside {whole[0]}; write both as one")
    for name, kind in OF_TYPE.items():
        if name in schema and "type" not in schema:
            raise _refusal(place, name, f'counts only beside a type; add "type": "{kind}"')
    missing = [name for name in schema.get("required", ()) if name not in schema.get("properties", {})]
    if missing:
        raise _refusal(place, "required", f"{missing[0]!r} is not among the properties; describe it there")
    for name, others in BESIDE.items():
        for other in others if name != "format" or schema.get("format") in FORMATS else ():
            if name in schema and other in schema:
                raise _refusal(place, name, f"is not supported beside {other}; leave one of them out")


def _check_supported(schema: dict[str, Any], place: str) -> None:
    """Refuse keywords whose value no grammar here expresses."""
    if schema.get("uniqueItems"):
        raise _refusal(place, "uniqueItems", "is not supported; leave it out")
    if len(schema.get("allOf", ())) > 1:
        raise _refusal(place, "allOf", "is supported with one schema; write its schemas as one")
    if "$id" in schema and place != "#":
        raise _refusal(place, "$id", "is supported at the top alone; leave it out")
    is_whole = schema.get("multipleOf", 1) in range(1, MAX_MULTIPLE + 1)
    if "multipleOf" in schema and ("number" in _kinds(schema) or not is_whole):
        why = f"is supported for integers alone, as a whole number from 1 to {MAX_MULTIPLE}"
        raise _refusal(place, "multipleOf", f'{why}; write "type": "integer", or leave it out')
    named = schema.get("patternProperties", {})
    if len(named) > 1:
        raise _refusal(place, "patternProperties", "is supported with one pattern; write its patterns as one")
    for name, patterns in (("pattern", [schema.get("pattern", "")]), ("patternProperties", named)):
        for pattern in patterns:
            if (fault := pattern_fault(pattern)) is not None:
                raise _refusal(place, name, f"{shown(pattern)}: {fault}")


def _refusal(place: str, name: str, why: str) -> ValueError:
    return ValueError(f"json: {name} at {place[:200]}: {why}")


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas inside a schema, and where they stand."""
    for name in ("properties", "patternProperties", "$defs", "definitions"):
        yield from ((f"{name}/{key}", value) for key, value in schema.get(name, {}).items())
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        yield from ((f"{name}/{place}", value) for place, value in enumerate(schema.get(name, ())))
    for name in ("items", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties"):
        if name in schema:
            yield name, schema[name]


def _named(reference: str, root: Any, place: str) -> Any:
    """The schema that a reference names. Raises ValueError where it names none, or none of this schema."""
    if not reference.startswith("#/"):
        raise _refusal(place, "$ref", f"{shown(reference)} is not in this schema; a reference begins with #/")
    for step in reference.split("/")[1:]:
        if not step or not isinstance(root, dict) or step not in root:
            raise _refusal(place, "$ref", f"{shown(reference)} names nothing in this schema; use #/$defs/NAME")
        root = root[step]
    return root


class _Comparison:
    """Tells schemas of one checked schema apart. num_left: pairs that may still be compared."""

    def __init__(self, root: Any) -> None:
        self.root, self.num_left = root, MAX_PAIRS
        self._values_of: dict[int, set[str] | None] = {}

    def are_apart(self, one: Any, other: Any) -> bool:
        """Whether no value follows both schemas, as far as their types, their fixed values and the properties that both
        require say."""
        pairs, seen = [(one, other)], set[tuple[int, int]]()
        for pair in pairs:  # which grow on the way
            one, other = map(self._resolved, pair)
            if not isinstance(one, dict) or not isinstance(other, dict) or (id(one), id(other)) in seen:
                continue
            if not self.num_left:
                return False
            self.num_left -= 1
            seen.add((id(one), id(other)))
            own, others = self._values(one), self._values(other)
            kinds, further = _kinds(one), _kinds(other)
            if own is not None and others is not None:
                if own.isdisjoint(others):
                    return True
            elif kinds and further and not kinds & further and not {"integer", "number"} <= kinds | further:
                return True
            elif kinds | further <= {"object"}:
                shared = set(one.get("required", ())) & set(other.get("required", ()))
                pairs += [(one["properties"][name], other["properties"][name]) for name in sorted(shared)]
        return False

    def _resolved(self, schema: Any) -> Any:
        """A schema, or what it refers to."""
        reference = schema.get("$ref", "#") if isinstance(schema, dict) else "#"
        return schema if reference == "#" else _named(reference, self.root, "#")

    def _values(self, schema: dict[str, Any]) -> set[str] | None:
        """The values that a schema names, as JSON; None if it names none."""
        if id(schema) not in self._values_of:
            values = [schema["const"]] if "const" in schema else schema.get("enum")
            self._values_of[id(schema)] = None if values is None else {_written(value) for value in values}
        return self._values_of[id(schema)]


def _kinds(schema: dict[str, Any]) -> set[str]:
    kinds = schema.get("type", [])
    return {kinds} if isinstance(kinds, str) else set(kinds)


def _written(value: Any) -> str:
    """A value as JSON; equal values are written alike, as 1 and 1.0 are."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{_written(inner)}" for key, inner in sorted(value.items())) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)


def _is_of(value: Any, kinds: Any) -> bool:
    """Whether a value is of a type, or of one of several."""
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if isinstance(value, TYPES.get(kind, ())) and (kind == "boolean" or not isinstance(value, bool)):
            return True
    return False
