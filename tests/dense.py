"""Attention over whole sequences at once, without a cache: the tests' oracle."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from aquiline.models.model_config import ModelConfig


class DenseAttention:
    """Causal attention over rows [B, T], with each layer's sliding window; implements types.Attention.

    Row t of a sequence sees rows max(0, t - window + 1) .. t. Sequences are padded on the right, which no valid row
    sees. `documents` [B, T] packs several into one: a row then sees its own document only."""

    def __init__(self, config: ModelConfig, documents: Tensor | None = None) -> None:
        self.config, self.documents = config, documents

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """q [B, T, Hq, Dh], k and v [B, T, Hkv, Dh] -> [B, T, Hq * Dh]; allocates, keeps nothing."""
        assert sinks is None
        length, window = q.shape[1], self.config.window(layer)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if self.documents is None and not 0 < window < length:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            mask = self._mask(length, window, q.device)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)

    def _mask(self, length: int, window: int, device: torch.device) -> Tensor:
        """True where a row may look: [T, T], or [B, 1, T, T] with documents."""
        row = torch.arange(length, device=device)
        distance = row[:, None] - row[None, :]
        mask = distance >= 0
        if window:
            mask &= distance < window
        if self.documents is None:
            return mask
        return (mask & (self.documents[:, :, None] == self.documents[:, None, :]))[:, None]
