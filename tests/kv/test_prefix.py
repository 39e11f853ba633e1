"""The prefix cache: what is found is what was published, the oldest leaf goes first, and no page has two meanings."""

from __future__ import annotations

import pytest
from tests.kv.kept import PER_SLOT, SIZE, Kept

from aquiline.errors import OutOfPages
from aquiline.kv.pool import PagePool
from aquiline.kv.prefix import PrefixCache


def test_the_longest_path_of_whole_pages_is_found() -> None:
    kept = Kept()
    kept.keep("abc")
    kept.keep("abd")
    for asked, found in (("abc", "abc"), ("abdx", "abd"), ("ab", "ab"), ("axc", "a"), ("bc", ""), ("", "")):
        assert kept.match(asked) == found, asked
    assert len(kept.cache.match(None, [*kept.tokens("ab"), *[ord("c")] * (SIZE - 1)])) == 2, "a page is found whole"
    assert len(kept.cache.match(None, [*kept.tokens("a"), *[ord("b")] * (SIZE - 1), ord("x")])) == 1, "a token differs"
    kept.check()


def test_spaces_share_nothing() -> None:
    """A salt keeps what one caller said from being found by another."""
    kept = Kept()
    kept.pool.reserve(0, SIZE)
    node = kept.cache.publish("salt", 0, None, 0, kept.tokens("a"), True, True)
    assert node is not None and kept.cache.match("salt", kept.tokens("a")) == [node]
    assert kept.cache.match(None, kept.tokens("a")) == kept.cache.match("pepper", kept.tokens("a")) == []


def test_nothing_is_kept_of_a_space_without_pages() -> None:
    """A caller may name another salt each time."""
    kept = Kept()
    for number in range(3 * PER_SLOT):
        assert kept.cache.match(f"salt {number}", kept.tokens("ab")) == []
    assert not kept.cache.roots
    for number in range(100):
        kept.pool.reserve(0, SIZE)
        assert kept.cache.publish(number, 0, None, 0, kept.tokens("a"), True, True)
        kept.pool.release(0)
    assert len(kept.cache.roots) == len(kept.cache.by_page) < 100 and 99 in kept.cache.roots


def test_a_match_takes_no_page() -> None:
    kept = Kept()
    kept.keep("abc")
    before = kept.pool.num_available, list(kept.pool.idle)
    kept.match("abc")
    assert (kept.pool.num_available, list(kept.pool.idle)) == before


def test_published_pages_outlive_their_sequence_and_are_shared() -> None:
    kept = Kept()
    kept.keep("abc")
    assert kept.pool.num_free == 9 and len(kept.pool.idle) == 3 and kept.pool.num_available == 12
    assert [kept.seat(slot, "abcd") for slot in (0, 1)] == [3, 3]
    assert kept.pool.owned[0][:3] == kept.pool.owned[1][:3] and kept.pool.owned[0][3] != kept.pool.owned[1][3]
    assert kept.pool.refcount[kept.pool.owned[0][0]] == 2 and not kept.pool.idle
    kept.leave(0)
    assert not kept.pool.idle, "the other still uses them"
    kept.check()


@pytest.mark.parametrize(("first", "second"), [(True, True), (False, False), (True, False)])
def test_who_computed_the_same_page_takes_the_tree_s_and_drops_its_own(first: bool, second: bool) -> None:
    """The tree's page has all that the other has; it may be in use or idle."""
    for is_idle in (False, True):
        kept = Kept()
        for slot in (0, 1):
            kept.seat(slot, "ab")
        kept.publish(0, "ab", first, first)
        theirs = list(kept.pool.owned[0])
        if is_idle:
            kept.leave(0)
        assert kept.publish(1, "ab", second, second)
        assert kept.pool.owned[1] == theirs and kept.pool.take_changes()[-2:] == [(1, 0, theirs[0]), (1, 1, theirs[1])]
        assert kept.pool.num_free == 10, "its own pages are free again"
        assert all(node.has_draft is first for node in kept.nodes[1])
        kept.check()


def test_an_idle_page_without_draft_keys_gives_way_to_one_with_them() -> None:
    kept = Kept()
    kept.seat(1, "ab")
    kept.keep("ab", has_draft=False)
    old = [node.page for node in kept.cache.match(None, kept.tokens("ab"))]
    assert kept.publish(1, "ab", has_draft=True)
    assert [node.page for node in kept.nodes[1]] == kept.pool.owned[1] and not set(old) & set(kept.pool.owned[1])
    assert kept.cache.match(None, kept.tokens("ab")) == kept.nodes[1] and all(node.has_draft for node in kept.nodes[1])
    assert kept.pool.num_free == 10 and not kept.pool.idle and kept.pool.is_free[old].all()
    kept.check()


def test_a_page_without_draft_keys_that_is_in_use_stays_and_nothing_follows() -> None:
    kept = Kept()
    for slot in (0, 1):
        kept.seat(slot, "abc")
    kept.publish(0, "ab", has_draft=False, drafts=False)
    own = list(kept.pool.owned[1])
    assert not kept.publish(1, "abc", has_draft=True)
    assert kept.pool.owned[1] == own and kept.nodes[1] == []
    assert kept.match("abc") == "ab" and not any(node.has_draft for node in kept.cache.match(None, kept.tokens("ab")))
    kept.leave(1)
    assert not kept.pool.idle, "what nobody was told of is free"
    kept.check()


def test_children_stay_below_an_upgraded_page() -> None:
    kept = Kept()
    kept.seat(1, "a")
    kept.keep("abc", has_draft=False)
    assert kept.publish(1, "a", has_draft=True)
    found = kept.cache.match(None, kept.tokens("abc"))
    assert [node.has_draft for node in found] == [True, False, False]
    kept.leave(1)
    kept.check()
    kept.seat(0, "xxxxxx")
    kept.seat(1, "yyyyyy")
    assert kept.match("abc") == "", "all room was needed; none of it was dropped before its children"
    kept.check()


@pytest.mark.parametrize("num_pages", [500, 4096])
def test_a_context_of_many_pages_is_found_and_checked(num_pages: int) -> None:
    """64K tokens in pages of 16."""
    pool = PagePool(num_pages, SIZE, 1, num_pages)
    cache, node = PrefixCache(pool), None
    pool.reserve(0, num_pages * SIZE)
    for index in range(num_pages):
        node = cache.publish(None, 0, node, index, [index] * SIZE, True, True)
    assert len(cache.match(None, [index for index in range(num_pages) for _ in range(SIZE)])) == num_pages
    cache.check()
    pool.release(0)
    cache.check()


def test_publishing_again_changes_nothing() -> None:
    kept = Kept()
    kept.seat(0, "a")
    node = kept.cache.publish(None, 0, None, 0, kept.tokens("a"), True, True)
    assert kept.cache.publish(None, 0, None, 0, kept.tokens("a"), True, True) is node
    assert (
        kept.cache.publish(None, 0, None, 0, kept.tokens("a"), False, False) is node
        and node is not None
        and node.has_draft
    )
    kept.check()


def test_the_leaf_of_the_longest_unused_text_goes_first() -> None:
    kept = Kept(num_pages=8)
    kept.keep("abc")
    kept.keep("abd")
    kept.keep("xyz")  # 7 of 8 pages
    kept.keep("abc")  # used again: later than xyz, and d, its sibling, earlier than either
    order = []
    texts = ["abc", "abd", "xyz"]
    for num in range(1, 9):
        kept.seat(0, "!" * min(num, PER_SLOT))
        if num > PER_SLOT:
            kept.seat(1, "?" * (num - PER_SLOT))
        order.append([kept.match(text) for text in texts])
        kept.check()
        kept.leave(0)
        kept.leave(1)
    assert order == [
        ["abc", "abd", "xyz"],  # the free page first
        ["abc", "ab", "xyz"],
        ["abc", "ab", "xy"],
        ["abc", "ab", "x"],
        ["abc", "ab", ""],
        ["ab", "ab", ""],
        ["a", "a", ""],
        ["", "", ""],
    ]


def test_only_as_much_as_is_needed_is_dropped_and_never_what_is_in_use() -> None:
    kept = Kept(num_pages=8)
    kept.keep("abcd")
    kept.seat(0, "ab")
    kept.seat(1, "xxxx")  # 4 free
    assert kept.match("abcd") == "abcd"
    kept.pool.reserve(1, 5 * SIZE)
    assert kept.match("abcd") == "abc"
    with pytest.raises(OutOfPages, match="need 2 more pages of 16 tokens; 1 of 8 are free"):
        kept.pool.reserve(0, 4 * SIZE)
    assert kept.match("abcd") == "abc", "a refusal drops nothing"
    kept.pool.reserve(0, 3 * SIZE)
    assert kept.match("abcd") == "ab", "in use"
    kept.check()


def test_clear_forgets_all_that_nobody_uses_and_frees_the_rest_when_they_leave() -> None:
    kept = Kept()
    kept.keep("abc")
    kept.keep("xy")
    kept.seat(0, "ab")
    kept.cache.clear()
    assert kept.match("abc") == "" == kept.match("xy") and not kept.pool.cached and not kept.pool.idle
    assert kept.pool.num_free == 10
    kept.check()
    kept.leave(0)
    assert kept.pool.num_free == 12
    kept.keep("abc")
    assert kept.match("abc") == "abc"
    kept.check()


def test_a_sequence_that_runs_on_after_clear_publishes_nothing_below_what_was_forgotten() -> None:
    kept = Kept()
    kept.seat(0, "abc")
    kept.publish(0, "ab")
    kept.cache.clear()
    kept.publish(0, "abc")
    kept.check()
    kept.leave(0)
    kept.seat(1, "xxxxxx")
    kept.seat(2, "yyyyyy")
    kept.check()


@pytest.mark.parametrize(
    "damage", ["page named twice", "node lost", "page not in the pool's list", "dropped before its child"]
)
def test_check_notices(damage: str) -> None:
    kept = Kept()
    kept.keep("abc")
    kept.keep("xy")
    kept.check()
    first, second, third = kept.cache.match(None, kept.tokens("abc"))
    if damage == "page named twice":
        third.page = second.page
    elif damage == "node lost":
        del first.children[second.tokens]
    elif damage == "page not in the pool's list":
        kept.pool.uncache(third.page)
    else:
        kept.pool.share(0, [second.page])  # and not its parent
    with pytest.raises(AssertionError):
        kept.check()


def test_a_page_that_is_dropped_before_its_children_is_noticed_at_once() -> None:
    kept = Kept(num_pages=3)
    kept.keep("abc")
    kept.pool.idle.move_to_end(kept.cache.match(None, kept.tokens("a"))[0].page, last=False)
    with pytest.raises(AssertionError, match="is dropped before those below it"):
        kept.seat(0, "x")


@pytest.mark.parametrize("is_idle", [False, True])
def test_a_slot_never_loses_the_draft_keys_it_reads(is_idle: bool) -> None:
    """It has some of the page's draft keys, the tree's page has none."""
    kept = Kept()
    for slot in (0, 1):
        kept.seat(slot, "a")
    kept.publish(0, "a", has_draft=False, drafts=False)
    if is_idle:
        kept.leave(0)
    own = list(kept.pool.owned[1])
    assert kept.publish(1, "a", has_draft=False, drafts=True) is is_idle
    assert kept.pool.owned[1] == own and (kept.pool.cached == set(own)) is is_idle
    assert not next(iter(kept.cache.by_page.values())).has_draft
    kept.check()
