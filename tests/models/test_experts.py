"""Checkpoints with experts: the same weights from every layout, those that transformers and gguf-py read."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from aquiline.blocks import Array, Weight, floats_of
from aquiline.errors import OutOfMemory
from aquiline.models.counting import read_shape, shape_of
from aquiline.models.files import Tensors
from aquiline.models.gguf.tensors import GGUFTensors
from aquiline.models.load import check_fits, open_tensors, read_model_config, read_target, target_entries
from aquiline.models.model_config import Experts
from aquiline.models.model_weights import ModelWeights, MoeWeights
from aquiline.models.parameters import OF_FILES
from checkpoints import edit_json, write_mxfp4, write_target
from gguf_files import write_gguf_target

LAYOUTS = ("floats", "mxfp4", "qwen3_moe")
E, H, I = 8, 64, 96  # noqa: E741


def write(directory: Path, layout: str) -> None:
    if layout == "mxfp4":
        write_mxfp4(directory)
    else:
        write_target(directory, "gpt_oss" if layout == "floats" else layout, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of every layout."""
    folder = tmp_path_factory.mktemp("experts")
    for layout in LAYOUTS:
        write(folder / layout, layout)
    return {layout: folder / layout for layout in LAYOUTS}


@pytest.fixture(scope="module")
def twins(places: dict[str, Path]) -> dict[str, Path]:
    """Their weights as GGUF files, floats as F32 and packed experts as they are."""
    for place in places.values():
        write_gguf_target(place.with_suffix(".gguf"), place)
    return {layout: place.with_suffix(".gguf") for layout, place in places.items()}


def moe_of(weights: ModelWeights, layer: int) -> MoeWeights:
    mlp = weights.layers[layer].mlp
    assert isinstance(mlp, MoeWeights)
    return mlp


def test_what_the_configs_say(places: dict[str, Path]) -> None:
    gpt_oss, qwen = read_model_config(places["mxfp4"]), read_model_config(places["qwen3_moe"])
    assert gpt_oss.experts == Experts(E, 4, has_bias=True)
    assert (gpt_oss.activation, gpt_oss.activation_limit) == ("clamped", 7.0)
    assert (gpt_oss.family, gpt_oss.windows, gpt_oss.sinks) == ("gpt_oss", (8, 0, 8, 0), True)
    assert (gpt_oss.qkv_bias, gpt_oss.o_bias, gpt_oss.mlp_bias, gpt_oss.qk_norm) == (True, True, False, False)
    assert (gpt_oss.rope.kind, gpt_oss.rope.parameters["truncate"]) == ("yarn", 0.0)
    assert qwen.experts == Experts(E, 4)
    assert (qwen.family, qwen.windows, qwen.sinks, qwen.intermediate_size) == ("qwen3_moe", (), False, I)
    assert (qwen.qkv_bias, qwen.o_bias, qwen.qk_norm) == (False, False, True)
    assert read_model_config(places["floats"]) == gpt_oss


@pytest.mark.parametrize(
    ("layout", "change", "field", "expected"),
    [
        ("floats", {"layer_types": None}, "windows", (8, 0, 8, 0)),
        ("floats", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "windows", (0, 0, 0, 8)),
        ("floats", {"layer_types": None, "sliding_window": "absent"}, "windows", (128, 0, 128, 0)),
        ("floats", {"attention_bias": False}, "qkv_bias", False),
        ("floats", {"attention_bias": None}, "o_bias", True),
        ("floats", {"swiglu_limit": None}, "activation_limit", 7.0),
        ("floats", {"swiglu_limit": 5}, "activation_limit", 5.0),
        ("floats", {"num_experts_per_tok": None, "experts_per_token": 3}, "experts", Experts(E, 3, True)),
        ("qwen3_moe", {"norm_topk_prob": False}, "experts", Experts(E, 4, over_all=True)),
        ("qwen3_moe", {"norm_topk_prob": None}, "experts", Experts(E, 4, over_all=True)),
        ("qwen3_moe", {"num_local_experts": None, "num_experts": E}, "experts", Experts(E, 4)),
        ("qwen3_moe", {"attention_bias": True}, "o_bias", True),
        ("qwen3_moe", {"sliding_window": 16}, "windows", ()),
    ],
)
def test_other_configs(
    layout: str, change: dict[str, Any], field: str, expected: object, places: dict[str, Path], tmp_path: Path
) -> None:
    fields = json.loads((places[layout] / "config.json").read_text()) | change
    fields = {name: value for name, value in fields.items() if value != "absent"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert getattr(read_model_config(tmp_path), field) == expected


def test_a_rotation_that_no_config_names_is_the_familys(places: dict[str, Path], tmp_path: Path) -> None:
    from transformers import GptOssConfig

    fields = json.loads((places["floats"] / "config.json").read_text())
    del fields["rope_parameters"]
    for own in ({}, {"rope_theta": 5e5}):
        (tmp_path / "config.json").write_text(json.dumps(fields | own))
        theirs = dict(GptOssConfig(**own).rope_parameters)
        rope = read_model_config(tmp_path).rope
        assert (rope.theta, rope.kind) == (theirs.pop("rope_theta"), theirs.pop("rope_type"))
        assert rope.parameters == theirs


def test_ends_are_those_of_the_generation_config_too(places: dict[str, Path], tmp_path: Path) -> None:
    """As gpt-oss ships: <|return|> in the config, <|return|>, <|endoftext|> and <|call|> beside it, and no <|end|>."""
    shutil.copytree(places["mxfp4"], tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / "config.json", lambda c: c.update(eos_token_id=92))
    edit_json(tmp_path / "generation_config.json", lambda c: c.update(eos_token_id=[92, 89, 94]))
    assert read_model_config(tmp_path).eos_token_ids == (92, 89, 94)


def expected_experts(layout: str, tensors: dict[str, torch.Tensor], layer: int, expert: int) -> list[torch.Tensor]:
    """gate_up [2 I, H] and down [H, I] of one expert, from a checkpoint of floats."""
    own = f"model.layers.{layer}.mlp.experts"
    if layout == "qwen3_moe":
        gate, up, down = (tensors[f"{own}.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return [torch.cat([gate, up]), down]
    fused = tensors[f"{own}.gate_up_proj"][expert]
    return [torch.cat([fused[:, ::2], fused[:, 1::2]], 1).T, tensors[f"{own}.down_proj"][expert].T]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
@pytest.mark.parametrize("layout", ["floats", "qwen3_moe"])
def test_experts_of_floats(layout: str, dtype: str, places: dict[str, Path]) -> None:
    tensors = load_file(places[layout] / "model.safetensors")
    weights = read_target(places[layout], dtype=dtype)
    for layer in (0, 3):
        moe = moe_of(weights, layer)
        assert len(moe.gate_up) == len(moe.down) == E
        for expert in range(E):
            for found, expected in zip(
                (moe.gate_up[expert], moe.down[expert]), expected_experts(layout, tensors, layer, expert), strict=True
            ):
                assert found.kind == ("float32" if dtype == "float32" else "bfloat16")
                assert np.array_equal(found.dequantised(), expected.float().numpy())
        router = tensors[f"model.layers.{layer}.mlp.{'gate' if layout == 'qwen3_moe' else 'router'}.weight"]
        assert np.array_equal(floats_of(moe.router).astype(np.float32), router.float().numpy())


def test_biases_and_sinks(places: dict[str, Path]) -> None:
    tensors = load_file(places["mxfp4"] / "model.safetensors")
    weights = read_target(places["mxfp4"], dtype="float32")
    moe, own = moe_of(weights, 2), "model.layers.2"
    fused = tensors[f"{own}.mlp.experts.gate_up_proj_bias"].float().numpy()
    assert moe.gate_up_bias is not None and moe.down_bias is not None and moe.router_bias is not None
    assert np.array_equal(moe.gate_up_bias, np.concatenate([fused[:, ::2], fused[:, 1::2]], 1))
    assert np.array_equal(moe.down_bias, tensors[f"{own}.mlp.experts.down_proj_bias"].float().numpy())
    assert np.array_equal(moe.router_bias, tensors[f"{own}.mlp.router.bias"].float().numpy())
    sinks = weights.layers[2].attention.sinks
    assert sinks is not None and np.array_equal(sinks, tensors[f"{own}.self_attn.sinks"].float().numpy())


def assert_same(found: ModelWeights, expected: ModelWeights) -> None:
    assert found.config == expected.config
    for (name, own), (other_name, other) in zip(found.named(), expected.named(), strict=True):
        assert name == other_name
        pairs = zip(own, other, strict=True) if isinstance(own, tuple) else [(own, other)]
        for one, two in pairs:
            if isinstance(one, Weight):
                assert (one.kind, one.shape) == (two.kind, two.shape), name
            a, b = (each.values if isinstance(each, Weight) else each for each in (one, two))
            assert a.dtype == b.dtype and np.array_equal(a.view(np.uint8), b.view(np.uint8)), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int4"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gguf_file_is_its_checkpoint(
    layout: str, dtype: str, places: dict[str, Path], twins: dict[str, Path]
) -> None:
    assert_same(read_target(twins[layout], dtype=dtype), read_target(places[layout], dtype=dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int8", "int4", "packed"])
def test_packed_experts_stay_packed(dtype: str, places: dict[str, Path], twins: dict[str, Path]) -> None:
    packed = read_target(twins["mxfp4"], dtype="packed")
    for place in (places["mxfp4"], twins["mxfp4"]):
        weights = read_target(place, dtype=dtype)
        for layer in range(4):
            own, other = moe_of(weights, layer), moe_of(packed, layer)
            for one, two in zip(own.gate_up + own.down, other.gate_up + other.down, strict=True):
                assert one.kind == two.kind == "MXFP4"
                assert np.array_equal(one.values, two.values)
    own_floats = {"packed": "bfloat16", "int8": "bfloat16", "int4": "bfloat16"}
    assert read_target(places["mxfp4"], dtype=dtype).embed[0].kind == own_floats.get(dtype, dtype)


def test_packed_experts_are_those_that_transformers_dequantises(places: dict[str, Path]) -> None:
    from transformers import GptOssForCausalLM, Mxfp4Config

    config = Mxfp4Config(dequantize=True)
    model = GptOssForCausalLM.from_pretrained(
        places["mxfp4"], quantization_config=config, dtype=torch.bfloat16, trust_remote_code=False
    )
    tensors = model.state_dict()
    weights = read_target(places["mxfp4"])
    for layer in range(4):
        moe = moe_of(weights, layer)
        for expert in range(E):
            gate_up, down = expected_experts("floats", tensors, layer, expert)
            assert np.array_equal(moe.gate_up[expert].dequantised(), gate_up.float().numpy())
            assert np.array_equal(moe.down[expert].dequantised(), down.float().numpy())
    assert np.array_equal(floats_of(weights.embed).astype(np.float32), model.get_input_embeddings().weight.float())


@pytest.mark.parametrize("kinds", [("Q8_0", "Q8_0", "Q4_0"), ("Q8_0", "Q4_1", "MXFP4"), ("F16", "F16", "BF16")])
def test_blocks_of_other_types(kinds: tuple[str, str, str], places: dict[str, Path], tmp_path: Path) -> None:
    """Experts of one type stay in its blocks; where gate and up differ they become floats."""
    table = dict(zip(("gate_proj", "up_proj", "down_proj"), kinds, strict=True))
    file = tmp_path / "model.gguf"
    held = write_gguf_target(file, places["qwen3_moe"], kind=lambda name: table.get(name.split(".")[-2], "F32"))
    moe, exact = (moe_of(read_target(file, dtype=dtype), 1) for dtype in ("packed", "float32"))
    gate, up, down = (held[f"model.layers.1.mlp.experts.{name}.weight"] for name in table)
    stored = {"F16": "float16", "BF16": "bfloat16"}
    for expert in range(E):
        assert moe.gate_up[expert].kind == (stored.get(kinds[0], kinds[0]) if kinds[0] == kinds[1] else "float32")
        assert moe.down[expert].kind == stored.get(kinds[2], kinds[2])
        for each in (moe, exact):
            assert np.array_equal(each.gate_up[expert].dequantised(), np.concatenate([gate[expert], up[expert]]))
            assert np.array_equal(each.down[expert].dequantised(), down[expert])


@pytest.mark.parametrize("layout", ["floats", "mxfp4"])
@pytest.mark.parametrize("is_twin", [False, True])
def test_an_expert_is_read_alone(
    layout: str, is_twin: bool, places: dict[str, Path], twins: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = read_target((twins if is_twin else places)[layout])
    asked: list[int | None] = []
    source = GGUFTensors if is_twin else Tensors
    name = "_rows" if is_twin else "get"
    plain = getattr(source, name)

    def recorded(self: object, tensor: object, index: int | None = None) -> Array:
        found: Array = plain(self, tensor, index)
        asked.append(index)
        return found

    monkeypatch.setattr(source, name, recorded)
    moe = moe_of(weights, 1)
    _ = moe.gate_up[5].values, moe.down[5].values
    assert set(asked) == {5}


def test_counts(places: dict[str, Path], twins: dict[str, Path]) -> None:
    for layout in LAYOUTS:
        config = read_model_config(places[layout])
        shape = read_shape(places[layout])
        assert shape_of(config, shape.body.precision.name) == shape
        assert replace(read_shape(twins[layout]), body=shape.body) == shape
    for layout in ("floats", "qwen3_moe"):
        tensors = load_file(places[layout] / "model.safetensors")
        assert read_shape(places[layout]).num_parameters == sum(tensor.numel() for tensor in tensors.values())


def memory_asked(checkpoints: dict[Path, str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The free bytes with which the check passes, and with one less does not."""
    low, high = 0, 2**40
    while low + 1 < high:
        middle = (low + high) // 2
        monkeypatch.setattr(psutil, "virtual_memory", lambda free=middle: type("Memory", (), {"available": free}))
        try:
            check_fits({open_tensors(place): dtype for place, dtype in checkpoints.items()})
            high = middle
        except OutOfMemory:
            low = middle
    return high


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "packed"])
def test_memory_counts_packed_experts_as_bytes(
    dtype: str, places: dict[str, Path], twins: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = load_file(places["mxfp4"] / "model.safetensors")
    size = 4 if dtype == "float32" else 2
    sizes = {name: t.numel() * (1 if t.dtype == torch.uint8 else size) for name, t in tensors.items()}
    embedding = 96 * H * size
    assert memory_asked({places["mxfp4"]: dtype}, monkeypatch) == sum(sizes.values()) + embedding
    expected = twins["mxfp4"].stat().st_size if dtype == "packed" else sum(sizes.values())
    found = memory_asked({twins["mxfp4"]: dtype}, monkeypatch)
    assert found == expected + (96 * H * 4 if dtype == "packed" else embedding)  # F32 in the file


def test_memory_beside_experts_of_floats_is_one_experts(
    places: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = load_file(places["floats"] / "model.safetensors")
    expected = 2 * sum(tensor.numel() for tensor in tensors.values()) + 2 * 2 * I * H
    assert memory_asked({places["floats"]: "int8"}, monkeypatch) == expected


GPT_OSS_20B = {
    "num_hidden_layers": 24, "num_local_experts": 32, "vocab_size": 201088, "hidden_size": 2880,
    "intermediate_size": 2880, "head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "sliding_window": 128, "layer_types": None,
}  # fmt: skip


class PackedNames:
    """A source that has blocks, for the weight map alone."""

    path = Path("none")
    names = ("x_proj_blocks",)


def test_gpt_oss_20b_fits_into_20_gib(places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of its real shapes, which holds nothing and takes no space on the disk."""
    (tmp_path / "config.json").write_bytes((places["mxfp4"] / "config.json").read_bytes())
    edit_json(tmp_path / "config.json", lambda c: c.update(GPT_OSS_20B))
    config = read_model_config(tmp_path)
    header, at = {}, 0
    for entry in target_entries(config, PackedNames()):  # type: ignore[arg-type]
        kind = "BF16" if entry.holds == "floats" else "U8"
        size = math.prod(entry.shape) * (OF_FILES[kind].itemsize if kind == "BF16" else 1)
        header[entry.source] = {"dtype": kind, "shape": entry.shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    weights = read_target(tmp_path, dtype="int8")
    assert moe_of(weights, 23).gate_up[31].num_bytes == 2 * 2880 * 90 * 17
    for dtype in ("bfloat16", "int8", "int4", "packed"):
        needed = memory_asked({tmp_path: dtype}, monkeypatch)
        assert needed == at + 2 * 201088 * 2880
        assert 13 * 2**30 < needed < 20 * 2**30
