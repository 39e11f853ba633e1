"""Pages: who uses which run of KV indices. Knows nothing of models, trees or scheduling.

One page table serves the target's and the draft's storage. The draft stores row j at KV index j + 1, so that index i
depends on tokens up to i only in both storages, and cutting a sequence to a length is one operation for both.

A page is in use (by as many slots as its refcount says), idle (cached, used by nobody: the prefix cache may hand it out
again) or free. Free pages are taken first, idle ones only under pressure, the least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from aquiline.errors import OutOfPages
from aquiline.types import Bool, Int32

ROOM_TOKENS = 512
"""KV indices that are left free for a slot to grow into before another slot's pages begin, where the pool has them."""


class PagePool:
    """Reference-counted pages and the per-slot tables that name them.

    `evicted` is called with a cached page before that page is handed out for other keys; the prefix cache sets it. The
    backend learns of changed tables from what `take_changes` returns."""

    def __init__(self, num_pages: int, page_size: int, num_slots: int, pages_per_slot: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.refcount: Int32 = np.zeros(num_pages, np.int32)
        self.is_free: Bool = np.ones(num_pages, np.bool_)
        self.num_free = num_pages
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.cached: set[int] = set()
        self.evicted: Callable[[int], None] = self.cached.discard
        self.pages_per_slot = pages_per_slot
        self._changes: list[tuple[int, int, int]] = []
        self.owned: list[list[int]] = [[] for _ in range(num_slots)]

    @property
    def num_available(self) -> int:
        """Pages that can be handed out: free pages, and cached pages that no slot uses."""
        return self.num_free + len(self.idle)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold KV indices 0 .. num_tokens - 1."""
        return -(-num_tokens // self.page_size)

    def reserve(self, slot: int, num_tokens: int) -> None:
        """Give the slot pages for KV indices below num_tokens, keeping what it has.

        Raises OutOfPages, taking nothing, when the pool or the slot's table is too small."""
        owned = self.owned[slot]
        need = self.pages_for(num_tokens) - len(owned)
        if need <= 0:
            return
        if need > self.num_available or len(owned) + need > self.pages_per_slot:
            raise OutOfPages(
                f"{num_tokens} KV indices need {need} more pages of {self.page_size} tokens; "
                f"{self.num_available} of {self.num_pages} are free and a slot holds at most {self.pages_per_slot}"
            )
        for count in range(need, 0, -1):
            self._give(slot, self._take(owned[-1] if owned else -1, count))

    def share(self, slot: int, pages: list[int]) -> None:
        """Let the slot use cached pages after those it has."""
        for page in pages:
            assert page in self.cached, f"page {page} is not cached"
            self._give(slot, page)

    def replace(self, slot: int, index: int, page: int) -> None:
        """Put a cached page that holds the same keys in the place of the slot's page number `index`."""
        own = self.owned[slot][index]
        self.idle.pop(page, None)
        self.refcount[page] += 1
        self.owned[slot][index] = page
        self._changes.append((slot, index, page))
        self._drop(own)

    def release(self, slot: int, keep_tokens: int = 0) -> None:
        """Drop the slot's pages that hold no KV index below keep_tokens, the last first."""
        keep = self.pages_for(keep_tokens)
        while len(self.owned[slot]) > keep:
            self._drop(self.owned[slot].pop())

    def take_changes(self) -> list[tuple[int, int, int]]:
        """(slot, index, page) of every place in a slot's table that was filled since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def cache(self, page: int) -> None:
        """Mark a page as cached: when no slot uses it any more it becomes idle, not free."""
        self.cached.add(page)

    def uncache(self, page: int) -> None:
        """Take the mark of `cache` off a page; the page becomes free if no slot uses it."""
        self.cached.discard(page)
        if self.refcount[page] == 0 and not self.is_free[page]:
            self.idle.pop(page, None)
            self._free(page)

    def check(self) -> None:
        """Conservation: every page is in use, idle or free, as its refcount says."""
        counts = np.zeros(self.num_pages, np.int32)
        for slot, pages in enumerate(self.owned):
            np.add.at(counts, pages, 1)
            assert len(pages) <= self.pages_per_slot, f"slot {slot} owns {len(pages)} pages"
        assert (counts == self.refcount).all(), "refcounts disagree with ownership"
        idle = np.zeros(self.num_pages, np.bool_)
        idle[list(self.idle)] = True
        assert self.cached.issuperset(self.idle), "an idle page is not cached"
        assert ((counts == 0) == (self.is_free | idle)).all(), "free and idle pages disagree with refcounts"
        assert not (self.is_free & idle).any() and self.num_free == self.is_free.sum(), "free pages miscounted"
        assert not self.is_free[list(self.cached)].any(), "a cached page is free"

    def _give(self, slot: int, page: int) -> None:
        self.idle.pop(page, None)
        self.refcount[page] += 1
        self._changes.append((slot, len(self.owned[slot]), page))
        self.owned[slot].append(page)

    def _drop(self, page: int) -> None:
        self.refcount[page] -= 1
        if self.refcount[page] > 0:
            return
        if page in self.cached:
            self.idle[page] = None
        else:
            self._free(page)

    def _free(self, page: int) -> None:
        self.is_free[page] = True
        self.num_free += 1

    def _take(self, last: int, count: int) -> int:
        """A page for a slot that takes `count` more and whose last page is `last` (-1: it has none).

        It is the page after `last` if that one is free, so that a context is read as one stream of memory. Otherwise it
        is in the first free run that holds `count` pages after some room for the slot whose pages end where the run
        begins. If no run is so long, it is in the longest. Early runs come first because memory that was never written
        must be cleared by the system. Without a free page, the least recently used idle page, which is evicted."""
        if self.num_free == 0:
            page = self.idle.popitem(last=False)[0]
            self.evicted(page)
            self.cached.discard(page)
            return page
        page = last + 1
        if last < 0 or page >= self.num_pages or not self.is_free[page]:
            edges = np.flatnonzero(np.diff(self.is_free, prepend=False, append=False))
            starts, lengths = edges[::2], edges[1::2] - edges[::2]
            room = self.pages_for(ROOM_TOKENS)
            is_enough = lengths >= count + room
            run = int(is_enough.argmax() if is_enough.any() else lengths.argmax())
            page, length = int(starts[run]), int(lengths[run])
            if page > 0 and length > count:
                page += min(room, length // 2, length - count)
        self.is_free[page] = False
        self.num_free -= 1
        return page
