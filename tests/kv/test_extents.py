"""Where pages lie: a context that grows page by page is one stream of memory, and few streams where several grow."""

from __future__ import annotations

import numpy as np
import pytest

from aquiline.kv.pool import ROOM_TOKENS, PagePool

SIZE = 16
ROOM = ROOM_TOKENS // SIZE


def num_extents(pool: PagePool, slot: int) -> int:
    """Runs of adjacent pages that a slot's keys lie in; 1 is one stream of memory."""
    pages = np.array(pool.owned[slot])
    return 1 + int((np.diff(pages) != 1).sum()) if len(pages) else 0


@pytest.mark.parametrize("num_pages", [1, 2, 3, 7, 64, 1000])
def test_a_lone_sequence_that_grows_is_one_extent(num_pages: int) -> None:
    """Whatever it grows to, the last page of the pool included: the first of all begins at page 0."""
    pool = PagePool(num_pages, SIZE, 1, num_pages)
    assert num_extents(pool, 0) == 0
    for end in range(1, num_pages + 1):
        pool.reserve(0, end * SIZE)
        assert num_extents(pool, 0) == 1, f"{end} of {num_pages} pages lie in {pool.owned[0]}"


@pytest.mark.parametrize("num_pages", [1, 5, 20, 40])
def test_a_newcomer_leaves_its_neighbour_room_and_has_the_rest(num_pages: int) -> None:
    pool = PagePool(120, SIZE, 2, 120)
    pool.reserve(0, 20 * SIZE)
    pool.reserve(1, num_pages * SIZE)
    pool.reserve(0, (20 + ROOM) * SIZE)
    for end in range(num_pages, 121 - 20 - ROOM):
        pool.reserve(1, end * SIZE)
    assert [num_extents(pool, slot) for slot in (0, 1)] == [1, 1]


def test_a_newcomer_that_needs_more_than_half_is_still_one_extent() -> None:
    pool = PagePool(120, SIZE, 2, 120)
    pool.reserve(0, 20 * SIZE)
    pool.reserve(1, 90 * SIZE)
    pool.reserve(0, 30 * SIZE)
    assert [num_extents(pool, slot) for slot in (0, 1)] == [1, 1]


@pytest.mark.parametrize("per_slot", [64, 256])
@pytest.mark.parametrize("filled", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("num_slots", [2, 3, 7, 16])
def test_sequences_that_grow_side_by_side_stay_in_few_extents(num_slots: int, filled: float, per_slot: int) -> None:
    """An extent per room that is outgrown, at most twice as many where the last pages of the pool go."""
    pool = PagePool(int(num_slots * per_slot / filled), SIZE, num_slots, per_slot)
    for end in range(1, per_slot + 1):
        for slot in range(num_slots):
            pool.reserve(slot, end * SIZE)
    pool.check()
    most = 1 + per_slot // ROOM * (2 if filled == 1.0 else 1)
    assert max(num_extents(pool, slot) for slot in range(num_slots)) <= most


def test_a_pool_is_not_written_before_it_is_needed() -> None:
    """Memory is cleared when it is first written, two megabytes in every layer at a time: sequences come and go, and
    none of them lies beyond what the most that ran at once needed."""
    pool = PagePool(25_000, SIZE, 16, 512)
    for round_ in range(20):
        for slot in range(16):
            pool.reserve(slot, (100 + 7 * round_) * SIZE // 8)
        for slot in range(16):
            pool.reserve(slot, (200 + 7 * round_) * SIZE // 8)
        assert max(max(pages) for pages in pool.owned) < 16 * (ROOM + 44)
        for slot in range(16):
            pool.release(slot)


def test_room_that_is_given_back_is_one_run_again() -> None:
    pool = PagePool(64, SIZE, 4, 64)
    for end in range(1, 17):
        for slot in range(4):
            pool.reserve(slot, end * SIZE)
    for slot in range(4):
        pool.release(slot)
    pool.reserve(2, 64 * SIZE)
    assert num_extents(pool, 2) == 1 and pool.owned[2][0] == 0


def test_extents_count_breaks_in_either_direction() -> None:
    pool = PagePool(8, SIZE, 1, 8)
    pool.reserve(0, 4 * SIZE)
    pool.owned[0] = [0, 1, 5, 4]
    assert num_extents(pool, 0) == 3
