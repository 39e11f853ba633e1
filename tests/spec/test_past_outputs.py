"""Past outputs against a search of all that was written, what is overwritten, and what lookups copy from them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aquiline.spec import past_outputs
from aquiline.spec.drafting import Match, Proposal
from aquiline.spec.lookup import Lookup, LookupProposer, LookupShared
from aquiline.spec.match_events import MAX_LENGTH, MatchEvents
from aquiline.spec.past_outputs import (
    BYTES_PER_TOKEN,
    MAX_PLACES,
    MIN_MATCH,
    NO_PLACE,
    PROMPT_TAIL,
    PastMatch,
    PastOutputs,
    PastSpace,
)
from aquiline.spec.suffix_automaton import SEPARATOR

EAGER = Lookup(min_match=1, min_confidence=0)
TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=24)
OUTPUTS = st.lists(st.tuples(st.integers(0, 1), TEXTS), min_size=1, max_size=12)
SALTS = (None, "salt")


def outputs_of(size: int, *outputs: Sequence[int]) -> PastOutputs:
    """A ring of so many tokens, with outputs of requests without a salt."""
    found = PastOutputs(size * BYTES_PER_TOKEN)
    for output in outputs:
        found.space(None).add((), output)
    return found


class Written:
    """All that was ever written, token by token with its space."""

    def __init__(self, size: int) -> None:
        self.outputs, self.size = PastOutputs(size * BYTES_PER_TOKEN), size
        self.tokens: list[int] = []
        self.salts: list[str | None] = []

    def add(self, salt: str | None, output: Sequence[int]) -> None:
        self.outputs.space(salt).add((), output)
        kept = [*output[-(self.size - 1) :], SEPARATOR]
        self.tokens += kept
        self.salts += [salt] * len(kept)

    def searched(self, salt: str | None, tokens: Sequence[int], least: int) -> tuple[int, int, int]:
        """The latest of the longest matches: its end, its length, and how many are as long."""
        found: list[tuple[int, int]] = []
        begin = max(0, len(self.tokens) - self.size)
        for end in range(begin, len(self.tokens) - 1):
            if self.salts[end] != salt or self.tokens[end + 1] == SEPARATOR:
                continue
            length = 0
            while length < min(len(tokens), MAX_LENGTH) and end - length >= begin:
                if self.tokens[end - length] != tokens[-1 - length]:
                    break
                length += 1
            found.append((length, end))
        length, end = max(found, default=(0, -1))
        return (end, length, sum(each == length for each, _ in found)) if length >= least else tuple(NO_PLACE)


@given(OUTPUTS, TEXTS, st.integers(8, 70), st.integers(MIN_MATCH, 6), st.sampled_from(SALTS))
def test_a_search_finds_what_is_still_there(
    outputs: list[tuple[int, list[int]]], tokens: list[int], size: int, least: int, salt: str | None
) -> None:
    """In the asking space alone, whatever was overwritten."""
    written = Written(size)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(past_outputs, "MAX_PLACES", size)
        for number, output in outputs:
            written.add(SALTS[number], output)
            space = written.outputs.space(salt)
            for end in range(1, len(tokens) + 1):
                found = space.outputs.find(space.number, tokens, end, least)
                assert tuple(found) == written.searched(salt, tokens[:end], least)


@given(OUTPUTS, TEXTS, TEXTS, st.integers(8, 70), st.integers(1, 5))
def test_following_is_searching_for_every_token(
    outputs: list[tuple[int, list[int]]], prompt: list[int], output: list[int], size: int, least: int
) -> None:
    """However the tokens come; and every token of the output tells whether the match before it was right."""
    written = Written(size)
    for number, earlier in outputs:
        written.add(SALTS[number], earlier)
    text, shortest = [*prompt, *output], max(least, MIN_MATCH)
    expected: list[tuple[int, bool]] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(past_outputs, "MAX_PLACES", size)
        told: list[tuple[int, bool]] = []
        patched.setattr(
            written.outputs.events, "add", lambda length, count, is_hit: told.append((length, is_hit)), raising=True
        )
        stepwise, at_once = (PastMatch(written.outputs.space(None), least) for _ in range(2))
        for num in range(len(prompt), len(text) + 1):
            end, length, _ = written.searched(None, text[:num], shortest)
            assert stepwise.follow(text[:num], len(prompt))[:2] == (end, length)
            if length and num < len(text):
                expected.append((length, written.tokens[end + 1] == text[num]))
        assert told == expected
        assert at_once.follow(text, len(prompt)) == stepwise.place and told == 2 * expected


def test_a_search_compares_a_constant_number_of_places() -> None:
    """The latest ones, of which the text's end has no token behind it."""
    outputs = outputs_of(1000, [5] * 900)
    end, length, count = outputs.find(outputs.space(None).number, [5] * 200, 200, MIN_MATCH)
    assert (end, length, count) == (898, MAX_LENGTH, MAX_PLACES - 1)


def test_no_place_counts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a ring that was gone round, the oldest place's link leads to the latest ones."""
    monkeypatch.setattr(past_outputs, "MAX_PLACES", 100)
    written = Written(30)
    for _ in range(9):
        written.add(None, [5] * 9)
        space = written.outputs.space(None)
        assert tuple(space.outputs.find(space.number, [5] * 9, 9, MIN_MATCH)) == written.searched(
            None, [5] * 9, MIN_MATCH
        )


def test_bytes_are_bounded_and_the_oldest_outputs_go() -> None:
    outputs = PastOutputs(2**16)
    space = outputs.space(None)
    for number in range(200):
        space.add((), [10_000 + 100 * number + i for i in range(90)])
        arrays = (outputs._text, outputs._spaces, outputs._latest, outputs._earlier)
        assert sum(len(each) * each.itemsize for each in arrays) <= 2**16
        kept = [
            n for n in range(200) if outputs.find(space.number, [10_000 + 100 * n + i for i in range(4)], 4, 4).length
        ]
        assert kept == list(range(max(0, number - len(kept) + 1), number + 1))
    assert len(kept) == (2**16 // BYTES_PER_TOKEN) // (90 + 1)


def test_an_output_longer_than_the_ring_leaves_its_end() -> None:
    outputs = outputs_of(20, [1, 2, 3, 4], list(range(100, 200)))
    number = outputs.space(None).number
    assert outputs.find(number, [1, 2, 3], 3, MIN_MATCH) == NO_PLACE
    assert [outputs.find(number, list(range(t - 3, t + 1)), 4, 4).length for t in (150, 184, 198, 199)] == [0, 4, 4, 0]


def test_what_is_overwritten_is_not_followed() -> None:
    """Not even where another space's output has the same tokens at the same place."""
    outputs = outputs_of(10, [1, 2, 3, 4, 5, 6, 7], [9])
    match = PastMatch(outputs.space(None), 1)
    assert match.follow([1, 2, 3, 4], 4).length == 4
    outputs.space("other").add((), [1, 2, 3, 4, 5, 6, 7])
    assert outputs.num_written == 18, "from place 0 on"
    assert match.follow([1, 2, 3, 4, 5], 4) == NO_PLACE and sum(outputs.events.trials) == 0


def test_nothing_is_added_of_a_request_that_wrote_nothing() -> None:
    outputs = outputs_of(64, [])
    outputs.space(None).add([1, 2, 3], [])
    assert outputs.num_written == 0


def test_the_first_tokens_are_found_behind_the_prompt() -> None:
    """A repeated request matches the prompt's end, another one as far as the prompts are alike."""
    outputs = PastOutputs(2**16)
    outputs.space(None).add(range(100), [201, 202, 203])
    for prompt, length in (([*range(100)], PROMPT_TAIL), ([0, 0, 95, 96, 97, 98, 99], 5), ([0, 97, 98, 99], 0)):
        assert PastMatch(outputs.space(None), 1).follow(prompt, len(prompt)).length == length


def proposer(space: PastSpace | None, num_prompt: int, drafting: Lookup = EAGER) -> LookupProposer:
    return drafting.proposer([0] * num_prompt, (), LookupShared(), space)


def test_a_draft_goes_on_to_the_end_of_the_past_output() -> None:
    outputs = outputs_of(64, [1, 2, 3, 4, 5, 6, 7], [8, 9])
    found = proposer(outputs.space(None), 4).propose([1, 2, 3, 4], 8)
    assert found == Proposal((5, 6, 7), (), (0.5, 0.25, 0.125), Match(4, 1))
    assert proposer(outputs.space(None), 4).propose([1, 2, 3, 4], 2).tokens == (5, 6)
    assert proposer(outputs.space(None), 7).propose([1, 2, 3, 4, 5, 6, 7], 8) == Proposal(())
    assert proposer(outputs.space("x"), 4).propose([1, 2, 3, 4], 8) == Proposal(())
    assert proposer(None, 4).propose([1, 2, 3, 4], 8) == Proposal(())
    cautious = Lookup(min_match=1, min_confidence=0.2)
    assert proposer(outputs.space(None), 4, cautious).propose([1, 2, 3, 4], 8).tokens == (5, 6)
    assert proposer(outputs.space(None), 4, Lookup(min_match=5)).propose([1, 2, 3, 4], 8) == Proposal(())


def test_the_longer_match_is_copied_and_the_texts_own_of_two_as_long() -> None:
    outputs = outputs_of(64, [1, 2, 3, 4, 5, 50])
    for text, token, length in (
        ([2, 3, 4, 5, 60, 9, 2, 3, 4, 5], 60, 4), ([2, 3, 4, 5, 60, 1, 2, 3, 4, 5], 50, 5),
        ([1, 2, 3, 4, 5, 60, 1, 2, 3, 4, 5], 60, 5), ([0, 1, 2, 3, 4, 5, 60, 0, 1, 2, 3, 4, 5], 60, 6),
    ):  # fmt: skip
        found = proposer(outputs.space(None), len(text)).propose(text, 8)
        assert (found.tokens[0], found.match and found.match.length) == (token, length), text


def test_the_other_match_is_copied_where_the_first_is_not_likely() -> None:
    outputs, drafting = outputs_of(64, [1, 2, 3, 4, 5, 50]), Lookup(min_match=1, min_confidence=0.3)
    for text, own in (([1, 2, 3, 4, 5, 60, 1, 2, 3, 4, 5], 60), ([2, 3, 4, 5, 60, 1, 2, 3, 4, 5], 60)):
        for chances, token in (((0.1, 0.9), 50), ((0.9, 0.1), own)):
            drafts = proposer(outputs.space(None), len(text), drafting)
            for events, chance in zip((drafts.shared.events, outputs.events), chances, strict=True):
                events.estimates[:] = array("d", [chance]) * len(events.estimates)
            assert drafts.propose(text, 1).tokens == (token,)


def test_matches_of_past_outputs_have_events_of_their_own() -> None:
    outputs = outputs_of(256, list(range(1, 60)))
    drafts = proposer(outputs.space(None), 4)
    text = [1, 2, 3, 4]
    for token in range(5, 40):
        drafts.propose(text, 8)
        text.append(token)
    drafts.propose([*text, 99], 8)
    assert sum(outputs.events.trials) == 36 and sum(outputs.events.hits) == 35
    assert sum(drafts.shared.events.trials) == 0, "nothing of the text itself stood before"
    assert outputs.events.estimates != MatchEvents().estimates
