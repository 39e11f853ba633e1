"""Grammars: what an answer may consist of, compiled once. `constraint` follows one.

The library is xgrammar, which brings torch; nothing here imports either before a request asks for a grammar. Compiling
takes milliseconds to seconds, so it is done where a request is made. The engine reads the compiled grammar, as text.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from aquiline.checks import parse_json, shown
from aquiline.config import Boundary, Structured
from aquiline.engine.constraint import Constraint, first_line
from aquiline.engine.schema import check_schema, pattern_fault

if TYPE_CHECKING:
    import xgrammar

MAX_SOURCE = 2**16
"""Characters of a schema, an expression or a grammar."""

MAX_COMPILED = 2**24
"""Bytes of a compiled grammar, which the engine reads in 0.25 s, between two steps. A text of a bounded length takes
twelve million over a vocabulary of 49,152."""

CACHE_BYTES = 64 * 2**20
"""Memory of the grammars that a compiler keeps."""

MAX_KEPT = 16
"""Compiled grammars that are kept for further requests, where they are compiled and in the engine."""

MAX_VOCABULARIES = 4
"""Vocabularies that are kept. Each has its own end tokens and named tokens."""

TOKEN_FIELDS = ("token", "trigger_tokens", "exclude_tokens")
"""Fields of a structural tag that name tokens, by their ids or texts."""

NO_TEXT: dict[str, str | bytes] = {"RAW": b"\xff", "BYTE_FALLBACK": "<0xFF>", "BYTE_LEVEL": "\xff"}
"""A byte that is part of no UTF-8 text, by the way in which a vocabulary is written."""


class Grammars:
    """Compiles grammars for the vocabulary of a target, and opens compiled ones. Any number of threads may compile.

    Raises ValueError where the library, or torch or transformers, which it needs, are not installed."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self._vocabulary = lru_cache(MAX_VOCABULARIES)(self._new_vocabulary)
        self._compiled = lru_cache(MAX_KEPT)(self._new_grammar)
        self._kept: dict[tuple[bytes, frozenset[int]], xgrammar.CompiledGrammar] = {}
        self._kind = lru_cache(1)(self._find_kind)

    def prepare(self) -> None:
        """Import the library and learn how the vocabulary is written, which takes seconds the first time."""
        self._kind()

    def compile(self, structured: Structured, ends: frozenset[int]) -> str:
        """A compiled grammar as text. Raises ValueError naming the field and what cannot be expressed."""
        [(name, value)] = structured.given.items()
        _check_source(name, value)
        named = frozenset[int]()
        if name == "structural_tag":
            value, named = self._checked_tag(value, ends)
        if not ends:
            raise ValueError(
                f"structured.{name}: the answer ends with an end token, and none is left; drop ignore_eos, or give "
                "stop_token_ids"
            )
        first = np.zeros(-(-self.vocab_size // 32), np.int32)
        try:
            found = self._compiled(name, value, ends, named)
            compiled = f"{sorted(named) or ''}{found.serialize_json()}"
            Constraint(_library().GrammarMatcher(found), ends, len(first)).fill_first(first)
        except RuntimeError as error:
            raise _refusal(name, value, error) from None
        if not first.any():
            raise ValueError(f"structured.{name}={shown(value)}: no text follows it; give rules that come to an end")
        if len(compiled) > MAX_COMPILED:
            raise ValueError(
                f"structured.{name}={shown(value)}: its grammar takes {len(compiled)} bytes; at most {MAX_COMPILED} "
                "are allowed, which the engine reads between two steps; use fewer and shorter repetitions"
            )
        return compiled

    def constraint(
        self, compiled: str, ends: frozenset[int], boundary: Boundary | None = None, prompt: Sequence[int] = ()
    ) -> Constraint:
        """The beginning of an answer to a prompt that follows a compiled grammar. Raises ValueError for a text that is
        no such grammar."""
        matcher = _library().GrammarMatcher(self._read(compiled, ends))
        return Constraint(matcher, ends, -(-self.vocab_size // 32), boundary, prompt)

    def _new_grammar(
        self, name: str, value: Any, ends: frozenset[int], named: frozenset[int]
    ) -> xgrammar.CompiledGrammar:
        info, compiler = self._vocabulary(ends, named)
        if named or (name == "grammar" and "Token" in value):  # xgrammar's cache takes every token for the same one
            compiler = _library().GrammarCompiler(info, max_threads=1, cache_enabled=False)
        if name == "json":
            return compiler.compile_json_schema(value, any_whitespace=False)
        if name == "regex":
            return compiler.compile_regex(value)
        if name == "grammar":
            return compiler.compile_grammar(value)
        if name == "choice":
            texts = [{"type": "const_string", "value": text} for text in value]
            value = json.dumps({"type": "structural_tag", "format": {"type": "or", "elements": texts}})
        return compiler.compile_structural_tag(value)

    def _read(self, compiled: str, ends: frozenset[int]) -> xgrammar.CompiledGrammar:
        """A compiled grammar, read once while it is among the last that were asked for."""
        key = (hashlib.sha256(compiled.encode()).digest(), ends)
        self._kept[key] = found = self._kept.pop(key, None) or self._deserialized(compiled, ends)
        if len(self._kept) > MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        return found

    def _deserialized(self, compiled: str, ends: frozenset[int]) -> xgrammar.CompiledGrammar:
        ids, brace, grammar = compiled.partition("{")
        try:
            info = self._vocabulary(ends, frozenset(json.loads(ids or "[]")))[0]
            return _library().CompiledGrammar.deserialize_json(brace + grammar, info)
        except (RuntimeError, json.JSONDecodeError) as error:
            raise ValueError(f"grammar: was not compiled for these models ({first_line(error)})") from None

    def _new_vocabulary(
        self, ends: frozenset[int], named: frozenset[int] = frozenset()
    ) -> tuple[xgrammar.TokenizerInfo, xgrammar.GrammarCompiler]:
        """The vocabulary with these ends, and its compiler. A special token that is no end is never part of a text, nor
        is an id that only fills the embedding up: both are written as nothing.

        named: tokens that a structural tag names. xgrammar allows no token that is written as nothing, so the special
        ones of them are written as a byte of no text."""
        library, kind = _library(), self._kind()
        special = {token for token, added in self.tokenizer.get_added_tokens_decoder().items() if added.special}
        written: list[str | bytes] = [""] * self.vocab_size
        for text, token in self.tokenizer.get_vocab().items():
            if token < self.vocab_size and token not in special:
                written[token] = text
        for token in named & special:
            written[token] = NO_TEXT[kind.vocab_type.name]
        info = library.TokenizerInfo(
            written, kind.vocab_type, vocab_size=self.vocab_size, stop_token_ids=sorted(ends),
            add_prefix_space=kind.add_prefix_space,
        )  # fmt: skip
        return info, library.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES)

    def _checked_tag(self, text: str, ends: frozenset[int]) -> tuple[str, frozenset[int]]:
        """A structural tag with the ids of the tokens that it names, and these ids. Raises ValueError for a schema that
        no grammar expresses, and for tokens that no answer goes on after."""
        try:
            tag = parse_json(text)
        except ValueError as error:
            raise ValueError(f"structural_tag={shown(text)}: is not JSON ({error})") from None
        parts, named = [tag], set[int]()
        while parts:
            part = parts.pop()
            if isinstance(part, list):
                parts += part
            elif isinstance(part, dict) and part.get("type") == "json_schema":
                check_schema(json.dumps(part.get("json_schema")))
            elif isinstance(part, dict) and part.get("type") == "regex" and isinstance(part.get("pattern"), str):
                _check_source("regex", part["pattern"])
            elif isinstance(part, dict):
                if part.get("type") == "token_dispatch":  # whose rules xgrammar keeps apart from these fields
                    raise ValueError("structural_tag: token_dispatch is not supported; use token_triggered_tags")
                for field in part.keys() & set(TOKEN_FIELDS):
                    given = part[field]
                    ids = [self._token_id(token) for token in (given if isinstance(given, list) else [given])]
                    if field != "exclude_tokens" and not ends.isdisjoint(ids):
                        raise ValueError(f"structural_tag: {field}={shown(given)} ends the answer; leave it out")
                    part[field] = ids if isinstance(given, list) else ids[0]
                    named.update(ids)
                parts += part.values()
        return json.dumps(tag), frozenset(named)

    def _token_id(self, given: object) -> int:
        """The id of a token that a structural tag names by its id or text."""
        found = self.tokenizer.token_to_id(given) if isinstance(given, str) else given
        if type(found) is not int or not 0 <= found < self.vocab_size:
            raise ValueError(f"structural_tag: {shown(given)} is no token of this vocabulary; name one, or its id")
        return found

    def _find_kind(self) -> xgrammar.TokenizerInfo:
        """How the vocabulary is written: as bytes, or as text with bytes beside it."""
        library = _library()
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast(tokenizer_object=self.tokenizer)
        return library.TokenizerInfo.from_huggingface(tokenizer, stop_token_ids=[0])


def _library() -> Any:
    """xgrammar. Raises ValueError naming what is missing."""
    try:
        return importlib.import_module("xgrammar")
    except ImportError as error:
        raise ValueError(f"structured: needs pip install 'aquiline[grammar]' ({error})") from None
    except (OSError, AttributeError, RuntimeError) as error:
        # It imports torch, which wants room for temporary files, and cannot be imported again once that has failed.
        raise ValueError(f"structured: xgrammar cannot be loaded ({error}); free disk space and start again") from None


def check_structured(structured: Structured) -> None:
    """Raises ValueError for a schema, an expression or a grammar that cannot be compiled for any target."""
    [(name, value)] = structured.given.items()
    _check_source(name, value)
    read = {"json": "from_json_schema", "regex": "from_regex", "grammar": "from_ebnf"}.get(name)
    if read is not None:
        try:
            getattr(_library().Grammar, read)(value)
        except RuntimeError as error:
            raise _refusal(name, value, error) from None


def _check_source(name: str, value: Any) -> None:
    """Raises ValueError for a source that is too long, and for what xgrammar would pass over in it."""
    size = sum(map(len, value)) if isinstance(value, tuple) else len(value)
    if size > MAX_SOURCE:
        raise ValueError(f"structured.{name}: has {size} characters; at most {MAX_SOURCE} are allowed")
    if name == "json":
        check_schema(value)
    if name == "regex" and (fault := pattern_fault(value)) is not None:
        raise ValueError(f"structured.regex={shown(value)}: {fault}")


def _refusal(name: str, value: Any, error: RuntimeError) -> ValueError:
    return ValueError(f"structured.{name}={shown(value)}: {first_line(error)}")
