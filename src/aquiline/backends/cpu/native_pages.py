"""Pages of keys and values as the native library lays them out."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from aquiline.blocks import FLOATS, Array
from aquiline.models.model_config import ModelConfig
from aquiline.types import CODE_GROUP, KEY_GROUP, KVGroup

KV_DTYPES = ("float32", "bfloat16", "int8")
"""How keys and values may be stored. int8: codes of eight bits, with a float32 scale for each key and each value."""


def new_group(config: ModelConfig, num_pages: int, page_size: int, kv_dtype: str) -> KVGroup:
    """Uninitialised storage for a model's keys and values: memory is touched only when a page is first written."""
    return new_pages(num_pages, config.num_layers, config.num_kv_heads, config.head_dim, page_size, kv_dtype)


def new_pages(num_pages: int, L: int, Hkv: int, Dh: int, page_size: int, kv_dtype: str) -> KVGroup:
    """The same for that many layers, heads and channels."""
    if kv_dtype == "int8":
        codes, scales = (num_pages, L, Hkv, page_size // KEY_GROUP), (num_pages, L, Hkv, page_size)
        return KVGroup(
            _uninitialised((*codes, Dh // CODE_GROUP, KEY_GROUP, CODE_GROUP), np.dtype(np.uint8)),
            _uninitialised((num_pages, L, Hkv, page_size // CODE_GROUP, Dh, CODE_GROUP), np.dtype(np.int8)),
            *(_uninitialised(scales, np.dtype(np.float32)) for _ in range(2)),
        )
    dtype = FLOATS[kv_dtype]
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
