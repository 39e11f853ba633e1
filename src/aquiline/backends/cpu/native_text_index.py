"""The index of a sequence's text inside the native library (csrc/lookup/lookup.h): the twin of spec/text_index.py."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import addressof, byref
from weakref import finalize

from aquiline.backends.cpu.native import AqCopy, AqMatchEvents
from aquiline.backends.cpu.native_weights import library
from aquiline.errors import NativeError
from aquiline.spec.drafting import NO_PROPOSAL, Match, Proposal
from aquiline.spec.match_events import MatchEvents


class NativeIndex:
    """See spec/text_index.py, TextIndex. Freed with the last reference to it.

    Memory: 90 bytes for every token that it has room for. Where there is room for no more, the index moves to one with
    half as many again: 140 bytes a token at most, and for the moment of moving 230."""

    def __init__(self, min_length: int, events: MatchEvents) -> None:
        self._library = lib = library()
        self._propose = lib.propose
        self._events = events  # the library writes to its arrays
        at = (each.buffer_info()[0] for each in (events.trials, events.hits, events.estimates))
        self._handle = lib.open_index(min_length, byref(AqMatchEvents(*at)))
        if not self._handle:
            raise NativeError(f"aq_open_index: {lib.last_error()}")
        finalize(self, lib.close_index, self._handle)
        self._copy = AqCopy()
        self._copy_at = addressof(self._copy)
        self.num_tokens = 0

    @property
    def match_length(self) -> int:
        """Tokens of the longest match, as `propose` found it last; 0: there was none."""
        return int(self._copy.length)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens that tell the events nothing."""
        new = array("i", tokens)
        self._library.extend_index(self._handle, *new.buffer_info())
        self.num_tokens += len(new)

    def propose(self, tokens: Sequence[int], max_tokens: int, least: float) -> Proposal:
        """Append tokens that the target wrote; then copy what followed the longest match."""
        new, copy = array("i", tokens), self._copy
        if self._propose(self._handle, *new.buffer_info(), max_tokens, least, self._copy_at) != 0:
            raise NativeError(f"aq_propose: {self._library.last_error()}")
        self.num_tokens += len(new)
        num = copy.num_tokens
        if num == 0:
            return NO_PROPOSAL
        match = Match(copy.length, copy.occurrences)
        return Proposal(tuple(copy.tokens[:num]), (), tuple(copy.chances[:num]), match)
