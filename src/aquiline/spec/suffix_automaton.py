"""A suffix automaton of a growing text of token ids. It knows the longest suffix that stood in the text before.

A state is a set of substrings that end at the same places of the text. Its link leads to their longest suffix that ends
at other places too. So the link of the state of the whole text is the longest suffix that stood in the text before, and
further links lead to shorter ones. Source: Blumer et al., The smallest automaton recognizing the subwords of a text,
Theoretical Computer Science 40, 1985. csrc/lookup/suffix_automaton.cpp is the same in the native library.

Time: appending a token takes amortised constant time, whatever the text. Memory: at most 2 states a token, 24 bytes
each, 4 bytes of text, and a dict for every state that more than one token follows. In all that is about 150 bytes a
token in ordinary text and below 400 in any (tests/spec/test_suffix_automaton.py). Tokens cannot be taken away.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Protocol

SEPARATOR = -1
"""Stands between two texts, at most once in an automaton: no match reaches across it, and no copy does."""

MAX_UPDATED_LINKS = 32
"""The greatest number of links whose counts a token raises. Texts that repeat themselves have paths of any length, and
time must stay constant. States further along keep an older place and a lower count, both true of a part of the text."""

_NO_TOKEN = -2


class Events(Protocol):
    """Counts whether tokens were those that a match predicted."""

    def add(self, length: int, count: int, is_hit: bool) -> None:
        """A match of `length` tokens, which stood in the text `count` times before, was followed by the same token as
        the last time, or by another."""
        ...


class SuffixAutomaton:
    """The automaton of `text`. State 0 is the empty text; as an answer it means that there is no such state.

    min_length: shorter matches are ignored, and their places and counts are not kept. length: tokens of a state's
    longest substring. count: how often the state's substrings stand in the text, and end: where the most recent of them
    ends, both without the text's last token."""

    def __init__(self, min_length: int) -> None:
        assert min_length >= 1, min_length
        self.min_length = min_length
        self.text = array("i")
        self.length, self.link = array("i", [0]), array("i", [-1])
        self.count, self.end = array("i", [0]), array("i", [-1])
        # The token that first followed a state, and the state that it leads to. Most states have no other.
        self.token, self.target = array("i", [_NO_TOKEN]), array("i", [0])
        self.branches: dict[int, dict[int, int]] = {}  # by state, the other tokens that followed it
        self.last = 0  # the state of the whole text

    def match(self) -> int:
        """The state of the longest suffix of at least min_length tokens that stood in the text before and was followed
        by a token. The text after its most recent place begins at text[end[state] + 1]."""
        state = self.link[self.last]
        while self.length[state] >= self.min_length:
            if self.text[self.end[state] + 1] != SEPARATOR:
                return state
            state = self.link[state]
        return 0

    def next(self, state: int, token: int) -> int:
        """The state of a state's longest substring followed by `token`; 0 if that is not in the text."""
        if self.token[state] == token:
            return self.target[state]
        others = self.branches.get(state)
        return 0 if others is None else others.get(token, 0)

    def extend(self, tokens: Iterable[int], events: Events | None = None) -> None:
        """Append tokens to the text. events: counts for each of them whether the match before it predicted it."""
        text, length, link, count, end = self.text, self.length, self.link, self.count, self.end
        first, target, branches, shortest = self.token, self.target, self.branches, self.min_length
        for token in tokens:
            at, new, last = len(text), len(length), self.last
            # The suffixes of the text so far become earlier ones. Before the first token there is the root alone, to
            # which its own link, -1, leads as well.
            state = link[last]
            if length[state] >= shortest:
                if events is not None:
                    self._tell(events, state, token)
                for _ in range(MAX_UPDATED_LINKS):
                    count[state] += 1
                    end[state] = at - 1
                    state = link[state]
                    if length[state] < shortest:
                        break
            text.append(token)
            length.append(length[last] + 1)
            link.append(0)
            count.append(1)
            end.append(at)
            first.append(_NO_TOKEN)
            target.append(0)
            self.last = new
            # Every suffix that no token like this one followed is now followed by it.
            state = last
            while state >= 0:
                seen = first[state]
                if seen == token:
                    found = target[state]
                elif seen == _NO_TOKEN:
                    first[state], target[state], found = token, new, new
                else:
                    found = branches.setdefault(state, {}).setdefault(token, new)
                if found != new:
                    link[new] = found if length[found] == length[state] + 1 else self._split(found, state, token)
                    break
                state = link[state]

    def _tell(self, events: Events, state: int, token: int) -> None:
        """Count the token after the match, which is `state` or a suffix of it."""
        predicted = self.text[self.end[state] + 1]
        if predicted == SEPARATOR:
            state = self.match()
            predicted = self.text[self.end[state] + 1]
        if state:
            events.add(self.length[state], self.count[state], predicted == token)

    def _split(self, whole: int, state: int, token: int) -> int:
        """Split a state. Of the substrings of `whole`, those that are `state` or its suffixes followed by `token` stand
        at one more place than the others from now on. They get a new state, which is returned."""
        length, link, first, target, branches = self.length, self.link, self.token, self.target, self.branches
        part = len(length)
        length.append(length[state] + 1)
        link.append(link[whole])
        self.count.append(self.count[whole])
        self.end.append(self.end[whole])
        first.append(first[whole])
        target.append(target[whole])
        if whole in branches:
            branches[part] = branches[whole].copy()
        link[whole] = part
        while state >= 0:
            if first[state] == token:
                if target[state] != whole:
                    break
                target[state] = part
            elif branches[state][token] == whole:
                branches[state][token] = part
            else:
                break
            state = link[state]
        return part
