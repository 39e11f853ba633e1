"""Pages are conserved whatever is reserved and released, and a refused reservation takes nothing."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aquiline.errors import OutOfPages
from aquiline.kv.pool import PagePool

SLOTS, PAGES, SIZE, PER_SLOT = 3, 7, 16, 4
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "release"]), st.integers(0, SLOTS - 1), st.integers(0, (PER_SLOT + 1) * SIZE)
    ),
    max_size=40,
)


def new_pool() -> PagePool:
    return PagePool(PAGES, SIZE, SLOTS, PER_SLOT)


@given(ACTIONS)
def test_pages_are_conserved(actions: list[tuple[str, int, int]]) -> None:
    pool, held = new_pool(), [0] * SLOTS  # pages of each slot, counted apart
    for action, slot, num_tokens in actions:
        pages = -(-num_tokens // SIZE)
        if action == "release":
            before = list(pool.owned[slot])
            pool.release(slot, num_tokens)
            held[slot] = min(held[slot], pages)
            assert pool.owned[slot] == before[: held[slot]], "a rollback keeps the pages in front, in place"
        elif max(pages, held[slot]) <= PER_SLOT and sum(held) + max(pages - held[slot], 0) <= PAGES:
            pool.reserve(slot, num_tokens)
            held[slot] = max(held[slot], pages)
        else:
            before_all = copy.deepcopy((pool.is_free.tolist(), pool.owned, pool.refcount.tolist()))
            with pytest.raises(OutOfPages, match=f"{num_tokens} KV indices"):
                pool.reserve(slot, num_tokens)
            assert (pool.is_free.tolist(), pool.owned, pool.refcount.tolist()) == before_all, "a refusal takes nothing"
        pool.check()
        assert [len(pages) for pages in pool.owned] == held
        assert pool.num_free == PAGES - sum(held)


@pytest.mark.parametrize("num_tokens", range(2 * SIZE + 2))
def test_release_keeps_exactly_the_pages_with_a_token_below(num_tokens: int) -> None:
    pool = new_pool()
    pool.reserve(0, 3 * SIZE)
    pool.release(0, num_tokens)
    assert len(pool.owned[0]) == len({index // SIZE for index in range(num_tokens)})


@pytest.mark.parametrize("damage", ["leak", "double", "table"])
def test_check_notices(damage: str) -> None:
    pool = new_pool()
    pool.reserve(1, 2 * SIZE)
    if damage == "leak":
        pool.is_free[pool.is_free.argmax()] = False
    elif damage == "double":
        pool.is_free[pool.owned[1][0]] = True
    else:
        pool.owned[1] += [6] * pool.pages_per_slot
    with pytest.raises(AssertionError):
        pool.check()
