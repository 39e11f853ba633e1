"""Any order of computing, publishing and leaving, against a model of plain texts and lists."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from tests.kv.kept import PER_SLOT, SLOTS, Kept

NONE, SOME, ALL = "none", "some", "all"  # of the draft keys of a page; the first one computed may have some


class Model(Kept):
    """Beside the real ones: what stands in every page, the texts that are kept, and the order they were used in."""

    def __init__(self) -> None:
        super().__init__(num_pages=9)
        self.texts = [""] * SLOTS
        self.num_published = [0] * SLOTS
        self.reads: list[list[str]] = [
            [] for _ in range(SLOTS)
        ]  # of each page, the draft keys that its slot found or wrote
        self.content: dict[int, tuple[str, str]] = {}  # page -> the text up to its end, how many draft keys it has
        self.kept: dict[str, bool] = {}  # text up to a page's end -> whether with draft keys
        self.users: dict[str, set[int]] = {}
        self.idle: list[str] = []  # the least recently used first

    def start(self, slot: int, text: str, draft_keys: str) -> None:
        found = next(n for n in range(len(text), -1, -1) if n == 0 or text[:n] in self.kept)
        assert self.match(text) == text[:found]
        prefixes = [text[: n + 1] for n in range(found)]
        num_free = self.pool.num_free
        need, spare = len(text) - found, num_free + sum(prefix not in prefixes for prefix in self.idle)
        if need > spare:
            return
        assert self.seat(slot, text) == found
        for prefix in prefixes:
            self.users[prefix].add(slot)
            if prefix in self.idle:
                self.idle.remove(prefix)
        for prefix in self.idle[: max(0, need - num_free)]:
            self.idle.remove(prefix)
            del self.kept[prefix], self.users[prefix]
        for index in range(found, len(text)):  # the sequence writes its keys
            self.content[self.pool.owned[slot][index]] = (
                text[: index + 1],
                draft_keys if index == found or draft_keys == NONE else ALL,
            )
        self.texts[slot], self.num_published[slot] = text, found
        self.reads[slot] = [self.content[page][1] for page in self.pool.owned[slot]]

    def offer(self, slot: int, num: int) -> None:
        text = self.texts[slot][: self.num_published[slot] + num]
        if self.num_published[slot] < 0 or not text:
            return
        expected = True
        for end in range(self.num_published[slot] + 1, len(text) + 1):
            prefix, draft_keys = text[:end], self.content[self.pool.owned[slot][end - 1]][1]
            if prefix in self.kept and draft_keys != NONE and not self.kept[prefix]:
                if self.users[prefix]:
                    expected = False
                    break
                self.idle.remove(prefix)
                self.kept[prefix] = draft_keys == ALL
            elif prefix in self.idle:
                self.idle.remove(prefix)
            self.kept.setdefault(prefix, draft_keys == ALL)
            self.users.setdefault(prefix, set()).add(slot)
            self.num_published[slot] = end
        own = [self.content[page][1] for page in self.pool.owned[slot]]
        done = [self.publish(slot, text[: i + 1], own[i] == ALL, own[i] != NONE) for i in range(len(text))]
        assert all(done) is expected
        if not expected:
            self.num_published[slot] = -1  # no more

    def stop(self, slot: int) -> None:
        text = self.texts[slot]
        for end in range(len(text), 0, -1):
            users = self.users.get(text[:end])
            if users is not None and slot in users:
                users.remove(slot)
                if not users:
                    self.idle.append(text[:end])
        self.leave(slot)
        self.texts[slot], self.num_published[slot], self.reads[slot] = "", 0, []

    def check(self) -> None:
        super().check()
        assert {self.content[page][0] for page in self.pool.cached} == set(self.kept)
        assert [self.content[page][0] for page in self.pool.idle] == self.idle, "the order in which texts are dropped"
        for page, node in self.cache.by_page.items():
            assert node.has_draft == self.kept[self.content[page][0]]
            assert self.content[page][1] == ALL or not node.has_draft, "draft keys are promised and not there"
        for slot, text in enumerate(self.texts):
            pages = [self.content[page] for page in self.pool.owned[slot]]
            assert [page[0] for page in pages] == list(itertools.accumulate(text))
            kinds = [NONE, SOME, ALL]
            for (_, has), reads in zip(pages, self.reads[slot], strict=True):
                assert kinds.index(has) >= kinds.index(reads), "a slot has lost draft keys"


ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("start"),
            st.integers(0, SLOTS - 1),
            st.text("ab", min_size=1, max_size=PER_SLOT),
            st.sampled_from([NONE, SOME, ALL]),
        ),
        st.tuples(st.just("offer"), st.integers(0, SLOTS - 1), st.integers(1, PER_SLOT)),
        st.tuples(st.just("stop"), st.integers(0, SLOTS - 1)),
    ),
    max_size=60,
)


@given(ACTIONS)
def test_whatever_is_computed_published_and_left(actions: list[tuple[str, int]]) -> None:
    """Found is the longest text that was published and not dropped; dropped is the longest unused, leaf first; a page
    that anyone can reach holds what its place in the tree says."""
    model = Model()
    for action, slot, *more in actions:
        if action == "start" and not model.texts[slot]:
            model.start(slot, *more)
        elif action == "offer":
            model.offer(slot, *more)
        elif action == "stop":
            model.stop(slot)
        model.check()
