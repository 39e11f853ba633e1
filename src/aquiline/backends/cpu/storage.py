"""Pages of keys and values as the native library lays them out."""

from __future__ import annotations

import torch

from aquiline.models.config import ModelConfig
from aquiline.types import KEY_GROUP, KVGroup


def new_group(config: ModelConfig, num_pages: int, page_size: int, kv_dtype: str) -> KVGroup:
    """Uninitialised storage for a model's keys and values: memory is touched only when a page is first written."""
    L, Hkv, Dh, dtype = config.num_layers, config.num_kv_heads, config.head_dim, getattr(torch, kv_dtype)
    return KVGroup(
        k=torch.empty(L, num_pages, Hkv, page_size // KEY_GROUP, Dh, KEY_GROUP, dtype=dtype),
        v=torch.empty(L, num_pages, Hkv, page_size, Dh, dtype=dtype),
    )
