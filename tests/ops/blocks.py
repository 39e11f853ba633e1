"""Random blocks of every type, and what they hold: codes, scales and minima by groups, read apart from the library."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aquiline.blocks import BLOCK_TYPES, Weight, block_size, in_memory

WIDTHS = {kind: block_size(kind)[0] for kind in BLOCK_TYPES}
IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
HALVES = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "IQ4_NL": (0,)}
HALVES |= {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": ()}
"""Where a block's float16 numbers are."""


def random_blocks(kind: str, n: int, k: int, seed: int = 0) -> Weight:
    """Random codes under scales and minima of the size that weights have."""
    rng = np.random.default_rng(seed)
    inputs, size = block_size(kind)
    blocks = rng.integers(0, 256, (n, k // inputs, size), np.uint8)
    for at in HALVES[kind]:
        scale = rng.normal(0, 0.01, (n, k // inputs, 1)).astype(np.float16)
        blocks[..., at : at + 2] = scale.view(np.uint8).reshape(n, -1, 2)
    if kind == "MXFP4":
        blocks[..., 0] = rng.integers(118, 123, blocks.shape[:-1])
    return in_memory(blocks.reshape(n, -1), kind)


@dataclass(frozen=True)
class Groups:
    """codes [n, k], integers; scales and minima float32 [n, k / size] (minima None where there are none)."""

    codes: NDArray[np.int64]
    scales: NDArray[np.float32]
    minima: NDArray[np.float32] | None

    def values(self) -> NDArray[np.float32]:
        """The weights, each step rounded to float32."""
        n, groups = self.scales.shape
        values = self.codes.reshape(n, groups, -1).astype(np.float32) * self.scales[..., None]
        if self.minima is not None:
            values = values + self.minima[..., None]
        return values.reshape(n, -1)


def groups_of(weight: Weight) -> Groups:
    """What the blocks hold, from the layout of ggml-common.h."""
    kind, (_, size) = weight.kind, block_size(weight.kind)
    n = weight.shape[0]
    b = weight.values.reshape(-1, size).astype(np.int64)
    half = [b[:, at] | b[:, at + 1] << 8 for at in HALVES[kind]]
    floats = [h.astype(np.uint16).view(np.float16).astype(np.float32) for h in half]
    read = {"Q4_K": _k4, "Q5_K": _k5, "Q6_K": _k6, "MXFP4": _mxfp4}.get(kind)
    if read is not None:
        codes, scales, minima = read(b, *floats)
    else:
        codes, scales = _plain(kind, b), floats[0][:, None]
        minima = floats[1][:, None] if len(floats) == 2 else None
    return Groups(codes.reshape(n, -1), scales.reshape(n, -1), None if minima is None else minima.reshape(n, -1))


def _nibbles(b: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([b & 15, b >> 4], 1)


def _bits(b: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([b[:, i : i + 1] >> np.arange(8) & 1 for i in range(4)], 1)


def _plain(kind: str, b: NDArray[np.int64]) -> NDArray[np.int64]:
    if kind == "Q8_0":
        return (b[:, 2:] ^ 128) - 128
    if kind == "IQ4_NL":
        return IQ4_NL[_nibbles(b[:, 2:])]
    if kind in ("Q4_0", "Q4_1"):
        return _nibbles(b[:, 2:]) - 8 if kind == "Q4_0" else _nibbles(b[:, 4:])
    start, offset = (2, 16) if kind == "Q5_0" else (4, 0)
    return _nibbles(b[:, start + 4 :]) + 16 * _bits(b[:, start : start + 4]) - offset


def _mxfp4(b):
    magnitudes = np.array([0, 1, 2, 3, 4, 6, 8, 12])
    return (
        np.concatenate([magnitudes, -magnitudes])[_nibbles(b[:, 1:])],
        (2.0 ** (b[:, :1] - 128)).astype(np.float32),
        None,
    )


def _six(b: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    scales = np.concatenate([b[:, 4:8] & 63, b[:, 12:16] & 15 | b[:, 4:8] >> 6 << 4], 1)
    minima = np.concatenate([b[:, 8:12] & 63, b[:, 12:16] >> 4 | b[:, 8:12] >> 6 << 4], 1)
    return scales, minima


def _k4(b, d, dmin):
    scales, minima = _six(b)
    codes = np.concatenate([_nibbles(b[:, 16 + 32 * p : 48 + 32 * p]) for p in range(4)], 1)
    return codes, d[:, None] * scales.astype(np.float32), -(dmin[:, None] * minima.astype(np.float32))


def _k5(b, d, dmin):
    scales, minima = _six(b)
    low = np.concatenate([_nibbles(b[:, 48 + 32 * p : 80 + 32 * p]) for p in range(4)], 1)
    high = np.concatenate([b[:, 16:48] >> g & 1 for g in range(8)], 1)
    return low + 16 * high, d[:, None] * scales.astype(np.float32), -(dmin[:, None] * minima.astype(np.float32))


def _k6(b, d):
    parts = []
    for half in (0, 1):
        low, high = b[:, half * 64 : half * 64 + 64], b[:, 128 + half * 32 : 160 + half * 32]
        nibbles = [low[:, :32] & 15, low[:, 32:] & 15, low[:, :32] >> 4, low[:, 32:] >> 4]
        parts += [nibble + 16 * (high >> 2 * i & 3) for i, nibble in enumerate(nibbles)]
    scales = (b[:, 192:208] ^ 128) - 128
    return np.concatenate(parts, 1) - 32, d[:, None] * scales.astype(np.float32), None
