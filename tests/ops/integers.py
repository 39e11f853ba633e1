"""The third arithmetic in numpy, rule by rule: what every native path must give, to the bit."""

from __future__ import annotations

import numpy as np
from blocks import Groups
from numpy.typing import NDArray

F = np.float32


def fma(a: NDArray[F], b: NDArray[F], c: NDArray[F]) -> NDArray[F]:
    """a * b + c, rounded once. The float64 sum is rounded to odd first, so that the second rounding is the only one."""
    product, addend = np.float64(a) * np.float64(b), np.float64(c) + np.zeros_like(np.float64(b))
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    toward = np.where(error > 0, np.inf, -np.inf)
    odd = total.view(np.int64) & 1
    return np.where((error != 0) & (odd == 0), np.nextafter(total, toward), total).astype(F)


def rounded(x: NDArray[F]) -> tuple[NDArray[np.int64], NDArray[F]]:
    """Codes [R, K] and scales [R, K / 32] of inputs."""
    blocks = x.reshape(len(x), -1, 32)
    amax = np.abs(blocks).max(-1, keepdims=True)
    odd, zero = ~np.isfinite(blocks).all(-1, keepdims=True), amax < 2.0**-120
    with np.errstate(all="ignore"):
        codes = np.rint(blocks * (F(127) / amax))
        codes = np.where(odd | zero, 0, codes).astype(np.int64)
        scales = np.where(odd, F(np.nan), np.where(zero, F(0), amax / F(127)))[..., 0]
    return codes.reshape(x.shape), scales.astype(F)


def linear(x: NDArray[F], weight: Groups) -> NDArray[F]:
    """x [R, K] times blocks [N, K]."""
    (n, num_groups), k = weight.scales.shape, x.shape[1]
    codes, scales = rounded(x)
    size = k // num_groups
    y = np.zeros((len(x), n), F)
    for g in range(num_groups):
        part = slice(g * size, (g + 1) * size)
        block = part.start // 32
        sums = codes[:, part] @ weight.codes[:, part].T
        y = fma(sums.astype(F), scales[:, block, None] * weight.scales[None, :, g], y)
        if weight.minima is not None:
            total = codes[:, part].sum(1).astype(F)
            y = fma(np.broadcast_to(weight.minima[None, :, g], y.shape), (scales[:, block] * total)[:, None], y)
    return y
