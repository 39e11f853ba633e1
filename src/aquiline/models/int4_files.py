"""Drafts whose matrices lie in their files as int4 codes and scales, about a quarter of their bytes in bfloat16.

A draft that serves in int4 gives the same codes from such a file as from its original: the value of largest magnitude
in a group is -8 times the scale, which bfloat16 holds, and all others stay nearest to their own code.
`setup.py` writes the chat model's draft so into wheels.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from aquiline.blocks import FLOATS, Array
from aquiline.models.files import Tensors
from aquiline.ops.quantise import GROUP, QuantisedWeight, quantise

CODES, SCALES = ".int4", ".scales"
"""Ends of the names of the two tensors of a matrix [N, K]: codes plus 8, uint8 [N, K / 2], the first of two in the low
half; scales bfloat16 [N, K / 32]."""


class Int4Tensors(Tensors):
    """A directory's tensors; a matrix that is stored in int4 reads as bfloat16 under its own name."""

    @property
    def names(self) -> list[str]:
        """Every tensor's name, sorted."""
        return sorted(name.removesuffix(CODES) for name in super().names if not name.endswith(SCALES))

    def __contains__(self, name: str) -> bool:
        return super().__contains__(name) or self._is_coded(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""
        if not self._is_coded(name):
            return super().shape(name)
        *rows, half = super().shape(name + CODES)
        return *rows, 2 * half

    def dtype(self, name: str) -> str:
        """A tensor's dtype, without reading it."""
        return "BF16" if self._is_coded(name) else super().dtype(name)

    def get(self, name: str, index: int | slice | None = None) -> Array:
        """Read one tensor, or an index or a slice of its first axis alone; it is not kept."""
        if not self._is_coded(name):
            return super().get(name, index)
        pairs, scales = super().get(name + CODES), super().get(name + SCALES)
        codes = np.stack([pairs & 15, pairs >> 4], -1).reshape(len(pairs), -1).astype(np.int8) - np.int8(8)
        values = QuantisedWeight(codes, scales).dequantised().astype(FLOATS["bfloat16"])
        return values if index is None else values[index]

    def _is_coded(self, name: str) -> bool:
        return super().__contains__(name + CODES) and super().__contains__(name + SCALES)


def write_int4(draft: Path, file: Path) -> None:
    """Write the weights of a draft's directory into a file, every matrix that int4 can hold as codes and scales."""
    tensors, found = Tensors(draft), dict[str, Array]()
    for name in tensors.names:
        values = tensors.get(name)
        if values.ndim != 2 or values.shape[1] % GROUP:
            found[name] = values
            continue
        coded = quantise(name, values, "int4")
        shifted = (coded.codes + np.int8(8)).view(np.uint8)
        found |= {name + CODES: shifted[:, ::2] | shifted[:, 1::2] << 4, name + SCALES: coded.scales}
    save_file({name: np.ascontiguousarray(values) for name, values in found.items()}, file, tensors.metadata)
