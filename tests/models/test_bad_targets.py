"""Broken and unsupported targets: every message names the file or field, the value and the way out."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aquiline.backends.torch.decoder import load_target
from aquiline.errors import CheckpointError
from aquiline.models.load import read_model_config, resolve
from checkpoints import edit_json, write_target


@pytest.fixture
def broken(target_dir: Path, tmp_path: Path) -> Path:
    """A copy of a good target, to be broken."""
    return Path(shutil.copytree(target_dir, tmp_path / "broken"))


def edit_tensors(directory: Path, edit: Any) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def error(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_target(directory)
    return str(caught.value)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_tensor_with_a_nan_or_an_infinity_is_named(dtype: str, broken: Path) -> None:
    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.5.self_attn.k_proj.weight"][1, 2:5] = float("nan")
        tensors["model.embed_tokens.weight"][9] = float("inf")
        tensors["model.layers.1.input_layernorm.weight"][:2] = torch.tensor([3e38, 3e38])  # finite; their sum is not

    edit_tensors(broken, poison)
    with pytest.raises(CheckpointError) as caught:
        load_target(broken, dtype=dtype)
    message = str(caught.value)
    assert "2 problems" in message and "input_layernorm" not in message
    assert f"embed_tokens.weight holds 48 of {160 * 48} values that are not finite (0 NaN, 48 infinite)" in message
    assert "layers.5.self_attn.k_proj.weight holds 3 of 1536 values that are not finite (3 NaN, 0" in message


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]}, ["gpt_neox", "LlamaForCausalLM"]),
    ({"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequenceClassification", "Qwen3ForCausalLM"]),
    ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
    ({"quantization_config": {"quant_method": "awq"}}, ["quantization_config", "awq", "bfloat16"]),
    ({"num_local_experts": 8}, ["num_local_experts", "8", "mixture"]),
    ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, ["dynamic", "llama3", "yarn"]),
    ({"rope_parameters": None, "rope_scaling": {"type": "longrope"}}, ["longrope", "linear"]),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, ["high_freq_factor", "low_freq_factor"]),
    ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "odd_field": 1}}, ["odd_field"]),
    ({"rope_parameters": {"rope_type": "linear", "factor": "two"}}, ["factor", "two", "number"]),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["flat"]),
    ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5", "1.0"]),
    ({"num_key_value_heads": 3}, ["num_key_value_heads=3", "num_attention_heads=4"]),
    ({"head_dim": 15}, ["head_dim=15", "odd"]),
    ({"hidden_size": "big"}, ["hidden_size", "big"]),
    ({"vocab_size": None}, ["vocab_size", "missing"]),
    ({"eos_token_id": "two"}, ["eos_token_id", "two"]),
    ({"eos_token_id": True}, ["eos_token_id=True", "token id"]),
    ({"eos_token_id": 160}, ["config.json: eos_token_id=160 must be a token id below vocab_size=160"]),
    ({"eos_token_id": [2, 2**31]}, ["eos_token_id=[2, 2147483648]", "below vocab_size=160"]),
    ({"bos_token_id": "<s>"}, ["bos_token_id='<s>'", "token id"]),
    ({"hidden_size": 48.0}, ["hidden_size=48.0", "integer"]),
    ({"num_hidden_layers": 2**31 - 1}, ["num_hidden_layers=2147483647", "at most 4096"]),
    ({"tie_word_embeddings": "false"}, ["tie_word_embeddings='false'", "true or false"]),
    ({"attention_bias": "false"}, ["attention_bias='false'", "true or false"]),
    ({"rms_norm_eps": float("nan")}, ["rms_norm_eps=nan"]),
    ({"rms_norm_eps": -1e-6}, ["rms_norm_eps=-1e-06"]),
    ({"quantization_config": "awq"}, ["quantization_config='awq'", "object"]),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, ["rope_theta=0", "number"]),
    ({"rope_parameters": None, "rope_theta": -1e4}, ["rope_theta=-10000.0", "number"]),
    ({"rope_parameters": None, "rope_theta": True}, ["rope_theta=True", "number"]),
    ({"rope_parameters": None, "rope_theta": float("inf")}, ["rope_theta=inf", "number"]),
    ({"rope_parameters": None, "rope_theta": 0.5}, ["rope_theta=0.5", "above 1"]),
    ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, ["factor=0", "number"]),
    ({"rope_parameters": {"rope_type": "linear", "factor": -2.0}}, ["factor=-2.0", "number"]),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": 0.5}}, ["truncate=0.5", "true or false"]),
    (
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}},
        ["low_freq_factor=4", "below high_freq_factor=4"],
    ),
    ({"rope_parameters": False}, ["rope_parameters=False", "object"]),
]


@pytest.mark.parametrize(("change", "words"), REFUSED, ids=lambda v: next(iter(v)) if isinstance(v, dict) else "")
def test_unsupported_config_is_refused_by_name(change: dict[str, Any], words: list[str], broken: Path) -> None:
    edit_json(broken / "config.json", lambda c: c.update(change))
    message = error(broken)
    assert "config.json" in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("family", "change", "word"),
    [
        ("mistral", {"sliding_window": 16, "layer_types": ["full_attention"] * 8}, "layer_types"),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["full_attention"] * 7}, "layer_types"),
        ("qwen2", {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 8}, "layer_types"),
        ("qwen2", {"use_mrope": True}, "use_mrope"),
        ("qwen3", {"use_sliding_window": True, "layer_types": ["chunked_attention"] * 8}, "chunked_attention"),
        ("mistral", {"attention_bias": True}, "attention_bias"),
        ("qwen3", {"mlp_bias": True}, "mlp_bias"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=true"),
        ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_activation='gelu'; supported is 'gelu_pytorch_tanh'"),
        ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1e4}}, "full_attention and sliding_attention"),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": 1e4}}, "sliding_attention=10000.0 must be an object"),
        ("gemma3_text", {"sliding_window": None}, "layer_types"),
        ("gemma3_text", {"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_family_specific_refusals(family: str, change: dict[str, Any], word: str, tmp_path: Path) -> None:
    write_target(tmp_path, family)
    read_model_config(tmp_path)
    edit_json(tmp_path / "config.json", lambda c: c.update(change))
    with pytest.raises(CheckpointError, match=word):
        read_model_config(tmp_path)


def test_every_tensor_that_does_not_fit_is_listed(broken: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.3.mlp.up_proj.weight"], tensors["lm_head.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
        tensors["model.layers.8.input_layernorm.weight"] = torch.zeros(48)
        tensors["model.norm.weight"] = torch.zeros(47)
        tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(48, 80, dtype=torch.int8)

    edit_tensors(broken, edit)
    message = error(broken)
    assert "6 problems" in message
    for line in (
        "missing tensor model.layers.3.mlp.up_proj.weight [80, 48]",
        "missing tensor lm_head.weight [160, 48]",
        "unexpected tensor model.layers.0.self_attn.q_proj.bias [64]",
        "unexpected tensor model.layers.8.input_layernorm.weight [48]",
        "tensor model.norm.weight has shape [47], the config says [48]",
        "tensor model.layers.1.mlp.down_proj.weight has dtype I8",
    ):
        assert line in message


def test_vocabulary_of_another_size(broken: Path) -> None:
    edit_json(broken / "config.json", lambda c: c.update(vocab_size=161))
    message = error(broken)
    assert "model.embed_tokens.weight has shape [160, 48], the config says [161, 48]" in message
    assert "lm_head.weight has shape [160, 48]" in message


def test_tied_head_that_differs(broken: Path) -> None:
    edit_json(broken / "config.json", lambda c: c.update(tie_word_embeddings=True))
    assert "tie_word_embeddings" in error(broken)


def test_missing_shards_are_named(tmp_path: Path) -> None:
    write_target(tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    shards[1].unlink()
    shards[2].unlink()
    message = error(tmp_path)
    assert shards[1].name in message
    assert shards[2].name in message


@pytest.mark.parametrize("keep", [0, 5, 300, 20_000])
def test_truncated_weights(keep: int, broken: Path) -> None:
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    message = error(broken)
    assert "model.safetensors" in message
    assert "truncated or corrupt" in message


def test_broken_and_missing_json(broken: Path) -> None:
    (broken / "generation_config.json").write_text("{")
    assert "generation_config.json is not valid JSON" in error(broken)
    (broken / "config.json").write_text("[1]")
    assert "config.json holds a JSON list" in error(broken)
    (broken / "config.json").write_text('{"model_type": ')
    assert "config.json is not valid JSON" in error(broken)
    (broken / "config.json").unlink()
    assert "config.json is missing" in error(broken)


def test_no_weights_and_empty_index(broken: Path) -> None:
    (broken / "model.safetensors").unlink()
    assert "has no weights" in error(broken)
    (broken / "model.safetensors.index.json").write_text("{}")
    assert "no weight_map" in error(broken)


def test_neither_a_directory_nor_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="neither a directory nor"):
        resolve(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        resolve(tmp_path / "file")
    assert resolve(str(tmp_path)) == tmp_path

    import huggingface_hub

    def fail(*args: Any, **kwargs: Any) -> str:
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=r"owner/name.*no route"):
        resolve("owner/name")


def test_hub_download_fetches_a_bin_only_where_there_are_no_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: list[list[str]] = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("owner/name") == tmp_path
    assert ["pytorch_model.bin" in patterns for patterns in asked] == [False, True]
    (tmp_path / "model.safetensors").touch()
    resolve("owner/name")
    assert ["pytorch_model.bin" in patterns for patterns in asked] == [False, True, False]
