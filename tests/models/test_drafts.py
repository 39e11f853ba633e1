"""Draft heads in every format and numbering against an independent implementation; saving; starting anew."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_reference import Reference
from tests.dense import DenseAttention
from torch import Tensor

from aquiline.backends.torch.decoder import Decoder, load_target
from aquiline.backends.torch.eagle import DraftHead, load_draft, save_head
from aquiline.models.formats import read_draft_config
from aquiline.models.model_config import RopeConfig, default_capture
from checkpoints import draft_vocabulary, write_draft, write_target

T = 21


def run(head: DraftHead, features: Tensor, tokens: Tensor) -> list[Tensor]:
    """a and logits of two passes, the second fed by the first: [T, ...]."""
    attention, positions = DenseAttention(head.config.model), torch.arange(len(tokens))[None]
    g, out = head.fuse(features[None]), []
    for _ in range(2):
        a = head(g, tokens[None], positions, attention)
        out += [a[0], head.logits(a)[0]]
        g = head.feedback(a)
    return out


def expect(reference: Reference, features: Tensor, tokens: Tensor) -> list[Tensor]:
    g, out = reference.fuse(features), []
    for _ in range(2):
        a = reference.forward(g, tokens)
        out += [a, reference.logits(a)]
        g = reference.next_g(a)
    return out


def inputs(target: Decoder, width: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(T, width * target.config.hidden_size, generator=generator)
    return features, torch.randint(target.config.vocab_size, (T,), generator=generator)


def agree(head: DraftHead, reference: Reference, features: Tensor, tokens: Tensor) -> None:
    for ours, theirs in zip(run(head, features, tokens), expect(reference, features, tokens), strict=True):
        assert (ours - theirs).abs().max() < 1e-4


FLAGS: list[dict[str, Any]] = [
    {},
    {"fc_norm": True},
    {"norm_before_fc": True},
    {"norm_before_residual": True},
    {"num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 40},
]


@pytest.mark.parametrize("flags", FLAGS, ids=lambda f: "+".join(f) or "plain")
@pytest.mark.parametrize("format", ["specforge", "safeailab", "speculators"])
def test_output_equals_the_reference(format: str, flags: dict[str, Any], target: Decoder, tmp_path: Path) -> None:
    config, tensors = write_draft(tmp_path, target.config, format, **flags)
    head = load_draft(tmp_path, target)
    flat = config | config.get("transformer_layer_config", {})
    reference = Reference(
        flat, tensors, target.embed.data, tensors["lm_head.weight"],
        layer="layers.0" if format == "speculators" else "midlayer",
        theta=10000.0 if format == "safeailab" else 500000.0,
    )  # fmt: skip
    agree(head, reference, *inputs(target))
    assert head.embed is target.embed
    assert head.target_ids(torch.arange(len(head.d2t))).equal(draft_vocabulary(target.config.vocab_size, 80, 1))


@pytest.mark.parametrize("feedback", [False, True])
def test_norm_output_is_followed_by_producer(feedback: bool, target: Decoder, tmp_path: Path) -> None:
    flags = {"norm_output": True, "fc_norm": True}
    config, tensors = write_draft(tmp_path / "forge", target.config, **flags)
    reference = Reference(config, tensors, target.embed.data, tensors["lm_head.weight"], feedback=feedback)
    agree(load_draft(tmp_path / "forge", target, norm_feedback=feedback), reference, *inputs(target))
    write_draft(tmp_path / "spec", target.config, "speculators", **flags)
    assert read_draft_config(tmp_path / "spec", target.config).norm_feedback
    write_draft(tmp_path / "off", target.config, norm_output=False)
    assert read_draft_config(tmp_path / "off", target.config, norm_feedback=feedback).norm_feedback == feedback
    write_draft(tmp_path / "spec-off", target.config, "speculators", norm_output=False)
    assert not read_draft_config(tmp_path / "spec-off", target.config).norm_feedback


def test_a_shipped_embedding_and_a_wider_target(tmp_path: Path) -> None:
    """A draft of hidden 32 below a target of 48: fc [32, 3 * 48], its own embedding and head."""
    write_target(tmp_path / "target")
    target = load_target(tmp_path / "target", dtype="float32")
    config, tensors = write_draft(
        tmp_path / "draft", target.config, hidden_size=32, target_hidden_size=48, ship_embed=True, fc_norm=True
    )
    head = load_draft(tmp_path / "draft", target)
    assert head.fc.shape == (32, 144)
    reference = Reference(config, tensors, tensors["embed_tokens.weight"], tensors["lm_head.weight"])
    agree(head, reference, *inputs(target))


def test_head_rows_come_from_the_target_when_none_are_shipped(target: Decoder, tmp_path: Path) -> None:
    def drop(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        del tensors["lm_head.weight"]

    _, tensors = write_draft(tmp_path / "some", target.config, edit=drop)
    ids = tensors["d2t"] + torch.arange(80)
    assert load_draft(tmp_path / "some", target).head.equal(target.head[ids])

    def drop_all(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config["draft_vocab_size"] = None
        for name in ("lm_head.weight", "d2t", "t2d"):
            del tensors[name]

    write_draft(tmp_path / "all", target.config, edit=drop_all)
    head = load_draft(tmp_path / "all", target)
    assert head.head.equal(target.head)
    assert not head.d2t.any()

    def only_name(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        del config["draft_vocab_size"]

    write_draft(tmp_path / "unnamed", target.config, edit=only_name)
    assert load_draft(tmp_path / "unnamed", target).config.draft_vocab_size == 80


def test_both_numberings_reach_the_same_layers(target: Decoder, tmp_path: Path) -> None:
    L = target.config.num_layers
    forge, spec = {}, {}
    write_draft(tmp_path / "default", target.config)
    assert read_draft_config(tmp_path / "default", target.config).capture == default_capture(L) == (1, 3, 4)
    write_draft(tmp_path / "lab", target.config, "safeailab")
    assert read_draft_config(tmp_path / "lab", target.config).capture == (1, 3, 4)
    forge["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}
    spec["eagle_aux_hidden_state_layer_ids"] = [1, 4, 7]
    write_draft(tmp_path / "forge", target.config, **forge)
    write_draft(tmp_path / "spec", target.config, "speculators", **spec)
    assert read_draft_config(tmp_path / "forge", target.config).capture == (0, 3, 6)
    assert read_draft_config(tmp_path / "spec", target.config).capture == (0, 3, 6)
    spec["eagle_aux_hidden_state_layer_ids"] = [1, 4, L]  # what leaves the last layer, as in gpt-oss-120b-Eagle3-v3
    write_draft(tmp_path / "last", target.config, "speculators", **spec)
    assert read_draft_config(tmp_path / "last", target.config).capture == (0, 3, L - 1)
    assert read_draft_config(tmp_path / "last", target.config, capture=(2, 4, 6)).capture == (2, 4, 6)


def test_the_target_may_be_named_by_its_directory(target: Decoder, target_dir: Path, tmp_path: Path) -> None:
    write_draft(tmp_path, target.config)
    assert read_draft_config(tmp_path, target_dir) == read_draft_config(tmp_path, target.config)


def test_dtype_and_freezing(target: Decoder, tmp_path: Path) -> None:
    write_draft(tmp_path, target.config)
    head = load_draft(tmp_path, target, dtype="bfloat16")
    assert {p.dtype for p in head.parameters()} == {torch.bfloat16}
    assert head.embed.equal(target.embed.bfloat16())
    assert {n for n, p in head.named_parameters() if not p.requires_grad} == {"embed"}


@pytest.mark.parametrize("flags", [*FLAGS, {"norm_output": True, "fc_norm": True}, {"ship_embed": True}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_save_and_load_round_trip(dtype: str, flags: dict[str, Any], target: Decoder, tmp_path: Path) -> None:
    feedback = True if "norm_output" in flags else None
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}  # the input numbering's default: a trap
    write_draft(tmp_path / "a", target.config, rope_scaling={"type": "linear", "factor": 2.0}, **ids | flags)
    with pytest.raises(Exception, match="numbering"):
        load_draft(tmp_path / "a", target)
    head = load_draft(tmp_path / "a", target, dtype=dtype, capture=(2, 4, 5), norm_feedback=feedback)
    for shared in (None, target):
        place = tmp_path / f"b{shared is None}"
        save_head(head, place, target=shared)
        again = load_draft(place, target, dtype=dtype)
        assert again.config == head.config
        for (name, a), (_, b) in zip(head.state_dict().items(), again.state_dict().items(), strict=True):
            assert a.equal(b), name
        assert again.rope.inv_freq.equal(head.rope.inv_freq)
        assert not list(place.glob("*.tmp"))


@pytest.mark.parametrize("truncate", [False, True])
def test_a_saved_yarn_is_read_again(truncate: bool, target: Decoder, tmp_path: Path) -> None:
    """`truncate` is a flag in a checkpoint, and 0 or 1 among the numbers of a RopeConfig."""
    write_draft(tmp_path / "a", target.config)
    head = load_draft(tmp_path / "a", target)
    rope = RopeConfig(10000.0, "yarn", {"factor": 2.0, "original_max_position_embeddings": 64, "truncate": truncate})
    model = dataclasses.replace(head.config.model, rope=rope)
    stretched = DraftHead(dataclasses.replace(head.config, model=model))
    stretched.load_state_dict(head.state_dict())
    save_head(stretched, tmp_path / "b")
    assert load_draft(tmp_path / "b", target).config.model.rope == rope


def test_saved_layout_is_specforges(target: Decoder, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    _, tensors = write_draft(tmp_path / "a", target.config)
    save_head(load_draft(tmp_path / "a", target), tmp_path / "b", target=target)
    saved = load_file(tmp_path / "b" / "model.safetensors")
    assert set(saved) == set(tensors)  # the embedding is the target's and stays out
    assert all(saved[name].equal(tensor) for name, tensor in tensors.items())
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert (config["draft_vocab_size"], config["rope_theta"]) == (80, 500000.0)
    save_head(load_draft(tmp_path / "a", target), tmp_path / "b")
    assert "embed_tokens.weight" in load_file(tmp_path / "b" / "model.safetensors")
