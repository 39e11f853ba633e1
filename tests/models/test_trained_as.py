"""Drafts are read as their trainers ran them, whatever fields their configs copied from the target's."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_reference import Reference
from test_drafts import agree, inputs
from test_rope import transformers_rotary
from torch import Tensor

from aquiline.backends.torch.decoder import Decoder, load_target
from aquiline.backends.torch.eagle import load_draft, save_head
from aquiline.models.formats import read_draft_config
from checkpoints import draft_vocabulary, write_draft, write_target

SLIDING = {"layer_types": ["sliding_attention"]}
FULL = {"layer_types": ["full_attention"]}
OURS = {"producer": "aquiline"}


@pytest.mark.parametrize(
    ("format", "said", "window"),
    [
        ("specforge", {}, 0),
        ("specforge", SLIDING, 0),
        ("safeailab", {}, 0),
        ("safeailab", SLIDING, 0),
        ("speculators", {}, 0),
        ("speculators", FULL, 0),
        ("speculators", SLIDING, 6),
        ("specforge", OURS, 6),
        ("specforge", OURS | SLIDING, 6),
        ("specforge", OURS | {"use_sliding_window": False}, 0),
    ],
)
def test_a_window_is_what_the_trainer_made_of_it(
    format: str, said: dict[str, Any], window: int, target: Decoder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, tensors = write_draft(tmp_path, target.config, format, sliding_window=6, **said)
    head = load_draft(tmp_path, target)
    assert head.config.model.windows == ((window,) if window else ())
    flat = config | config.get("transformer_layer_config", {})
    reference = Reference(
        flat, tensors, target.embed.data, tensors["lm_head.weight"], window=window,
        layer="layers.0" if format == "speculators" else "midlayer",
        theta=10000.0 if format == "safeailab" else 500000.0,
    )  # fmt: skip
    agree(head, reference, *inputs(target))
    is_told = not window and "use_sliding_window" not in said
    assert ("sliding_window=6 has no effect" in caplog.text) == is_told


def test_a_window_of_ours_survives_saving_and_says_so_both_ways(target: Decoder, tmp_path: Path) -> None:
    write_draft(tmp_path / "a", target.config, sliding_window=6, **OURS)
    save_head(load_draft(tmp_path / "a", target), tmp_path / "b", target=target)
    assert load_draft(tmp_path / "b", target).config.model.windows == (6,)
    saved = json.loads((tmp_path / "b" / "config.json").read_text())
    assert (saved["producer"], saved["sliding_window"], saved["layer_types"]) == ("aquiline", 6, ["sliding_attention"])


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}


def specforges_scale(mscale: float, all_dim: float) -> float:
    growth = 0.1 * math.log(8.0)
    return (growth * mscale + 1) / (growth * all_dim + 1)


@pytest.mark.parametrize("extra", [{}, {"attention_factor": 3.0, "truncate": False}], ids=["plain", "unread"])
@pytest.mark.parametrize(("mscale", "all_dim"), [(0.707, 0.0), (1.0, 0.7), (0.0, 0.5), (1.0, 0.0)])
def test_specforges_yarn(
    mscale: float, all_dim: float, extra: dict[str, Any], target: Decoder, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    fields = YARN | {"beta_fast": 32, "beta_slow": 1, "mscale": mscale, "mscale_all_dim": all_dim} | extra
    write_draft(tmp_path, target.config, rope_scaling=fields)
    head = load_draft(tmp_path, target)
    theirs, _ = transformers_rotary("yarn", 10000.0, {k: v for k, v in YARN.items() if k != "rope_type"}, 16)
    assert head.rope.scale == pytest.approx(specforges_scale(mscale, all_dim), rel=1e-12)
    assert torch.allclose(head.rope.inv_freq, theirs, rtol=5e-7, atol=0), "the base is 10000, not rope_theta"
    assert "rope_theta=500000 has no effect" in caplog.text
    save_head(head, tmp_path / "again", target=target)
    again = load_draft(tmp_path / "again", target)
    assert again.rope.scale == head.rope.scale and again.rope.inv_freq.equal(head.rope.inv_freq)


def test_yarn_of_speculators_is_transformers(target: Decoder, tmp_path: Path) -> None:
    fields = YARN | {"mscale": 0.707, "mscale_all_dim": 0.0}
    write_draft(tmp_path, target.config, "speculators", rope_scaling=fields)
    head = load_draft(tmp_path, target)
    named = {name: value for name, value in fields.items() if name != "rope_type"}
    theirs, scale = transformers_rotary("yarn", 500000.0, named, 16)
    assert head.rope.scale == pytest.approx(scale, rel=1e-12) != pytest.approx(specforges_scale(0.707, 0.0), rel=1e-6)
    assert torch.allclose(head.rope.inv_freq, theirs, rtol=5e-7, atol=0)


@pytest.mark.parametrize(
    ("format", "inside", "theta"),
    [
        ("specforge", {}, 10000.0),
        ("safeailab", {}, 10000.0),
        ("speculators", {}, 500000.0),
        ("specforge", {"rope_theta": 500000.0}, 500000.0),
        ("specforge", {"rope_theta": None}, 10000.0),
    ],
)
def test_the_base_of_a_linearly_scaled_embedding(
    format: str, inside: dict[str, float | None], theta: float, target: Decoder, tmp_path: Path
) -> None:
    scaling = {"type": "linear", "factor": 2.0} | inside
    write_draft(tmp_path, target.config, format, rope_theta=500000.0, rope_scaling=scaling)
    assert read_draft_config(tmp_path, target.config).model.rope.theta == theta


@pytest.mark.parametrize("ship_embed", [True, False])
def test_a_tied_head_is_the_drafts_own_embedding(ship_embed: bool, target: Decoder, tmp_path: Path) -> None:
    def drop(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        del tensors["lm_head.weight"]

    config, tensors = write_draft(tmp_path, target.config, edit=drop, ship_embed=ship_embed, tie_word_embeddings=True)
    head = load_draft(tmp_path, target)
    embed = tensors["embed_tokens.weight"] if ship_embed else target.embed.data
    rows = embed[draft_vocabulary(target.config.vocab_size, 80, 1)]
    assert head.head.equal(rows) and not head.head.equal(target.head[: len(rows)])
    agree(head, Reference(config, tensors, embed, rows), *inputs(target))


def test_a_tied_draft_that_ships_a_head_keeps_it(target: Decoder, tmp_path: Path) -> None:
    """SpecForge copies the field from tied targets, and trains and saves a head of its own all the same."""
    _, tensors = write_draft(tmp_path, target.config, ship_embed=True, tie_word_embeddings=True)
    assert load_draft(tmp_path, target).head.equal(tensors["lm_head.weight"])


def test_a_tied_draft_of_another_width_needs_no_head(tmp_path: Path) -> None:
    write_target(tmp_path / "target")
    target = load_target(tmp_path / "target", dtype="float32")
    _, tensors = write_draft(
        tmp_path / "draft", target.config, hidden_size=32, target_hidden_size=48, ship_embed=True,
        tie_word_embeddings=True, edit=lambda config, tensors: tensors.pop("lm_head.weight"),
    )  # fmt: skip
    rows = draft_vocabulary(target.config.vocab_size, 80, 1)
    assert load_draft(tmp_path / "draft", target).head.equal(tensors["embed_tokens.weight"][rows])
