"""The public JSON-Schema-Test-Suite: a schema is refused by name, or no value that breaks it is accepted."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from aquiline.config import Structured
from aquiline.engine.grammar import Grammars
from aquiline.models.known_pairs import BUNDLED_TARGET
from aquiline.text.tokenizer import load_tokenizer

xgrammar = pytest.importorskip("xgrammar", reason="not installed: xgrammar")

DRAFTS = ("draft2020-12", "draft2019-09", "draft7", "draft6", "draft4")
UNTYPED = {
    "minLength": 2, "maxLength": 2, "pattern": "a", "minimum": 1, "exclusiveMaximum": 1, "multipleOf": 2, "minItems": 1,
    "maxItems": 2, "maxProperties": 1, "patternProperties": {"a": {}}, "propertyNames": {"type": "string"},
}  # fmt: skip


def grammars() -> Grammars:
    tokenizer = load_tokenizer(BUNDLED_TARGET)
    assert tokenizer is not None
    return Grammars(tokenizer, 4096)


@pytest.mark.parametrize("name", UNTYPED)
def test_a_keyword_that_counts_only_beside_a_type_asks_for_it(name: str) -> None:
    with pytest.raises(ValueError, match=f'{name} at #/anyOf/1: counts only beside a type; add "type": "'):
        schema = {"anyOf": [{"type": "null"}, {name: UNTYPED[name]}]}
        grammars().compile(Structured(json=json.dumps(schema)), frozenset({0}))


@pytest.mark.slow
def test_what_is_accepted_follows_its_schema() -> None:
    root = os.environ.get("AQUILINE_TEST_SCHEMAS")
    if root is None:
        pytest.skip("set AQUILINE_TEST_SCHEMAS to the suite's folder of tests")
    from xgrammar.testing import _is_grammar_accept_string

    own, num_taken, wrong = grammars(), 0, []
    for file in sorted(file for draft in DRAFTS for file in Path(root, draft).glob("*.json")):
        for group in json.loads(file.read_text(encoding="utf-8")):
            schema = json.dumps(group["schema"])
            try:
                own.compile(Structured(json=schema), frozenset({0}))
            except ValueError as error:
                assert str(error).startswith(("json", "structured.json")), error
                continue
            num_taken += 1
            grammar = xgrammar.Grammar.from_json_schema(schema, any_whitespace=False)
            wrong += [
                (file.name, schema, test["data"])
                for test in group["tests"]
                if not test["valid"]
                and _is_grammar_accept_string(grammar, json.dumps(test["data"], ensure_ascii=False))
            ]
    assert num_taken > 300 and not wrong, wrong
