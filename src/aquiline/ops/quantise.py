"""Linear weights as int8 or int4 codes times scales: how a weight is rounded, and what the rounded weight is.

Symmetric, without zero points; multiplied in float32 (csrc/formats says in which order). Every step is exact or
correctly rounded per element, and no sum is taken, so a checkpoint gives the same codes on every machine.
`backends/torch/rounding.py` is the twin for tensors that are trained.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aquiline.blocks import FLOATS, Array, Parts, all_finite
from aquiline.types import Float32

QUANTISED = ("int8", "int4")

LINEARS = ("qkv", "o", "gate_up", "down", "head", "fc")
"""Names of the weights that int8 and int4 store. A tied head is quantised; the embedding it shares is not."""
GROUP = 32
"""Inputs that share one int4 scale."""

_CHUNK = 1 << 16  # values rounded at once, few enough that the float32 values in between stay in the cache


@dataclass(frozen=True, eq=False)
class QuantisedWeight:
    """A weight [N, K] as int8 codes [N, K] times scales: float32 [N, 1] (int8) or bfloat16 [N, K / GROUP] (int4)."""

    codes: NDArray[np.int8]
    scales: NDArray[Any]

    def dequantised(self) -> Float32:
        """The float32 weight [N, K] that these codes stand for; int8 rounds each product once."""
        n, num_groups = self.scales.shape
        codes = self.codes.reshape(n, num_groups, -1).astype(np.float32)
        return (codes * self.scales.astype(np.float32)[..., None]).reshape(n, -1)


def quantise(name: str, weight: Array, dtype: str) -> QuantisedWeight:
    """Round a weight [N, K] to int8 (8 bits and a float32 scale per output) or int4 (4.5 bits), ties to even.

    int8 takes codes -127 .. 127 and maps the largest magnitude of a row to 127. int4 takes codes -8 .. 7 over groups of
    GROUP inputs and maps the value of largest magnitude to -8, whatever its sign: a ninth less error than +-7. Codes
    are chosen for the scale as stored, so that bfloat16 scales cost what float32 ones would.
    Raises ValueError for an unknown dtype, a width that is no multiple of GROUP in int4, and values that are not
    finite."""
    n, k = weight.shape
    check_width(name, (n, k), dtype)
    if not all_finite(weight):
        raise ValueError(f"{name} holds values that are not finite: dtype={dtype!r} cannot store them; use 'bfloat16'")
    step = max(1, _CHUNK // k)
    codes = np.empty((n, k), np.int8)
    scales = np.empty((n, 1), np.float32) if dtype == "int8" else np.empty((n, k // GROUP), FLOATS["bfloat16"])
    for i in range(0, n, step):
        part = _round(weight[i : i + step].astype(np.float32), dtype)
        codes[i : i + step], scales[i : i + step] = part.codes, part.scales
    return QuantisedWeight(codes, scales)


def check_width(name: str, shape: tuple[int, int], dtype: str) -> None:
    """Raises ValueError for an unknown dtype, and for a weight whose width int4 cannot hold."""
    if dtype not in QUANTISED:
        raise ValueError(f"dtype={dtype!r}: linears are quantised to one of {', '.join(QUANTISED)}")
    if dtype == "int4" and shape[1] % GROUP != 0:
        raise ValueError(
            f"{name} is {list(shape)}: dtype='int4' needs a width that is a multiple of {GROUP}; use 'int8'"
        )


def stored_bytes(shape: tuple[int, int], dtype: str) -> int:
    """Bytes that the codes and scales of a weight of this shape [N, K] take."""
    n, k = shape
    return n * (k + 4) if dtype == "int8" else n * k // 2 + n * k // GROUP * 2


def _round(rows: Float32, dtype: str) -> QuantisedWeight:
    # A column is a group: numpy is fast along rows, and slow where it reduces 32 neighbours.
    groups = np.ascontiguousarray(rows.reshape(-1, rows.shape[1] if dtype == "int8" else GROUP).T)
    low, high = groups.min(0), groups.max(0)
    scales: Array
    if dtype == "int8":
        limits, scales = (-127, 127), np.where(high > -low, high, -low) / np.float32(127)
    else:
        limits = -8, 7
        scales = (np.where(high >= -low, high, low) / np.float32(-8)).astype(FLOATS["bfloat16"])
    # A scale of zero means that all values are zero, or so small that their scale rounds to zero.
    divisors = scales.astype(np.float32)
    divisors[divisors == 0] = np.inf
    groups /= divisors
    codes = np.clip(np.rint(groups, out=groups), *limits, out=groups).astype(np.int8)
    return QuantisedWeight(codes.T.reshape(rows.shape), scales.reshape(len(rows), -1))


def stored_sizes(named: Iterable[tuple[str, Parts | Array]], dtype: str) -> dict[object, int]:
    """Bytes of weights as they are stored, linears quantised if dtype says so; a weight in blocks as it is. By weight:
    one that is given twice is there once, but for a tied head that is quantised beside the embedding."""
    sizes: dict[object, int] = {}
    for name, weight in named:
        if isinstance(weight, np.ndarray):
            sizes[id(weight), None] = weight.nbytes
            continue
        for part in weight:
            own = dtype if dtype in QUANTISED and name in LINEARS and not part.is_blocks else None
            sizes[id(part), own] = part.num_bytes if own is None else stored_bytes(part.shape, own)
    return sizes
