"""Keys and values in pages, and attention over them.

Every tensor has one place more than its pages hold: the scratch place, to which rows that only fill a shape write.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aquiline.models.model_config import ModelConfig


class TorchPages:
    """Keys and values of one model: k and v [L, places, Hkv, Dh], place = page * page_size + offset."""

    def __init__(self, config: ModelConfig, num_places: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = config.num_layers, num_places + 1, config.num_kv_heads, config.head_dim
        self.k, self.v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy places source [n] to places target [n] in all layers. All are read before any is written."""
        for kv in (self.k, self.v):
            kv[:, target] = kv[:, source]


@dataclass(frozen=True)
class RowBlock:
    """n rows of each of b slots, which attend to the first T KV indices of their slot.

    tokens and positions [b, n]; write [b, n]: the places of the rows' own keys; read [b, T]: the places of the slot's
    KV indices; visible [b, n, T]: which keys a row sees. order [b, n] and key_order [b, T]: how many keys stand before
    a row, or before a key, on its path; sliding windows compare the two."""

    tokens: Tensor
    positions: Tensor
    write: Tensor
    read: Tensor
    visible: Tensor
    order: Tensor
    key_order: Tensor


class PagedAttention:
    """The Attention protocol for the flat rows of several blocks, one block after the other."""

    def __init__(self, storage: TorchPages, config: ModelConfig, blocks: list[RowBlock]) -> None:
        self.storage, self.config, self.blocks = storage, config, blocks
        self.write = torch.cat([block.write.reshape(-1) for block in blocks])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """q [R, Hq, Dh], k and v [R, Hkv, Dh] -> [R, Hq * Dh]; stores k and v first."""
        keys, values = self.storage.k[layer], self.storage.v[layer]
        keys[self.write], values[self.write] = k.to(keys.dtype), v.to(values.dtype)
        outputs, first = [], 0
        for block in self.blocks:
            num = block.tokens.numel()
            outputs.append(self._attend(layer, block, q[first : first + num], keys, values, sinks))
            first += num
        return torch.cat(outputs)

    def _attend(
        self, layer: int, block: RowBlock, q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None
    ) -> Tensor:
        b, n, _ = block.visible.shape
        heads = self.config.num_kv_heads
        grouped = q.float().view(b, n, heads, -1, self.config.head_dim)
        k, v = keys[block.read].float(), values[block.read].float()  # [b, T, Hkv, Dh]
        scores = torch.einsum("bnhgd,bthd->bnhgt", grouped, k) * self.config.head_dim**-0.5
        visible = block.visible
        if window := self.config.window(layer):
            visible = visible & (block.key_order[:, None] > block.order[..., None] - window)
        scores = scores.masked_fill(~visible[:, :, None, None], float("-inf"))
        if sinks is not None:  # as a key of their own, which has no value
            column = sinks.float().view(heads, -1, 1).expand(b, n, heads, -1, 1)
            scores = torch.cat((scores, column), dim=-1)
        probs = torch.softmax(scores, dim=-1)[..., : k.shape[1]]
        return torch.einsum("bnhgt,bthd->bnhgd", probs, v).reshape(b * n, -1)
