"""Grammars: what an answer may consist of, compiled once, and each sequence's place in its grammar.

The library is xgrammar, which brings torch; nothing here imports either before a request asks for a grammar. Compiling
takes milliseconds to seconds, so it is done where a request is made. The engine reads the compiled grammar, as text.

A `Constraint` follows the tokens that its sequence has kept, and no others: nothing is ever taken back. For a step it
says which nodes of a drafted tree may stand, and which tokens the target may draw at each of them. The target draws at
every node with the same masks and the same noise whether the node was drafted or not, so drafts do not change the text.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from aquiline.backends.base import TokenMasks
from aquiline.checks import parse_json, shown
from aquiline.config import Boundary, Structured
from aquiline.engine.schema import check_schema
from aquiline.spec.tree import DraftTree, Topology
from aquiline.types import Int32

if TYPE_CHECKING:
    import xgrammar

MAX_FORCED = 16
"""Tokens of forced text that a step drafts at most."""

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

ALL = -1
"""A word of a mask that allows all of its 32 tokens."""

SOURCE_PLACE = re.compile(r"\[[\d:]+\] \S+: (Check failed: \(.*\) is false: )?")

PROMPT_TAIL = 8
"""Tokens at a prompt's end that are looked at for the beginning and the end of reasoning."""

_IN_GRAMMAR = -1


class Constraint:
    """The place of one sequence in its grammar. num_words: of a row of a mask, W. failure: why the sequence cannot go
    on, if it cannot."""

    def __init__(
        self,
        matcher: xgrammar.GrammarMatcher,
        ends: frozenset[int],
        num_words: int,
        boundary: Boundary | None = None,
        prompt: Sequence[int] = (),
    ) -> None:
        self._matcher, self._ends, self._boundary, self.num_words = matcher, ends, boundary, num_words
        is_free = boundary is not None and bool(boundary.marker)
        self._state = 0 if is_free else _IN_GRAMMAR  # else how many tokens of the marker have come
        self._may_open = False  # the answer's first token decides whether the grammar begins at once
        if boundary is not None and boundary.opener >= 0:
            marks = [token for token in prompt[-PROMPT_TAIL:] if token in (boundary.opener, *boundary.marker)]
            self._may_open = not marks
            self._state = 0 if not marks or marks[-1] == boundary.opener else _IN_GRAMMAR
        self.failure: str | None = None

    def accept(self, tokens: Iterable[int]) -> None:
        """Follow tokens that the sequence has kept."""
        for token in tokens:
            if self._state != _IN_GRAMMAR:
                assert self._boundary is not None
                is_answer, self._may_open = self._may_open and token != self._boundary.opener, False
                self._state = _IN_GRAMMAR if is_answer else self._following(self._state, token)
                if not is_answer:
                    continue
            try:
                if self._matcher.accept_token(token):
                    continue
                self.failure = f"the grammar refuses token {token}, which its mask had allowed"
            except RuntimeError as error:
                self.failure = first_line(error)
            return

    def forced(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The tokens that the grammar leaves no choice about, as the tokenizer writes them. The last one may go on
        into what follows, so it is left out unless the grammar may end there."""
        if self._state != _IN_GRAMMAR or self.failure is not None:
            return ()
        try:
            text = self._matcher.find_jump_forward_string()
            if not text:
                return ()
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) <= MAX_FORCED:
                after = self._matcher.fork()
                ids = ids if after.accept_string(text) and after.is_completed() else ids[:-1]
        except RuntimeError as error:
            self.failure = first_line(error)
            return ()
        return tuple(ids[:MAX_FORCED])

    def fill_first(self, row: Int32) -> None:
        """Write which tokens may begin the answer into a row [W] of a mask."""
        if self._state != _IN_GRAMMAR and not self._may_open:
            return
        self._fill([0], [0], [0], row[None])
        if self._may_open and self._boundary is not None:
            word, bit = divmod(self._boundary.opener, 32)
            row.view(np.uint32)[word] |= np.uint32(1 << bit)

    def fill_tree(self, tokens: list[int], parents: list[int], rows: Int32) -> list[int]:
        """Write into rows [N, W] which tokens may follow each of the N nodes of a tree, whose root the sequence has
        kept. Returns the nodes that may stand, in order."""
        states, of_root = [self._state], [0]  # the node at which the grammar of a node began
        groups = {0: [0]} if self._state == _IN_GRAMMAR else {}
        for node in range(1, len(tokens)):
            parent = parents[node]
            state, root = states[parent], of_root[parent]
            if state != _IN_GRAMMAR:
                state, root = self._following(state, tokens[node]), node
                if state == _IN_GRAMMAR:
                    groups[node] = []
            if state == _IN_GRAMMAR:
                groups[root].append(node)
            states.append(state)
            of_root.append(root)
        standing = {node for node, state in enumerate(states) if state != _IN_GRAMMAR}
        for nodes in groups.values():
            standing |= self._fill(nodes, tokens, parents, rows)
        return sorted(standing)

    def _following(self, state: int, token: int) -> int:
        """The state after one more token before the grammar."""
        assert self._boundary is not None
        marker, end = self._boundary.marker, self._boundary.end
        if state == len(marker):
            return _IN_GRAMMAR if token == end else state
        state = state + 1 if token == marker[state] else int(token == marker[0])
        return _IN_GRAMMAR if state == len(marker) and end < 0 else state

    def _fill(self, nodes: list[int], tokens: list[int], parents: list[int], rows: Int32) -> set[int]:
        """`fill_tree` for those nodes of a tree that stand below nodes[0], at which the matcher is."""
        number = {node: i for i, node in enumerate(nodes)}
        child, sibling = np.full((2, len(nodes)), -1, np.int64)
        for i, node in enumerate(nodes[1:], 1):
            parent = number[parents[node]]
            child[parent], sibling[i] = i, child[parent]
        own = np.zeros((len(nodes), rows.shape[1]), np.int32)
        try:
            self._matcher.traverse_draft_tree(child, sibling, np.array([tokens[n] for n in nodes], np.int64), own)
        except RuntimeError as error:
            self.failure = first_line(error)
            return {nodes[0]}
        # Rows of nodes that may not stand, and all below them, stay empty, as that of an end: nothing follows them.
        standing = {nodes[0]}
        for i, node in enumerate(nodes):
            if i:
                token = tokens[node]
                if not own[number[parents[node]], token >> 5] >> (token & 31) & 1:
                    continue
                standing.add(node)
            if not i or tokens[node] not in self._ends:
                rows[node] = own[i]
        return standing


def constrain(
    tree: DraftTree, decoding: Sequence[Constraint | None], drawing: Sequence[Constraint | None]
) -> tuple[DraftTree, TokenMasks]:
    """The nodes of the trees that may stand, and the masks of their rows and of the chunks that draw.

    decoding: of each tree, drawing: of each of those chunks, one of them at least is constrained. Rows of the others
    allow every token."""
    num_words = next(constraint.num_words for constraint in (*decoding, *drawing) if constraint is not None)
    shape = tree.topology
    offsets, tokens, parents = shape.offsets.tolist(), tree.tokens.tolist(), shape.parents.tolist()
    masks = np.full((len(tokens) + len(drawing), num_words), ALL, np.int32)
    kept, new_parents, new_offsets = list[int](), list[int](), [0]
    for constraint, first, end in zip(decoding, offsets, offsets[1:], strict=False):
        nodes, own = [*range(end - first)], parents[first:end]
        if constraint is not None:
            nodes = constraint.fill_tree(tokens[first:end], own, masks[first:end])
        number = {node: i for i, node in enumerate(nodes)}
        kept += [first + node for node in nodes]
        new_parents += [number[own[node]] for node in nodes]
        new_offsets.append(len(kept))
    for row, constraint in zip(masks[len(tokens) :], drawing, strict=True):
        if constraint is not None:
            constraint.fill_first(row)
    if len(kept) == len(tokens):
        return tree, masks
    masks = masks[[*kept, *range(len(tokens), len(masks))]]
    cut = Topology(np.array(new_parents, np.int32), shape.depths[kept], np.array(new_offsets, np.int32))
    return DraftTree(cut, tree.tokens[kept]), masks


class Grammars:
    """Compiles grammars for the vocabulary of a target, and opens compiled ones. Any number of threads may compile.

    Raises ValueError where the library, or torch or transformers, which it needs, are not installed."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self._vocabulary = lru_cache(MAX_VOCABULARIES)(self._new_vocabulary)
        self._compiled = lru_cache(MAX_KEPT)(self._new_grammar)
        self._read = lru_cache(MAX_KEPT)(self._deserialized)
        self._kind = lru_cache(1)(self._find_kind)

    def prepare(self) -> None:
        """Import the library and learn how the vocabulary is written, which takes seconds the first time."""
        self._kind()

    def compile(self, structured: Structured, ends: frozenset[int]) -> str:
        """A compiled grammar as text. Raises ValueError naming the field and what cannot be expressed."""
        [(name, value)] = structured.given.items()
        size = sum(map(len, value)) if isinstance(value, tuple) else len(value)
        if size > MAX_SOURCE:
            raise ValueError(f"structured.{name}: has {size} characters; at most {MAX_SOURCE} are allowed")
        if name == "json":
            check_schema(value)
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
            raise ValueError(f"structured.{name}={shown(value)}: {first_line(error)}") from None
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


def first_line(error: BaseException) -> str:
    """The first line of an error of xgrammar, without the time and the place in its source."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return SOURCE_PLACE.sub("", lines[0])
