"""An EAGLE-3 draft in plain numpy, float32, run without anything of models or ops. `reference_files` reads it.

It shares no code with what it judges. `Layer` also describes a layer of any target, so that a diagnosis can run a
target's layer again. Every assumption is a field, and a diagnosis replaces fields.
Source: Li et al., EAGLE-3, arXiv 2503.01840; transformers 5.24, modeling_rope_utils, for scaled rotations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Stages = dict[str, Array]
KeysValues = tuple[Array, Array]
"""Rotated keys and values [T, Hkv, Dh]."""


@dataclass(frozen=True)
class ReferenceRope:
    """Rotary embedding. parameters: the scheme's own fields. factors [Dh / 2]: what the scheme `factors` divides
    frequencies by. pairs: which halves of a head rotate together."""

    theta: float = 10000.0
    kind: str = "default"
    parameters: Mapping[str, float] = field(default_factory=dict)
    factors: tuple[float, ...] = ()
    pairs: Literal["halves", "neighbours"] = "halves"

    def frequencies(self, head_dim: int) -> tuple[NDArray[np.float64], float]:
        """Inverse frequencies [Dh / 2], and the factor on cos and sin. Raises ValueError for an unknown scheme."""
        p, plain = self.parameters, self.theta ** (-np.arange(0, head_dim, 2) / head_dim)
        if self.kind == "default":
            return plain, 1.0
        if self.kind == "linear":
            return plain / p["factor"], 1.0
        if self.kind == "factors":
            return plain / np.array(self.factors), 1.0
        if self.kind == "llama3":
            turns = p["original_max_position_embeddings"] * plain / (2 * math.pi)
            low, high = p["low_freq_factor"], p["high_freq_factor"]
            share = np.clip((turns - low) / (high - low), 0, 1)
            return plain * (share + (1 - share) / p["factor"]), 1.0
        if self.kind != "yarn":
            raise ValueError(f"rope_type={self.kind!r}: the reference has default, linear, llama3, yarn and factors")
        return self._yarn(plain, head_dim)

    def _yarn(self, plain: NDArray[np.float64], head_dim: int) -> tuple[NDArray[np.float64], float]:
        p, ends = self.parameters, []
        for turns in (p.get("beta_fast", 32.0), p.get("beta_slow", 1.0)):
            at = p["original_max_position_embeddings"] / (turns * 2 * math.pi)
            ends.append(head_dim * math.log(at) / (2 * math.log(self.theta)))
        low, high = (math.floor(ends[0]), math.ceil(ends[1])) if p.get("truncate", 1) else ends
        low, high = max(low, 0), min(high, head_dim - 1)
        ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0, 1)
        growth = 0.1 * math.log(p["factor"]) if p["factor"] > 1 else 0.0
        scale = p.get("attention_factor")
        if scale is None:
            both = p.get("mscale") and p.get("mscale_all_dim")
            one, two = (p["mscale"], p["mscale_all_dim"]) if both else (1.0, 0.0)
            scale = (1 + growth * one) / (1 + growth * two)
        return plain * (1 - ramp + ramp / p["factor"]), scale

    def __call__(self, x: Array, positions: NDArray[Any]) -> Array:
        """Rotate x [T, heads, Dh] at positions [T]."""
        frequencies, scale = self.frequencies(x.shape[-1])
        angle = positions[:, None] * frequencies
        turn = (scale * np.exp(1j * angle))[:, None]
        first, second = (x[..., ::2], x[..., 1::2]) if self.pairs == "neighbours" else np.split(x, 2, axis=-1)
        turned = (first + 1j * second) * turn
        parts = turned.real, turned.imag
        joined = np.stack(parts, -1).reshape(x.shape) if self.pairs == "neighbours" else np.concatenate(parts, -1)
        return joined.astype(np.float32)


@dataclass(frozen=True, eq=False, kw_only=True)
class Layer:
    """One decoder layer. q, k, v [heads * Dh, In], o [H, Hq * Dh]; gate, up [I, H], down [H, I], each with a leading E
    where there is a router [E, H]. norms None: not there. biases: by the matrix's name.

    sees: how many keys beyond its own a row sees (0, or by mistake -1 or 1). shift: of every position. window 0: none.
    over_all: experts' weights are probabilities among all experts, else among the chosen ones."""

    q: Array
    k: Array
    v: Array
    o: Array
    gate: Array
    up: Array
    down: Array
    input_norm: Array | None
    post_norm: Array | None
    num_heads: int
    num_kv_heads: int
    eps: float
    rope: ReferenceRope
    scale: float = 0.0  # of the products of queries and keys; 0: head_dim ** -0.5
    window: int = 0
    biases: Mapping[str, Array] = field(default_factory=dict)
    q_norm: Array | None = None
    k_norm: Array | None = None
    attention_out_norm: Array | None = None
    mlp_out_norm: Array | None = None
    sinks: Array | None = None
    activation: Literal["swiglu", "geglu", "clamped"] = "swiglu"
    limit: float = 0.0
    router: Array | None = None
    per_token: int = 0
    over_all: bool = False
    sees: int = 0
    shift: int = 0

    def norm(self, x: Array, weight: Array | None) -> Array:
        """RMS norm over the last axis; x itself where there is no weight."""
        return x if weight is None else normed(x, weight, self.eps)

    def forward(self, x: Array) -> Array:
        """A target's layer over a whole text: [T, H] to [T, H]."""
        return self.run(self.norm(x, self.input_norm), x, np.arange(len(x)))["out"]

    def run(self, x: Array, residual: Array, positions: NDArray[Any], before: KeysValues | None = None) -> Stages:
        """Rows of normed input x [T, In] after the keys `before`, each stage by its name; keys and values of all rows,
        those before included, are all_keys and all_values."""
        q, k, v = (self.linear(x, name) for name in "qkv")
        found = {"qkv": np.concatenate((q, k, v), -1)}
        heads = self.num_heads, self.num_kv_heads, self.num_kv_heads
        q, k, v = (each.reshape(len(x), count, -1) for each, count in zip((q, k, v), heads, strict=True))
        positions = positions + self.shift
        q = self.rope(self.norm(q, self.q_norm), positions)
        k = self.rope(self.norm(k, self.k_norm), positions)
        found |= {"keys": k.reshape(len(x), -1), "values": v.reshape(len(x), -1)}
        if before is not None:
            k, v = np.concatenate((before[0], k)), np.concatenate((before[1], v))
        mixed = self._matrix(self.attend(q, k, v).reshape(len(x), -1), self.o, "o")
        hidden = residual + self.norm(mixed, self.attention_out_norm)
        made = self.mlp(self.norm(hidden, self.post_norm))
        out = hidden + self.norm(made, self.mlp_out_norm)
        return found | {"attn_out": mixed, "ffn_out": made, "out": out, "all_keys": k, "all_values": v}

    def linear(self, x: Array, name: str) -> Array:
        """x [..., In] times the matrix of that name, with its bias."""
        return self._matrix(x, getattr(self, name), name)

    def _matrix(self, x: Array, weight: Array, name: str, expert: int | None = None) -> Array:
        bias = self.biases.get(name)
        if expert is not None:
            weight, bias = weight[expert], None if bias is None else bias[expert]
        product: Array = x @ weight.T
        return product if bias is None else product + bias

    def attend(self, q: Array, k: Array, v: Array) -> Array:
        """q [T, Hq, Dh], the last rows of k and v [N, Hkv, Dh] -> [T, Hq, Dh]."""
        T, N, groups = len(q), len(k), self.num_heads // self.num_kv_heads
        back = np.arange(N - T, N)[:, None] - np.arange(N)
        visible = back >= -self.sees
        if self.window:
            visible &= back < self.window
        k, v = k.repeat(groups, 1), v.repeat(groups, 1)
        scores = np.einsum("thd,nhd->thn", q, k) * (self.scale or q.shape[-1] ** -0.5)
        scores = np.where(visible[:, None], scores, -1e30)
        sinks = np.full((self.num_heads, 1), -1e30, np.float32) if self.sinks is None else self.sinks[:, None]
        scores = np.concatenate((scores, np.broadcast_to(sinks, (T, *sinks.shape))), -1)
        weights = softmax(scores)[..., :N] * visible[:, None]  # a row that sees nothing has nothing
        mixed: Array = np.einsum("thn,nhd->thd", weights, v).astype(np.float32)
        return mixed

    def mlp(self, x: Array) -> Array:
        """The gated MLP, or the mixture of experts, of normed rows [T, H]."""
        if self.router is None:
            return self._gated(x)
        logits = self.linear(x, "router")
        chosen = np.argsort(-logits, axis=-1, kind="stable")[:, : self.per_token]
        best = np.take_along_axis(logits, chosen, -1)
        weights = np.take_along_axis(softmax(logits), chosen, -1) if self.over_all else softmax(best)
        found: Array = np.zeros_like(x)
        for expert in np.unique(chosen):
            row, rank = np.nonzero(chosen == expert)
            found[row] += weights[row, rank, None] * self._gated(x[row], int(expert))
        return found

    def _gated(self, x: Array, expert: int | None = None) -> Array:
        gate, up = (self._matrix(x, getattr(self, name), name, expert) for name in ("gate", "up"))
        return self._matrix(self.activated(gate, up).astype(np.float32), self.down, "down", expert)

    def activated(self, gate: Array, up: Array) -> Array:
        """The activation of gate and up."""
        if self.activation == "geglu":
            inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
            gelu: Array = gate * (1 + np.tanh(inner)) / 2
            return gelu * up
        if self.activation == "clamped":
            gate, up = np.minimum(gate, self.limit), np.clip(up, -self.limit, self.limit)
            return (up + 1) * gate * sigmoid(1.702 * gate)
        return gate * sigmoid(gate) * up


@dataclass(frozen=True, eq=False)
class ReferenceDraft:
    """An EAGLE-3 head. layer: its input is [embedding; hidden]; embed [V, H], head [Vd, H], fc [H, C Ht]; ids [Vd]: the
    target ids of draft ids. capture: the target layers whose outputs it reads. input_norm [C Ht] or fc_norm [C, Ht]:
    before fc."""

    layer: Layer
    fc: Array
    hidden_norm: Array | None
    norm: Array | None
    embed: Array
    head: Array
    ids: NDArray[np.int64]
    capture: tuple[int, ...]
    input_norm: Array | None = None
    fc_norm: Array | None = None
    norm_before_residual: bool = False
    norm_feedback: bool = False

    def fuse(self, features: Array) -> Array:
        """Features [T, C, Ht] -> g [T, H]."""
        features = self.layer.norm(features, self.fc_norm).reshape(len(features), -1)
        return self.layer.norm(features, self.input_norm) @ self.fc.T

    def rows(self, g: Array, tokens: NDArray[Any], first: int, before: KeysValues | None = None) -> Stages:
        """Draft rows from position `first` on: g [T, H] and the tokens [T] that follow."""
        embedded = self.layer.norm(self.embed[tokens], self.layer.input_norm)
        hidden = self.layer.norm(g, self.hidden_norm)
        residual = hidden if self.norm_before_residual else g
        x = np.concatenate((embedded, hidden), -1)
        found = {"fc_out": g} | self.layer.run(x, residual, first + np.arange(len(g)), before)
        found["pre_head_hidden"] = found.pop("out")
        found["logits"] = self.layer.norm(found["pre_head_hidden"], self.norm) @ self.head.T
        return found

    def feedback(self, a: Array) -> Array:
        """What the next pass takes as its g."""
        return self.layer.norm(a, self.norm) if self.norm_feedback else a

    def best_ids(self, logits: Array, count: int) -> NDArray[np.int64]:
        """The target ids of the `count` highest logits [..., Vd], best first."""
        return self.ids[np.argsort(-logits, axis=-1, kind="stable")[..., :count]]


def normed(x: Array, weight: Array, eps: float) -> Array:
    """RMS norm over the last axis."""
    found: Array = (x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps) * weight).astype(np.float32)
    return found


def softmax(x: Array) -> Array:
    """Over the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    found: Array = e / e.sum(-1, keepdims=True)
    return found


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)) without overflow."""
    found: Array = (0.5 * (1 + np.tanh(x / 2))).astype(np.float32)
    return found
