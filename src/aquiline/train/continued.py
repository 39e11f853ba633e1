"""A draft that goes on from earlier weights: those of a checkpoint that is resumed, or of any draft (--init)."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from aquiline.models.decoder import Decoder
from aquiline.models.eagle import DraftHead
from aquiline.models.formats import load_draft
from aquiline.train.config import TrainConfig

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
