"""Linear weights in GGUF's packed blocks, as a file holds them. They are read when they are asked for, and not kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

BLOCK_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL")
"""The types that stay packed; a file's other types are floats."""

PACKED = "packed"
"""The `dtype` setting for weights as a GGUF file has them."""

_HALVES = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,), "IQ4_NL": (0,),
}  # fmt: skip
"""Where a block's float16 scale is, and its minimum: all that can be NaN or infinite."""


def is_packed(storage: str) -> bool:
    """Whether a storage, as results name it ("q4_1", "q4_1+q8_0"), is a GGUF file's blocks."""
    return storage.partition("+")[0].upper() in BLOCK_TYPES


@dataclass(frozen=True, eq=False)
class BlockWeight:
    """A weight [N, K] as rows of packed blocks. kind: one of BLOCK_TYPES; num_rows: N; row_bytes: of one row's blocks.

    read: gives the blocks. Where they lie in a file it reads them anew at each call. So a model is never twice in
    memory while it is packed."""

    kind: str
    num_rows: int
    row_bytes: int
    read: Callable[[], Tensor]

    @property
    def blocks(self) -> Tensor:
        """The blocks now, uint8 [N, bytes of a row]. Keep them in a variable for as long as they are needed."""
        found = self.read()
        assert found.shape == (self.num_rows, self.row_bytes), (found.shape, self.num_rows, self.row_bytes)
        return found

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        inputs, size = block_size(self.kind)
        return self.num_rows, self.row_bytes // size * inputs

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks."""
        return self.num_rows * self.row_bytes

    def is_finite(self) -> bool:
        """Whether every weight is a finite number; reads the blocks."""
        blocks = self.blocks.reshape(-1, block_size(self.kind)[1])
        halves = (blocks[:, at : at + 2].contiguous().view(torch.float16) for at in _HALVES[self.kind])
        return all(bool(torch.isfinite(half).all()) for half in halves)

    def dequantised(self) -> Tensor:
        """The float32 weight [N, K] that the blocks stand for, as gguf-py computes it."""
        values = quants.dequantize(self.blocks.numpy(), GGMLQuantizationType[self.kind])
        return torch.from_numpy(np.require(values, np.float32, ["C", "W"]))


Parts = tuple[BlockWeight, ...]
"""A fused weight: its rows part by part, since parts may be of different types."""


def in_memory(kind: str, blocks: Tensor) -> BlockWeight:
    """A weight whose blocks, uint8 [N, bytes of a row], are in memory."""
    return BlockWeight(kind, blocks.shape[0], blocks.shape[1], lambda: blocks)


def joined(weights: Sequence[BlockWeight]) -> Parts:
    """Weights one below the other; neighbours of one type become one part."""
    runs = [list(run) for _, run in groupby(weights, key=lambda weight: weight.kind)]
    return tuple(run[0] if len(run) == 1 else _below(run) for run in runs)


def _below(run: list[BlockWeight]) -> BlockWeight:
    """Weights of one type as one."""
    num_rows = sum(weight.num_rows for weight in run)
    return replace(run[0], num_rows=num_rows, read=lambda: torch.cat([weight.blocks for weight in run]))


def dequantised(parts: Parts) -> Tensor:
    """The float32 weight of all parts."""
    return torch.cat([part.dequantised() for part in parts])


def block_size(kind: str) -> tuple[int, int]:
    """Inputs and bytes of one block."""
    inputs, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return int(inputs), int(size)
