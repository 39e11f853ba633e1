"""Any order of computing, publishing and leaving, against a model of plain texts and lists."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from tests.kv.kept import PER_SLOT, SLOTS, Kept


class Model(Kept):
    """Beside the real ones: what stands in every page, the texts that are kept, and the order they were used in."""

    def __init__(self) -> None:
        super().__init__(num_pages=9)
        self.texts = [""] * SLOTS
        self.num_published = [0] * SLOTS
        self.content: dict[int, tuple[str, bool]] = {}  # page -> the text up to its end, whether with draft keys
        self.kept: dict[str, bool] = {}  # text up to a page's end -> whether with draft keys
        self.users: dict[str, set[int]] = {}
        self.idle: list[str] = []  # the least recently used first

    def start(self, slot: int, text: str, has_draft: bool) -> None:
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
            self.content[self.pool.owned[slot][index]] = (text[: index + 1], has_draft)
        self.texts[slot], self.num_published[slot] = text, found

    def offer(self, slot: int, num: int) -> None:
        text = self.texts[slot][: self.num_published[slot] + num]
        if self.num_published[slot] < 0 or not text:
            return
        expected = True
        for end in range(self.num_published[slot] + 1, len(text) + 1):
            prefix, drafts = text[:end], self.content[self.pool.owned[slot][end - 1]][1]
            if prefix in self.kept and drafts and not self.kept[prefix]:
                if self.users[prefix]:
                    expected = False
                    break
                self.idle.remove(prefix)
                self.kept[prefix] = True
            elif prefix in self.idle:
                self.idle.remove(prefix)
            self.kept.setdefault(prefix, drafts)
            self.users.setdefault(prefix, set()).add(slot)
            self.num_published[slot] = end
        drafts = self.content[self.pool.owned[slot][len(text) - 1]][1]
        assert self.publish(slot, text, drafts) is expected
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
        self.texts[slot], self.num_published[slot] = "", 0

    def check(self) -> None:
        super().check()
        assert {self.content[page][0] for page in self.pool.cached} == set(self.kept)
        assert [self.content[page][0] for page in self.pool.idle] == self.idle, "the order in which texts are dropped"
        for page, node in self.cache.by_page.items():
            assert node.has_draft == self.kept[self.content[page][0]]
            assert self.content[page][1] or not node.has_draft, "draft keys are promised and not there"
        for slot, text in enumerate(self.texts):
            assert [self.content[page][0] for page in self.pool.owned[slot]] == list(itertools.accumulate(text))


ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("start"), st.integers(0, SLOTS - 1), st.text("ab", min_size=1, max_size=PER_SLOT), st.booleans()
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
