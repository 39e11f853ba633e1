"""The outputs of an engine's earlier requests, from which drafts of later requests are copied (lookup.py).

The outputs stand one after the other in a ring of tokens, each after the last tokens of its prompt and before a
SEPARATOR. A new output overwrites the oldest ones. A text is found by hash chains, as in deflate: `latest` holds, for
the hash of every MIN_MATCH tokens, the last place where such tokens ended, and `earlier` holds for every place the
previous place with the same hash. Nothing is removed from these chains: a place counts if the tokens there are the
wanted ones.

Each place has the number of a space, made from a request's `cache_salt`. A sequence finds only places of its space.

Time: adding a token takes constant time, and so does each token of a sequence that looks for matches. Memory:
BYTES_PER_TOKEN a token, all allocated at the start.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

from aquiline.spec.match_events import MAX_LENGTH, MatchEvents
from aquiline.spec.suffix_automaton import SEPARATOR

BYTES_PER_TOKEN = 20
"""Bytes of a token in the ring: 4 each for the token and its links `latest` and `earlier`, and 8 for its space."""

MIN_MATCH = 4
"""The least number of tokens of a match. In so much text two or three equal tokens mean little."""

PROMPT_TAIL = 32
"""Number of a prompt's last tokens that stand before its output, so that the first output tokens can be found."""

MAX_PLACES = 8
"""Number of places that one search compares, the latest first."""


class PastPlace(NamedTuple):
    """An earlier place of a sequence's latest tokens. end: the number of the ring's token at which they end, counted
    from the first token that was ever added; length: how many tokens are the same; occurrences: the number of places
    with as long a match when this one was found."""

    end: int
    length: int
    occurrences: int


NO_PLACE = PastPlace(-1, 0, 0)


class PastOutputs:
    """The outputs of an engine's ended requests, as many of the latest tokens as num_bytes hold.

    events: how often the token after a match in past outputs was the one that the target wrote."""

    def __init__(self, num_bytes: int) -> None:
        self.size = num_bytes // BYTES_PER_TOKEN
        assert self.size > 1, num_bytes
        self.events = MatchEvents()
        self.num_written = 0  # tokens ever added; token i stands at i % size until token i + size comes
        self._text = array("i", [SEPARATOR]) * self.size
        self._spaces = array("q", [0]) * self.size
        self._latest, self._earlier = array("i", [-1]) * self.size, array("i", [-1]) * self.size

    def space(self, salt: str | None) -> PastSpace:
        """The outputs that requests with this cache_salt see."""
        # 64 bits of SHA-256: no request meets another salt's text by chance, and no such salt can be computed.
        named = b"" if salt is None else b"=" + salt.encode("utf-8", "surrogatepass")
        return PastSpace(self, int.from_bytes(sha256(named).digest()[:8], "big", signed=True))

    def add(self, space: int, context: Sequence[int], output: Sequence[int]) -> None:
        """Add an output after the last PROMPT_TAIL tokens of `context`, the tokens before it."""
        tokens = [*context[-PROMPT_TAIL:], *output][-(self.size - 1) :]
        size, text, spaces = self.size, self._text, self._spaces
        for i, token in enumerate(tokens, 1):
            at = self.num_written % size
            text[at], spaces[at] = token, space
            if i >= MIN_MATCH:
                bucket = hash((space, *tokens[i - MIN_MATCH : i])) % size
                self._earlier[at], self._latest[bucket] = self._latest[bucket], at
            else:
                self._earlier[at] = -1
            self.num_written += 1
        text[self.num_written % size] = SEPARATOR
        self.num_written += 1

    def find(self, space: int, tokens: Sequence[int], end: int, least: int) -> PastPlace:
        """The place of the space with the longest match of the tokens before tokens[end], and the latest of such
        places. Another token must follow there. A match has at least `least` tokens, MIN_MATCH or more; up to
        MAX_LENGTH are compared."""
        if end < least:
            return NO_PLACE
        size, last, age = self.size, self.num_written - 1, -1
        at = self._latest[hash((space, *tokens[end - MIN_MATCH : end])) % size]
        best, length, count = -1, least, 0
        for _ in range(MAX_PLACES):
            # The places of a chain become older. A place that does not was overwritten, and so were all after it.
            age, younger = (last - at) % size, age
            if at < 0 or age <= younger:
                break
            if self._spaces[at] == space and self._text[(at + 1) % size] != SEPARATOR:
                common = self._common(at, tokens, end)
                if common > length or (common == length and not count):
                    best, length, count = last - age, common, 1
                elif common == length:
                    count += 1
            at = self._earlier[at]
        return PastPlace(best, length, count) if count else NO_PLACE

    def token(self, number: int) -> int:
        """A token of the ring by its number; SEPARATOR if it was overwritten."""
        return self._text[number % self.size] if number >= self.num_written - self.size else SEPARATOR

    def _common(self, at: int, tokens: Sequence[int], end: int) -> int:
        """The number of tokens up to place `at` that equal those before tokens[end]."""
        text = self._text
        for i in range(min(end, MAX_LENGTH)):  # a SEPARATOR ends the comparison before it has gone round
            if text[at - i] != tokens[end - 1 - i]:  # a negative place counts from the ring's end
                return i
        return min(end, MAX_LENGTH)


class PastSpace(NamedTuple):
    """The outputs of one space."""

    outputs: PastOutputs
    number: int

    def add(self, context: Sequence[int], output: Sequence[int]) -> None:
        """Add the output of a request that has ended; context: its prompt."""
        if output:
            self.outputs.add(self.number, context, output)


class PastMatch:
    """The longest match of one sequence in its space, which follows the sequence token by token.

    min_length: shorter matches are ignored."""

    def __init__(self, space: PastSpace, min_length: int) -> None:
        self.space, self.min_length = space, max(MIN_MATCH, min_length)
        self.place = NO_PLACE
        self._num_seen = -1

    def follow(self, tokens: Sequence[int], num_prompt: int) -> PastPlace:
        """The place of the latest tokens. Each new output token since the last call tells `events` whether the match
        before it was right."""
        outputs, number = self.space
        place, least = self.place, self.min_length
        if self._num_seen < 0:
            self._num_seen = num_prompt
            place = outputs.find(number, tokens, num_prompt, least)
        for i in range(self._num_seen, len(tokens)):
            end, length, count = place
            is_hit = False
            if length:
                predicted = outputs.token(end + 1)
                is_hit = predicted == tokens[i]
                if predicted != SEPARATOR:
                    outputs.events.add(length, count, is_hit)
            if is_hit and outputs.token(end + 2) != SEPARATOR:
                place = PastPlace(end + 1, length + 1, count)
            else:
                place = outputs.find(number, tokens, i + 1, least)
        self.place, self._num_seen = place, len(tokens)
        return place
