"""Inverse frequencies of the rotary embedding, for every scaling the supported families use.

Computed with Python floats so that the bits do not depend on a vector library, then rounded to float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from aquiline.models.model_config import RopeConfig
from aquiline.types import Float32


@dataclass(frozen=True)
class Rotary:
    """inv_freq float32 [Dh / 2] and the factor on cos and sin."""

    inv_freq: Float32
    scale: float

    def mean_of(self, heads: Float32, num_positions: int) -> Float32:
        """The mean of vectors [n, Dh] rotated to the first positions, summed as a geometric series."""
        cos, sin = [], []
        for freq in map(float, self.inv_freq):
            length = math.sin(num_positions * freq / 2) / (num_positions * math.sin(freq / 2)) * self.scale
            cos.append(length * math.cos((num_positions - 1) * freq / 2))
            sin.append(length * math.sin((num_positions - 1) * freq / 2))
        first, second = np.split(heads.astype(np.float64), 2, axis=1)
        return np.hstack((first * cos - second * sin, second * cos + first * sin)).astype(np.float32)


def rotary(config: RopeConfig, head_dim: int, max_positions: int) -> Rotary:
    """Inverse frequencies for a RopeConfig. Source: transformers 5.23 modeling_rope_utils, the named schemes.

    Raises ValueError for a scheme that is not supported."""
    base = [1.0 / _f32(config.theta ** (2 * i / head_dim)) for i in range(head_dim // 2)]
    schemes = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn, "factors": _factors}
    if config.kind not in schemes:
        raise ValueError(f"rope_type={config.kind!r}: supported are {', '.join(schemes)}")
    freqs, scale = schemes[config.kind](base, config, head_dim, max_positions)
    return Rotary(np.array(freqs, np.float32), scale)


def _f32(x: float) -> float:
    return float(np.float32(x))


def _default(base: list[float], config: RopeConfig, head_dim: int, max_positions: int) -> tuple[list[float], float]:
    return base, 1.0


def _linear(base: list[float], config: RopeConfig, head_dim: int, max_positions: int) -> tuple[list[float], float]:
    return [f / config.parameters["factor"] for f in base], 1.0


def _factors(base: list[float], config: RopeConfig, head_dim: int, max_positions: int) -> tuple[list[float], float]:
    return [f / factor for f, factor in zip(base, config.factors, strict=True)], 1.0


def _llama3(base: list[float], config: RopeConfig, head_dim: int, max_positions: int) -> tuple[list[float], float]:
    p = config.parameters
    factor, low, high = p["factor"], p["low_freq_factor"], p["high_freq_factor"]
    original = p["original_max_position_embeddings"]

    def scaled(freq: float) -> float:
        wavelength = 2 * math.pi / freq
        if wavelength < original / high:
            return freq
        if wavelength > original / low:
            return freq / factor
        smooth = (original / wavelength - low) / (high - low)
        return (1 - smooth) * freq / factor + smooth * freq

    return [scaled(f) for f in base], 1.0


def _yarn(base: list[float], config: RopeConfig, head_dim: int, max_positions: int) -> tuple[list[float], float]:
    p = config.parameters
    original = p.get("original_max_position_embeddings", max_positions)
    factor = p.get("factor") or max_positions / original
    beta_fast, beta_slow = p.get("beta_fast", 32.0), p.get("beta_slow", 1.0)

    def mscale(multiplier: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0

    scale = p.get("attention_factor")
    if scale is None:
        if p.get("mscale") and p.get("mscale_all_dim"):
            scale = mscale(p["mscale"]) / mscale(p["mscale_all_dim"])
        else:
            scale = mscale(1.0)

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension(beta_fast), dimension(beta_slow)
    if p.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    freqs = []
    for i, freq in enumerate(base):
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        freqs.append(freq / factor * ramp + freq * (1 - ramp))
    return freqs, scale
