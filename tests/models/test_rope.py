"""Inverse frequencies and scale against transformers' own, at real models' settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from aquiline.backends.torch import reference as ops
from aquiline.models.model_config import RopeConfig
from aquiline.models.rope import rotary

LLAMA31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
QWEN_YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
GPT_OSS = {
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": 0.0,
}
CASES = [
    ("default", 10000.0, {}, 128),
    ("default", 1000000.0, {}, 64),
    ("linear", 10000.0, {"factor": 4.0}, 128),
    ("llama3", 500000.0, LLAMA31, 128),
    ("llama3", 500000.0, LLAMA31 | {"factor": 32.0}, 64),
    ("yarn", 1000000.0, QWEN_YARN, 128),
    ("yarn", 150000.0, GPT_OSS, 64),
    ("yarn", 10000.0, QWEN_YARN | {"factor": 0.5}, 64),
    (
        "yarn",
        10000.0,
        {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.7},
        64,
    ),
]


def transformers_rotary(
    kind: str, theta: float, parameters: dict[str, Any], head_dim: int
) -> tuple[torch.Tensor, float]:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    fields = {"rope_type": kind, "rope_theta": theta, **parameters}
    config = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, rope_parameters=fields,
                         max_position_embeddings=131072)  # fmt: skip
    module = LlamaRotaryEmbedding(config)
    return module.inv_freq, module.attention_scaling


@pytest.mark.parametrize(("kind", "theta", "parameters", "head_dim"), CASES)
def test_equals_transformers(kind: str, theta: float, parameters: dict[str, float], head_dim: int) -> None:
    ours = rotary(RopeConfig(theta, kind, parameters), head_dim, 131072)
    freqs, scale = transformers_rotary(kind, theta, parameters, head_dim)
    assert ours.inv_freq.dtype == np.float32
    assert np.allclose(ours.inv_freq, freqs.numpy(), rtol=5e-7, atol=0)
    assert ours.scale == pytest.approx(scale, rel=1e-12)


def test_unknown_scheme() -> None:
    with pytest.raises(ValueError, match="dynamic"):
        rotary(RopeConfig(kind="dynamic"), 64, 1024)


@pytest.mark.parametrize(("kind", "theta", "parameters", "head_dim"), CASES[1:6:4])
def test_mean_over_positions(kind: str, theta: float, parameters: dict[str, Any], head_dim: int) -> None:
    """The series against vectors that are rotated one position after the other."""
    rope = rotary(RopeConfig(theta, kind, parameters), head_dim, 131072)
    heads = np.random.default_rng(0).normal(size=(3, head_dim)).astype(np.float32)
    cos, sin = ops.rope_cos_sin(torch.arange(8192), torch.from_numpy(rope.inv_freq), rope.scale)
    rotated = ops.rope(torch.from_numpy(heads).expand(8192, 3, head_dim), cos, sin)
    np.testing.assert_allclose(rope.mean_of(heads, 8192), rotated.double().mean(0), rtol=0, atol=1e-4)
