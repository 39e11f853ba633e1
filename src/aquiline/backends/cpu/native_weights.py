"""Weights in the native library's layout: their memory, one packed linear, and which dtypes can be packed."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from aquiline.backends.cpu import native
from aquiline.backends.cpu.native import AqLinear, Library
from aquiline.blocks import Array, Parts, Weight
from aquiline.errors import NativeError
from aquiline.ops.quantise import GROUP, quantise
from aquiline.types import KEY_GROUP


def library() -> Library:
    """The native library. Raises NativeError with the reason where there is none."""
    loaded = native.load()
    if loaded is None:
        raise NativeError(f"the native CPU library is missing: {native.missing_reason()}")
    return loaded


PAIRED = {"bfloat16": native.BFLOAT16_DOT, "bfloat16_tiles": native.BFLOAT16_TILES}
"""The library's codes of bfloat16 weights in the arithmetics that multiply pairs of rounded inputs."""


def has_bf16_dot() -> bool:
    """Whether linears can run in bfloat16 arithmetic: AVX512_BF16, in this CPU and in the compiler of this build."""
    return library().has_bf16_dot()


def fastest_bf16() -> str:
    """The arithmetic in which bfloat16 weights are multiplied fastest: bfloat16_tiles by AMX, bfloat16 on AMD's CPUs
    that have it (Intel's have three quarters of the rate of float32), else float32."""
    found = library().fastest_bf16()
    return next((arithmetic for arithmetic, code in PAIRED.items() if code == found), "float32")


def paired_arithmetics() -> list[str]:
    """Those of PAIRED that this CPU has instructions for, the fastest last."""
    return ["bfloat16"] * has_bf16_dot() + ["bfloat16_tiles"] * (fastest_bf16() == "bfloat16_tiles")


_CODES = {"float32": native.FLOAT32, "bfloat16": native.BFLOAT16, "float16": native.FLOAT16}


def float_code(name: str, dtype: str) -> int:
    """The library's code of the dtype of floats in a weight or an embedding. Raises ValueError for any other dtype."""
    if dtype not in _CODES:
        raise ValueError(f"{name} is {dtype}: the native path stores float32, bfloat16 or float16")
    return _CODES[dtype]


def kv_code(name: str, keys: Array) -> int:
    """The library's code of the dtype of keys and values. Raises ValueError for a dtype it does not store them in."""
    codes = {"float32": native.FLOAT32, "bfloat16": native.BFLOAT16, "uint8": native.INT8}
    if keys.dtype.name not in codes:
        raise ValueError(f"{name} is {keys.dtype}: the native path stores keys and values in float32, bfloat16 or int8")
    return codes[keys.dtype.name]


def check_paired(name: str, weight: Weight, arithmetic: str, dtype: str | None) -> None:
    """Raises ValueError or NativeError unless a linear can run in `arithmetic`, which is neither float32 nor int8."""
    if arithmetic not in PAIRED:
        raise ValueError(f"arithmetic={arithmetic!r}: must be 'float32', 'bfloat16', 'bfloat16_tiles' or 'int8'")
    if weight.kind != "bfloat16" or dtype is not None:
        found = dtype or weight.kind
        raise ValueError(f"arithmetic={arithmetic!r}: {name} is {found}, it needs weights stored in bfloat16")
    if arithmetic == "bfloat16" and not has_bf16_dot():
        raise NativeError("arithmetic='bfloat16': needs a CPU with AVX512_BF16 and a build for it; use 'float32'")


class Arena:
    """Memory for packed weights, in chunks so large that numpy asks for huge pages: reading a model through 4 KB pages
    takes about 5 % longer, for address translation. Memory that was never written is not resident."""

    CHUNK = 32 << 20

    def __init__(self) -> None:
        self.tables: WeakKeyDictionary[Weight, AqLinear] = WeakKeyDictionary()  # what is packed of blocks
        self.embeddings: WeakKeyDictionary[Weight, Array] = WeakKeyDictionary()  # of floats, as they were read
        self._chunks: list[NDArray[np.uint8]] = []
        self._next = self._end = 0
        self._shared: Arena | None = None

    def beside(self) -> Arena:
        """Another arena, freed by itself, for weights that share embeddings and tables with those in this one."""
        arena = Arena()
        arena.tables, arena.embeddings, arena._shared = self.tables, self.embeddings, self
        return arena

    def take(self, num_bytes: int) -> int:
        """The address of that many bytes, on a cache line, for as long as the arena lives."""
        if self._next + num_bytes > self._end:
            self._chunks.append(np.empty(max(num_bytes, self.CHUNK) + 64, np.uint8))
            start = self._chunks[-1].ctypes.data
            self._next, self._end = -(-start // 64) * 64, start + len(self._chunks[-1])
        address = self._next
        self._next += -(-num_bytes // 64) * 64
        return address


class PackedLinear:
    """A linear weight in the library's layout, with the arrays that its struct points to.

    Stored as it is given, in blocks or floats, or quantised: dtype "int8" or "int4". Arithmetic "int8" multiplies
    codes; a weight of floats is multiplied in float32 beside it, and so is one whose width is no multiple of GROUP."""

    def __init__(
        self,
        name: str,
        weight: Weight,
        bias: Array | None,
        arithmetic: str,
        arena: Arena,
        dtype: str | None = None,
    ) -> None:
        n, k = weight.shape
        if k % KEY_GROUP != 0:
            raise ValueError(f"{name} is [{n}, {k}]: the native path needs a width that is a multiple of {KEY_GROUP}")
        source = _source(name, weight, arithmetic, dtype)
        self._arena = arena
        self.num_bytes = library().packed_bytes(n, k, source.code)
        address = arena.take(self.num_bytes)
        source.pack(n, k, address)
        self._bias = None if bias is None else np.ascontiguousarray(bias, np.float32)
        self.struct = AqLinear(address, None if self._bias is None else self._bias.ctypes.data, n, k, source.code)


class PackedExperts:
    """One linear of E experts, packed one by one at equal distances. struct: expert 0's, its bias that of all experts;
    num_bytes: the distance.

    Blocks are not rounded to `dtype`, and are multiplied as codes beside bfloat16 arithmetic."""

    def __init__(
        self, name: str, weights: Parts, biases: Array | None, arithmetic: str, arena: Arena, dtype: str | None
    ) -> None:
        n, k = weights[0].shape
        self._arena = arena
        if weights[0].is_blocks:
            arithmetic, dtype = "float32" if arithmetic == "float32" else "int8", None
        for index, weight in enumerate(weights):
            source = _source(name, weight, arithmetic, dtype)
            if index == 0:
                self.num_bytes = -(-library().packed_bytes(n, k, source.code) // 64) * 64
                first = arena.take(self.num_bytes * len(weights))
            source.pack(n, k, first + index * self.num_bytes)
        self._biases = None if biases is None else np.ascontiguousarray(biases, np.float32)
        self.struct = AqLinear(first, None if self._biases is None else self._biases.ctypes.data, n, k, source.code)


class _PackInput(NamedTuple):
    """What aq_pack takes."""

    values: Array
    scales: Array | None
    code: int

    def pack(self, n: int, k: int, address: int) -> None:
        """Pack a weight [n, k] at an address."""
        scales_at = None if self.scales is None else self.scales.ctypes.data
        library().pack(self.values.ctypes.data, scales_at, n, k, self.code, address)


def block_code(name: str, weight: Weight, arithmetic: str, dtype: str | None = None) -> int:
    """The library's code of a weight in blocks. Codes of one type that differ by arithmetic stand for one layout."""
    if dtype is not None:
        raise ValueError(f"dtype={dtype!r}: {name} is in {weight.kind} blocks, which are not rounded again")
    if arithmetic in PAIRED:
        raise ValueError(f"arithmetic={arithmetic!r}: {name} is in {weight.kind} blocks; use 'int8' or 'float32'")
    return native.FORMATS.index(weight.kind.lower() + ("_dot" if arithmetic == "int8" else ""))


def _source(name: str, weight: Weight, arithmetic: str, dtype: str | None) -> _PackInput:
    if weight.is_blocks:
        return _PackInput(weight.values, None, block_code(name, weight, arithmetic, dtype))
    on_codes = "_dot" if arithmetic == "int8" and weight.shape[1] % GROUP == 0 else ""
    code = float_code(name, weight.kind)
    if dtype is not None and arithmetic in ("float32", "int8"):
        quantised = quantise(name, weight.values, dtype)
        return _PackInput(quantised.codes, quantised.scales, native.FORMATS.index(dtype + on_codes))
    if arithmetic not in ("float32", "int8"):
        check_paired(name, weight, arithmetic, dtype)
        code = PAIRED[arithmetic]
    return _PackInput(weight.values, None, code)


def interleave(gate_up: Weight) -> Weight:
    """A weight [gate; up] whose rows are reordered to alternate in runs of KEY_GROUP, so that a panel of outputs holds
    matching pairs. Blocks lie by rows, so theirs move as bytes."""
    return replace(gate_up, read=lambda: alternating(gate_up.values))


def alternating(rows: Array) -> Array:
    """[2 I, width], two halves, to runs of KEY_GROUP rows of each in turn."""
    n, width = rows.shape
    return rows.reshape(2, n // (2 * KEY_GROUP), KEY_GROUP, width).swapaxes(0, 1).reshape(n, width)
