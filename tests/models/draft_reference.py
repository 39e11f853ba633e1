"""An EAGLE-3 head in plain torch float32, straight from raw checkpoint tensors: shares no code with the package.

Written from the papers and the published heads; names are the checkpoint's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Reference:
    """`config` holds flat Hugging Face fields; `embed` [V, H] is whichever embedding the head should use."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    embed: Tensor
    head: Tensor
    layer: str = "midlayer"
    theta: float = 500000.0
    feedback: bool = False
    window: int = 0
    inv_freq: Tensor | None = None  # of a scaled rotation; None: plain, at base theta

    def norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.config["rms_norm_eps"]
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self.tensors[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        y, bias = x @ self.tensors[f"{self.layer}.{name}.weight"].T, self.tensors.get(f"{self.layer}.{name}.bias")
        return y if bias is None else y + bias

    def fuse(self, features: Tensor) -> Tensor:
        if self.config.get("norm_before_fc"):
            features = self.norm(features, "input_norm")
        if self.config.get("fc_norm"):
            chunks = features.chunk(3, dim=-1)
            features = torch.cat([self.norm(c, f"fc_norm.{i}") for i, c in enumerate(chunks)], dim=-1)
        return features @ self.tensors["fc.weight"].T

    def rotate(self, x: Tensor) -> Tensor:
        """x [T, heads, Dh] at positions 0 .. T-1, as complex numbers of the two halves."""
        half = x.shape[-1] // 2
        plain = self.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        freqs = plain if self.inv_freq is None else self.inv_freq.double()
        angle = torch.arange(x.shape[0], dtype=torch.float64)[:, None, None] * freqs
        z = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((z.real, z.imag), dim=-1).float()

    def attention(self, x: Tensor) -> Tensor:
        c, T = self.config, x.shape[0]
        q = self.rotate(self.linear(x, "self_attn.q_proj").view(T, c["num_attention_heads"], -1))
        k = self.rotate(self.linear(x, "self_attn.k_proj").view(T, c["num_key_value_heads"], -1))
        v = self.linear(x, "self_attn.v_proj").view(T, c["num_key_value_heads"], -1)
        group, out = q.shape[1] // k.shape[1], []
        for t in range(T):
            first = max(0, t + 1 - self.window) if self.window else 0
            for h in range(q.shape[1]):
                scores = k[first : t + 1, h // group] @ q[t, h] / math.sqrt(q.shape[-1])
                out.append(torch.softmax(scores, 0) @ v[first : t + 1, h // group])
        return self.linear(torch.stack(out).view(T, -1), "self_attn.o_proj")

    def forward(self, g: Tensor, tokens: Tensor) -> Tensor:
        """g [T, H] and the shifted tokens [T] -> a [T, H]."""
        L = self.layer
        normed = self.norm(g, f"{L}.hidden_norm")
        x = torch.cat((self.norm(self.embed[tokens], f"{L}.input_layernorm"), normed), dim=-1)
        residual = normed if self.config.get("norm_before_residual") else g
        hidden = residual + self.attention(x)
        y = self.norm(hidden, f"{L}.post_attention_layernorm")
        gate, up = self.linear(y, "mlp.gate_proj"), self.linear(y, "mlp.up_proj")
        return hidden + self.linear(gate * torch.sigmoid(gate) * up, "mlp.down_proj")

    def next_g(self, a: Tensor) -> Tensor:
        return self.norm(a, "norm") if self.feedback else a

    def logits(self, a: Tensor) -> Tensor:
        return self.norm(a, "norm") @ self.head.T
