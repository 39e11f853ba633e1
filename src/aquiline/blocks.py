"""Linear weights in GGUF's packed blocks, as a file holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, eq=False)
class BlockWeight:
    """A weight [N, K] as rows of packed blocks, uint8 [N, bytes of a row]. kind: one of BLOCK_TYPES."""

    kind: str
    blocks: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        inputs, size = block_size(self.kind)
        return self.blocks.shape[0], self.blocks.shape[1] // size * inputs

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks."""
        return self.blocks.numel()

    @property
    def is_finite(self) -> bool:
        """Whether every weight is a finite number."""
        blocks = self.blocks.reshape(-1, block_size(self.kind)[1])
        halves = (blocks[:, at : at + 2].contiguous().view(torch.float16) for at in _HALVES[self.kind])
        return all(bool(torch.isfinite(half).all()) for half in halves)

    def dequantised(self) -> Tensor:
        """The float32 weight [N, K] that the blocks stand for, as gguf-py computes it."""
        values = quants.dequantize(self.blocks.numpy(), GGMLQuantizationType[self.kind])
        return torch.from_numpy(np.require(values, np.float32, ["C", "W"]))


Parts = tuple[BlockWeight, ...]
"""A fused weight: its rows part by part, since parts may be of different types."""


def joined(weights: Sequence[BlockWeight]) -> Parts:
    """Weights one below the other; neighbours of one type become one part."""
    parts: list[BlockWeight] = []
    for weight in weights:
        if parts and parts[-1].kind == weight.kind:
            weight = BlockWeight(weight.kind, torch.cat([parts.pop().blocks, weight.blocks]))
        parts.append(weight)
    return tuple(parts)


def dequantised(parts: Parts) -> Tensor:
    """The float32 weight of all parts."""
    return torch.cat([part.dequantised() for part in parts])


def block_size(kind: str) -> tuple[int, int]:
    """Inputs and bytes of one block."""
    inputs, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return int(inputs), int(size)
