"""Lookup: what is copied, where it is cut, what is learnt from every token, and what is kept of a text."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.spec.test_suffix_automaton import STREAMS, places, searched

from aquiline.config import MAX_DEPTH
from aquiline.spec.drafting import Match, Proposal
from aquiline.spec.lookup import Lookup, LookupProposer, LookupShared
from aquiline.spec.match_events import MAX_TRIALS, MatchEvents, cell_of
from aquiline.spec.past_outputs import PROMPT_TAIL
from aquiline.spec.suffix_automaton import MAX_UPDATED_LINKS, SEPARATOR

EAGER = Lookup(min_match=1, min_confidence=0)
SHORT = STREAMS.map(lambda text: text[:MAX_UPDATED_LINKS])  # whose places and counts are all known


def proposer(
    drafting: Lookup, num_prompt: int = 0, prediction: Sequence[int] = (), events: MatchEvents | None = None
) -> LookupProposer:
    return drafting.proposer([0] * num_prompt, prediction, LookupShared(events or MatchEvents()))


def proposed(drafting: Lookup, text: list[int], events: MatchEvents | None = None) -> Proposal:
    """What is drafted behind a text that was all in the prompt."""
    return proposer(drafting, len(text), events=events).propose(text, drafting.max_draft)


def told(chances: float | Sequence[float]) -> MatchEvents:
    """Events whose estimates are these."""
    events = MatchEvents()
    num = len(events.estimates)
    events.estimates[:] = array("d", [chances] * num if isinstance(chances, float) else [*chances][:num])
    return events


def copied(text: list[int], drafting: Lookup, estimates: list[float]) -> Proposal:
    """The draft by searches of the whole text."""
    length, count, end = searched(text, drafting.min_match)
    if not length:
        return Proposal(())
    drafted: list[int] = []
    chances: list[float] = []
    chance, whole = 1.0, list(text)
    for j in range(drafting.max_draft):
        part = whole[len(text) - length :]
        stood = places(text[:-1], part)
        count = len(stood) if stood else 1 if part == text[len(text) - len(part) :] else count
        chance *= estimates[cell_of(length + j, count)]
        if chance < drafting.min_confidence:
            break
        drafted.append(whole[end + 1 + j])
        chances.append(chance)
        whole.append(drafted[-1])
    found = searched(text, drafting.min_match)
    return Proposal(tuple(drafted), (), tuple(chances), Match(*found[:2])) if drafted else Proposal(())


@given(SHORT, st.integers(1, 3), st.sampled_from((0, 0.05, 0.3)), st.integers(0, 2**32 - 1))
def test_a_draft_is_what_a_search_copies(text: list[int], min_match: int, least: float, seed: int) -> None:
    """Its confidences are products of the estimates of the matches that its tokens would make."""
    chances = np.random.default_rng(seed).uniform(0.3, 1, 64).tolist()
    drafting = Lookup(min_match, max_draft=6, min_confidence=least)
    events = told(chances)
    assert proposed(drafting, text, events) == copied(text, drafting, events.estimates)


def test_the_latest_place_is_copied() -> None:
    assert proposed(EAGER, [1, 2, 3, 1, 2, 4, 1, 2]).tokens[:2] == (4, 1)
    assert proposed(EAGER, [1, 2, 3, 1, 2, 4, 1, 2]).match == Match(2, 2)
    assert proposed(EAGER, [1, 2, 3, 9, 2, 4, 1, 2]).tokens[0] == 3, "a longer match counts more than a later one"


def test_a_text_that_repeats_itself_goes_on() -> None:
    assert proposed(EAGER, [7, 8, 9, 7, 8, 9, 7, 8]).tokens == (9, 7, 8, 9, 7, 8, 9, 7)
    assert proposed(EAGER, [5, 5]).tokens == (5,) * 8


def test_without_a_match_nothing_is_drafted() -> None:
    for text in ([1], [1, 2, 3, 4], [1, 2, 3, 2]):
        assert proposed(Lookup(min_match=2, min_confidence=0), text) == Proposal(())


def test_a_wrong_copy_is_followed_by_a_shorter_match() -> None:
    """The target wrote 5 where 4 was copied; 5 has been seen behind another text."""
    drafts = proposer(EAGER, 8)
    text = [3, 5, 6, 1, 2, 3, 4, 1]
    text += [2, 3]
    assert drafts.propose(text, 8).tokens[0] == 4
    text += [5]
    found = drafts.propose(text, 8)
    assert found.tokens[0] == 6 and found.match == Match(2, 1), "(3, 5), where (1, 2, 3) stood before"


def test_a_draft_ends_where_it_is_not_likely_enough() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 1, 2]
    for least, num in ((0.5, 0), (0.4, 1), (0.16, 2), (0.15, 2), (0.064, 3), (0.0001, 8)):
        found = proposed(Lookup(min_match=1, min_confidence=least), text, told(0.4))
        assert len(found.tokens) == len(found.confidences) == num, least
        assert found.confidences == pytest.approx([0.4**i for i in range(1, num + 1)])
        assert found == Proposal(()) or (found.match == Match(2, 1) and found.parents == ())


def test_what_is_not_drafted_is_learnt_from_too() -> None:
    """No cell is closed for ever: a text that begins to repeat itself is drafted again."""
    events = MatchEvents()
    drafting = Lookup(min_match=1, min_confidence=0.45)
    drafts = proposer(drafting, 1, events=events)
    draw = np.random.default_rng(0)
    text = [0, *draw.integers(0, 3, 400).tolist()]
    nums = [len(drafts.propose(text[:num], 8).tokens) for num in range(2, len(text) + 1)]
    assert sum(nums[200:]) < 20, "a third is too little"
    before = sum(events.trials)
    for _ in range(200):
        text += [9, 8, 7]
        found = drafts.propose(text, 8)
    assert sum(events.trials) == before + 600 - 3, "9, 8, 7 were new once"
    assert len(found.tokens) == 8 and found.confidences[-1] > 0.9


@given(STREAMS, st.integers(0, 30), st.lists(st.integers(1, 9), max_size=60))
def test_events_are_the_same_however_the_tokens_come(text: list[int], num_prompt: int, sizes: list[int]) -> None:
    """Prompt tokens are none: the target did not draw them."""
    at_once, in_steps = MatchEvents(), MatchEvents()
    proposer(EAGER, num_prompt, events=at_once).propose(text, 8)
    drafts = proposer(EAGER, num_prompt, events=in_steps)
    for num in (*(n for n in np.cumsum(sizes).tolist() if num_prompt < n < len(text)), len(text)):
        drafts.propose(text[:num], 8)
    assert (at_once.trials, at_once.hits) == (in_steps.trials, in_steps.hits)
    assert sum(at_once.trials) <= max(0, len(text) - num_prompt)


def test_estimates_are_shares_of_hits_with_one_of_each_added() -> None:
    events = MatchEvents()
    assert set(events.estimates) == {0.5}
    for is_hit in (True, True, False, True):
        events.add(5, 2, is_hit)
    assert events.estimates[cell_of(5, 2)] == 4 / 6 and sum(e != 0.5 for e in events.estimates) == 1
    for length, count in ((4, 2), (7, 3)):
        assert cell_of(length, count) == cell_of(5, 2)
    cells = [cell_of(length, count) for length in (1, 2, 4, 8, 16, 32, 64) for count in (1, 2, 4, 8)]
    assert len(set(cells)) == len(cells) and max(cells) == len(events.estimates) - 1
    assert cell_of(10**6, 10**6) == cell_of(64, 8)


def test_confidences_say_how_many_tokens_are_accepted() -> None:
    """Phrases that come again, one token in eight changed, written as verification would write them. A step begins
    behind a wrong copy more often than a token does, so first tokens are accepted somewhat less often, later ones more.
    """
    draw = np.random.default_rng(3)
    phrases = [draw.integers(0, 40, draw.integers(3, 30)).tolist() for _ in range(60)]
    whole = [
        t if draw.random() > 0.125 else int(draw.integers(40)) for i in draw.integers(0, 60, 900) for t in phrases[i]
    ]
    events, drafting = MatchEvents(), Lookup(min_match=1, min_confidence=0.1)
    drafts = proposer(drafting, 1, events=events)
    expected = np.zeros(drafting.max_draft)
    accepted = np.zeros(drafting.max_draft)
    num = 2
    while num < len(whole) - drafting.max_draft:
        found = drafts.propose(whole[:num], drafting.max_draft)
        num_right = 0
        while num_right < len(found.tokens) and found.tokens[num_right] == whole[num + num_right]:
            num_right += 1
        if num > 2000:
            expected[: len(found.tokens)] += found.confidences
            accepted[:num_right] += 1
        num += num_right + 1
    assert expected.sum() == pytest.approx(accepted.sum(), rel=0.1) and accepted.sum() > 3000
    often = accepted > 100
    assert expected[often] == pytest.approx(accepted[often], rel=0.25) and sum(often) >= 5


def test_what_is_long_ago_is_forgotten() -> None:
    events = MatchEvents()
    for _ in range(10 * MAX_TRIALS):
        events.add(1, 1, True)
    for _ in range(MAX_TRIALS):
        events.add(1, 1, False)
    assert events.estimates[cell_of(1, 1)] < 0.5 and max(events.trials) < MAX_TRIALS


def test_a_prediction_is_copied_from_the_first_token_on() -> None:
    prompt, prediction = [1, 2, 3, 2, 3], [50, 51, 52, 53, 54, 55]
    drafts = proposer(Lookup(min_match=2, min_confidence=0), len(prompt), prediction)
    assert drafts.propose([*prompt, 50], 8).tokens == (51, 52, 53, 54, 55), "its end is the end of the draft"
    assert drafts.propose([*prompt, 50, 51, 60], 8).tokens == ()
    assert drafts.propose([*prompt, 50, 51, 60, 53, 54], 8).tokens == (55,), "found again behind a changed token"
    assert drafts.propose([*prompt, 50, 51, 60, 53, 54, 55, 70, 51, 60], 2).tokens == (53, 54), "the output is later"


def test_a_prediction_that_ends_is_followed_by_a_shorter_match() -> None:
    drafts = proposer(Lookup(min_match=1, min_confidence=0), 4, [20, 21, 22])
    found = drafts.propose([21, 22, 30, 1, 20, 21, 22], 2)
    assert found.tokens == (30, 1) and found.match == Match(2, 3), "the prompt's end stands before the prediction too"


def test_of_a_long_text_the_latest_half_is_kept() -> None:
    drafting = Lookup(min_match=1, min_confidence=0, window=8 * PROMPT_TAIL)
    prediction = list(range(1000, 3000))
    for expected, most in (((), 128), (prediction, 0)):
        drafts = proposer(drafting, 2000, expected)
        text = list(range(4000))
        sizes, kept = [], []
        for num in range(2001, 4001):
            drafts.propose(text[:num], 8)
            assert drafts.index is not None
            held = drafts.index.automaton.text
            sizes.append(len(held))
            own = held[list(held).index(SEPARATOR) + 1 :] if expected else held
            kept.append(len(own))
            assert own.tolist() == text[num - len(own) : num]
        num_rebuilt = sum(later < earlier for earlier, later in pairwise(sizes))
        assert max(sizes) == drafting.window and min(kept) >= drafting.window // 4 and min(kept) >= most
        assert 2000 // (drafting.window // 2) <= num_rebuilt <= 2000 // (drafting.window // 4) + 1


def test_many_tokens_at_once_do_not_pass_the_window() -> None:
    """As they come to a sequence that did not look anything up for a while."""
    drafting = Lookup(window=8 * PROMPT_TAIL)
    drafts = proposer(drafting, 10)
    text = list(range(5000))
    for num in (11, 200, 1200, 1300, 5000):
        drafts.propose(text[:num], 8)
        assert drafts.index is not None and drafts.index.num_tokens <= drafting.window
        assert drafts.index.automaton.text.tolist() == text[num - drafts.index.num_tokens : num]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"min_match": 0}, "min_match=0: must be between 1 and 32"),
        ({"min_match": 2.0}, "min_match=2.0: must be a whole number"),
        ({"max_draft": 0}, "max_draft=0: must be between 1 and 32; drafter='none' switches"),
        ({"max_draft": MAX_DEPTH + 1}, "max_draft=33: must be between 1 and 32"),
        ({"min_confidence": 1}, "min_confidence=1: must be in [0, 1)"),
        ({"min_confidence": -0.1}, "min_confidence=-0.1: must be in [0, 1)"),
        ({"window": 100}, "max_lookup=100: must be between 256 and 2^24"),
    ],
)
def test_fields_name_what_is_wrong(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        Lookup(**fields)  # type: ignore[arg-type]
    assert Lookup(max_draft=MAX_DEPTH).max_depth == MAX_DEPTH and Lookup().label == "lookup-8"
