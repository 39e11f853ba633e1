"""One decoder for all families, which differ by flags of ModelConfig.

This is the readable twin of the native forward, the model that training differentiates and the path that runs where
no native library is. It knows nothing of pages, trees or batches: rows are whatever leading shape the caller gives,
and everything they may look at lies behind `Attention`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from aquiline.backends.torch import reference as ops
from aquiline.backends.torch.ranks import ALONE, Ranks
from aquiline.blocks import Array, Parts, Weight, floats_of
from aquiline.models.files import resolve
from aquiline.models.load import read_target
from aquiline.models.model_config import Experts, ModelConfig, RopeConfig
from aquiline.models.model_weights import AttentionWeights, DenseWeights, LayerWeights, ModelWeights, MoeWeights
from aquiline.models.rope import rotary
from aquiline.models.shares import ACTIVATIONS
from aquiline.ops.torch_arrays import array_of, tensor_of


class Attention(Protocol):
    """What a model calls for attention. The caller implements it and owns the cache; a model knows no cache."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Attend from rotated q [..., Hq, Dh] over everything the rows may see, k and v [..., Hkv, Dh] included.

        sinks [Hq]: a logit per head that joins the softmax's denominator and has no value. Returns [..., Hq * Dh].
        Writes k and v where the rows' keys belong."""
        ...


def parameter(*shape: int) -> nn.Parameter:
    """An uninitialised weight; checkpoints and `init_weights` fill it."""
    return nn.Parameter(torch.empty(*shape))


def optional(exists: bool, *shape: int) -> nn.Parameter | None:
    """A weight that only some models have."""
    return parameter(*shape) if exists else None


def stored(weight: nn.Parameter) -> Parts:
    """A linear's or an embedding's parameter as a weight of the native library; they share memory on a CPU."""
    kind = str(weight.dtype).removeprefix("torch.")
    return (Weight(kind, (weight.shape[0], weight.shape[1]), lambda: array_of(weight)),)


def vector(weight: nn.Parameter | None) -> Array | None:
    """A norm or a bias as an array."""
    return None if weight is None else array_of(weight)


def each_stored(stack: nn.Parameter, count: int) -> Parts:
    """A stack [E * N, K] as the weights of its E experts; they share memory on a CPU."""
    return tuple(part for each in stack.detach().chunk(count) for part in stored(nn.Parameter(each)))


def held(weight: Parts | Array) -> nn.Parameter:
    """A weight as a parameter that is not trained. Packed blocks become float32."""
    values = floats_of(weight) if isinstance(weight, tuple) else weight
    return nn.Parameter(tensor_of(values), requires_grad=False)


@dataclass(frozen=True)
class Rotation:
    """cos and sin of the rows' positions, [..., Dh / 2]."""

    cos: Tensor
    sin: Tensor


class Rope(nn.Module):
    """Computes the rotation of positions [...] by one RoPE of a model."""

    inv_freq: Tensor

    def __init__(self, config: ModelConfig, own: RopeConfig | None = None) -> None:
        super().__init__()
        rope = rotary(own or config.rope, config.head_dim, config.max_positions)
        self.scale = rope.scale
        self.register_buffer("inv_freq", torch.from_numpy(rope.inv_freq), persistent=False)

    def forward(self, positions: Tensor) -> Rotation:
        """Rotation of absolute positions [...]."""
        return Rotation(*ops.rope_cos_sin(positions, self.inv_freq, self.scale))


class DecoderLayer(nn.Module):
    """Attention and an MLP around a residual; `in_features` is 2H for the EAGLE-3 draft, which norms its own input.

    gate_up and down are stacks [E * 2 I, H] and [E * H, I] where there are E experts, their biases [E, 2 I] and
    [E, H]. Of several ranks each has its share of these (models/shares.py); config then counts its heads."""

    def __init__(
        self, config: ModelConfig, index: int, in_features: int | None = None, ranks: Ranks = ALONE
    ) -> None:  # fmt: skip
        super().__init__()
        self.config, self.index, self.ranks = config, index, ranks
        H, Dh, inner = config.hidden_size, config.head_dim, config.intermediate_size
        experts = config.experts
        stack = () if experts is None else (experts.count,)
        has_bias = config.mlp_bias if experts is None else experts.has_bias
        q_width, kv_width = config.num_heads * Dh, config.num_kv_heads * Dh
        self.split = [q_width, kv_width, kv_width]
        self.qkv = parameter(q_width + 2 * kv_width, in_features or H)
        self.qkv_bias = optional(config.qkv_bias, q_width + 2 * kv_width)
        self.o = parameter(H, q_width)
        self.o_bias = optional(config.o_bias, H)
        self.sinks = optional(config.sinks, config.num_heads)
        self.router = optional(experts is not None, *stack, H)
        self.router_bias = optional(experts is not None and has_bias, *stack)
        self.gate_up = parameter(math.prod(stack) * 2 * inner, H)
        self.gate_up_bias = optional(has_bias, *stack, 2 * inner)
        self.down = parameter(math.prod(stack) * H, inner)
        self.down_bias = optional(has_bias, *stack, H)
        self.input_norm = parameter(H)
        self.post_norm = parameter(H)
        self.attention_out_norm = optional(config.output_norms, H)
        self.mlp_out_norm = optional(config.output_norms, H)
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
        if c.query_pre_attn_scalar not in (None, c.head_dim):  # the caller scales by head_dim
            q = q * (c.attention_scale * c.head_dim**0.5)
        attended = attn.attend(self.index, q, k, v, self.sinks)
        attended = self.ranks.inputs(attended, self.o.shape[1], c.head_dim)
        attended = self.ranks.outputs(ops.linear(attended, self.o, self.o_bias), c.hidden_size)
        hidden = residual + self.output(attended, self.attention_out_norm)
        return hidden + self.output(self.mlp(self.norm(hidden, self.post_norm)), self.mlp_out_norm)

    def output(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """What a block adds to the residual [..., H]: its output, normed where the model does."""
        return x if norm is None else self.norm(x, norm)

    def mlp(self, x: Tensor) -> Tensor:
        """The MLP or the mixture of experts of a normed input [..., H]."""
        experts = self.config.experts
        if experts is not None:
            return self.mixture(x, experts)
        inner = self.activate(ops.linear(x, self.gate_up, self.gate_up_bias))
        return self.ranks.outputs(ops.linear(inner, self.down, self.down_bias), self.config.hidden_size)

    def activate(self, gate_up: Tensor) -> Tensor:
        """This model's activation [..., I] of gate and up [..., 2 I], or what down reads of this rank's of both."""
        own = ops.activate(gate_up, self.config.activation, self.config.activation_limit)
        return self.ranks.inputs(own, self.config.intermediate_size, ACTIVATIONS)

    def mixture(self, x: Tensor, config: Experts) -> Tensor:
        """The weighted sum of the experts that the router chooses for each row of x [..., H], in the router's order."""
        assert self.router is not None, "a layer without a router"
        rows = x.flatten(0, -2)
        ids, weights = ops.route(ops.linear(rows, self.router, self.router_bias), config.per_token, config.over_all)
        outputs = x.new_zeros(*ids.shape, len(self.down) // config.count)
        for expert in set(ids.flatten().tolist()):
            row, rank = torch.nonzero(ids == expert, as_tuple=True)
            outputs[row, rank] = self.expert(rows[row], expert, config)
        total = torch.zeros_like(outputs[:, 0])
        for weight, output in zip(weights.unbind(1), outputs.unbind(1), strict=True):
            total = total + weight[:, None] * output
        return self.ranks.outputs(total, x.shape[-1]).view_as(x)

    def expert(self, x: Tensor, index: int, config: Experts) -> Tensor:
        """One expert's MLP of rows x [R, H]."""
        gate_up, down = (stack.chunk(config.count)[index] for stack in (self.gate_up, self.down))
        first, second = (None if bias is None else bias[index] for bias in (self.gate_up_bias, self.down_bias))
        return ops.linear(self.activate(ops.linear(x, gate_up, first)), down, second)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm with this model's epsilon."""
        return ops.rms_norm(x, weight, self.config.rms_norm_eps)

    def weights(self, hidden_norm: nn.Parameter | None = None) -> LayerWeights:
        """This layer as plain values, for a backend that runs the whole forward itself."""
        attention = AttentionWeights(
            stored(self.qkv), stored(self.o), vector(self.qkv_bias), vector(self.o_bias), vector(self.q_norm),
            vector(self.k_norm), vector(self.sinks), self.config.window(self.index),
        )  # fmt: skip
        biases = vector(self.gate_up_bias), vector(self.down_bias)
        mlp: DenseWeights | MoeWeights
        if self.router is None:
            mlp = DenseWeights(stored(self.gate_up), stored(self.down), *biases)
        else:
            gate_up, down = (each_stored(stack, len(self.router)) for stack in (self.gate_up, self.down))
            mlp = MoeWeights(stored(self.router), gate_up, down, vector(self.router_bias), *biases)
        norms = array_of(self.input_norm), array_of(self.post_norm), vector(hidden_norm)
        return LayerWeights(attention, mlp, *norms, vector(self.attention_out_norm), vector(self.mlp_out_norm))

    def hold(self, weights: LayerWeights) -> None:
        """Take the values of weights; the norm of a draft's hidden state is its head's."""
        for name, weight in weights.named():
            if name != "hidden_norm":
                setattr(self, name, held(weight))


@dataclass(frozen=True)
class DecoderOutput:
    """hidden [..., H] before the final norm; features [..., len(capture) * H]."""

    hidden: Tensor
    features: Tensor


class TargetModel(Protocol):
    """What a step calls a target for, wherever and however it is computed. See Decoder."""

    config: ModelConfig
    ranks: Ranks
    embed: Any

    def __call__(self, tokens: Tensor, positions: Tensor, attn: Any, /) -> DecoderOutput:  # noqa: D102
        ...

    def logits(self, hidden: Tensor, is_whole: bool = True) -> Tensor:  # noqa: D102
        ...


class Decoder(nn.Module):
    """Embedding, layers, final norm and head. `capture` names the layers whose outputs are the draft's features."""

    def __init__(self, config: ModelConfig, capture: tuple[int, ...] = (), ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.config, self.capture, self.ranks = config, capture, ranks
        self.embed = parameter(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i, ranks=ranks) for i in range(config.num_layers))
        self.final_norm = parameter(config.hidden_size)
        self.head = self.embed if config.tied_head else parameter(config.vocab_size, config.hidden_size)
        self.rope = Rope(config)
        self.local_rope = None if config.local_rope is None else Rope(config, config.local_rope)

    def forward(self, tokens: Tensor, positions: Tensor, attn: Attention) -> DecoderOutput:
        """tokens and positions [...] -> the residual stream after the last layer, and the captured features."""
        hidden = self.ranks.embed(self.embed, tokens, self.config.vocab_size)
        hidden = hidden.to(self.compute_dtype) * self.config.embed_scale
        rotation = self.rope(positions)
        local = rotation if self.local_rope is None else self.local_rope(positions)
        features = []
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, local if self.config.window(index) else rotation, attn)
            if index in self.capture:
                features.append(hidden)
        return DecoderOutput(hidden, torch.cat(features, -1) if features else hidden[..., :0])

    def logits(self, hidden: Tensor, is_whole: bool = True) -> Tensor:
        """Final norm and head: [..., H] -> float32 [..., V]; of this rank's tokens alone unless is_whole."""
        normed = ops.rms_norm(hidden, self.final_norm, self.config.rms_norm_eps)
        own = ops.linear(normed, self.head).float()
        return self.ranks.gather(own, self.config.vocab_size) if is_whole else own

    @property
    def compute_dtype(self) -> torch.dtype:
        """bfloat16 weights compute in float32 on a CPU (exact, and often faster); in their own dtype on a GPU."""
        return self.embed.dtype if self.embed.is_cuda else torch.float32

    def weights(self) -> ModelWeights:
        """The whole model as plain values, for a backend that runs the forward in one call."""
        layers = tuple(cast(DecoderLayer, layer).weights() for layer in self.layers)
        embed = stored(self.embed)
        head = embed if self.head is self.embed else stored(self.head)
        return ModelWeights(self.config, embed, layers, array_of(self.final_norm), head, self.capture)

    @classmethod
    def of(cls, weights: ModelWeights, ranks: Ranks = ALONE) -> Decoder:
        """The module of a target's weights, which it reads one by one; it is not trained."""
        decoder = cls(weights.config, weights.capture, ranks)
        decoder.embed, decoder.final_norm = held(weights.embed), held(weights.final_norm)
        decoder.head = decoder.embed if weights.head is weights.embed else held(weights.head)
        for layer, own in zip(decoder.layers, weights.layers, strict=True):
            cast(DecoderLayer, layer).hold(own)
        return decoder.eval()


def load_target(path: str | Path, *, dtype: str = "bfloat16", capture: tuple[int, ...] = ()) -> Decoder:
    """A target as a module from a Hugging Face directory or hub id or a GGUF file. Raises as `read_target`."""
    return Decoder.of(read_target(resolve(path), dtype=dtype, capture=capture))
