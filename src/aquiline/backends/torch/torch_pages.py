"""Keys and values in pages, and attention over them.

Every tensor has one place more than its pages hold: the scratch place, to which rows that only fill a shape write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aquiline.backends.torch import reference as ops
from aquiline.backends.torch.decoder import Attention
from aquiline.backends.torch.slot_state import SlotState
from aquiline.backends.torch.torch_rows import RowBlock
from aquiline.models.model_config import ModelConfig


class TorchPages:
    """Keys and values of one model: k and v [L, places, Hkv, Dh], place = page * page_size + offset. In torch.int8 they
    are codes, and k_scales and v_scales [L, places, Hkv] what these are multiplied by; keys are then stored less
    key_shifts [L, Hkv, Dh], if there are any."""

    def __init__(
        self, config: ModelConfig, state: SlotState, dtype: torch.dtype, key_shifts: Tensor | None = None
    ) -> None:  # fmt: skip
        self.config, self.state, device = config, state, state.device
        shape = config.num_layers, state.scratch + 1, config.num_kv_heads, config.head_dim
        self.in_codes = dtype == torch.int8
        self.key_shifts = key_shifts if self.in_codes else None
        self.k, self.v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        scales = shape[:3] if self.in_codes else (0, 0)
        self.k_scales, self.v_scales = (torch.zeros(scales, device=device) for _ in range(2))

    def attention(self, blocks: Sequence[RowBlock]) -> Attention:
        """Attention of the flat rows of several blocks, one block after the other."""
        return PagedAttention(self, blocks)

    def write(self, layer: int, places: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v [n, Hkv, Dh] at places [n] of a layer, rounded to the dtype."""
        k = k if self.key_shifts is None else k - self.key_shifts[layer]
        for values, stored, scales in ((k, self.k, self.k_scales), (v, self.v, self.v_scales)):
            if self.in_codes:
                values, scales[layer, places] = ops.head_codes(values.float())
            stored[layer, places] = values.to(stored.dtype)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy places source [n] to places target [n] in all layers. All are read before any is written."""
        for kv in (self.k, self.v, self.k_scales, self.v_scales)[: 4 if self.in_codes else 2]:
            kv[:, target] = kv[:, source]


@dataclass(frozen=True)
class DenseBlock:
    """What the rows of a block see, as masks. read [b, T]: the places of the slots' first T KV indices; visible [b, n,
    T]; order [b, n] and key_order [b, T]: how many keys stand before a row, or before a key, on its path; sliding
    windows compare the two."""

    read: Tensor
    visible: Tensor
    order: Tensor
    key_order: Tensor

    @staticmethod
    def of(block: RowBlock, state: SlotState) -> DenseBlock:
        """The masks of a block's rows."""
        index = torch.arange(block.longest, device=block.slots.device)
        last = torch.minimum(block.base, block.order)[..., None]
        visible = (index >= block.first[:, None, None]) & (index <= last)
        b, n, T = visible.shape
        level = torch.arange(1, block.path.shape[2], device=index.device)
        number = block.base[..., None] + level  # of the keys behind the base, and where these stand
        place = torch.where(number <= block.order[..., None], block.base[..., None] + block.path[..., 1:], T)
        visible = torch.cat((visible, visible.new_zeros(b, n, 1)), 2).scatter(2, place, True)[..., :T]
        key_order = torch.arange(T + 1, device=index.device).expand(b, -1)
        key_order = key_order.scatter(1, place.flatten(1), number.flatten(1))[:, :T]
        return DenseBlock(state.places(block.slots, index.expand(b, -1)), visible, block.order, key_order)


class PagedAttention:
    """The Attention protocol for the flat rows of several blocks, one block after the other."""

    def __init__(self, storage: TorchPages, blocks: Sequence[RowBlock]) -> None:
        self.storage, self.config, state = storage, storage.config, storage.state
        self.blocks = [DenseBlock.of(block, state) for block in blocks]
        self.write = torch.cat([state.places(b.slots, b.keys, b.keys >= 0).reshape(-1) for b in blocks])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """q [R, Hq, Dh], k and v [R, Hkv, Dh] -> [R, Hq * Dh]; stores k and v first."""
        self.storage.write(layer, self.write, k, v)
        outputs, first = [], 0
        for block in self.blocks:
            num = block.order.numel()
            outputs.append(self._attend(layer, block, q[first : first + num], sinks))
            first += num
        return torch.cat(outputs)

    def _attend(self, layer: int, block: DenseBlock, q: Tensor, sinks: Tensor | None) -> Tensor:
        """A block's attention. Every head is a matrix product over memory of its own, so that its sums do not depend
        on how many heads this rank has."""
        b, n, _ = block.visible.shape
        heads, Dh, scale = self.config.num_kv_heads, self.config.head_dim, self.config.head_dim**-0.5
        grouped = q.float().view(b, n, heads, -1, Dh).transpose(1, 2).contiguous()  # [b, Hkv, n, G, Dh]
        k, v = (kv[layer, block.read].float().transpose(1, 2).contiguous() for kv in (self.storage.k, self.storage.v))
        visible = block.visible
        if window := self.config.window(layer):
            visible = visible & (block.key_order[:, None] > block.order[..., None] - window)
        visible = visible[:, None, :, None]
        column = None if sinks is None else sinks.float().view(heads, 1, -1, 1).expand(b, heads, n, -1, 1)
        if column is not None and self.storage.key_shifts is not None:  # lowered as every score is
            column = column - (grouped @ self.storage.key_shifts[layer][:, None, :, None]) * scale
        if self.storage.in_codes:
            grouped, own = ops.head_codes(grouped)
            k_scales, v_scales = (
                s[layer, block.read].mT[:, :, None, None] for s in (self.storage.k_scales, self.storage.v_scales)
            )
            scores = (grouped.flatten(2, 3) @ k.mT).view(*own.shape, -1) * ((own * scale)[..., None] * k_scales)
            positions = block.key_order[:, None, None, None]
            probs = ops.coded_softmax(scores, v_scales, positions, visible, column)
        else:
            scores = (grouped.flatten(2, 3) @ k.mT).view(*grouped.shape[:4], -1) * scale
            scores = scores.masked_fill(~visible, float("-inf"))
            if column is not None:  # as a key of their own, which has no value
                scores = torch.cat((scores, column), dim=-1)
            probs = torch.softmax(scores, dim=-1)[..., : k.shape[2]]
        return (probs.flatten(2, 3) @ v).view(grouped.shape).transpose(1, 2).reshape(b * n, -1)
