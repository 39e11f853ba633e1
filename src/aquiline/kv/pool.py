"""Pages: who owns which run of KV indices. Knows nothing of models, trees or scheduling.

One page table serves the target's and the draft's storage alike: the draft keeps row j at KV index j + 1, so that
index i of either depends on tokens up to i only, and one rollback by length serves both (EAGLE3.md §2).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from aquiline.errors import OutOfPages
from aquiline.types import KEY_GROUP, Int32, KVGroup


@dataclass(frozen=True)
class KVGeometry:
    """What one model stores per token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Keys and values of every layer."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


def new_group(geometry: KVGeometry, num_pages: int, page_size: int, dtype: torch.dtype) -> KVGroup:
    """Uninitialised storage: memory is touched only when a page is first written."""
    L, Hkv, Dh = geometry.num_layers, geometry.num_kv_heads, geometry.head_dim
    return KVGroup(
        k=torch.empty(L, num_pages, Hkv, page_size // KEY_GROUP, Dh, KEY_GROUP, dtype=dtype),
        v=torch.empty(L, num_pages, Hkv, page_size, Dh, dtype=dtype),
    )


class PagePool:
    """Reference-counted pages and the per-slot tables that name them.

    `table` [S, pages per slot] is the array the forwards read; rows of free slots are stale and never read."""

    def __init__(self, num_pages: int, page_size: int, num_slots: int, pages_per_slot: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.refcount: Int32 = np.zeros(num_pages, np.int32)
        self.free = list(range(num_pages - 1, -1, -1))
        self.table: Int32 = np.zeros((num_slots, pages_per_slot), np.int32)
        self.owned: list[list[int]] = [[] for _ in range(num_slots)]

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold KV indices 0 .. num_tokens - 1."""
        return -(-num_tokens // self.page_size)

    def reserve(self, slot: int, num_tokens: int) -> None:
        """Give the slot pages for KV indices below num_tokens, keeping what it has.

        Raises OutOfPages, taking nothing, when the pool or the slot's table is too small."""
        need = self.pages_for(num_tokens) - len(self.owned[slot])
        if need <= 0:
            return
        if need > len(self.free) or len(self.owned[slot]) + need > self.table.shape[1]:
            raise OutOfPages(
                f"{num_tokens} KV indices need {need} more pages of {self.page_size} tokens; "
                f"{len(self.free)} of {self.num_pages} are free and a slot holds at most {self.table.shape[1]}"
            )
        for _ in range(need):
            page = self.free.pop()
            self.refcount[page] += 1
            self.table[slot, len(self.owned[slot])] = page
            self.owned[slot].append(page)

    def release(self, slot: int, keep_tokens: int = 0) -> None:
        """Drop the slot's pages that hold no KV index below keep_tokens; pages nobody refers to become free."""
        keep = self.pages_for(keep_tokens)
        while len(self.owned[slot]) > keep:
            page = self.owned[slot].pop()
            self.refcount[page] -= 1
            if self.refcount[page] == 0:
                self.free.append(page)

    def check(self) -> None:
        """Conservation: every page is free or owned, as often as its refcount says, and the tables agree."""
        counts = np.zeros(self.num_pages, np.int32)
        for slot, pages in enumerate(self.owned):
            np.add.at(counts, pages, 1)
            assert list(self.table[slot, : len(pages)]) == pages, f"slot {slot}: table and ownership disagree"
        assert (counts == self.refcount).all(), "refcounts disagree with ownership"
        assert sorted(self.free) == list(np.flatnonzero(counts == 0)), "free list disagrees with refcounts"
