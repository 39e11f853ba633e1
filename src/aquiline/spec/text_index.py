"""The index of a growing text, which finds where its latest tokens stood before, and copies the tokens that followed.

Each backend has an implementation: the native library's, or SuffixIndex, its readable twin. Both give the same results
to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from aquiline.spec.drafting import NO_PROPOSAL, Match, Proposal
from aquiline.spec.match_events import MatchEvents, cell_of
from aquiline.spec.suffix_automaton import SEPARATOR, SuffixAutomaton


class TextIndex(Protocol):
    """The index of one sequence's text. Tokens cannot be taken away."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the text."""
        ...

    @property
    def match_length(self) -> int:
        """Length of the longest match that the last `propose` found; 0 without a match."""
        ...

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens without counting events; SEPARATOR may be among them."""
        ...

    def propose(self, tokens: Sequence[int], max_tokens: int, least: float) -> Proposal:
        """Append tokens that the target wrote, and count for each of them whether the match before it was right. Then
        copy up to max_tokens tokens from after the longest match, as long as their chance is at least `least`.

        A copy that reaches the text's end continues from the copy's beginning, because such a text repeats itself."""
        ...


NewIndex = Callable[[int, MatchEvents], TextIndex]
"""Makes the index of an empty text, from the least length of a match and the events to count in."""


class SuffixIndex:
    """A TextIndex in Python, by a suffix automaton."""

    def __init__(self, min_length: int, events: MatchEvents) -> None:
        self.automaton, self.events = SuffixAutomaton(min_length), events
        self.match_length = 0

    @property
    def num_tokens(self) -> int:  # noqa: D102
        return len(self.automaton.text)

    def extend(self, tokens: Sequence[int]) -> None:  # noqa: D102
        self.automaton.extend(tokens)

    def propose(self, tokens: Sequence[int], max_tokens: int, least: float) -> Proposal:  # noqa: D102
        automaton, estimates = self.automaton, self.events.estimates
        automaton.extend(tokens, self.events)
        text, state = automaton.text, automaton.match()
        self.match_length = automaton.length[state]
        if not state:
            return NO_PROPOSAL
        match = Match(automaton.length[state], automaton.count[state])
        matched, count = match
        begin = place = automaton.end[state] + 1
        chance = 1.0
        drafted: list[int] = []
        confidences: list[float] = []
        for _ in range(max_tokens):
            chance *= estimates[cell_of(matched, count)]
            token = text[place]
            if chance < least or token == SEPARATOR:
                break
            drafted.append(token)
            confidences.append(chance)
            # If the token is accepted, the match is one token longer, and has the count of that longer match.
            matched += 1
            state = automaton.next(state, token) if state else 0
            count = automaton.count[state] if state else count
            place = place + 1 if place + 1 < len(text) else begin
        return Proposal(tuple(drafted), (), tuple(confidences), match) if drafted else NO_PROPOSAL
