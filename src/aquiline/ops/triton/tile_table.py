"""Which tiles a device runs a shape with: the table that `aquiline tune` writes, and defaults where it has no entry.

Tiles decide the order of sums. A key therefore names what a model's shape fixes, and never rows, batch or context: a
row has the same bits however many rows run beside it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from aquiline.ops.triton.attention import AttentionTiles
from aquiline.ops.triton.head_draw import HEAD_TILES
from aquiline.ops.triton.linear import LinearTiles
from aquiline.writing import write_whole

CONFIGS = Path(__file__).with_name("configs")
"""A file for each device that was tuned."""

Tiles = LinearTiles | AttentionTiles
KINDS: dict[str, type[LinearTiles] | type[AttentionTiles]] = {
    "linear": LinearTiles, "head": LinearTiles, "attention": AttentionTiles,
}  # fmt: skip
"""What has tiles, and of which kind."""


class TileKey(NamedTuple):
    """What tiles are for. kind: one of KINDS; shape: N and K of a linear, V and H of a head, query heads, KV heads and
    head size of attention; dtype: of weights or keys."""

    kind: str
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> TileKey:
        """The key of a shape in a dtype of torch."""
        return cls(kind, shape, str(dtype).removeprefix("torch."))

    def __str__(self) -> str:
        return f"{self.kind} {'x'.join(map(str, self.shape))} {self.dtype}"

    @property
    def default(self) -> Tiles:
        """Tiles that were chosen by reasoning and not measured."""
        if self.kind == "attention":
            return AttentionTiles.of(self.shape[2])
        return HEAD_TILES if self.kind == "head" else LinearTiles.of(self.shape[0], self.shape[1])


class TileEntry(NamedTuple):
    """The fastest tiles of a key: microseconds of all its uses together, with them and with the default ones."""

    tiles: Tiles
    us: float
    default_us: float


@dataclass(eq=False)
class TileTable:
    """The entries of one device, and how often each key was asked for: hits and misses."""

    device: str
    entries: Mapping[TileKey, TileEntry] = field(default_factory=dict)
    triton: str = ""
    hits: Counter[TileKey] = field(default_factory=Counter)
    misses: Counter[TileKey] = field(default_factory=Counter)

    @classmethod
    def of(cls, device: str, path: Path | None = None) -> TileTable:
        """The table of a device by name, from its file among CONFIGS or from `path`; without a file it is empty.

        Raises ValueError for a file that is not such a table."""
        path = path or file_of(device)
        if not path.exists():
            return cls(device)
        try:
            fields = json.loads(path.read_text())
            found = dict(_entry(record) for record in fields["entries"])
            return cls(fields["device"], found, fields["triton"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error!r}; write the table anew with aquiline tune") from None

    def tiles(self, key: TileKey) -> Tiles:
        """The tiles of a key: its entry's, or the default ones. Counts a hit or a miss."""
        entry = self.entries.get(key)
        (self.misses if entry is None else self.hits)[key] += 1
        return key.default if entry is None else entry.tiles

    def linear(self, N: int, K: int, dtype: torch.dtype) -> LinearTiles:
        """The tiles of a linear's weight [N, K]."""
        return self._linear(TileKey.of("linear", (N, K), dtype))

    def head(self, V: int, H: int, dtype: torch.dtype) -> LinearTiles:
        """The tiles of a head's weight [V, H]."""
        return self._linear(TileKey.of("head", (V, H), dtype))

    def attention(self, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> AttentionTiles:
        """The tiles of attention over keys in a dtype, with a window or without."""
        found = self.tiles(TileKey.of("attention", (heads, kv_heads, head_dim), dtype))
        assert isinstance(found, AttentionTiles), found
        return found

    def _linear(self, key: TileKey) -> LinearTiles:
        found = self.tiles(key)
        assert isinstance(found, LinearTiles), found
        return found

    def describe(self) -> str:
        """One line for the log: how much of what was asked for was tuned."""
        asked = self.hits.total() + self.misses.total()
        line = f"tiles: {self.hits.total()} of {asked} launches are tuned for {self.device}"
        return f"{line}; not measured: {', '.join(map(str, self.misses))}" if self.misses else line

    def write(self, path: Path) -> None:
        """Write the table as `of` reads it."""
        entries = [
            key._asdict() | entry._asdict() | {"tiles": asdict(entry.tiles)} for key, entry in self.entries.items()
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        fields = {"device": self.device, "triton": self.triton, "entries": entries}
        write_whole(path, json.dumps(fields, indent=1) + "\n", "The table is as before")


def file_of(device: str) -> Path:
    """Where the table of a device stands."""
    return CONFIGS / f"{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def _entry(record: dict[str, Any]) -> tuple[TileKey, TileEntry]:
    key = TileKey(record["kind"], tuple(record["shape"]), record["dtype"])
    return key, TileEntry(KINDS[key.kind](**record["tiles"]), record["us"], record["default_us"])
