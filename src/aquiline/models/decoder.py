"""One decoder for llama, mistral, qwen2 and qwen3; the families differ by flags of ModelConfig.

This is the readable twin of the native forward, the model that training differentiates and the path that runs where
no native library is. It knows nothing of pages, trees or batches: rows are whatever leading shape the caller gives,
and everything they may look at lies behind `Attention`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

import torch
from torch import Tensor, nn

from aquiline.blocks import Parts
from aquiline.models.model_config import ModelConfig
from aquiline.models.rope import rotary
from aquiline.ops import reference as ops
from aquiline.types import Attention, AttentionWeights, DenseWeights, LayerWeights, ModelWeights

NOTHING: Mapping[str, Parts] = MappingProxyType({})


def parameter(*shape: int) -> nn.Parameter:
    """An uninitialised weight; checkpoints and `init_weights` fill it."""
    return nn.Parameter(torch.empty(*shape))


def optional(exists: bool, *shape: int) -> nn.Parameter | None:
    """A weight that only some models have."""
    return parameter(*shape) if exists else None


def _data(weight: nn.Parameter | None) -> Tensor | None:
    return None if weight is None else weight.data


@dataclass(frozen=True)
class Rotation:
    """cos and sin of the rows' positions, [..., Dh / 2]."""

    cos: Tensor
    sin: Tensor


class Rope(nn.Module):
    """Computes the rotation of positions [...] for one model."""

    inv_freq: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        rope = rotary(config.rope, config.head_dim, config.max_positions)
        self.scale = rope.scale
        self.register_buffer("inv_freq", rope.inv_freq, persistent=False)

    def forward(self, positions: Tensor) -> Rotation:
        """Rotation of absolute positions [...]."""
        return Rotation(*ops.rope_cos_sin(positions, self.inv_freq, self.scale))


class DecoderLayer(nn.Module):
    """Attention and SwiGLU around a residual; `in_features` is 2H for the EAGLE-3 draft, which norms its own input."""

    def __init__(self, config: ModelConfig, index: int, in_features: int | None = None) -> None:
        super().__init__()
        self.config, self.index = config, index
        H, Dh = config.hidden_size, config.head_dim
        q_width, kv_width = config.num_heads * Dh, config.num_kv_heads * Dh
        self.split = [q_width, kv_width, kv_width]
        self.qkv = parameter(q_width + 2 * kv_width, in_features or H)
        self.qkv_bias = optional(config.qkv_bias, q_width + 2 * kv_width)
        self.o = parameter(H, q_width)
        self.o_bias = optional(config.o_bias, H)
        self.sinks = optional(config.sinks, config.num_heads)
        self.gate_up = parameter(2 * config.intermediate_size, H)
        self.gate_up_bias = optional(config.mlp_bias, 2 * config.intermediate_size)
        self.down = parameter(H, config.intermediate_size)
        self.down_bias = optional(config.mlp_bias, H)
        self.input_norm = parameter(H)
        self.post_norm = parameter(H)
        self.q_norm = optional(config.qk_norm, Dh)
        self.k_norm = optional(config.qk_norm, Dh)

    def forward(self, hidden: Tensor, rotation: Rotation, attn: Attention) -> Tensor:
        """hidden [..., H] -> [..., H]."""
        return self.mix(self.norm(hidden, self.input_norm), hidden, rotation, attn)

    def mix(self, x: Tensor, residual: Tensor, rotation: Rotation, attn: Attention) -> Tensor:
        """The layer proper: normed input x [..., In] and residual [..., H] -> [..., H]."""
        c = self.config
        parts = torch.split(ops.linear(x, self.qkv, self.qkv_bias), self.split, dim=-1)
        q, k, v = (torch.unflatten(t, -1, (-1, c.head_dim)) for t in parts)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.norm(q, self.q_norm), self.norm(k, self.k_norm)
        q, k = ops.rope(q, rotation.cos, rotation.sin), ops.rope(k, rotation.cos, rotation.sin)
        hidden = residual + ops.linear(attn.attend(self.index, q, k, v, self.sinks), self.o, self.o_bias)
        gate_up = ops.linear(self.norm(hidden, self.post_norm), self.gate_up, self.gate_up_bias)
        return hidden + ops.linear(ops.swiglu(gate_up), self.down, self.down_bias)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm with this model's epsilon."""
        return ops.rms_norm(x, weight, self.config.rms_norm_eps)

    def weights(self, hidden_norm: Tensor | None = None, packed: Mapping[str, Parts] = NOTHING) -> LayerWeights:
        """This layer as plain tensors, for a backend that runs the whole forward itself; `packed`: the weights that
        stand for parameters of these names."""
        qkv, o, gate_up, down = (packed.get(n, getattr(self, n).data) for n in ("qkv", "o", "gate_up", "down"))
        attention = AttentionWeights(
            qkv, o, _data(self.qkv_bias), _data(self.o_bias), _data(self.q_norm),
            _data(self.k_norm), _data(self.sinks), self.config.window(self.index),
        )  # fmt: skip
        mlp = DenseWeights(gate_up, down, _data(self.gate_up_bias), _data(self.down_bias))
        return LayerWeights(attention, mlp, self.input_norm.data, self.post_norm.data, hidden_norm)


@dataclass(frozen=True)
class DecoderOutput:
    """hidden [..., H] before the final norm; features [..., len(capture) * H]."""

    hidden: Tensor
    features: Tensor


class Decoder(nn.Module):
    """Embedding, layers, final norm and head. `capture` names the layers whose outputs are the draft's features.

    packed: by parameter name, weights in packed blocks. Such a parameter is on the meta device and has no values:
    only a backend that multiplies blocks can run the decoder then."""

    def __init__(self, config: ModelConfig, capture: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.packed: dict[str, Parts] = {}
        self.config, self.capture = config, capture
        self.embed = parameter(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.final_norm = parameter(config.hidden_size)
        self.head = self.embed if config.tied_head else parameter(config.vocab_size, config.hidden_size)
        self.rope = Rope(config)

    def forward(self, tokens: Tensor, positions: Tensor, attn: Attention) -> DecoderOutput:
        """tokens and positions [...] -> the residual stream after the last layer, and the captured features."""
        hidden = self.embed[tokens].to(self.compute_dtype)
        rotation = self.rope(positions)
        features = []
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, rotation, attn)
            if index in self.capture:
                features.append(hidden)
        return DecoderOutput(hidden, torch.cat(features, -1) if features else hidden[..., :0])

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: [..., H] -> float32 [..., V]."""
        normed = ops.rms_norm(hidden, self.final_norm, self.config.rms_norm_eps)
        return ops.linear(normed, self.head).float()

    @property
    def compute_dtype(self) -> torch.dtype:
        """bfloat16 weights compute in float32 on a CPU (exact, and often faster); in their own dtype on a GPU."""
        return self.embed.dtype if self.embed.is_cuda else torch.float32

    def weights(self) -> ModelWeights:
        """The whole model as plain tensors, for a backend that runs the forward in one call."""
        layers = tuple(
            cast(DecoderLayer, layer).weights(packed=self.packed_below(f"layers.{i}."))
            for i, layer in enumerate(self.layers)
        )
        return model_weights(
            self.config, self.rope, self.packed.get("embed", self.embed.data), layers, self.final_norm.data,
            self.packed.get("head", self.head.data), capture=self.capture,
        )  # fmt: skip

    def packed_below(self, prefix: str) -> dict[str, Parts]:
        """The packed weights whose parameters' names begin with `prefix`, without it."""
        return {name.removeprefix(prefix): parts for name, parts in self.packed.items() if name.startswith(prefix)}

    def keep_packed(self, name: str, parts: Parts) -> None:
        """Let packed blocks stand for a parameter, which loses its values."""
        nothing = nn.Parameter(torch.empty_like(self.get_parameter(name), device="meta"), requires_grad=False)
        for own in ("embed", "head") if name == "embed" and self.config.tied_head else (name,):
            owner, _, attribute = own.rpartition(".")
            setattr(self.get_submodule(owner), attribute, nothing)
            self.packed[own] = parts


def model_weights(
    config: ModelConfig,
    rope: Rope,
    embed: Tensor | Parts,
    layers: tuple[LayerWeights, ...],
    final_norm: Tensor,
    head: Tensor | Parts,
    **flags: tuple[int, ...] | bool,
) -> ModelWeights:
    """ModelWeights of one ModelConfig; flags are capture, is_draft and norm_before_residual."""
    return ModelWeights(
        hidden_size=config.hidden_size, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim, intermediate_size=config.intermediate_size, rms_norm_eps=config.rms_norm_eps,
        inv_freq=rope.inv_freq, rope_scale=rope.scale, embed=embed, layers=layers, final_norm=final_norm, head=head,
        **flags,  # type: ignore[arg-type]
    )  # fmt: skip
