"""How a draft begins: with the weights of an earlier one, or as close to the target's own last layer and head as its
shape allows.

A draft guesses what the target's remaining layers and head will say; the target's final norm, head rows and, where
the geometry is the same, last decoder layer are a far better beginning than noise. The fused feature begins as the
deepest captured one. Everything is set for features of unit size (teacher.py, feature_scale).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from aquiline.models.config import DraftConfig
from aquiline.models.decoder import Decoder, DecoderLayer
from aquiline.models.eagle import DraftHead
from aquiline.models.formats import load_draft
from aquiline.train.config import TrainConfig

NOISE = 0.02
SHAPE = ("draft_vocab_size", "intermediate_size", "num_heads", "num_kv_heads")


def loaded_head(source: Path, target: Decoder, config: TrainConfig) -> DraftHead:
    """The float32 draft in folder `source`, with its vocabulary and shape: a head's rows mean nothing under another.

    Raises ValueError if the config asks for another shape."""
    head = load_draft(source, target, dtype="float32", capture=target.capture)
    for name, has in shape_of(head).items():
        asked = getattr(config, name)
        if asked is not None and asked != has:
            raise ValueError(f"{name}={asked}: the draft at {source} has {has}; drop the option")
    if head.embed is target.embed:  # two owners of one parameter would save and count it twice
        head.embed = nn.Parameter(target.embed.detach().clone(), requires_grad=False)
    return head.train()


def shape_of(head: DraftHead) -> dict[str, int]:
    """The options of a run that a head's shape answers."""
    c, model = head.config, head.config.model
    values = (c.draft_vocab_size, model.intermediate_size, model.num_heads, model.num_kv_heads)
    return dict(zip(SHAPE, values, strict=True))


def new_head(
    target: Decoder,
    vocab: Tensor,
    *,
    intermediate_size: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    seed: int = 0,
    size: float = 1.0,
) -> DraftHead:
    """A fresh float32 draft for a target loaded with its capture layers; None takes the target's geometry.

    vocab int64 [Vd]: target ids, ascending; size as in `initialise`. The embedding is a frozen copy of the target's."""
    t = target.config
    model = replace(
        t, family="llama", num_layers=1, qkv_bias=False, qk_norm=False, tied_head=False, windows=(),
        intermediate_size=intermediate_size or t.intermediate_size,
        num_heads=num_heads or t.num_heads, num_kv_heads=num_kv_heads or t.num_kv_heads,
    )  # fmt: skip
    if model.num_heads % model.num_kv_heads:
        raise ValueError(f"num_heads={model.num_heads}: must be a multiple of num_kv_heads={model.num_kv_heads}")
    head = DraftHead(DraftConfig(model, len(vocab), t.hidden_size, target.capture))
    initialise(head, target, vocab, seed, size)
    head.embed.requires_grad_(False)
    return head


@torch.no_grad()
def initialise(head: DraftHead, target: Decoder, vocab: Tensor, seed: int, size: float) -> None:
    """Fill every parameter. vocab int64 [Vd]: target ids, ascending. size: rms of the deepest captured feature before
    it was brought to unit size; what the target's layer adds to the stream shrinks by as much."""
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
        head.layer.o.copy_(last.o / size)
        head.hidden_norm.copy_(last.input_norm)
    width, inner = head.config.model.intermediate_size, last.down.shape[1]
    if width <= inner and head.layer.down.shape[0] == last.down.shape[0]:
        gate, up = last.gate_up.chunk(2)
        weight = last.down.norm(dim=0) * up.norm(dim=1)  # the neurons that say most, in their order
        kept = weight.topk(width).indices.sort().values
        head.layer.gate_up.copy_(torch.cat((gate[kept], up[kept])))
        head.layer.down.copy_(last.down[:, kept] / size)
        head.layer.post_norm.copy_(last.post_norm)
