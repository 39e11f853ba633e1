"""Gumbel noise inside kernels: the noise of backends/torch/reference.py, computed in float32.

The twin computes the same uniform numbers in float64. Both agree within a few roundings of a float32. The noise
depends on seed, position and token id alone, so a row has the same noise in every batch and in every tree.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def lowbias32(x):
    """Mix the bits of uint32 numbers. Twin: `lowbias32`."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def noise_words(seed_low, seed_high, position):
    """The two words that key the noise of the token at a position, from the words of a seed; all int32."""
    low, high = seed_low.to(tl.uint32, bitcast=True), seed_high.to(tl.uint32, bitcast=True)
    first = lowbias32(lowbias32(low ^ 0x243F6A88) ^ high)
    second = lowbias32(lowbias32(first ^ position.to(tl.uint32, bitcast=True)) ^ 0x85A308D3)
    return first, second


@triton.jit
def gumbel(ids, first, second):
    """Gumbel noise of token ids, int32; ids and the words are broadcast. Twin: `gumbel`.

    The exponential -log(u) of a uniform u above one half is -log1p(-(1 - u)). The series of the inverse hyperbolic
    tangent gives it to a float32's last bit: its argument is at most 1/3."""
    bits = lowbias32(lowbias32(ids.to(tl.uint32, bitcast=True) * 0x9E3779B9 + first) ^ second)
    scale: tl.constexpr = 1.0 / 4294967296.0
    low = -tl.log((bits.to(tl.float32) + 0.5) * scale)
    rest = ((0 - bits).to(tl.float32) - 0.5) * scale  # 1 - u
    ratio = rest / (2.0 - rest)
    square = ratio * ratio
    series = 1.0 / 15.0 + square * (1.0 / 17.0)
    series = 1.0 / 11.0 + square * (1.0 / 13.0 + square * series)
    series = 1.0 / 7.0 + square * (1.0 / 9.0 + square * series)
    series = 1.0 / 3.0 + square * (1.0 / 5.0 + square * series)
    high = 2.0 * (ratio + ratio * square * series)
    return -tl.log(tl.where(bits < 0x80000000, low, high))
