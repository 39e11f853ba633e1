"""Shapes against models that exist: every count equals that of the modules themselves, or the published one."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.bench.published import (
    GPT_OSS_20B,
    GPT_OSS_120B,
    LLAMA_8B,
    LLAMA_8B_HEAD,
    MIXTRAL_8X7B,
    QWEN3_30B_A3B,
    QWEN_7B,
    write_config,
)
from tests.checkpoints import SMALL, write_draft, write_target
from tests.conftest import TINY, TINY_DRAFT, tiny_pair
from tests.json_values import ANY_JSON

from aquiline.errors import CheckpointError
from aquiline.models.counting import assumed_draft, draft_shape_of, read_draft_shape, read_shape, shape_of
from aquiline.models.draft_config import read_draft_config
from aquiline.models.known_pairs import BUNDLED_DRAFT, BUNDLED_TARGET
from aquiline.models.load import read_model_config
from aquiline.models.shape import Matrix, Storage, precision_of

QWEN_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied and biased": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "qwen2_moe": (
        "Qwen2Moe",
        QWEN_MOE | {"shared_expert_intermediate_size": 80, "mlp_only_layers": [1], "decoder_sparse_step": 2},
    ),
    "qwen3_moe": ("Qwen3Moe", QWEN_MOE),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": ("Gemma2", {}),
    "gemma3_text": ("Gemma3", {}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_those_of_the_transformers_model(name: str, tmp_path: Path) -> None:
    base, overrides = FAMILIES[name]
    config_class = getattr(transformers, base + ("TextConfig" if base == "Gemma3" else "Config"))
    config = config_class(**SMALL | {"hidden_size": 64} | overrides)
    with torch.device("meta"):
        model = getattr(transformers, f"{base}ForCausalLM")(config)
    config.save_pretrained(tmp_path)
    shape = read_shape(tmp_path)
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    assert not shape.assumptions
    wanted = [kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or []]
    if wanted:
        assert [layer.attention.window > 0 for layer in shape.body.layers] == wanted


@pytest.mark.parametrize(
    ("fields", "total_b", "active_b"),
    [
        (LLAMA_8B, 8.03, 7.50),
        (GPT_OSS_120B, 116.83, 5.13),
        (GPT_OSS_20B, 20.91, 3.61),
        (MIXTRAL_8X7B, 46.70, 12.75),  # 12.88 with the embedding, as its authors count
        (QWEN3_30B_A3B, 30.53, 3.04),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else None,
)
def test_published_parameter_counts(fields: dict[str, Any], total_b: float, active_b: float, tmp_path: Path) -> None:
    shape = read_shape(write_config(tmp_path, fields))
    assert shape.num_parameters / 1e9 == pytest.approx(total_b, abs=0.006)
    assert shape.num_active / 1e9 == pytest.approx(active_b, abs=0.006)


def test_published_sizes(tmp_path: Path) -> None:
    llama = read_shape(write_config(tmp_path / "llama", LLAMA_8B))
    assert llama.stored_bytes / 1e9 == pytest.approx(16.06, abs=0.005)
    assert llama.body.kv_bytes_per_token == 131072
    for fields, gib in ((GPT_OSS_120B, 60.8), (GPT_OSS_20B, 12.8)):  # as their model cards say, MXFP4 experts
        shape = read_shape(write_config(tmp_path / str(gib), fields))
        assert shape.body.precision.name == "mxfp4" and shape.body.precision.layers.name == "bfloat16"
        assert shape.stored_bytes / 2**30 == pytest.approx(gib, abs=0.05)
    head = read_draft_shape(write_config(tmp_path / "head", LLAMA_8B_HEAD), llama)
    assert head.num_parameters / 1e6 == pytest.approx(424.7, abs=0.05)


@pytest.mark.parametrize("tied", [False, True])
def test_a_shape_counts_the_decoder_and_the_head_that_run(tied: bool) -> None:
    config = dataclasses.replace(TINY, tied_head=tied, qkv_bias=True, qk_norm=True)
    draft = dataclasses.replace(TINY_DRAFT, fc_norm=True)
    decoder, head = tiny_pair(config=config, draft=draft)
    target = shape_of(config)
    assert target.num_parameters == sum(p.numel() for p in decoder.parameters())
    assert target.stored_bytes == 2 * target.num_parameters
    shape = draft_shape_of(draft, target)
    assert shape.num_parameters == sum(p.numel() for p in head.parameters()) - head.embed.numel()
    assert shape.stored_bytes == 2 * shape.num_parameters
    assert draft_shape_of(draft, shape_of(config, "float32")).stored_bytes == 4 * shape.num_parameters


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_reading_a_file_and_taking_a_loaded_config_agree(family: str, tmp_path: Path) -> None:
    write_target(tmp_path / "target", family)
    model = read_model_config(tmp_path / "target")
    target = read_shape(tmp_path / "target", "bfloat16")
    assert target == shape_of(model)
    for layout in ("specforge", "safeailab", "speculators"):
        write_draft(tmp_path / layout, model, layout, norm_before_fc=True, sliding_window=8, producer="aquiline")
        config = read_draft_config(tmp_path / layout, model)
        assert read_draft_shape(tmp_path / layout, target) == draft_shape_of(config, target)
        write_draft(tmp_path / layout, model, layout, sliding_window=8, layer_types=["sliding_attention"])
        config = read_draft_config(tmp_path / layout, model)
        assert config.model.window(0) == 8 * (layout == "speculators")
        assert read_draft_shape(tmp_path / layout, target) == draft_shape_of(config, target)


def test_a_draft_of_another_width_brings_its_embedding() -> None:
    target = shape_of(TINY)
    narrow = dataclasses.replace(TINY_DRAFT, model=dataclasses.replace(TINY_DRAFT.model, hidden_size=32))
    assert draft_shape_of(narrow, target).num_embedding == TINY.vocab_size * 32
    assert draft_shape_of(TINY_DRAFT, target).num_embedding == 0


def test_the_bundled_pair_is_read_as_it_is() -> None:
    target = read_shape(BUNDLED_TARGET)
    model = read_model_config(BUNDLED_TARGET)
    assert target == shape_of(model)
    assert read_draft_shape(BUNDLED_DRAFT, target) == draft_shape_of(read_draft_config(BUNDLED_DRAFT, model), target)


def test_quantised_sizes_count_codes_and_scales() -> None:
    n, k = 48, 160
    codes = torch.empty(n, k, dtype=torch.int8)
    per_output, per_group = torch.empty(n, 1), torch.empty(n, k // 32, dtype=torch.bfloat16)
    exponents = torch.empty(n, k // 32, dtype=torch.uint8)
    sizes = {
        "float32": 4 * n * k,
        "bfloat16": 2 * n * k,
        "int8": codes.nbytes + per_output.nbytes,
        "fp8": codes.nbytes + per_output.nbytes,
        "int4": codes.nbytes // 2 + per_group.nbytes,
        "mxfp4": codes.nbytes // 2 + exponents.nbytes,
    }
    for name, size in sizes.items():
        assert precision_of(name).experts.num_bytes(Matrix(n, k)) == size, name
    ragged = Storage("int4", 4, 16, 64)  # 160 inputs: two whole groups and a half
    assert ragged.num_bytes(Matrix(n, k)) == n * k / 2 + 3 * 2 * n


@pytest.mark.parametrize(
    ("dtype", "layers", "head", "plain"),
    [
        ("float32", "float32", "float32", "float32"),
        ("int8", "int8", "int8", "bfloat16"),
        ("fp8", "fp8", "bfloat16", "bfloat16"),
        ("mxfp4", "mxfp4", "bfloat16", "bfloat16"),
    ],
)
def test_what_a_dtype_is_the_storage_of(dtype: str, layers: str, head: str, plain: str) -> None:
    precision = precision_of(dtype)
    assert (precision.layers.name, precision.head.name, precision.plain.name) == (layers, head, plain)
    assert precision.kv.name == ("float32" if dtype == "float32" else "bfloat16")
    assert precision_of(dtype, "fp8").kv_bytes(10) == 10


def test_a_tied_head_takes_room_only_where_it_is_stored_otherwise() -> None:
    head = TINY.vocab_size * TINY.hidden_size
    for dtype, extra in (("bfloat16", 2 * head), ("int8", 0)):
        tied, untied = (shape_of(dataclasses.replace(TINY, tied_head=flag), dtype) for flag in (True, False))
        assert untied.num_parameters - tied.num_parameters == head
        assert untied.stored_bytes - tied.stored_bytes == extra


def test_a_checkpoints_own_quantisation(tmp_path: Path) -> None:
    awq = LLAMA_8B | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    shape = read_shape(write_config(tmp_path / "awq", awq))
    # 6.98 G weights of 4 + (16 + 4) / 128 bits, and 1.05 G of embedding and head of 16
    assert shape.stored_bytes / 1e9 == pytest.approx(5.73, abs=0.01)
    assert shape.body.precision.head.name == "bfloat16"
    fp8 = read_shape(write_config(tmp_path / "fp8", LLAMA_8B | {"quantization_config": {"quant_method": "fp8"}}))
    assert fp8.stored_bytes / 1e9 == pytest.approx(9.08, abs=0.01)
    other = write_config(tmp_path / "other", LLAMA_8B | {"quantization_config": {"quant_method": "quip"}})
    with pytest.raises(CheckpointError, match=r"quant_method='quip'.*--dtype"):
        read_shape(other)
    assert read_shape(other, "int4").body.precision.name == "int4"


def test_sliding_windows_by_every_way_to_say_so(tmp_path: Path) -> None:
    def windows(fields: dict[str, Any]) -> list[int]:
        return [layer.attention.window for layer in read_shape(write_config(tmp_path, SMALL | fields)).body.layers]

    assert windows({"model_type": "mistral"}) == [4096] * 8
    assert windows({"model_type": "mistral", "sliding_window": None}) == [0] * 8
    assert windows({"model_type": "llama", "sliding_window": 64}) == [0] * 8
    assert windows({"model_type": "gpt_oss", "sliding_window": 64}) == [64, 0] * 4
    qwen = {"model_type": "qwen3", "sliding_window": 64, "max_window_layers": 5}
    assert windows(qwen) == [0] * 8
    assert windows(qwen | {"use_sliding_window": True}) == [0] * 5 + [64] * 3
    assert windows({"model_type": "gemma3_text", "sliding_window_pattern": 4}) == [4096, 4096, 4096, 0] * 2


def test_experts_only_where_there_are_some(tmp_path: Path) -> None:
    fields = {"model_type": "glm4_moe", "n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 3}
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
    shape = read_shape(write_config(tmp_path, SMALL | fields | experts))
    assert [layer.num_experts for layer in shape.body.layers] == [0] * 3 + [6] * 5
    dense, sparse = shape.body.layers[0], shape.body.layers[3]
    assert dense.fixed[-1].k == SMALL["intermediate_size"] and sparse.fixed[-1].k == 2 * 48
    assert "glm4_moe" in shape.assumptions[0], "a family that is not known says so"


def test_a_typical_draft_is_assumed_aloud(tmp_path: Path) -> None:
    llama = read_shape(write_config(tmp_path / "llama", LLAMA_8B))
    head = read_draft_shape(write_config(tmp_path / "head", LLAMA_8B_HEAD), llama)
    assumed = assumed_draft(llama)
    assert dataclasses.replace(assumed, assumptions=()) == head and "assumed" in assumed.assumptions[0]
    moe = assumed_draft(read_shape(write_config(tmp_path / "moe", GPT_OSS_120B)))
    assert moe.body.layers[0].fixed[-1].k == 4 * 2880 and moe.body.head.n == 32000


def test_multimodal_configs_count_their_text_model(tmp_path: Path) -> None:
    plain = read_shape(write_config(tmp_path / "plain", QWEN_7B))
    nested = write_config(tmp_path / "nested", {"model_type": "some_vl", "text_config": QWEN_7B})
    assert read_shape(nested) == plain


def test_a_file_will_do(tmp_path: Path) -> None:
    directory = write_config(tmp_path, LLAMA_8B)
    assert read_shape(directory / "config.json") == read_shape(directory)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"kv_lora_rank": 512}, "kv_lora_rank=512"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types="),
        ({"num_local_experts": 8}, "num_experts_per_tok is missing"),
        ({"num_local_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok=9 exceeds the 8 experts"),
        ({"torch_dtype": "int3"}, "dtype='int3'"),
    ],
)
def test_what_cannot_be_counted_is_refused(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises((CheckpointError, ValueError), match=named):
        read_shape(write_config(tmp_path, LLAMA_8B | change))


SHAPE_FIELDS = (
    "text_config", "model_type", "kv_lora_rank", "num_hidden_layers", "num_local_experts", "num_experts_per_tok",
    "moe_intermediate_size", "mlp_only_layers", "decoder_sparse_step", "first_k_dense_replace", "layer_types",
    "sliding_window", "sliding_window_pattern", "use_sliding_window", "max_window_layers", "torch_dtype",
    "quantization_config", "attention_bias", "mlp_bias", "tie_word_embeddings", "max_position_embeddings",
    "transformer_layer_config", "eagle_config", "draft_vocab_size", "norm_before_fc", "n_shared_experts",
)  # fmt: skip


@settings(max_examples=100)
@given(fields=st.dictionaries(st.sampled_from(SHAPE_FIELDS), ANY_JSON, min_size=1, max_size=3))
@example({"num_hidden_layers": 2**31 - 1})
@example({"quantization_config": {"quant_method": "awq", "bits": True}})
@example({"num_local_experts": "8"})
@example({"eagle_config": [1]})
def test_any_fields_are_counted_or_refused(tmp_path_factory: pytest.TempPathFactory, fields: dict[str, Any]) -> None:
    target = read_shape(write_config(tmp_path_factory.getbasetemp() / "plain", LLAMA_8B))
    place = write_config(tmp_path_factory.getbasetemp() / "any", LLAMA_8B | {"num_hidden_layers": 1} | fields)
    for read in (read_shape, lambda file: read_draft_shape(file, target)):
        with contextlib.suppress(CheckpointError, ValueError):  # a dtype is a setting too
            read(place)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": 2048}, "hidden_size=2048, the target has 4096"),
        ({"vocab_size": 32000}, "vocab_size=32000, the target has 128256"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2"),
    ],
)
def test_a_draft_of_another_target_is_refused(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    target = read_shape(write_config(tmp_path / "target", LLAMA_8B))
    with pytest.raises(CheckpointError, match=named):
        read_draft_shape(write_config(tmp_path / "draft", LLAMA_8B_HEAD | change), target)


def test_a_hub_id_is_read_from_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    place = tmp_path / "models--owner--name"
    write_config(place / "snapshots" / ("0" * 40), LLAMA_8B)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0" * 40)
    assert read_shape("owner/name").num_parameters == 8_030_261_248
    for missing in ("owner/other", "no such thing", str(tmp_path / "nowhere")):
        with pytest.raises(
            CheckpointError, match=r"no directory or config\.json here|neither a directory nor a config\.json"
        ):
            read_shape(missing)
