"""How a new draft begins: as close to the target's own last layer and head as its shape allows.

A draft guesses what the target's remaining layers and head will say; the target's final norm, head rows and, where
the geometry is the same, last decoder layer are a far better beginning than noise. The fused feature begins as the
deepest captured one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from aquiline.models.config import DraftConfig
from aquiline.models.decoder import Decoder, DecoderLayer
from aquiline.models.eagle import DraftHead

NOISE = 0.02


def new_head(
    target: Decoder,
    vocab: Tensor,
    *,
    intermediate_size: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    seed: int = 0,
) -> DraftHead:
    """A fresh float32 draft for a target loaded with its capture layers; None takes the target's geometry.

    vocab int64 [Vd]: target ids, ascending. The embedding is a frozen copy of the target's."""
    t = target.config
    model = replace(
        t, family="llama", num_layers=1, qkv_bias=False, qk_norm=False, tied_head=False, windows=(),
        intermediate_size=intermediate_size or t.intermediate_size,
        num_heads=num_heads or t.num_heads, num_kv_heads=num_kv_heads or t.num_kv_heads,
    )  # fmt: skip
    if model.num_heads % model.num_kv_heads:
        raise ValueError(f"num_heads={model.num_heads}: must be a multiple of num_kv_heads={model.num_kv_heads}")
    head = DraftHead(DraftConfig(model, len(vocab), t.hidden_size, target.capture))
    initialise(head, target, vocab, seed)
    head.embed.requires_grad_(False)
    return head


@torch.no_grad()
def initialise(head: DraftHead, target: Decoder, vocab: Tensor, seed: int) -> None:
    """Fill every parameter of a draft with the target's embedding. vocab int64 [Vd]: target ids, ascending."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in head.named_parameters():
        if parameter.ndim == 1 or name == "fc_norm":
            parameter.fill_(1.0)
        elif name != "embed":
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * NOISE)
    head.embed.copy_(target.embed)
    head.head.copy_(target.head[vocab])
    head.norm.copy_(target.final_norm)
    head.d2t.copy_(vocab - torch.arange(len(vocab)))
    H = head.config.model.hidden_size
    if head.config.target_hidden_size == H:
        head.fc[:, -H:] += torch.eye(H)
    last = target.layers[-1]
    assert isinstance(last, DecoderLayer)
    if head.layer.qkv.shape[0] == last.qkv.shape[0] and head.layer.o.shape == last.o.shape:
        head.layer.qkv[:, -H:] = last.qkv
        head.layer.o.copy_(last.o)
        head.hidden_norm.copy_(last.input_norm)
    if head.layer.gate_up.shape == last.gate_up.shape:
        head.layer.gate_up.copy_(last.gate_up)
        head.layer.down.copy_(last.down)
        head.layer.post_norm.copy_(last.post_norm)
