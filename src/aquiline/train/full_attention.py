"""The training-time test's attention over all keys at once, three ways: readable, torch's own, and FlexAttention.

The rows of pass k see T keys of step 0 and N of each step 1 .. k, one after the other, under one mask. `attention.py`
computes the same without the mask and without the scores of invisible keys. The functions here are its oracle, and GPUs
have kernels for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor, "StepKeys"], Tensor]


@dataclass(frozen=True)
class StepKeys:
    """Which keys the rows of pass `step` see: document int [B, T]; rows int64 [N], their positions in step 0.

    Of step 0, a row sees the keys of its own document up to its own position; of later steps, its own keys only. A
    window counts back from the row's present position, `step` positions further on; 0 is no window."""

    document: Tensor
    rows: Tensor
    step: int
    window: int

    @property
    def num_keys(self) -> int:
        """T + step * N."""
        return self.document.shape[1] + self.step * len(self.rows)

    def sees(self, b: Tensor, row: Tensor, key: Tensor) -> Tensor:
        """Whether rows see keys: bool, for batch entries b, rows (numbers within the pass) and keys whose shapes
        broadcast."""
        T, N = self.document.shape[1], len(self.rows)
        place, first = self.rows[row], key.clamp_max(T - 1)
        seen = (first <= place) & (self.document[b, first] == self.document[b, place])
        if self.window:
            seen = seen & (first > place + self.step - self.window)
        return torch.where(key < T, seen, (key - T) % N == row)

    def mask(self) -> Tensor:
        """bool [B, N, T + step * N]."""
        device = self.document.device
        b = torch.arange(len(self.document), device=device)[:, None, None]
        row = torch.arange(len(self.rows), device=device)[:, None]
        return self.sees(b, row, torch.arange(self.num_keys, device=device))


def full_attention(kind: str, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], seen: StepKeys) -> Tensor:
    """q [B, N, Hq, Dh] over keys[0] [B, T, Hkv, Dh] and keys[1:] [B, N, Hkv, Dh] -> [B, N, Hq * Dh].

    kind: eager, sdpa or flex. Computes in bfloat16 under autocast, else in q's dtype."""
    device = q.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else q.dtype
    k, v = (torch.cat(list(parts), 1).to(dtype).transpose(1, 2) for parts in (keys, values))
    with torch.autocast(device, enabled=False):
        out = KINDS[kind](q.to(dtype).transpose(1, 2), k, v, seen)
    return out.transpose(1, 2).flatten(2)


def _eager(q: Tensor, k: Tensor, v: Tensor, seen: StepKeys) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen.mask()[:, None], -torch.inf)
    return torch.softmax(scores, -1) @ v


def _sdpa(q: Tensor, k: Tensor, v: Tensor, seen: StepKeys) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen.mask()[:, None], enable_gqa=True)


def _flex(q: Tensor, k: Tensor, v: Tensor, seen: StepKeys) -> Tensor:
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(b: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return seen.sees(b, row, key)

    blocks = create_block_mask(visible, len(q), None, q.shape[2], k.shape[2], device=str(q.device))
    out: Tensor = _flex_kernel(q.device.type)(q, k, v, block_mask=blocks, enable_gqa=True)
    return out


@lru_cache
def _flex_kernel(device: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if device == "cuda" else flex_attention


KINDS: dict[str, Attend] = {"eager": _eager, "sdpa": _sdpa, "flex": _flex}


def check_attention(kind: str, device: str) -> None:
    """Raises ValueError for a kind of attention that cannot train on this device."""
    if kind == "flex" and torch.device(device).type == "cpu":
        raise ValueError("attention='flex': torch has no backward pass for it on a CPU; take fused, sdpa or eager")
