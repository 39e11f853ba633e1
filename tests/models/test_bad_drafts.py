"""Drafts that do not fit: one CheckpointError that names every mismatch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aquiline.backends.torch.decoder import Decoder, load_target
from aquiline.backends.torch.eagle import load_draft
from aquiline.errors import CheckpointError
from aquiline.models.formats import read_draft_config
from checkpoints import write_draft, write_target

IDS = "eagle_aux_hidden_state_layer_ids"


def error(directory: Path, target: Decoder, **overrides: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_draft(directory, target, **overrides)
    return str(caught.value)


def test_every_mismatch_with_the_target_is_named_at_once(target: Decoder, tmp_path: Path) -> None:
    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config.update(vocab_size=161, hidden_size=40, eagle_config={IDS: [1, 3, 8]})
        del tensors["d2t"], tensors["norm.weight"]
        tensors["verifier.weight"] = torch.zeros(3)

    write_draft(tmp_path, target.config, edit=edit)
    message = error(tmp_path, target)
    for words in (
        "vocab_size=161, the target has 160",
        "hidden_size=40, the target has 48",
        f"{IDS}=[1, 3, 8] (output numbering)",
        "0 .. 7",
        "missing tensor d2t: draft_vocab_size=80 is smaller than vocab_size=161",
        "missing tensor norm.weight [40]",
        "unexpected tensor verifier.weight [3]",
        "tensor fc.weight has shape [48, 144], the config says [40, 120]",
    ):
        assert words in message


def _set(**changes: Tensor | None) -> Any:
    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name, value in changes.items():
            if value is None:
                del tensors[name]
            else:
                tensors[name] = value

    return edit


ASCENDING = torch.zeros(80, dtype=torch.int64)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (_set(d2t=ASCENDING.index_fill(0, torch.tensor([79]), 81)), "outside the target's vocabulary [0, 160)"),
        (_set(d2t=ASCENDING.index_fill(0, torch.tensor([0]), -1)), "1 draft ids outside"),
        (_set(d2t=ASCENDING.index_fill(0, torch.tensor([5]), 1)), "draft id 6 maps to 6 after 6"),
        (_set(d2t=ASCENDING.int()), "32 [80]; expected int64 offsets"),
        (_set(d2t=ASCENDING[:79]), "[79]"),
        (_set(d2t=None), "missing tensor d2t"),
        (_set(t2d=torch.zeros(160, dtype=torch.bool)), "disagree on 80 target ids"),
        (_set(t2d=torch.zeros(159, dtype=torch.bool)), "expected bool [160]"),
    ],
)
@pytest.mark.parametrize("format", ["specforge", "safeailab"])
def test_vocabulary_maps(format: str, edit: Any, words: str, target: Decoder, tmp_path: Path) -> None:
    write_draft(tmp_path, target.config, format, edit=edit)
    assert words in error(tmp_path, target)


def test_a_good_map_without_t2d_loads(target: Decoder, tmp_path: Path) -> None:
    write_draft(tmp_path, target.config, edit=_set(t2d=None))
    load_draft(tmp_path, target)


@pytest.mark.parametrize(
    ("format", "change", "words"),
    [
        ("specforge", {"eagle_config": {IDS: [2, 4, 5]}}, ["input numbering", "(1, 3, 4)", "(2, 4, 5)"]),
        ("speculators", {IDS: [1, 3, 4]}, ["output numbering", "(1, 3, 4)", "(0, 2, 3)"]),
        ("specforge", {"eagle_config": {IDS: [4, 3, 1]}}, ["ascending"]),
        ("specforge", {"eagle_config": {IDS: [1, 1, 4]}}, ["ascending"]),
        ("speculators", {IDS: [0, 3, 4]}, ["ascending layers", "0 .. 7"]),
        ("specforge", {"eagle_config": {IDS: "1,3,4"}}, ["list of layer numbers"]),
        ("specforge", {"norm_output": True}, ["norm_output=true", "#879", "--no-norm-feedback", "--norm-feedback"]),
        ("specforge", {"norm_output": False}, ["norm_output=false", "#879", "without", "pass norm_feedback=False"]),
        ("specforge", {"aux_layer_ids": [0, 1, 2]}, ["aux_layer_ids=[0, 1, 2] is not known", IDS]),
        ("specforge", {IDS: [1, 3, 5], "eagle_config": {IDS: [1, 3, 6]}}, ["[1, 3, 5]", "[1, 3, 6] differ"]),
        ("specforge", {"fc_norm": True, "norm_before_fc": True}, ["norm_before_fc and fc_norm"]),
        ("specforge", {"target_hidden_size": 64}, ["target_hidden_size=64, the target has 48"]),
    ],
)
def test_layers_and_flags(
    format: str, change: dict[str, Any], words: list[str], target: Decoder, tmp_path: Path
) -> None:
    write_draft(tmp_path, target.config, format, **change)
    message = error(tmp_path, target)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, ["Eagle3DeepseekV2ForCausalLM", "LlamaForCausalLMEagle3"]),
        ({"model_type": "gpt_oss"}, ["gpt_oss", "llama"]),
        ({"num_hidden_layers": 2}, ["num_hidden_layers=2"]),
        ({"attention_bias": 1}, ["attention_bias=1", "true or false"]),
        ({"hidden_act": "gelu"}, ["hidden_act"]),
        ({"eagle_config": {"use_last_layernorm": False}}, ["use_last_layernorm=False", "final norm"]),
        ({"eagle_config": {"use_first_layernorm": False}}, ["use_first_layernorm", "known are"]),
        ({"eagle_config": {"use_aux_hidden_state": False}}, ["use_aux_hidden_state"]),
        ({"speculators_model_type": "eagle"}, ["speculators_model_type='eagle'"]),
        ({"speculators_model_type": "eagle3"}, ["transformer_layer_config"]),
        ({"hidden_size": None}, ["hidden_size", "missing"]),
        ({"fc_norm": "false"}, ["fc_norm='false'", "true or false"]),
        ({"norm_output": "true"}, ["norm_output='true'", "true or false"]),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings=1", "true or false"]),
        ({"sliding_window": 6, "use_sliding_window": "false"}, ["use_sliding_window='false'", "true or false"]),
        ({"norm_before_residual": 1}, ["norm_before_residual=1", "true or false"]),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [True, 3, 4]}}, ["[True, 3, 4]", "layer numbers"]),
        ({"rope_theta": 0}, ["rope_theta=0", "number"]),
    ],
)
def test_unsupported_configs(change: dict[str, Any], words: list[str], target: Decoder, tmp_path: Path) -> None:
    write_draft(tmp_path, target.config, edit=lambda config, tensors: config.update(change))
    with pytest.raises(CheckpointError) as caught:
        read_draft_config(tmp_path, target.config)
    assert all(word in str(caught.value) for word in words)


def test_speculators_must_say_norm_before_residual(target: Decoder, tmp_path: Path) -> None:
    write_draft(tmp_path, target.config, "speculators", edit=lambda c, t: c.pop("norm_before_residual"))
    assert "norm_before_residual is missing" in error(tmp_path, target)


def test_speculators_layer_types(target: Decoder, tmp_path: Path) -> None:
    write_draft(tmp_path / "two", target.config, "speculators", layer_types=["sliding_attention"] * 2)
    assert "layer_types=['sliding_attention', 'sliding_attention']; supported is one" in error(tmp_path / "two", target)
    write_draft(tmp_path / "none", target.config, "speculators", layer_types=["sliding_attention"])
    assert "sliding_window is missing" in error(tmp_path / "none", target)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_tensor_with_a_nan_or_an_infinity_is_named(dtype: str, target: Decoder, tmp_path: Path) -> None:
    def poison(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["fc.weight"][3, :2] = float("nan")
        tensors["fc.weight"][7, 7] = float("-inf")
        tensors["midlayer.self_attn.v_proj.weight"][0, 0] = float("inf")
        tensors["fc_norm.2.weight"][:] = 3e38  # finite in float32, but its sum is not

    write_draft(tmp_path, target.config, edit=poison, fc_norm=True)
    message = error(tmp_path, target, dtype=dtype)
    assert "2 problems" in message and "fc_norm" not in message
    assert f"fc.weight holds 3 of {48 * 144} values that are not finite (2 NaN, 1 infinite)" in message
    assert "midlayer.self_attn.v_proj.weight holds 1 of" in message


def test_a_small_target_needs_explicit_layers(tmp_path: Path) -> None:
    write_target(tmp_path / "target", num_hidden_layers=6)
    target = load_target(tmp_path / "target", dtype="float32")
    write_draft(tmp_path / "draft", target.config)
    assert "pass capture=" in error(tmp_path / "draft", target)
    assert load_draft(tmp_path / "draft", target, capture=(0, 2, 5)).config.capture == (0, 2, 5)
    assert "capture=(0, 2, 6)" in error(tmp_path / "draft", target, capture=(0, 2, 6))


def test_a_target_loaded_for_other_layers(target_dir: Path, tmp_path: Path) -> None:
    target = load_target(target_dir, dtype="float32", capture=(0, 3, 4))
    write_draft(tmp_path, target.config)
    assert "capture=(1, 3, 4), the target was loaded with capture=(0, 3, 4)" in error(tmp_path, target)


def test_a_narrow_draft_must_ship_embedding_and_head(target: Decoder, tmp_path: Path) -> None:
    change: dict[str, Any] = {"hidden_size": 32, "target_hidden_size": 48}
    write_draft(tmp_path, target.config, edit=_set(**{"lm_head.weight": None}), **change)
    message = error(tmp_path, target)
    assert "missing tensor embed_tokens.weight" in message
    assert "missing tensor lm_head.weight" in message
    write_draft(tmp_path, target.config, edit=_set(**{"lm_head.weight": None}), tie_word_embeddings=True, **change)
    message = error(tmp_path, target)
    assert "missing tensor embed_tokens.weight" in message and "lm_head" not in message


def test_bin_files_run_no_code_and_may_be_truncated(target: Decoder, tmp_path: Path) -> None:
    write_draft(tmp_path, target.config, "safeailab")
    file = tmp_path / "pytorch_model.bin"
    good = file.read_bytes()
    for keep in (0, 10, len(good) // 2):
        file.write_bytes(good[:keep])
        assert "pytorch_model.bin is truncated, corrupt or holds more than tensors" in error(tmp_path, target)
    torch.save({"fc.weight": Path("/")}, file)
    assert "pytorch_model.bin" in error(tmp_path, target)
    torch.save([torch.zeros(1)], file)
    assert "not a dictionary of tensors" in error(tmp_path, target)


def test_broken_config(target: Decoder, tmp_path: Path) -> None:
    write_draft(tmp_path, target.config)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": []})[:-1])
    assert "config.json is not valid JSON" in error(tmp_path, target)
