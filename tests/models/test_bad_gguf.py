"""Broken and unsupported GGUF files: every message names the file, the field and the value."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from aquiline.backends.torch.decoder import load_target
from aquiline.backends.torch.eagle import load_draft
from aquiline.errors import CheckpointError
from aquiline.models.draft_config import read_draft_config
from aquiline.models.gguf.tensors import TYPES
from aquiline.models.load import read_model_config
from checkpoints import write_target
from gguf_files import Vocabulary, finish, write_gguf_target


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_target(directory, num_hidden_layers=2)
    return directory


def error(file: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_target(file)
    message = str(caught.value)
    assert str(file) in message
    return message


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({".expert_count": 8, ".expert_used_count": 2}, ["llama.expert_count=8", "mixture-of-experts"]),
    ({".attention.sliding_window": 4096}, ["llama.attention.sliding_window=4096", "not supported"]),
    ({".logit_scale": 0.5, ".embedding_scale": 2.0}, ["llama.embedding_scale=2.0, llama.logit_scale=0.5"]),
    ({".attention.causal": False}, ["llama.attention.causal=False"]),
    ({".attention.value_length": 8}, ["llama.attention.value_length=8", "16"]),
    ({".rope.dimension_count": 8}, ["llama.rope.dimension_count=8", "16"]),
    ({".rope.scaling.type": "longrope"}, ["llama.rope.scaling.type='longrope'", "yarn"]),
    ({".rope.scaling.attn_factor": 1.5}, ["attn_factor=1.5", "yarn alone"]),
    ({".rope.scaling.yarn_log_multiplier": 0.1}, ["yarn_log_multiplier"]),
    ({".rope.scaling.type": "yarn", ".rope.scaling.factor": "two"}, ["llama.rope.scaling.factor='two'", "number"]),
    ({".block_count": [2, 2]}, ["llama.block_count=[2, 2]", "positive integer"]),
    ({".attention.head_count_kv": 3}, ["num_key_value_heads=3"]),
    ({".rope.scaling.type": "yarn", ".rope.scaling.factor": -2.0}, ["rope.scaling.factor=-2.0", "negative"]),
    ({".rope.freq_base": True}, ["llama.rope.freq_base=True", "finite number"]),
    ({"split.count": "two"}, ["split.count=two"]),
    ({"tokenizer.ggml.eot_token_id": 160}, ["eos_token_id=[2, 160] must be a token id below vocab_size=160"]),
    ({"tokenizer.ggml.padding_token_id": True}, ["tokenizer.ggml.padding_token_id=True must be a token id"]),
    ({".block_count": True}, ["llama.block_count=True must be a positive integer"]),
    ({"split.count": 3}, ["split.count=3", "llama-gguf-split --merge"]),
    ({"general.architecture": "gemma2"}, ["general.architecture='gemma2'", "llama, qwen2, qwen3"]),
    ({"general.architecture": "gemma3"}, ["gemma3.embedding_length is missing"]),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED, ids=lambda v: next(iter(v)) if isinstance(v, dict) else "")
def test_unsupported_metadata_is_refused_by_name(
    fields: dict[str, Any], words: list[str], checkpoint: Path, tmp_path: Path
) -> None:
    write_gguf_target(tmp_path / "model.gguf", checkpoint, fields=fields)
    message = error(tmp_path / "model.gguf")
    for word in words:
        assert word in message


def test_missing_metadata_are_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    finish(writer)
    assert "llama.embedding_length is missing" in error(tmp_path / "model.gguf")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    finish(writer)
    assert "tokenizer.ggml.tokens must be a list of strings, and it is missing" in error(tmp_path / "model.gguf")


def test_every_tensor_that_does_not_fit_is_listed(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    extra = {
        "blk.0.attn_q.bias": np.zeros(64, np.float32),
        "blk.2.attn_norm.weight": np.zeros(48, np.float32),
        "blk.1.attn_sinks.weight": np.zeros(4, np.float32),
        "output_norm.weight": np.zeros(47, np.float32),
        "blk.0.ffn_down.weight": np.zeros((48, 80), np.int8),
    }
    drop = ("blk.1.ffn_up.weight", "output_norm.weight", "blk.0.ffn_down.weight")
    write_gguf_target(file, checkpoint, extra=extra, drop=drop)
    message = error(file)
    assert "6 problems" in message
    for line in (
        "missing tensor model.layers.1.mlp.up_proj.weight [80, 48]",
        "unexpected tensor model.layers.0.self_attn.q_proj.bias [64]",
        "unexpected tensor model.layers.2.input_layernorm.weight [48]",
        "unexpected tensor blk.1.attn_sinks.weight [4]",
        "tensor model.norm.weight has shape [47], the config says [48]",
        f"tensor model.layers.0.mlp.down_proj.weight has dtype I8; {', '.join(TYPES)} are read",
    ):
        assert line in message


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.IQ2_XXS, gguf.GGMLQuantizationType.Q2_K, 97])
def test_types_are_refused_by_name(kind: int, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    write_target(tmp_path / "hf", **sizes)
    file = tmp_path / "model.gguf"
    write_gguf_target(file, tmp_path / "hf", kind=lambda name: "Q8_0" if "down_proj" in name else "F32")
    data = file.read_bytes()
    at = data.index(b"blk.0.ffn_down.weight") + len(b"blk.0.ffn_down.weight") + 4 + 16
    assert struct.unpack_from("<I", data, at) == (gguf.GGMLQuantizationType.Q8_0,)
    file.write_bytes(data[:at] + struct.pack("<I", kind) + data[at + 4 :])
    name = kind.name if isinstance(kind, gguf.GGMLQuantizationType) else "number 97"
    assert f"model.layers.0.mlp.down_proj.weight has dtype {name}; F32, F16" in error(file)


def test_values_that_are_not_finite(checkpoint: Path, tmp_path: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
    poisoned = tmp_path / "poisoned"
    shutil.copytree(checkpoint, poisoned)
    save_file(tensors, poisoned / "model.safetensors", metadata={"format": "pt"})
    write_gguf_target(tmp_path / "model.gguf", poisoned)
    message = error(tmp_path / "model.gguf")
    assert "model.layers.1.mlp.down_proj.weight holds 1 of" in message and "(1 NaN, 0 infinite)" in message


def test_factors_that_do_not_fit(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf_target(file, checkpoint, extra={"rope_freqs.weight": np.ones(7, np.float32)})
    assert "rope_freqs.weight is F32 [7]; expected F32 [8]" in error(file)
    write_gguf_target(file, checkpoint, extra={"rope_freqs.weight": np.zeros(8, np.float32)})
    assert "rope_freqs.weight holds 0.0; factors are positive numbers" in error(file)
    scaling = {".rope.scaling.type": "linear", ".rope.scaling.factor": 2.0}
    write_gguf_target(file, checkpoint, extra={"rope_freqs.weight": np.ones(8, np.float32)}, fields=scaling)
    assert "rope_freqs.weight beside llama.rope.scaling.type='linear'" in error(file)


def test_special_ids_and_lists_of_another_kind(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf_target(file, checkpoint, vocabulary=Vocabulary("none", others={"ggml.eot_token_id": "<|im_end|>"}))
    assert "tokenizer.ggml.eot_token_id='<|im_end|>' must be a token id" in error(file)
    write_gguf_target(file, checkpoint, vocabulary=Vocabulary("none", None, ["a", "b"], [1]))
    assert "tokenizer.ggml.token_type must be a list of 2 numbers, and it is a list of 1" in error(file)


def test_truncated_and_corrupt_files(checkpoint: Path, tmp_path: Path) -> None:
    """Cut anywhere: in the header, the metadata, the list of tensors, the tensors."""
    file = tmp_path / "model.gguf"
    write_gguf_target(file, checkpoint, vocabulary=Vocabulary("none", None, [f"t{i}" for i in range(160)]))
    data = file.read_bytes()
    for keep in [0, 3, 7, 20, 30, *range(40, 4000, 61), len(data) // 2, len(data) - 1]:
        file.write_bytes(data[:keep])
        message = error(file)
        assert "truncated or corrupt" in message or "is no GGUF file" in message
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 2**63))
    assert "truncated or corrupt" in error(file)
    file.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"x" + struct.pack("<I", 77))
    assert "metadata of type 77" in error(file)
    alignment = struct.pack("<Q17sII", 17, b"general.alignment", 4, 0)
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + alignment)
    assert "general.alignment=0" in error(file)
    file.write_bytes(b"safetensors")
    assert "is no GGUF file" in error(file)
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    assert "version 1" in error(file)
    file.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    assert "big-endian" in error(file)


def test_a_target_in_gguf_is_no_draft(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "draft.gguf"
    write_gguf_target(file, checkpoint)
    target = load_target(checkpoint)
    for read in (lambda: read_draft_config(file, checkpoint), lambda: load_draft(tmp_path, target)):
        with pytest.raises(
            CheckpointError, match=r"draft\.gguf: this is no draft: .*general\.architecture='llama' is a target's"
        ):
            read()
    assert read_model_config(file).num_layers == 2
