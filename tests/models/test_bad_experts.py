"""Broken and unsupported checkpoints with experts: every message names the field or the tensor, and what is wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aquiline.blocks import MXFP4_LARGEST, Weight
from aquiline.errors import CheckpointError
from aquiline.models.gguf.reader import read_gguf
from aquiline.models.load import read_model_config, read_target
from checkpoints import edit_json, write_mxfp4, write_target
from gguf_files import write_gguf_target


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sound")
    write_mxfp4(folder / "mxfp4", num_hidden_layers=2)
    for family in ("gpt_oss", "qwen3_moe"):
        write_target(folder / family, family, num_hidden_layers=2)
    return {name: folder / name for name in ("mxfp4", "gpt_oss", "qwen3_moe")}


@pytest.fixture
def broken(places: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a sound checkpoint, to be broken."""
    return lambda name: Path(shutil.copytree(places[name], tmp_path / name))


def error(place: Path, dtype: str = "bfloat16") -> str:
    """The message with which a checkpoint is refused, at once or when its weights are read."""
    with pytest.raises(CheckpointError) as caught:
        for _, parts in read_target(place, dtype=dtype).named():
            for part in parts:
                _ = part.values if isinstance(part, Weight) else part
    assert str(place) in str(caught.value)
    return str(caught.value)


def edit_tensors(directory: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha=1.5; supported is 1.702"),
    ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit=0 must be a number"),
    ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act='gelu'; supported is 'silu'"),
    ("gpt_oss", {"mlp_bias": True}, "mlp_bias=true adds biases that gpt_oss does not have here"),
    ("gpt_oss", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 exceeds num_local_experts=8"),
    ("qwen3_moe", {"num_local_experts": 2**31 - 1}, "num_local_experts=2147483647 must be a positive integer, at most"),
    ("gpt_oss", {"num_local_experts": None}, "num_local_experts is missing"),
    ("gpt_oss", {"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
    ("gpt_oss", {"sliding_window": None, "layer_types": None}, "sliding_window is null"),
    ("gpt_oss", {"sliding_window": None}, "layer_types="),
    ("gpt_oss", {"layer_types": ["chunked_attention"] * 2}, "layer_types=['chunked_attention', 'chunked_attention']"),
    ("gpt_oss", {"quantization_config": {"quant_method": "awq"}}, "quantization_config (quant_method='awq')"),
    ("mxfp4", {"quantization_config": {"bits": 4}}, "quantization_config (quant_method='unknown')"),
    ("mxfp4", {"quantization_config": {"quant_method": ["mxfp4"]}}, "quantization_config (quant_method=['mxfp4'])"),
    ("qwen3_moe", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config (quant_method='mxfp4')"),
    ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers=[1] is not supported beside experts"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported beside experts"),
    ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window=True is not supported beside experts"),
    ("qwen3_moe", {"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
    ("qwen3_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob='yes' must be true or false"),
    ("qwen3_moe", {"model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"]}, "model_type='qwen2_moe'"),
    ("gpt_oss", {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}, "model_type='mixtral'"),
    (
        "qwen3_moe",
        {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
        "num_local_experts=8; mixture-of-exp",
    ),
]


@pytest.mark.parametrize(
    ("name", "change", "words"), REFUSED, ids=lambda v: next(iter(v)) if isinstance(v, dict) else ""
)
def test_configs_are_refused_by_name(
    name: str, change: dict[str, Any], words: str, broken: Callable[[str], Path]
) -> None:
    place = broken(name)
    read_model_config(place)
    edit_json(place / "config.json", lambda c: c.update(change))
    assert words in error(place)


def test_every_tensor_that_does_not_fit_is_listed(broken: Callable[[str], Path]) -> None:
    place, own = broken("mxfp4"), "model.layers.0.mlp.experts"

    def edit(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{own}.gate_up_proj_scales"], tensors["model.layers.1.self_attn.sinks"]
        tensors[f"{own}.gate_up_proj"] = torch.zeros(8, 64, 192)
        tensors[f"{own}.down_proj_scales"] = torch.zeros(8, 64, 2, dtype=torch.uint8)
        tensors[f"{own}.down_proj_blocks"] = torch.zeros(8, 64, 3, 16, dtype=torch.int8)
        tensors[f"{own}.down_proj_bias"] = torch.zeros(8, 64, dtype=torch.uint8)

    edit_tensors(place, edit)
    message = error(place)
    assert "6 problems" in message
    for line in (
        f"missing tensor {own}.gate_up_proj_scales [8, 192, 2]",
        "missing tensor model.layers.1.self_attn.sinks [4]",
        f"unexpected tensor {own}.gate_up_proj [8, 64, 192]",
        f"tensor {own}.down_proj_scales has shape [8, 64, 2], the config says [8, 64, 3]",
        f"tensor {own}.down_proj_blocks has dtype I8; U8, uint8 are read",
        f"tensor {own}.down_proj_bias has dtype U8; F32",
    ):
        assert line in message


def test_a_missing_stack_and_a_missing_expert(broken: Callable[[str], Path]) -> None:
    place = broken("gpt_oss")
    edit_tensors(place, lambda tensors: tensors.pop("model.layers.1.mlp.experts.down_proj"))
    message = error(place)
    assert "1 problem)" in message and "missing tensor model.layers.1.mlp.experts.down_proj [8, 96, 64]" in message
    place = broken("qwen3_moe")
    edit_tensors(place, lambda tensors: tensors.pop("model.layers.1.mlp.experts.7.up_proj.weight"))
    assert "missing tensor model.layers.1.mlp.experts.7.up_proj.weight [96, 64]" in error(place)
    edit_json(place / "config.json", lambda c: c.update(num_local_experts=6))
    message = error(place)
    assert "unexpected tensor model.layers.0.mlp.experts.6.down_proj.weight [64, 96]" in message
    assert "tensor model.layers.0.mlp.gate.weight has shape [8, 64], the config says [6, 64]" in message


def test_packed_is_for_checkpoints_with_blocks(places: dict[str, Path]) -> None:
    for name in ("gpt_oss", "qwen3_moe"):
        assert "dtype='packed' is for .gguf files and experts in MXFP4" in error(places[name], "packed")


@pytest.mark.parametrize("dtype", ["float32", "packed"])
def test_scales_that_float32_cannot_hold_are_named(dtype: str, broken: Callable[[str], Path], tmp_path: Path) -> None:
    place, own = broken("mxfp4"), "model.layers.{}.mlp.experts.{}_proj_scales"

    def poison(tensors: dict[str, Tensor], scale: int) -> None:
        tensors[own.format(0, "gate_up")][3, 7, 1] = scale
        tensors[own.format(1, "down")][5, 0, 2] = scale

    edit_tensors(place, lambda tensors: poison(tensors, MXFP4_LARGEST))
    for _, parts in read_target(place, dtype=dtype).named():
        assert all(np.isfinite(part.dequantised()).all() for part in parts if isinstance(part, Weight))
    edit_tensors(place, lambda tensors: poison(tensors, MXFP4_LARGEST + 1))
    message = error(place, dtype)
    assert "2 problems" in message
    for name in (f"{own.format(0, 'gate_up')}[3]", f"{own.format(1, 'down')}[5]"):
        assert f"tensor {name} has scales that are not finite: download it again" in message
    write_gguf_target(tmp_path / "model.gguf", place)
    message = error(tmp_path / "model.gguf", dtype)
    assert "2 problems" in message
    for name in ("model.layers.0.mlp.experts.up_proj.weight[3]", "model.layers.1.mlp.experts.down_proj.weight[5]"):
        assert f"tensor {name} has scales that are not finite: download it again" in message


def test_experts_that_are_not_finite_are_named(broken: Callable[[str], Path]) -> None:
    place = broken("gpt_oss")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    edit_tensors(place, lambda tensors: tensors[name].__setitem__((2, 0, slice(0, 3)), float("nan")))
    message = error(place)
    assert "1 problem)" in message
    assert f"tensor {name}[2] holds 3 of {192 * 64} values that are not finite (3 NaN, 0 infinite)" in message


def test_rows_that_are_no_whole_blocks(broken: Callable[[str], Path]) -> None:
    place = broken("mxfp4")
    edit_json(place / "config.json", lambda c: c.update(intermediate_size=80))
    assert "intermediate_size=80; experts in MXFP4 need a multiple of 32" in error(place)


@pytest.mark.parametrize("keep", [5, 300, 40_000])
def test_truncated_weights(keep: int, broken: Callable[[str], Path]) -> None:
    file = broken("mxfp4") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "model.safetensors is truncated or corrupt" in error(file.parent)


GGUF_REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mxfp4", {".expert_count": 0}, "gpt-oss.expert_count=0 must be a positive integer"),
    ("mxfp4", {".expert_used_count": 9}, "num_experts_per_tok=9 exceeds num_local_experts=8"),
    ("mxfp4", {".attention.sliding_window": True}, "gpt-oss.attention.sliding_window=True must be a positive integer"),
    ("mxfp4", {".expert_shared_count": 1}, "gpt-oss.expert_shared_count=1: not supported"),
    ("qwen3_moe", {".expert_weights_norm": False}, "qwen3moe.expert_weights_norm=False: not supported"),
    ("qwen3_moe", {".attention.sliding_window": 8}, "qwen3moe.attention.sliding_window=8: not supported"),
    (
        "qwen3_moe",
        {".expert_feed_forward_length": 64},
        "mlp.experts.up_proj.weight has shape [8, 96, 64], the config say",
    ),
]


@pytest.mark.parametrize(("name", "fields", "words"), GGUF_REFUSED)
def test_metadata_are_refused_by_name(
    name: str, fields: dict[str, Any], words: str, places: dict[str, Path], tmp_path: Path
) -> None:
    write_gguf_target(tmp_path / "model.gguf", places[name], fields=fields)
    assert words in error(tmp_path / "model.gguf")


def test_tensors_and_fields_that_a_file_lacks(places: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    drop = ("blk.0.ffn_gate_exps.bias", "blk.1.attn_sinks.weight", "blk.1.ffn_gate_inp.weight")
    extra = {"blk.0.ffn_norm.weight": np.zeros(64, np.float32), "blk.0.ffn_up.weight": np.zeros((96, 64), np.float32)}
    write_gguf_target(file, places["mxfp4"], drop=drop, extra=extra)
    message = error(file)
    assert "5 problems" in message
    for line in (
        "missing tensor model.layers.0.mlp.experts.gate_proj.bias [8, 96]",
        "missing tensor model.layers.1.self_attn.sinks [4]",
        "missing tensor model.layers.1.mlp.router.weight [8, 64]",
        "unexpected tensor blk.0.ffn_norm.weight [64]",
        "unexpected tensor blk.0.ffn_up.weight [96, 64]",
    ):
        assert line in message
    own, other = b"gpt-oss.expert_used_count", b"general.expert_used_coun_"
    write_gguf_target(file, places["mxfp4"])
    file.write_bytes(file.read_bytes().replace(own, other))
    assert "gpt-oss.expert_used_count is missing" in error(file)


def test_a_truncated_file(places: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf_target(file, places["mxfp4"])
    data, last = file.read_bytes(), max(info.start + info.num_bytes for info in read_gguf(file).tensors.values())
    for keep in (30, 2000, last // 2, last - 1):
        file.write_bytes(data[:keep])
        assert "truncated or corrupt" in error(file)
