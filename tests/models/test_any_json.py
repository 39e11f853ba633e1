"""Whatever stands in a checkpoint's JSON files, it is refused by name or loaded; nothing else comes out of a loader."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.json_values import ANY_JSON, nested

from aquiline.backends.torch.decoder import Decoder, load_target
from aquiline.backends.torch.eagle import load_draft
from aquiline.errors import CheckpointError
from aquiline.models.load import read_model_config, read_target
from aquiline.text.chat_template import ChatTemplate
from checkpoints import edit_json, write_draft, write_mxfp4, write_target

CONFIG = (
    "model_type", "architectures", "hidden_act", "quantization_config", "num_experts", "attention_bias", "mlp_bias",
    "use_mrope", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "eos_token_id",
    "bos_token_id", "rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor", "sliding_window",
    "use_sliding_window", "max_window_layers", "layer_types", "original_max_position_embeddings",
    "hidden_activation", "query_pre_attn_scalar", "rope_local_base_freq", "sliding_window_pattern",
    "attn_logit_softcapping", "use_bidirectional_attention",
)  # fmt: skip
DRAFT = (
    *CONFIG, "draft_vocab_size", "target_hidden_size", "eagle_config", "eagle_aux_hidden_state_layer_ids",
    "norm_before_fc", "fc_norm", "norm_before_residual", "norm_output", "producer", "speculators_config",
    "speculators_model_type", "transformer_layer_config",
)  # fmt: skip
ROPE = (
    "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "factors",
    "partial_rotary_factor",
)  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0},
    "factors": {"factors": [1.0] * 8},
}
EXPERTS = (
    "num_local_experts", "num_experts", "num_experts_per_tok", "experts_per_token", "moe_intermediate_size",
    "norm_topk_prob", "mlp_only_layers", "decoder_sparse_step", "swiglu_alpha", "swiglu_limit", "quantization_config",
    "layer_types", "sliding_window", "attention_bias", "rope_parameters", "model_type", "hidden_size",
)  # fmt: skip
MANY = settings(max_examples=150)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded target whose config has windows too."""
    place = tmp_path_factory.mktemp("qwen")
    write_target(place, "qwen3", max_shard_size="50KB", use_sliding_window=True, sliding_window=16, max_window_layers=4)
    return place


@pytest.fixture(scope="module")
def target(target_dir: Path) -> Decoder:
    return load_target(target_dir, dtype="float32")


@pytest.fixture(scope="module")
def drafts(target: Decoder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("drafts")
    for name in ("specforge", "speculators"):
        write_draft(place / name, target.config, name)
    return {name: place / name for name in ("specforge", "speculators")}


def loads_or_is_refused(file: Path, change: Callable[[dict[str, Any]], object], load: Callable[[], object]) -> None:
    """`load` after a change of a JSON file, which is undone."""
    before = file.read_text()
    edit_json(file, change)
    try:
        load()
    except CheckpointError as error:
        assert str(file) in str(error) or str(file.parent) in str(error), error
    finally:
        file.write_text(before)


@MANY
@given(fields=st.dictionaries(st.sampled_from(CONFIG), ANY_JSON, min_size=1, max_size=2))
@example({"rope_theta": 0})
@example({"rope_theta": -1e4})
@example({"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 4.0}})
@example({"rope_scaling": {"type": "linear", "factor": 0}})
@example({"rope_scaling": {"type": ["linear"], "factor": 2}})
@example({"quantization_config": ["awq"]})
@example({"num_hidden_layers": 2**31 - 1})
@example({"layer_types": [["full_attention"]] * 8})
@example({"max_window_layers": "28"})
@example({"model_type": ["qwen3"]})
def test_any_fields_of_a_config(qwen: Path, fields: dict[str, Any]) -> None:
    def change(config: dict[str, Any]) -> None:
        config.update(rope_parameters=None)
        config.update(fields)

    loads_or_is_refused(qwen / "config.json", change, lambda: load_target(qwen, dtype="float32"))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("experts")
    write_mxfp4(folder / "gpt_oss", num_hidden_layers=2)
    write_target(folder / "qwen3_moe", "qwen3_moe", num_hidden_layers=2)
    return {name: folder / name for name in ("gpt_oss", "qwen3_moe")}


@MANY
@given(
    name=st.sampled_from(["gpt_oss", "qwen3_moe"]),
    fields=st.dictionaries(st.sampled_from(EXPERTS), ANY_JSON, min_size=1, max_size=2),
)
@example("qwen3_moe", {"num_local_experts": 2**31 - 1})
@example("gpt_oss", {"quantization_config": {"quant_method": {}}})
@example("gpt_oss", {"layer_types": [["full_attention"]] * 2})
@example("gpt_oss", {"hidden_size": 65})
def test_any_fields_of_a_config_with_experts(experts: dict[str, Path], name: str, fields: dict[str, Any]) -> None:
    place = experts[name]
    loads_or_is_refused(place / "config.json", lambda c: c.update(fields), lambda: read_target(place))


@MANY
@given(kind=st.sampled_from(sorted(KINDS)), name=st.sampled_from(ROPE), value=ANY_JSON)
@example("llama3", "factor", 0)
@example("llama3", "low_freq_factor", 4.0)
@example("llama3", "high_freq_factor", 0)
@example("yarn", "beta_fast", 5e-324)
@example("yarn", "factor", -1.0)
@example("yarn", "mscale_all_dim", -1e9)
@example("linear", "rope_theta", 1e-300)
def test_any_field_of_a_rotation(qwen: Path, kind: str, name: str, value: Any) -> None:
    rope = {"rope_type": kind, **KINDS[kind], name: value}
    load = lambda: load_target(qwen, dtype="float32")  # noqa: E731
    loads_or_is_refused(qwen / "config.json", lambda c: c.update(rope_parameters=rope), load)


@MANY
@given(
    form=st.sampled_from(["specforge", "speculators"]),
    fields=st.dictionaries(st.sampled_from(DRAFT), ANY_JSON, min_size=1, max_size=2),
    is_inside=st.booleans(),
)
@example("specforge", {"eagle_config": [1]}, False)
@example("specforge", {"architectures": [["LlamaForCausalLMEagle3"]]}, False)
@example("specforge", {"fc_norm": "false"}, False)
@example("speculators", {"transformer_layer_config": [1]}, False)
def test_any_fields_of_a_draft(
    target: Decoder, drafts: dict[str, Path], form: str, fields: dict[str, Any], is_inside: bool
) -> None:
    """is_inside: in the section that the format has, so that its own fields are reached too."""
    section = {"specforge": "eagle_config", "speculators": "transformer_layer_config"}[form]

    def change(config: dict[str, Any]) -> None:
        (config.setdefault(section, {}) if is_inside else config).update(fields)

    loads_or_is_refused(drafts[form] / "config.json", change, lambda: load_draft(drafts[form], target))


@MANY
@given(name=st.sampled_from(["eos_token_id", "bos_token_id", "_from_model_config"]), value=ANY_JSON)
@example("eos_token_id", True)
def test_any_field_of_a_generation_config(qwen: Path, name: str, value: Any) -> None:
    file = qwen / "generation_config.json"
    loads_or_is_refused(file, lambda c: c.update({name: value}), lambda: read_model_config(qwen))


@MANY
@given(value=ANY_JSON | st.dictionaries(st.text(max_size=5), ANY_JSON, min_size=1, max_size=2))
@example({"a": 1, "b": "model.safetensors"})
@example({"a": ["x"]})
@example({"a": ""})
@example({"a": "x" * 300})
@example({"a": "\x00"})
def test_any_weight_map(qwen: Path, value: Any) -> None:
    file = qwen / "model.safetensors.index.json"
    load = lambda: load_target(qwen, dtype="float32")  # noqa: E731
    loads_or_is_refused(file, lambda index: index.update(weight_map=value), load)


@MANY
@given(
    file=st.sampled_from(["tokenizer_config.json", "special_tokens_map.json"]),
    name=st.sampled_from(["chat_template", "bos_token", "eos_token", "extra_special_tokens"]),
    value=ANY_JSON,
)
@example("tokenizer_config.json", "chat_template", [{"name": [], "template": "x"}])
@example("tokenizer_config.json", "chat_template", "{{ \ud800 }}")
def test_any_field_beside_a_tokenizer(
    tmp_path_factory: pytest.TempPathFactory, file: str, name: str, value: Any
) -> None:
    place = tmp_path_factory.mktemp("tokenizer", numbered=True)
    (place / file).write_text("{}")
    loads_or_is_refused(place / file, lambda c: c.update({name: value}), lambda: ChatTemplate.load(place, None))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("levels", [90, 101, 900, 990, 100_000])
def test_deep_nesting(name: str, levels: int, qwen: Path, tmp_path: Path) -> None:
    """As the whole file, and in every field, where a message may show it."""
    place = Path(shutil.copytree(qwen, tmp_path / "copy"))
    fields = json.loads((place / name).read_text())
    for text in (nested(levels), *(json.dumps({**fields, f: "@"}).replace('"@"', nested(levels)) for f in fields)):
        (place / name).write_text(text)
        try:
            load_target(place, dtype="float32")
        except CheckpointError as error:
            assert name in str(error)


@pytest.mark.parametrize(
    "shard",
    ["../outside.safetensors", "/{}/outside.safetensors", "a/../../outside.safetensors", "./../outside.safetensors"],
)
def test_an_index_does_not_lead_out_of_its_folder(shard: str, target_dir: Path, tmp_path: Path) -> None:
    """The file it names is there and would load."""
    place = Path(shutil.copytree(target_dir, tmp_path / "model"))
    (place / "a").mkdir()
    shutil.move(place / "model.safetensors", tmp_path / "outside.safetensors")
    shard = shard.replace("{}", str(tmp_path).strip("/"))
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": shard}}))
    with pytest.raises(
        CheckpointError, match=r"index\.json: weight_map\['lm_head\.weight'\]=.*in the folder of the ind"
    ):
        load_target(place)


def test_a_folder_of_symbolic_links_loads(qwen: Path, tmp_path: Path) -> None:
    """The hub's cache is made so: names in the snapshot are links to blobs beside it."""
    for file in qwen.iterdir():
        (tmp_path / file.name).symlink_to(file)
    assert load_target(tmp_path, dtype="float32").head.equal(load_target(qwen, dtype="float32").head)


def test_a_config_that_is_a_folder(target_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        load_target(tmp_path)
