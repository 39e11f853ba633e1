"""The native index of a text and its readable twin: the same drafts, chances and events, to the bit; what the native
one costs in memory, and what it refuses."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.conftest import needs_native
from tests.spec.test_suffix_automaton import STREAMS

from aquiline.backends.cpu.native_text_index import NativeIndex
from aquiline.backends.cpu.native_weights import library
from aquiline.config import MAX_DEPTH
from aquiline.engine import engine, llm
from aquiline.errors import NativeError
from aquiline.models.known_pairs import BUNDLED_TARGET
from aquiline.spec.drafting import Proposal
from aquiline.spec.lookup import Lookup, LookupShared
from aquiline.spec.match_events import MatchEvents
from aquiline.spec.past_outputs import PROMPT_TAIL, PastOutputs
from aquiline.spec.suffix_automaton import SEPARATOR, SuffixAutomaton
from aquiline.spec.text_index import SuffixIndex
from aquiline.text.tokenizer import load_tokenizer

pytestmark = needs_native

LEASTS = st.sampled_from((0.0, 0.02, 0.3))


def twins() -> tuple[LookupShared, LookupShared]:
    return LookupShared(new_index=NativeIndex), LookupShared(new_index=SuffixIndex)


def bits(proposal: Proposal) -> tuple[object, ...]:
    return (*proposal[:2], [chance.hex() for chance in proposal.confidences], proposal.match)


def learnt(events: MatchEvents) -> list[bytes]:
    return [each.tobytes() for each in (events.trials, events.hits, events.estimates)]


def texts() -> dict[str, list[int]]:
    """Texts of several thousand tokens that an automaton has most states, links or branches for, and ordinary ones."""
    draw = np.random.default_rng(0)
    tokenizer = load_tokenizer(BUNDLED_TARGET)
    assert tokenizer is not None
    fibonacci = [[0], [0, 1]]
    while len(fibonacci[-1]) < 4000:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    phrases = [draw.integers(0, 40, draw.integers(3, 30)).tolist() for _ in range(60)]
    return {
        "ordinary": tokenizer.encode(inspect.getsource(engine) + inspect.getsource(llm)).ids,
        "two kinds": draw.integers(0, 2, 6000).tolist(), "thirty kinds": draw.integers(0, 30, 6000).tolist(),
        "all new": list(range(6000)), "all alike": [7] * 6000, "one then another": [1] * 3000 + [2] * 3000,
        "most states": [0, *[1] * 4000], "most branches": [*[0] * 2000, *[1] * 2000, 2], "fibonacci": fibonacci[-1],
        "phrases": [t for i in draw.integers(0, 60, 400) for t in phrases[i]],
        "large ids": (2**31 - 1 - draw.integers(0, 9, 3000)).tolist(),
    }  # fmt: skip


TEXTS = texts()


@given(STREAMS, STREAMS, st.integers(1, 3), LEASTS, st.lists(st.integers(0, 9), max_size=60), st.integers(0, 12))
@example([0] * 40, [0] * 40, 1, 0.0, [1] * 40, MAX_DEPTH)
@example([0, 1, 0, 1, 0, 0, 1], [0, 1, 0], 1, 0.0, [], 3)
def test_the_same_copies_and_events(
    first: list[int], text: list[int], min_length: int, least: float, sizes: list[int], max_tokens: int
) -> None:
    """However the tokens come, behind another text, with a separator between them or without."""
    for between in ((), (SEPARATOR,)):
        ours, theirs = MatchEvents(), MatchEvents()
        native, python = NativeIndex(min_length, ours), SuffixIndex(min_length, theirs)
        for index in (native, python):
            index.extend([*first, *between])
        at = 0
        for size in (*sizes, len(text)):
            new, at = text[at : at + size], at + size
            copies = [bits(index.propose(new, max_tokens, least)) for index in (native, python)]
            assert copies[0] == copies[1]
            assert native.match_length == python.match_length and native.num_tokens == python.num_tokens
        assert learnt(ours) == learnt(theirs)


@pytest.mark.parametrize("name", TEXTS)
def test_the_same_in_long_texts(name: str) -> None:
    """Token by token, then in runs of them; one text behind the other in one engine's events."""
    text = TEXTS[name]
    shares = twins()
    for drafting, sizes in ((Lookup(1, 16, 0.0), [1]), (Lookup(), [1, 2, 9, 1, 5]), (Lookup(3, 32, 0.2), [40, 3])):
        proposers = [drafting.proposer(text[:500], (), shared) for shared in shares]
        num = 500
        while num < len(text):
            num += sizes[num % len(sizes)]
            ours, theirs = (each.propose(text[:num], drafting.max_draft) for each in proposers)
            assert bits(ours) == bits(theirs), (drafting, num)
    assert learnt(shares[0].events) == learnt(shares[1].events)


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), LEASTS, st.booleans())
def test_the_same_with_windows_predictions_and_past_outputs(
    seed: int, min_match: int, least: float, with_past: bool
) -> None:
    """Several sequences of an engine in turn, whose indexes are made anew when they are full."""
    draw = np.random.default_rng(seed)
    drafting = Lookup(min_match, 8, least, window=8 * PROMPT_TAIL)
    shares = twins()
    pasts = [PastOutputs(2**16).space(None) if with_past else None for _ in shares]
    kinds = int(draw.integers(1, 30))
    whole = [draw.integers(0, kinds, 500).tolist() for _ in range(3)]
    predictions = [[], whole[1][100:200], draw.integers(0, kinds, 400).tolist()]
    for past in pasts:
        if past is not None:
            past.add(whole[0][:20], whole[0][20:200])
    pairs = [
        [drafting.proposer(text[:90], prediction, *shared) for shared in zip(shares, pasts, strict=True)]
        for text, prediction in zip(whole, predictions, strict=True)
    ]
    nums = [90] * 3
    while min(nums) < 480:
        for i, (text, proposers) in enumerate(zip(whole, pairs, strict=True)):
            nums[i] = min(nums[i] + int(draw.integers(0, 20)), 500)
            ours, theirs = (each.propose(text[: nums[i]], drafting.max_draft) for each in proposers)
            assert bits(ours) == bits(theirs)
    assert learnt(shares[0].events) == learnt(shares[1].events)
    ours, theirs = ([] if past is None else learnt(past.outputs.events) for past in pasts)
    assert ours == theirs


@given(STREAMS)
def test_states_and_branches_have_the_room_that_is_reserved_for_them(text: list[int]) -> None:
    """2 states and a branch a token, as csrc/lookup/suffix_automaton.h counts them."""
    automaton = SuffixAutomaton(1)
    for num, token in enumerate(text, 1):
        automaton.extend([token])
        assert len(automaton.length) <= 2 * num and sum(map(len, automaton.branches.values())) < num


def num_bytes(index: NativeIndex) -> int:
    return int(library().index_bytes(index._handle))


@pytest.mark.parametrize("name", TEXTS)
def test_bytes_a_token_are_bounded_in_any_text(name: str) -> None:
    text = TEXTS[name]
    grown, opened = (NativeIndex(2, MatchEvents()) for _ in range(2))
    for i, token in enumerate(text, 1):
        grown.propose([token], 0, 0.0)
        if i >= 64:
            assert 80 * i < num_bytes(grown) < 140 * i
    opened.extend(text)
    assert 80 * len(text) < num_bytes(opened) < 92 * len(text)


class Alive:
    """The handles of open indexes, and how many were ever opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.handles: set[int] = set()
        self.num_opened = 0
        self._open, self._close = library().open_index, library().close_index
        patch.setattr(library(), "open_index", self.open)
        patch.setattr(library(), "close_index", self.close)

    def open(self, *arguments: object) -> int:
        handle = int(self._open(*arguments))
        self.num_opened += 1
        self.handles.add(handle)
        return handle

    def close(self, handle: int) -> None:
        self.handles.remove(handle)
        self._close(handle)


def test_an_index_is_closed_with_the_last_reference_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    alive = Alive(monkeypatch)
    index = NativeIndex(1, MatchEvents())
    index.propose([1, 2, 1], 4, 0.0)
    assert alive.handles == {index._handle}
    del index
    assert not alive.handles


def test_a_new_index_takes_the_place_of_a_full_one(monkeypatch: pytest.MonkeyPatch) -> None:
    alive, drafting = Alive(monkeypatch), Lookup(window=8 * PROMPT_TAIL)
    drafts = drafting.proposer([0] * 10, (), drafting.shared(NativeIndex))
    text = list(range(2000))
    for num in range(10, 2001, 10):
        drafts.propose(text[:num], 8)
        assert drafts.index is not None and drafts.index.num_tokens <= drafting.window and len(alive.handles) == 1
    assert alive.num_opened == pytest.approx(2000 / (drafting.window // 2), abs=2)
    del drafts
    assert not alive.handles


def test_what_is_refused_changes_nothing() -> None:
    events = MatchEvents()
    index = NativeIndex(1, events)
    index.propose([4, 5, 4, 5], 8, 0.0)
    before, num_before = learnt(events), num_bytes(index)
    for tokens, max_tokens, message in (
        ([1, -2], 8, r"aq_propose: tokens\[1\]=-2: must be an id, or -1"),
        ([1], MAX_DEPTH + 1, r"aq_propose: max_tokens=33: must be in \[0, 32\]"),
        ([1], -1, r"aq_propose: max_tokens=-1: must be in \[0, 32\]"),
    ):  # fmt: skip
        with pytest.raises(NativeError, match=message):
            index.propose(tokens, max_tokens, 0.0)
    with pytest.raises(NativeError, match=r"aq_extend_index: tokens\[0\]=-9: must be an id, or -1"):
        index.extend([-9])
    with pytest.raises(OverflowError):
        index.extend([2**31])
    assert index.num_tokens == 4 and learnt(events) == before and num_bytes(index) == num_before
    assert index.propose([], 2, 0.0).tokens == (4, 5)
    with pytest.raises(NativeError, match="aq_open_index: min_length=0: must be at least 1"):
        NativeIndex(0, events)


def test_calls_without_an_index_or_a_place_to_write_are_refused() -> None:
    lib = library()
    assert lib.propose(None, None, 0, 0, 0.0, None) == -1 and "copy" in lib.last_error()
    index = NativeIndex(1, MatchEvents())
    assert lib.propose(None, None, 0, 0, 0.0, index._copy_at) == -1 and "index" in lib.last_error()
    assert lib.propose(index._handle, None, 1, 0, 0.0, index._copy_at) == -1 and "tokens" in lib.last_error()
    assert lib.propose(index._handle, None, -1, 0, 0.0, index._copy_at) == -1 and "num_tokens=-1" in lib.last_error()
    assert lib.propose(index._handle, None, 2**28 + 1, 0, 0.0, index._copy_at) == -1
    assert lib.index_bytes(None) == -1 and not lib.open_index(1, None)


def drafts_of(tokens: Sequence[int]) -> Proposal:
    return NativeIndex(1, MatchEvents()).propose(tokens, 8, 0.0)


def test_a_copy_goes_round_and_ends_before_a_separator() -> None:
    assert drafts_of([7, 8, 9, 7, 8, 9, 7, 8]).tokens == (9, 7, 8, 9, 7, 8, 9, 7)
    assert drafts_of([5, 5]).tokens == (5,) * 8 and drafts_of([5, 5]).match == (1, 1)
    assert drafts_of([1, 2, 3, SEPARATOR, 1]).tokens == (2, 3)
    assert drafts_of([1, 2, SEPARATOR, 1, 2]) == drafts_of([]) == drafts_of([1]) == Proposal(())
