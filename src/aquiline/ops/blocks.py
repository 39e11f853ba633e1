"""Linear weights in GGUF's packed blocks, as a file holds them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

BLOCK_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL")
"""The types that stay packed; a file's other types are floats."""


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

    def dequantised(self) -> Tensor:
        """The float32 weight [N, K] that the blocks stand for, as gguf-py computes it."""
        values = quants.dequantize(self.blocks.numpy(), GGMLQuantizationType[self.kind])
        return torch.from_numpy(np.require(values, np.float32, ["C", "W"]))


def block_size(kind: str) -> tuple[int, int]:
    """Inputs and bytes of one block."""
    inputs, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return int(inputs), int(size)
