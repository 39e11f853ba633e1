"""Paged storage seen through the Attention seam, in plain torch: the path without a native library.

Reads each slot's context once per forward and layer and each row's own tail; a result may depend on how many rows
run together, which is why this path does not promise bit-exact trees.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from aquiline.ops import reference
from aquiline.types import Int32, KVGroup, Rows


class PagedAttention:
    """Attention of the flat rows of one forward over a KVGroup; one instance serves all layers of a model."""

    def __init__(self, group: KVGroup, rows: Rows, head_dim: int, windows: tuple[int, ...]) -> None:
        self.group, self.rows, self.windows = group, rows, windows
        self.scale = head_dim**-0.5

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """q [R, Hq, Dh], k and v [R, Hkv, Dh] -> [R, Hq * Dh]; stores k and v at the rows' write indices."""
        rows = self.rows
        written = np.flatnonzero(rows.write[: rows.num] >= 0)
        reference.write_kv(
            self.group, layer, *self._places(rows.slots[written], rows.write[written]),
            k[torch.from_numpy(written)], v[torch.from_numpy(written)],
        )  # fmt: skip
        return torch.stack([self._row(layer, r, q[r], sinks) for r in range(rows.num)])

    def _row(self, layer: int, r: int, q: Tensor, sinks: Tensor | None) -> Tensor:
        rows = self.rows
        tail = rows.tail[r, : rows.tail_len[r]]
        end = int(rows.context_len[r]) + len(tail)
        window = self.windows[layer] if self.windows else 0
        start = max(int(rows.key_start[r]), end - window if window else 0)
        indices = np.concatenate((np.arange(int(rows.context_len[r])), tail))[start:].astype(np.int32)
        slots = np.full(len(indices), rows.slots[r], np.int32)
        k, v = reference.read_kv(self.group, layer, *self._places(slots, indices))
        return reference.attention(q, k, v, self.scale, sinks)

    def _places(self, slots: Int32, indices: Int32) -> tuple[Tensor, Tensor]:
        size = self.group.page_size
        pages = self.rows.page_table[slots, indices // size]
        return torch.from_numpy(pages).long(), torch.from_numpy(indices % size).long()


def move_kv(group: KVGroup, page_table: Int32, slots: Int32, src: Int32, dst: Int32) -> None:
    """Copy keys and values of every layer from KV index src[i] to dst[i] of slot slots[i], in order."""
    size = group.page_size
    for slot, a, b in zip(slots.tolist(), src.tolist(), dst.tolist(), strict=True):
        pa, pb = int(page_table[slot, a // size]), int(page_table[slot, b // size])
        ga, gb = a % size // 16, b % size // 16
        group.k[:, pb, :, gb, :, b % 16] = group.k[:, pa, :, ga, :, a % 16].clone()
        group.v[:, pb, :, b % size] = group.v[:, pa, :, a % size].clone()
