"""The place of a sequence in its grammar.

A `Constraint` follows the tokens that its sequence has kept, and no others: nothing is ever taken back. For a step it
says which nodes of a drafted tree may stand, and which tokens the target may draw at each of them. The target draws at
every node with the same masks and the same noise whether the node was drafted or not, so drafts do not change the text.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from aquiline.backends.base import TokenMasks
from aquiline.config import Boundary
from aquiline.spec.tree import DraftTree, Topology
from aquiline.types import Int32

if TYPE_CHECKING:
    import xgrammar

MAX_FORCED = 16
"""Tokens of forced text that a step drafts at most."""

STEP_S, MAX_SLOW_S = 0.01, 0.1
"""Processor seconds that a grammar may take at once, and what it may take beyond in all. All requests wait for it: one
that takes longer, as `(a*)*b` does after a hundred tokens, ends."""

TOO_SLOW = "the grammar took too long to follow"
"""How the failure of such a request begins."""

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
        self._slow_s = 0.0

    def accept(self, tokens: Iterable[int]) -> None:
        """Follow tokens that the sequence has kept."""
        with self._timed():
            self._accept(tokens)

    def _accept(self, tokens: Iterable[int]) -> None:
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
        with self._timed():
            try:
                text = self._matcher.find_jump_forward_string()
                ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids if text else []
                if 0 < len(ids) <= MAX_FORCED:
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

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Count what the grammar takes inside. The processor's time is counted and not the clock's: on a busy machine
        sound grammars wait long too."""
        began = time.thread_time()
        yield
        self._slow_s += max(0.0, time.thread_time() - began - STEP_S)
        if self._slow_s > MAX_SLOW_S and self.failure is None:
            self.failure = (
                f"{TOO_SLOW}; write it so that a text can be read in one way alone, as repetitions inside repetitions "
                "cannot"
            )

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
        if self.failure is not None:
            return {nodes[0]}
        number = {node: i for i, node in enumerate(nodes)}
        child, sibling = np.full((2, len(nodes)), -1, np.int64)
        for i, node in enumerate(nodes[1:], 1):
            parent = number[parents[node]]
            child[parent], sibling[i] = i, child[parent]
        own = np.zeros((len(nodes), rows.shape[1]), np.int32)
        try:
            with self._timed():
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


def first_line(error: BaseException) -> str:
    """The first line of an error of xgrammar, without the time and the place in its source."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return SOURCE_PLACE.sub("", lines[0])
