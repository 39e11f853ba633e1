"""A draft that starts from earlier weights: those of a checkpoint that is resumed, or of any draft (--init)."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn

from aquiline.models.decoder import Decoder
from aquiline.models.eagle import DraftHead
from aquiline.models.formats import load_draft
from aquiline.models.model_config import RopeConfig
from aquiline.train.train_config import TrainConfig, yarn_of

SHAPE = ("draft_vocab_size", "intermediate_size", "num_heads", "num_kv_heads")


def loaded_head(source: Path, target: Decoder, config: TrainConfig) -> DraftHead:
    """The draft in folder `source` in float32, with its own vocabulary and shape: its weights fit no other.

    Raises ValueError if the config asks for another shape."""
    head = load_draft(source, target, dtype="float32", capture=target.capture, norm_feedback=config.norm_feedback)
    for name, has in shape_of(head).items():
        asked = getattr(config, name)
        if asked is not None and asked != has:
            raise ValueError(f"{name}={asked}: the draft at {source} has {has}; drop the option")
    if head.embed is target.embed:  # a parameter of two modules would be saved and counted twice
        head.embed = nn.Parameter(target.embed.detach().clone(), requires_grad=False)
    if 0 < head.config.model.window(0) < config.ttt_steps and config.draft_window is None:
        raise ValueError(
            f"ttt_steps={config.ttt_steps}: exceeds the window of {head.config.model.window(0)} of {source}"
        )
    return head.train()


def shape_of(head: DraftHead) -> dict[str, int]:
    """The values of the options in SHAPE for this head."""
    c, model = head.config, head.config.model
    values = (c.draft_vocab_size, model.intermediate_size, model.num_heads, model.num_kv_heads)
    return dict(zip(SHAPE, values, strict=True))


def reach_of(head: DraftHead) -> dict[str, Any]:
    """The settings that decide how far a head can attend, window and rotary embedding, as checkpoints store them."""
    model = head.config.model
    return {"draft_window": model.window(0), "rope_scaling": asdict(model.rope)}


def for_long_contexts(head: DraftHead, config: TrainConfig) -> DraftHead:
    """The head with the window and rotary embedding that the config asks for, its weights the same.

    YaRN (arXiv 2309.00071) stretches the rotary embedding, whatever scaling it had, from the positions that the draft
    was trained for; training on long rows then makes the head fit it. A window keeps a draft at the distances it was
    trained on, however long the context."""
    model = head.config.model
    if config.draft_window is not None:
        model = replace(model, windows=(config.draft_window,) if config.draft_window else ())
    if config.rope_scaling is not None:
        yarn = yarn_of(config.rope_scaling)
        assert yarn is not None, config.rope_scaling
        built_for = model.rope.parameters.get("original_max_position_embeddings", model.max_positions)
        original = yarn.original or int(built_for if model.rope.kind == "yarn" else model.max_positions)
        parameters = {"factor": yarn.factor, "original_max_position_embeddings": float(original)}
        reached = max(model.max_positions, round(yarn.factor * original))
        model = replace(model, rope=RopeConfig(model.rope.theta, "yarn", parameters), max_positions=reached)
    if model == head.config.model:
        return head
    changed = DraftHead(replace(head.config, model=model))
    changed.load_state_dict(head.state_dict(), assign=True)
    changed.embed.requires_grad_(False)
    return changed.train()
