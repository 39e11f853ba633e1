"""Pages of keys and values as the native library lays them out."""

from __future__ import annotations

import torch

from aquiline.kv.pool import KVGeometry
from aquiline.kv.pool import new_group as _new_group
from aquiline.models.config import ModelConfig
from aquiline.types import KVGroup


def new_group(config: ModelConfig, num_pages: int, page_size: int, kv_dtype: str) -> KVGroup:
    """Uninitialised storage for a model's keys and values: memory is touched only when a page is first written."""
    geometry = KVGeometry(config.num_layers, config.num_kv_heads, config.head_dim)
    return _new_group(geometry, num_pages, page_size, getattr(torch, kv_dtype))
