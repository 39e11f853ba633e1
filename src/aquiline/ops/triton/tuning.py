"""The search for the fastest tiles: which shapes a program has, the launches that are timed, and the way uphill.

The inventory is read off the launches of programs. A key's tiles are timed for all its uses together, each as often as
it occurs, because one choice has to serve every number of rows (tile_table.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from aquiline.ops.triton.attention import AttentionTiles, SpanBuffers, attention, spans_kernel
from aquiline.ops.triton.head_draw import DrawRows, TileBest, VocabularyHead, best_by_tile, head_kernel
from aquiline.ops.triton.launch import Launch
from aquiline.ops.triton.launches import TorchCall
from aquiline.ops.triton.linear import LinearTiles, linear, linear_kernel, partials_shape
from aquiline.ops.triton.rows import DeviceRows
from aquiline.ops.triton.tile_table import TileEntry, TileKey, Tiles

CHOICES: Mapping[str, Mapping[str, Sequence[int]]] = {
    "linear": {
        "block_n": (16, 32, 64, 128), "block_k": (32, 64, 128, 256), "num_splits": (1, 2, 4, 8, 16),
        "num_warps": (2, 4, 8), "num_stages": (2, 3, 4, 5, 6),
    },
    "head": {"block_n": (32, 64, 128, 256), "block_k": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4, 5)},
    "attention": {
        "span": (256, 512, 1024, 2048), "block": (32, 64, 128), "num_warps": (2, 4, 8), "num_stages": (2, 3, 4),
    },
}  # fmt: skip
"""By kind, the values of each knob in ascending order."""

Timer = Callable[[Sequence[Launch]], float]
"""Microseconds that launches take one after the other; infinite where the device cannot run them."""


@dataclass(frozen=True)
class TileUse:
    """A use of a key in the inventory: with M rows, in groups of `group` that see `context` keys, or `window` of them,
    where it is attention. tag: the launch's name; dtype of the rows; count: how often programs launch it."""

    key: TileKey
    M: int
    dtype: str
    tag: str
    group: int = 1
    context: int = 0
    window: int = 0
    count: int = 1

    def as_dict(self) -> dict[str, Any]:
        """As JSON: a linear's or a head's with the M, K and N of its product."""
        fields = {name: value for name, value in asdict(self).items() if name != "key"} | {"key": str(self.key)}
        if self.key.kind == "attention":
            return fields
        return {"M": self.M, "K": self.key.shape[1], "N": self.key.shape[0]} | fields

    @property
    def least_bytes(self) -> int:
        """Bytes of the weight, or of the keys and values that all groups see."""
        size: int = getattr(torch, self.key.dtype).itemsize
        if self.key.kind != "attention":
            return math.prod(self.key.shape) * size
        _, kv_heads, head_dim = self.key.shape
        seen = min(self.context, self.window) if self.window else self.context
        return self.M // self.group * seen * 2 * kv_heads * head_dim * size

    def launches(self, tiles: Tiles, device: torch.device) -> list[Launch]:
        """The launches of this use with given tiles, over new buffers of random values."""
        if isinstance(tiles, AttentionTiles):
            return _attention(self, tiles, device)
        return (_linear if self.key.kind == "linear" else _head)(self, tiles, device)


def inventory(launches: Iterable[Launch | TorchCall]) -> list[TileUse]:
    """Every use of tiles among the launches of programs, most frequent first; equal ones are counted."""
    found = Counter(use for launch in launches if isinstance(launch, Launch) and (use := _use(launch)) is not None)
    return [replace(use, count=count) for use, count in found.most_common()]


def _use(launch: Launch) -> TileUse | None:
    x, weight, constants = launch.arguments[0], launch.arguments[1], launch.constants
    if launch.kernel not in (linear_kernel, head_kernel, spans_kernel) or x is None:
        return None
    assert isinstance(x, Tensor) and isinstance(weight, Tensor), launch.name
    dtype = str(x.dtype).removeprefix("torch.")
    if launch.kernel is spans_kernel:
        shape = constants["HQ"], constants["HKV"], constants["D"]
        num_spans, group = launch.arguments[14:16]
        assert isinstance(num_spans, int) and isinstance(group, int), launch.name
        key = TileKey.of("attention", shape, weight.dtype)
        return TileUse(key, len(x), dtype, launch.name, group, num_spans * constants["SPAN"], constants["WINDOW"])
    kind = "linear" if launch.kernel is linear_kernel else "head"
    N, K = weight.shape
    return TileUse(TileKey.of(kind, (N, K), weight.dtype), len(x), dtype, launch.name)


def search(key: TileKey, uses: Sequence[TileUse], timer: Timer, device: torch.device) -> TileEntry:
    """The fastest tiles of a key for its uses: from the default ones on, one knob after the other takes each of its
    values, and the best is kept, until a round changes nothing."""
    known: dict[Tiles, float] = {}

    def us(tiles: Tiles) -> float:
        if tiles not in known:
            known[tiles] = sum(use.count * timer(use.launches(tiles, device)) for use in uses)
        return known[tiles]

    best = key.default
    default_us, before = us(best), None
    while best != before:
        before = best
        for knob, values in CHOICES[key.kind].items():
            tried = [tiles for value in values if (tiles := _with(best, knob, value)) is not None]
            best = min((best, *tried), key=us)
    return TileEntry(best, us(best), default_us)


def _with(tiles: Tiles, knob: str, value: int) -> Tiles | None:
    """The tiles with another value of a knob; None if there are no such tiles."""
    try:
        return replace(tiles, **{knob: value})  # type: ignore[arg-type]
    except ValueError:
        return None


def device_us(launches: Sequence[Launch]) -> float:
    """A Timer: the median on the current CUDA device, with an L2 cache that holds nothing of theirs."""

    def run() -> None:
        for launch in launches:
            launch.run()

    try:
        return float(1000 * triton.testing.do_bench(run, warmup=5, rep=20, return_mode="median"))
    except triton.runtime.errors.OutOfResources:
        return math.inf


def _floats(dtype: str, device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device).to(getattr(torch, dtype))


def _slots(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


def _linear(use: TileUse, tiles: LinearTiles, device: torch.device) -> list[Launch]:
    N, K = use.key.shape
    x, weight = _floats(use.dtype, device, use.M, K), _floats(use.key.dtype, device, N, K)
    out, partials = torch.empty(use.M, N, device=device), None
    if (shape := partials_shape(use.M, N, K, tiles))[0]:
        partials = torch.empty(shape, device=device)
    return [*linear(use.tag, x, weight, out, _slots(use.M, device), partials=partials, tiles=tiles)]


def _head(use: TileUse, tiles: LinearTiles, device: torch.device) -> list[Launch]:
    V, H = use.key.shape
    slots = _slots(use.M, device)
    rows = DrawRows(slots, slots, torch.ones(1, device=device), _slots(2, device).view(1, 2))
    head, best = VocabularyHead(_floats(use.key.dtype, device, V, H)), TileBest.new(use.M, V, 1, device, tiles)
    return [best_by_tile(_floats(use.dtype, device, use.M, H), head, rows, best, tiles)]


def _attention(use: TileUse, tiles: AttentionTiles, device: torch.device) -> list[Launch]:
    """Every group of rows sees a context of its own, behind which its keys stand like a chain's."""
    (Hq, Hkv, D), M, page_size = use.key.shape, use.M, 16
    num_slots, pages = M // use.group, triton.cdiv(use.context, page_size)
    k_cache, v_cache = (_floats(use.key.dtype, device, num_slots * pages * page_size, Hkv, D) for _ in range(2))
    table = torch.randperm(num_slots * pages, device=device, dtype=torch.int32).view(num_slots, pages)
    slots = torch.arange(M, device=device, dtype=torch.int32) // use.group
    end = use.context - use.group + 1 + torch.arange(M, device=device, dtype=torch.int32) % use.group
    none = _slots(M, device)
    rows = DeviceRows(slots, end, end, none, end, none, None, table, page_size, use.group)
    spans = triton.cdiv(use.context, tiles.span)
    scratch = SpanBuffers(*(torch.empty(M, Hq, spans, last, device=device) for last in (D, 2)))
    q, out = _floats(use.dtype, device, M, Hq, D), _floats(use.dtype, device, M, Hq * D)
    how: dict[str, Any] = {"scale": D**-0.5, "window": use.window, "tiles": tiles}
    return [*attention(use.tag, q, k_cache, v_cache, rows, out, scratch, **how)]
