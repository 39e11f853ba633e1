"""The weights of a target and of a draft as plain values: what checkpoints become and what backends take.

Linears and embeddings are `Weight`s, read one at a time while a backend packs them; norms and biases are arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from aquiline.blocks import Array, Parts
from aquiline.models.model_config import DraftConfig, ModelConfig
from aquiline.models.rope import Rotary, rotary
from aquiline.types import Float32, Int64

SHIFT_POSITIONS = 8192
"""Positions over which a key's bias is averaged: longer texts still find slow channels near their mean."""


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """The attention of one layer: qkv [(Hq + 2 Hkv) Dh, In] and o [H, Hq Dh], with biases of their rows.

    In is H for a target, 2H for a draft. q_norm and k_norm [Dh] norm every head (qwen3); sinks [Hq]: a logit per head
    that joins the softmax's denominator and has no value."""

    qkv: Parts
    o: Parts
    qkv_bias: Array | None = None
    o_bias: Array | None = None
    q_norm: Array | None = None
    k_norm: Array | None = None
    sinks: Array | None = None
    window: int = 0  # 0: every earlier position is visible


@dataclass(frozen=True, eq=False)
class DenseWeights:
    """The gated MLP of one layer: gate_up [2 I, H], the gate's rows first, and down [H, I], with row biases."""

    gate_up: Parts
    down: Parts
    gate_up_bias: Array | None = None
    down_bias: Array | None = None


@dataclass(frozen=True, eq=False)
class MoeWeights:
    """A mixture of E experts: router [E, H]; gate_up, E parts [2 I, H], the gate's rows first; down, E parts [H, I].

    Biases, all or none: router_bias [E], gate_up_bias [E, 2 I], down_bias [E, H]."""

    router: Parts
    gate_up: Parts
    down: Parts
    router_bias: Array | None = None
    gate_up_bias: Array | None = None
    down_bias: Array | None = None


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One decoder layer: its blocks and the norms [H] before them. A draft's layer also norms the hidden state.

    attention_out_norm and mlp_out_norm [H] norm what the blocks add to the residual stream (gemma3)."""

    attention: AttentionWeights
    mlp: DenseWeights | MoeWeights
    input_norm: Array
    post_norm: Array
    hidden_norm: Array | None = None
    attention_out_norm: Array | None = None
    mlp_out_norm: Array | None = None

    def named(self) -> Iterator[tuple[str, Parts | Array]]:
        """Every weight with its name."""
        for block in (self.attention, self.mlp, self):
            for field in fields(block):
                value = getattr(block, field.name)
                if isinstance(value, tuple | np.ndarray):
                    yield field.name, value


@dataclass(frozen=True, eq=False)
class ModelWeights:
    """All that a forward needs. embed and head are [V, H] (a draft's head: [Vd, H]); a tied head is the embedding."""

    config: ModelConfig
    embed: Parts
    layers: tuple[LayerWeights, ...]
    final_norm: Array
    head: Parts
    capture: tuple[int, ...] = ()  # layers whose output is a feature, ascending
    is_draft: bool = False
    norm_before_residual: bool = False  # draft only: the residual is the normed input

    @property
    def rotary(self) -> Rotary:
        """The inverse frequencies of the rotary embedding, and the factor on cos and sin."""
        return rotary(self.config.rope, self.config.head_dim, self.config.max_positions)

    @property
    def local_rotary(self) -> Rotary | None:
        """The same for layers with a window, where they have a rotation of their own."""
        local = self.config.local_rope
        return None if local is None else rotary(local, self.config.head_dim, self.config.max_positions)

    def key_shift(self, attention: AttentionWeights) -> Float32 | None:
        """What the rotated keys [Hkv, Dh] of a layer have in common by their bias: its mean over the first positions.

        A vector that all keys of a head are stored without lowers a query's scores alike, so that the softmax stays as
        it is; codes of eight bits then need not reach as far as the bias. None where keys have no bias or are normed
        after it, and for a draft, whose bias may change while its keys stay in their pages."""
        if attention.qkv_bias is None or attention.k_norm is not None or self.is_draft:
            return None
        config, local = self.config, self.local_rotary
        first, count = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        bias = attention.qkv_bias[first : first + count].astype(np.float32).reshape(-1, config.head_dim)
        rope = self.rotary if local is None or not attention.window else local
        return rope.mean_of(bias, min(config.max_positions, SHIFT_POSITIONS))

    def named(self) -> Iterator[tuple[str, Parts | Array]]:
        """Every weight with its name in its block, layer by layer. Shared weights are given for each use."""
        yield "embed", self.embed
        for layer in self.layers:
            yield from layer.named()
        yield "final_norm", self.final_norm
        yield "head", self.head


@dataclass(frozen=True, eq=False)
class DraftWeights:
    """An EAGLE-3 draft head. model: its layer, embedding, norm and head; fc [H, C Ht] fuses the features.

    input_norm [C Ht] norms the features together, fc_norm [C, Ht] each on its own. d2t [Vd]: what is added to a draft
    id to get the target id."""

    config: DraftConfig
    model: ModelWeights
    fc: Parts
    d2t: Int64
    input_norm: Array | None = None
    fc_norm: Array | None = None

    def named(self) -> Iterator[tuple[str, Parts | Array]]:
        """Every weight with its name, as `ModelWeights.named` gives them; d2t is not a weight."""
        yield from self.model.named()
        yield "fc", self.fc
        for name in ("input_norm", "fc_norm"):
            norm: Array | None = getattr(self, name)
            if norm is not None:
                yield name, norm
