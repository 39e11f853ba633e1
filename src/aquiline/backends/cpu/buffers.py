"""Numpy buffers as structs and pointers of the native library. Checks dtype and layout, copies nothing."""

from __future__ import annotations

from ctypes import addressof, c_char
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aquiline.backends.cpu.native import INT8, AqKV, AqRows
from aquiline.backends.cpu.native_weights import kv_code
from aquiline.types import CODE_GROUP, KEY_GROUP, Float32, KVGroup, Rows

ROWS_ARRAYS = ("tokens", "positions", "slots", "write", "key_start", "context_len", "tail", "tail_len", "page_table")


def address(name: str, array: NDArray[Any], dtype: Any) -> int:
    """Where an array begins. Raises ValueError if it is not C-contiguous of that dtype."""
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(f"{name} is {array.dtype} {array.shape}: must be C-contiguous {np.dtype(dtype)}")
    return pointer(array)


def pointer(array: NDArray[Any]) -> int:
    """Where an array begins, unchecked."""
    try:
        # Takes a fifth of the time of numpy's own attributes.
        return addressof(c_char.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # read-only, or empty
        return int(array.__array_interface__["data"][0])


def describe_kv(kv: KVGroup) -> AqKV:
    """A KVGroup as the library sees it. Raises ValueError for arrays that do not belong together."""
    dtype = kv_code("KVGroup.k", kv.k)
    in_codes = dtype == INT8
    num_pages, num_layers, heads, page_size, dim = kv.v.shape[:5]
    fours: tuple[int, ...] = ()
    if in_codes:
        page_size, dim, fours = page_size * CODE_GROUP, dim // CODE_GROUP * CODE_GROUP, (CODE_GROUP,)
    expected = (num_pages, num_layers, heads, page_size // KEY_GROUP, dim // (CODE_GROUP if in_codes else 1), KEY_GROUP)
    if tuple(kv.k.shape) != expected + fours or kv.v.shape[5:] != fours:
        raise ValueError(f"KVGroup.k is {tuple(kv.k.shape)}: must be {expected + fours} beside v {tuple(kv.v.shape)}")
    if not (kv.k.flags.c_contiguous and kv.v.flags.c_contiguous and (in_codes or kv.k.dtype == kv.v.dtype)):
        raise ValueError("KVGroup.k and v must be contiguous and of one dtype")
    scales: list[int | None] = [None, None]
    if in_codes:
        places = (num_pages, num_layers, heads, page_size)
        scales = [_scales(f"KVGroup.{name}", getattr(kv, name), places) for name in ("k_scales", "v_scales")]
    return AqKV(pointer(kv.k), pointer(kv.v), *scales, num_layers, num_pages, page_size, heads, dim, dtype)


def _scales(name: str, scales: Float32 | None, shape: tuple[int, ...]) -> int:
    if scales is None or scales.shape != shape:
        raise ValueError(f"{name} is {None if scales is None else scales.shape}: must be {shape} beside keys in int8")
    return address(name, scales, np.float32)


def describe_rows(rows: Rows) -> AqRows:
    """Rows as the library sees them; num_rows is to be kept up to date."""
    addresses = (address(f"Rows.{name}", getattr(rows, name), np.int32) for name in ROWS_ARRAYS)
    num_slots, stride = rows.page_table.shape
    return AqRows(*addresses, num_rows=rows.num, tail_stride=rows.max_tail, table_stride=stride, num_slots=num_slots)
