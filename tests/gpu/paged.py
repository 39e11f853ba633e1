"""Small caches in pages, rows that look at them, and attention in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from tests.gpu.running import DEVICE, int32, poison, randn, run
from torch import Tensor

from aquiline.ops.triton.attention import AttentionTiles, SpanBuffers, attention
from aquiline.ops.triton.rows import DeviceRows

PAGE = 16
TILES = AttentionTiles(span=64, block=16, num_stages=3)


@dataclass(frozen=True)
class Row:
    """What a row sees: KV indices [start, context) of its slot, then context - 1 + node for each node of its path."""

    context: int
    slot: int = 0
    start: int = 0
    path: tuple[int, ...] = ()

    @property
    def indices(self) -> list[int]:
        return [*range(self.context), *(self.context - 1 + node for node in self.path)]

    def seen(self, window: int) -> list[int]:
        """KV indices that the row sees, in the order of their places."""
        first = max(self.start, len(self.indices) - window) if window else self.start
        return self.indices[first:]


DEAD = Row(2**30, slot=-1)


@dataclass(eq=False)
class Cache:
    """Keys and values of slots in pages in a mixed order. Places that no row sees are poison."""

    heads: tuple[int, int, int]  # Hq, Hkv, D
    num_slots: int = 1
    length: int = 320
    dtype: torch.dtype = torch.float32
    table: Tensor = field(init=False)

    def __post_init__(self) -> None:
        pages = self.length // PAGE
        order = torch.randperm(self.num_slots * pages, generator=torch.Generator().manual_seed(1))
        self.table = order.to(DEVICE, torch.int32).view(self.num_slots, pages)
        _, Hkv, D = self.heads
        self.keys, self.values = (
            randn(self.num_slots, self.length, Hkv, D, dtype=self.dtype, seed=seed) for seed in (2, 3)
        )

    def places(self, slot: int, indices: Sequence[int]) -> Tensor:
        at = torch.tensor(indices, device=DEVICE)
        return self.table[slot].long()[at // PAGE] * PAGE + at % PAGE

    def stored(self, rows: Sequence[Row], window: int) -> tuple[Tensor, Tensor]:
        """k_cache and v_cache."""
        _, Hkv, D = self.heads
        caches = tuple(poison(self.num_slots * self.length, Hkv, D, dtype=self.dtype) for _ in range(2))
        for row in rows:
            if row.slot >= 0:
                seen = row.seen(window)
                for cache, values in zip(caches, (self.keys, self.values), strict=True):
                    cache[self.places(row.slot, seen)] = values[row.slot, seen]
        return caches[0], caches[1]


@dataclass(eq=False)
class Case:
    """Rows in groups over a cache, each with a query."""

    cache: Cache
    rows: Sequence[Row]
    group: int = 1
    window: int = 0
    sinks: Tensor | None = None
    num_spans: int = 5
    tiles: AttentionTiles = TILES
    queries: Tensor | None = None

    def __post_init__(self) -> None:
        Hq, _, D = self.cache.heads
        if self.queries is None:
            self.queries = randn(len(self.rows), Hq, D, dtype=self.cache.dtype, seed=4)

    def alone(self, row: int) -> Tensor:
        """The result of one row by itself."""
        assert self.queries is not None
        return replace(self, rows=[self.rows[row]], group=1, queries=self.queries[row : row + 1].clone()).computed()[0]

    def device_rows(self) -> DeviceRows:
        """The rows as kernels take them; with a path only where one has a tail."""
        rows, levels = self.rows, max(len(row.path) for row in self.rows)
        paths = [[*row.path, *[2**30] * (levels - len(row.path))] for row in rows]
        unused = int32([0] * len(rows))
        return DeviceRows(
            slots=int32([row.slot for row in rows]), positions=unused, write=unused,
            key_start=int32([row.start for row in rows]), context_len=int32([row.context for row in rows]),
            tail_len=int32([len(row.path) for row in rows]), path=int32(paths) if levels else None,
            page_table=self.cache.table, page_size=PAGE, group=self.group,
        )  # fmt: skip

    def computed(self) -> Tensor:
        """What the kernels say, [M, Hq * D]."""
        assert self.queries is not None
        (M, Hq, D), out = self.queries.shape, poison(*self.queries.flatten(1).shape)
        k, v = self.cache.stored(self.rows, self.window)
        scratch = SpanBuffers(poison(M, Hq, self.num_spans, D), poison(M, Hq, self.num_spans, 2))
        run(attention(
            "attention", self.queries, k, v, self.device_rows(), out, scratch,
            scale=D**-0.5, window=self.window, sinks=self.sinks, tiles=self.tiles,
        ))  # fmt: skip
        return out

    def wanted(self) -> Tensor:
        """Attention in float64; NaN for dead rows."""
        assert self.queries is not None
        Hq, Hkv, D = self.cache.heads
        results = poison(len(self.rows), Hq * D, dtype=torch.float64)
        for number, row in enumerate(self.rows):
            if row.slot < 0:
                continue
            k, v = (
                each[row.slot, row.seen(self.window)].double().repeat_interleave(Hq // Hkv, 1)
                for each in (self.cache.keys, self.cache.values)
            )
            scores = torch.einsum("hd,thd->ht", self.queries[number].double(), k) * D**-0.5
            if self.sinks is not None:
                scores = torch.cat((scores, self.sinks.double()[:, None]), 1)
            weights = torch.softmax(scores, 1)[:, : len(k)]
            results[number] = torch.einsum("ht,thd->hd", weights, v).flatten()
        return results
