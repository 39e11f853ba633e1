"""Pages of keys and values as the native library lays them out."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from aquiline.blocks import FLOATS, Array
from aquiline.models.model_config import ModelConfig
from aquiline.types import KEY_GROUP, KVGroup


def new_group(config: ModelConfig, num_pages: int, page_size: int, kv_dtype: str) -> KVGroup:
    """Uninitialised storage for a model's keys and values: memory is touched only when a page is first written."""
    L, Hkv, Dh, dtype = config.num_layers, config.num_kv_heads, config.head_dim, FLOATS[kv_dtype]
    return KVGroup(
        k=_uninitialised((num_pages, L, Hkv, page_size // KEY_GROUP, Dh, KEY_GROUP), dtype),
        v=_uninitialised((num_pages, L, Hkv, page_size, Dh), dtype),
    )


def _uninitialised(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Memory that begins on a cache line. numpy asks for huge pages: keys of a batch lie apart, and each of them would
    otherwise be looked up through page tables that no cache holds."""
    num_bytes = prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + num_bytes].view(dtype).reshape(shape)
