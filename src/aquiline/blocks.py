"""Weights of linears and embeddings as they are stored: floats, or GGUF's packed blocks. They are read when they are
asked for, and not kept: so a model is never twice in memory while it is packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
"""An array of floats of one of FLOATS, or of bytes."""

FLOATS: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16),
}  # fmt: skip
"""The dtypes of floats that weights are stored in, by name."""


class StoredType(NamedTuple):
    """A type of GGUF: its number in a file, and the inputs and bytes of a block."""

    number: int
    inputs: int
    num_bytes: int


GGUF_FLOATS = {"F32": StoredType(0, 1, 4), "F16": StoredType(1, 1, 2), "BF16": StoredType(30, 1, 2)}
GGUF_BLOCKS = {
    "Q8_0": StoredType(8, 32, 34), "Q4_0": StoredType(2, 32, 18), "Q4_1": StoredType(3, 32, 20),
    "Q5_0": StoredType(6, 32, 22), "Q5_1": StoredType(7, 32, 24), "Q4_K": StoredType(12, 256, 144),
    "Q5_K": StoredType(13, 256, 176), "Q6_K": StoredType(14, 256, 210), "IQ4_NL": StoredType(20, 32, 18),
    "MXFP4": StoredType(39, 32, 17),
}  # fmt: skip
"""The types that are read. gguf-py knows them too, but its import takes a tenth of a second. Source: gguf-py 0.19,
constants.py."""

BLOCK_TYPES = tuple(GGUF_BLOCKS)
"""The types that stay packed; a file's other types are floats."""

PACKED = "packed"
"""The `dtype` setting for weights as a GGUF file has them."""

_HALVES = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,), "IQ4_NL": (0,),
}  # fmt: skip
"""Where a block's float16 scale is, and its minimum: all that can be NaN or infinite."""

MXFP4 = "MXFP4"
"""The one type that Hugging Face checkpoints have too: their experts' blocks stay packed whatever the `dtype`."""

MXFP4_LARGEST = 252
"""The largest scale of a block of MXFP4: a block's values are 2^(scale - 128) times up to 12. 253 overflows a float32,
and 255 is NaN."""

_EXPONENTS = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}
"""The bits that are all set in a NaN and in an infinity, and in no other float."""

_LOW = np.uint64(0x0F0F0F0F0F0F0F0F)  # the lower nibbles of eight bytes
_CHUNK = 1 << 16  # values looked at together, few enough to stay in the cache


def is_packed(storage: str) -> bool:
    """Whether a storage, as results name it ("q4_1", "q4_1+q8_0"), is a GGUF file's blocks."""
    return storage.partition("+")[0].upper() in BLOCK_TYPES


@dataclass(frozen=True, eq=False)
class Weight:
    """A weight [N, K]. kind: one of FLOATS or of BLOCK_TYPES. shape: N and K.

    read: gives the floats [N, K], or the blocks, uint8 [N, bytes of a row]. What lies in a file is read anew at each
    call. read_rows: the same of some rows, without reading the others; None where all must be read."""

    kind: str
    shape: tuple[int, int]
    read: Callable[[], Array]
    read_rows: Callable[[slice], Array] | None = None

    @property
    def is_blocks(self) -> bool:
        """Whether the weight is in packed blocks."""
        return self.kind in BLOCK_TYPES

    @property
    def row_bytes(self) -> int:
        """Bytes of one row as it is stored."""
        inputs, size = block_size(self.kind)
        return self.shape[1] // inputs * size

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight as it is stored."""
        return self.shape[0] * self.row_bytes

    @property
    def values(self) -> Array:
        """The floats [N, K], or the blocks uint8 [N, bytes of a row], now. Keep them in a variable for as long as they
        are needed."""
        found = self.read()
        expected = (self.shape[0], self.row_bytes) if self.is_blocks else self.shape
        assert found.shape == expected and found.flags.c_contiguous, (found.shape, found.flags, expected)
        return found

    def own(self, parts: Sequence[slice]) -> Weight:
        """The weight that has these rows alone."""

        def read() -> Array:
            rows_of = self.read_rows or self.values.__getitem__
            return np.concatenate([rows_of(rows) for rows in parts])

        return Weight(self.kind, (sum(rows.stop - rows.start for rows in parts), self.shape[1]), read)

    def of_inputs(self, own: slice) -> Weight:
        """The weight that has these inputs alone, whole blocks of them; all inputs are read."""
        inputs, size = block_size(self.kind)
        assert own.start % inputs == own.stop % inputs == 0, (self.kind, own)
        at = slice(own.start // inputs, own.stop // inputs)
        columns = slice(at.start * size, at.stop * size) if self.is_blocks else at
        return Weight(self.kind, (self.shape[0], own.stop - own.start), lambda: self.values[:, columns].copy())

    def dequantised(self) -> Array:
        """The float32 weight [N, K] that is meant; for blocks, as gguf-py computes it."""
        if not self.is_blocks:
            return self.values.astype(np.float32, copy=False)
        from gguf import GGMLQuantizationType, quants

        return np.require(quants.dequantize(self.values, GGMLQuantizationType[self.kind]), np.float32, ["C", "W"])


Parts = tuple[Weight, ...]
"""A fused weight: its rows part by part, since parts may be of different types."""


def in_memory(values: Array, kind: str | None = None) -> Weight:
    """A weight whose floats [N, K], or whose blocks of type `kind`, uint8 [N, bytes of a row], are in memory."""
    if kind is None:
        return Weight(values.dtype.name, (values.shape[0], values.shape[1]), lambda: values)
    inputs, size = block_size(kind)
    return Weight(kind, (values.shape[0], values.shape[1] // size * inputs), lambda: values)


def joined(weights: Sequence[Weight]) -> Parts:
    """Weights one below the other; neighbours of one type become one part."""
    runs = [list(run) for _, run in groupby(weights, key=lambda weight: weight.kind)]
    return tuple(run[0] if len(run) == 1 else _below(run) for run in runs)


def _below(run: list[Weight]) -> Weight:
    """Weights of one type as one."""
    num_rows = sum(weight.shape[0] for weight in run)
    return Weight(run[0].kind, (num_rows, run[0].shape[1]), lambda: np.concatenate([weight.values for weight in run]))


def floats_of(parts: Parts) -> Array:
    """The weight of all parts [N, K] as floats: those of one part as they are stored, blocks in float32."""
    if len(parts) == 1:
        return parts[0].dequantised() if parts[0].is_blocks else parts[0].values
    return np.concatenate([part.dequantised() for part in parts])


def block_size(kind: str) -> tuple[int, int]:
    """Inputs and bytes of one block; of one float."""
    if kind in FLOATS:
        return 1, FLOATS[kind].itemsize
    return GGUF_BLOCKS[kind][1:]


def all_finite(values: Array) -> bool:
    """Whether every float of a contiguous array of one of FLOATS is finite. Reads the array once and copies nothing."""
    return _have_no(_EXPONENTS[values.dtype.name], values.reshape(-1).view(np.dtype(f"u{values.itemsize}")))


def _have_no(exponent: int, bits: NDArray[np.unsignedinteger[Any]]) -> bool:
    """Whether no number [n] has all bits of `exponent`."""
    mask = bits.dtype.type(exponent)
    return not any(((bits[i : i + _CHUNK] & mask) == mask).any() for i in range(0, len(bits), _CHUNK))


def blocks_are_finite(kind: str, blocks: Array) -> bool:
    """Whether the scales of blocks of a type, uint8 [N, bytes of a row], are finite."""
    rows = blocks.reshape(-1, block_size(kind)[1])
    if kind == MXFP4:
        return not (rows[:, 0] > MXFP4_LARGEST).any()
    halves = rows.view(np.uint16)
    return all(_have_no(_EXPONENTS["float16"], halves[:, at // 2]) for at in _HALVES[kind])


def mxfp4_blocks(nibbles: Array, scales: Array) -> Array:
    """Blocks uint8 [N, 17 K / 32] as GGUF has them, from Hugging Face's nibbles uint8 [N, K / 32, 16] and scales uint8
    [N, K / 32]. Byte i of 16 has inputs 2i (low) and 2i + 1 there, and inputs i and i + 16 here.

    Source: transformers 5.23, integrations/mxfp4.py; gguf-py 0.19, quants.py."""
    num_rows, num_blocks = scales.shape
    blocks = np.empty((num_rows, num_blocks, GGUF_BLOCKS[MXFP4].num_bytes), np.uint8)
    eights = nibbles.view(np.uint64)  # eight bytes at once: inputs 0 to 15, and 16 to 31
    first, second = eights[..., :1], eights[..., 1:]
    blocks[..., 0] = scales
    blocks[..., 1::2] = ((first & _LOW) | ((second & _LOW) << 4)).view(np.uint8)
    blocks[..., 2::2] = (((first >> 4) & _LOW) | (second & ~_LOW)).view(np.uint8)
    return blocks.reshape(num_rows, -1)
