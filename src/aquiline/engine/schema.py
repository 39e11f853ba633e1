"""Which JSON schemas a grammar expresses. xgrammar passes over some keywords in silence, and its answers would then not
follow the schema; here these are refused by name, with the place where they stand."""

from __future__ import annotations

import itertools
import json
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

CONSTRAINING = (
    *WHOLE, "type", "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
    "minProperties", "maxProperties", "items", "prefixItems", "minItems", "maxItems", "minLength", "maxLength",
    "pattern", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "unevaluatedItems",
    "unevaluatedProperties",
)  # fmt: skip

OF_TYPE = {
    "minLength": "string", "maxLength": "string", "pattern": "string", "minimum": "number", "maximum": "number",
    "exclusiveMinimum": "number", "exclusiveMaximum": "number", "multipleOf": "number", "minItems": "array",
    "maxItems": "array", "minProperties": "object", "maxProperties": "object", "patternProperties": "object",
    "propertyNames": "object",
}  # fmt: skip
"""Keywords that do not count where no type is named, and the type that they are for."""

TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
    "object": (dict,), "array": (list,),
}  # fmt: skip


def check_schema(text: str) -> None:
    """Raises ValueError naming the first keyword of a JSON schema that a grammar does not express, and its place."""
    try:
        schema = parse_json(text, is_strict=True)
    except ValueError as error:
        raise ValueError(f"json={shown(text)}: is not JSON ({error})") from None
    _check(schema, schema, "#")


def _check(schema: Any, root: Any, place: str) -> None:
    if not isinstance(schema, dict):
        return
    for name in REFUSED:
        if name in schema:
            raise _refusal(place, name, "is not supported; leave it out")
    if schema.get("uniqueItems"):
        raise _refusal(place, "uniqueItems", "is not supported; leave it out")
    _check_together(schema, place)
    if len(schema.get("allOf", ())) > 1:
        raise _refusal(place, "allOf", "is supported with one schema; write its schemas as one")
    if isinstance(schema.get("oneOf"), list):
        for one, other in itertools.combinations(schema["oneOf"], 2):
            if not _are_apart(_resolved(one, root), _resolved(other, root), root):
                raise _refusal(place, "oneOf", "two of its schemas may both hold; use anyOf, or types that differ")
    for step, inner in _parts(schema):
        _check(inner, root, f"{place}/{step}")


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
    for name, others in (("pattern", ("minLength", "maxLength")), ("patternProperties", ("properties",))):
        for other in others:
            if name in schema and other in schema:
                raise _refusal(place, name, f"is not supported beside {other}; leave one of them out")
    reference = schema.get("$ref", "#")
    if isinstance(reference, str) and reference != "#" and not reference.startswith("#/"):
        raise _refusal(place, "$ref", f"{shown(reference)} is not in this schema; a reference begins with #/")


def _refusal(place: str, name: str, why: str) -> ValueError:
    return ValueError(f"json: {name} at {place[:200]}: {why}")


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas inside a schema, and where they stand."""
    for name in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(inner := schema.get(name), dict):
            yield from ((f"{name}/{key}", value) for key, value in inner.items())
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if isinstance(inner := schema.get(name), list):
            yield from ((f"{name}/{place}", value) for place, value in enumerate(inner))
    for name in ("items", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties"):
        yield name, schema.get(name)


def _resolved(schema: Any, root: Any) -> Any:
    """A schema, or what it refers to; None where that is not plain."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    for step in str(reference).split("/")[1:] if reference is not None else ():
        root = root.get(step) if isinstance(root, dict) else None
    return schema if reference is None else root


def _are_apart(one: Any, other: Any, root: Any) -> bool:
    """Whether no value follows both schemas, as far as their types and their fixed values say."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    own, others = _values(one), _values(other)
    if own is not None and others is not None:
        return not own & others
    kinds, further = _kinds(one), _kinds(other)
    if kinds and further and not kinds & further and not {"integer", "number"} <= kinds | further:
        return True
    shared = set(one.get("required", ())) & set(other.get("required", ()))
    inside = [(one["properties"].get(name), other["properties"].get(name)) for name in sorted(shared)]
    return any(_are_apart(_resolved(a, root), _resolved(b, root), root) for a, b in inside)


def _kinds(schema: dict[str, Any]) -> set[str]:
    kinds = schema.get("type", [])
    return {kinds} if isinstance(kinds, str) else set(kinds)


def _values(schema: dict[str, Any]) -> set[str] | None:
    """The values that a schema names, as JSON; None if it names none."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return None if values is None else {json.dumps(value, sort_keys=True) for value in values}


def _is_of(value: Any, kinds: Any) -> bool:
    """Whether a value is of a type, or of one of several."""
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if isinstance(value, TYPES.get(kind, ())) and (kind == "boolean" or not isinstance(value, bool)):
            return True
    return False
