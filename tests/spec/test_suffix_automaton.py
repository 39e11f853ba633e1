"""The suffix automaton against a search of the whole text, and what it costs in memory and time."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aquiline.engine import engine, llm
from aquiline.models.known_pairs import BUNDLED_TARGET
from aquiline.spec import suffix_automaton
from aquiline.spec.suffix_automaton import MAX_UPDATED_LINKS, SEPARATOR, SuffixAutomaton
from aquiline.text.tokenizer import load_tokenizer

STREAMS = st.integers(1, 4).flatmap(lambda kinds: st.lists(st.integers(0, kinds - 1), min_size=1, max_size=60))


def places(text: Sequence[int], part: Sequence[int]) -> list[int]:
    """The last places of every `part` in the text."""
    size = len(part)
    return [i for i in range(size - 1, len(text)) if list(text[i - size + 1 : i + 1]) == list(part)]


def searched(text: Sequence[int], min_length: int) -> tuple[int, int, int]:
    """Length of the longest suffix that stood before with a token behind it, how often it did, and its latest end."""
    for length in range(len(text) - 1, min_length - 1, -1):
        found = places(text[:-1], text[len(text) - length :])
        if found and text[found[-1] + 1] != SEPARATOR:
            return length, len(found), found[-1]
    return 0, 0, -1


def found(automaton: SuffixAutomaton) -> tuple[int, int, int]:
    """The same, from the automaton."""
    state = automaton.match()
    if not state:
        return 0, 0, -1
    return automaton.length[state], automaton.count[state], automaton.end[state]


@given(STREAMS, st.integers(1, 3))
@example([0] * 40, 1)
@example([0, 1, 0, 1, 0, 0, 1, 0, 0, 1, 0, 1, 0], 1)
def test_it_finds_what_a_search_finds(text: list[int], min_length: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(suffix_automaton, "MAX_UPDATED_LINKS", len(text))
        automaton = SuffixAutomaton(min_length)
        for num, token in enumerate(text, 1):
            automaton.extend([token])
            assert found(automaton) == searched(text[:num], min_length), text[:num]
    assert list(automaton.text) == text


@given(STREAMS, STREAMS)
def test_nothing_is_found_across_two_texts(first: list[int], second: list[int]) -> None:
    automaton = SuffixAutomaton(1)
    automaton.extend([*first, SEPARATOR])
    for num in range(1, len(second) + 1):
        automaton.extend(second[num - 1 : num])
        length, _, end = found(automaton)
        whole = [*first, SEPARATOR, *second[:num]]
        assert length == searched(whole, 1)[0]
        assert not length or (SEPARATOR not in whole[end - length + 1 : end + 2])


@given(STREAMS)
def test_every_substring_leads_to_its_state(text: list[int]) -> None:
    automaton = SuffixAutomaton(1)
    automaton.extend(text)
    for begin in range(len(text)):
        state = 0
        for token in text[begin:]:
            state = automaton.next(state, token)
            assert state
        assert automaton.next(state, 99) == 0
    assert len(automaton.length) <= 2 * len(text) + 1


def test_a_text_of_one_token_settles_a_constant_number_of_links() -> None:
    """Behind MAX_UPDATED_LINKS links, places and counts are those of an earlier text: true of it, and not the
    latest."""
    automaton = SuffixAutomaton(1)
    text = [5] * 200
    automaton.extend(text)
    assert found(automaton) == (199, 1, 198)
    automaton.extend([6, 5, 5])
    text += [6, 5, 5]
    length, count, end = found(automaton)
    assert length == 2 and end in places(text, [5, 5]) and end < len(text) - 1
    assert count == MAX_UPDATED_LINKS + 1 < len(places(text, [5, 5]))


class Told:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[int, int, bool]] = []

    def add(self, length: int, count: int, is_hit: bool) -> None:
        self.events.append((length, count, is_hit))


@given(STREAMS.map(lambda text: text[:MAX_UPDATED_LINKS]), st.integers(1, 3), st.integers(0, MAX_UPDATED_LINKS))
def test_events_say_whether_the_match_was_right(text: list[int], min_length: int, num_prompt: int) -> None:
    told = Told()
    automaton = SuffixAutomaton(min_length)
    automaton.extend(text[:num_prompt])
    automaton.extend(text[num_prompt:], told)
    expected = []
    for num in range(max(1, num_prompt), len(text)):
        length, count, end = searched(text[:num], min_length)
        if length:
            expected.append((length, count, text[end + 1] == text[num]))
    assert told.events == expected


def num_bytes(automaton: SuffixAutomaton) -> int:
    """Bytes that the automaton takes, keys and values of its dicts included."""
    a = automaton
    arrays = sum(sys.getsizeof(each) for each in (a.text, a.length, a.link, a.count, a.end, a.token, a.target))
    inner = sum(sys.getsizeof(others) + 2 * 28 * len(others) for others in a.branches.values())
    return arrays + sys.getsizeof(a.branches) + 28 * len(a.branches) + inner


def test_bytes_a_token_are_bounded() -> None:
    """What the module says of its memory, for source code and for texts that are all new, all alike, and between."""
    draw = np.random.default_rng(0)
    tokenizer = load_tokenizer(BUNDLED_TARGET)
    assert tokenizer is not None
    ordinary = tokenizer.encode(inspect.getsource(engine) + inspect.getsource(llm)).ids
    for text, least, most in (
        (ordinary, 100, 200), (draw.integers(0, 2, 8000).tolist(), 300, 400), (list(range(8000)), 0, 400),
        ([1] * 8000, 0, 400), (draw.integers(0, 30, 8000).tolist(), 0, 400), ([1] * 4000 + [2] * 4000, 0, 400),
    ):  # fmt: skip
        automaton = SuffixAutomaton(2)
        automaton.extend(text)
        each = num_bytes(automaton) / len(text)
        assert least < each < most, each
