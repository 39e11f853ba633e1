"""Where pages lie: a context that grows page by page is one stream of memory, and few streams where several grow."""

from __future__ import annotations

import numpy as np
import pytest

from aquiline.kv.pool import PagePool

SIZE = 16


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
def test_a_newcomer_has_room_to_grow_and_leaves_as_much(num_pages: int) -> None:
    """100 pages are free behind the first sequence: half for it, half for a newcomer, or what its prompt needs."""
    pool = PagePool(120, SIZE, 2, 120)
    pool.reserve(0, 20 * SIZE)
    pool.reserve(1, num_pages * SIZE)
    for end in range(num_pages, 51):
        pool.reserve(1, end * SIZE)
        pool.reserve(0, (20 + end) * SIZE)
    assert [num_extents(pool, slot) for slot in (0, 1)] == [1, 1]


def test_a_newcomer_that_needs_more_than_half_is_still_one_extent() -> None:
    pool = PagePool(120, SIZE, 2, 120)
    pool.reserve(0, 20 * SIZE)
    pool.reserve(1, 90 * SIZE)
    pool.reserve(0, 30 * SIZE)
    assert [num_extents(pool, slot) for slot in (0, 1)] == [1, 1]


@pytest.mark.parametrize(
    ("num_slots", "filled", "most"),
    [
        *((num_slots, 1.0, 1) for num_slots in (2, 4, 16)),
        *((num_slots, 0.5, 1) for num_slots in (3, 7, 12)),
        *((num_slots, 0.9, 2) for num_slots in (3, 7, 12)),
        *((num_slots, 1.0, 4) for num_slots in (3, 7, 12)),
    ],
)
def test_sequences_that_grow_side_by_side_stay_in_few_extents(num_slots: int, filled: float, most: int) -> None:
    """Each newcomer starts in the middle of the longest free run. Powers of two share even a full pool without a cut,
    other numbers one with room; where the last pages go, an extent per neighbour remains, not one per page (64)."""
    per_slot = 64
    pool = PagePool(int(num_slots * per_slot / filled), SIZE, num_slots, per_slot)
    for end in range(1, per_slot + 1):
        for slot in range(num_slots):
            pool.reserve(slot, end * SIZE)
    pool.check()
    assert max(num_extents(pool, slot) for slot in range(num_slots)) <= most


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
