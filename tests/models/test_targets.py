"""Our Decoder against transformers' eager float32, for every family, config style and rope scheme."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dense import DenseAttention
from torch import Tensor

from aquiline.backends.torch.decoder import Decoder, load_target
from aquiline.errors import CheckpointError
from aquiline.models.load import read_model_config, target_entries
from checkpoints import SMALL, edit_json, write_target

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64, "rope_theta": 500000.0}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
YARN_FULL = YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3, "truncate": False}
YARN_MSCALE = YARN | {"mscale": 0.8, "mscale_all_dim": 0.5}
LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 20000.0}

BY_TYPE = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}

LISTED = ["full_attention", "sliding_attention"] * 4
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_no_gqa": ("llama", {"num_key_value_heads": 4}),
    "llama_llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama_linear": ("llama", {"rope_parameters": LINEAR}),
    "llama_yarn": ("llama", {"rope_parameters": YARN}),
    "llama_yarn_full": ("llama", {"rope_parameters": YARN_FULL}),
    "llama_yarn_mscale": ("llama", {"rope_parameters": YARN_MSCALE}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {}),
    "mistral_window": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2_tied_yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 3}),
    "qwen3": ("qwen3", {}),
    "qwen3_biases": ("qwen3", {"attention_bias": True}),
    "gemma3": ("gemma3_text", {}),
    "gemma3_biases": ("gemma3_text", {"attention_bias": True, "query_pre_attn_scalar": 40}),
    "gemma3_types": ("gemma3_text", {"layer_types": LISTED, "rope_parameters": BY_TYPE, "tie_word_embeddings": False}),
    "qwen3_types": ("qwen3", {"use_sliding_window": True, "sliding_window": 24, "layer_types": LISTED}),
}
LENGTHS = (1, 7, 23, 24, 25, 100)


def logits(model: Decoder, tokens: Tensor) -> Tensor:
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return model.logits(model(tokens, positions, DenseAttention(model.config)).hidden)


def random_tokens(length: int, batch: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(SMALL["vocab_size"], (batch, length), generator=generator)


def worst(reference: Any, model: Decoder, tokens: Tensor) -> float:
    return float((reference(tokens).logits - logits(model, tokens)).abs().max())


def greedy(reference: Any, prompt: Tensor, count: int) -> Tensor:
    """The prompt and `count` greedy tokens of the transformers model, over its cache, end tokens ignored."""
    from transformers import DynamicCache

    tokens, cache = prompt, DynamicCache(config=reference.config)
    for _ in range(count):
        out = reference(tokens[:, cache.get_seq_length() :], past_key_values=cache).logits
        tokens = torch.cat((tokens, out[:, -1:].argmax(-1)), dim=1)
    return tokens


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_text_equal_transformers(name: str, tmp_path: Path) -> None:
    family, overrides = CASES[name]
    reference = write_target(tmp_path, family, **overrides)
    model = load_target(tmp_path, dtype="float32")
    for length in LENGTHS:
        assert worst(reference, model, random_tokens(length)) < 1e-4, f"length {length}"
    # a right-padded batch: valid rows never see the padding
    tokens = random_tokens(40, batch=2)
    short = tokens[1:, :17]
    assert (logits(model, tokens)[1:, :17] - reference(short).logits).abs().max() < 1e-4
    # greedy by induction: given their tokens so far, our best next token is theirs at every one of 64 steps
    theirs = greedy(reference, random_tokens(9), 64)
    assert logits(model, theirs)[:, 8:-1].argmax(-1).tolist() == theirs[:, 9:].tolist()


def test_window_matters(tmp_path: Path) -> None:
    """Without the window the mistral case must fail, or the parity test above would prove nothing about it."""
    reference = write_target(tmp_path, "mistral", sliding_window=24)
    edit_json(tmp_path / "config.json", lambda c: c.update(sliding_window=None))
    model = load_target(tmp_path, dtype="float32")
    assert worst(reference, model, random_tokens(24)) < 1e-4
    assert worst(reference, model, random_tokens(40)) > 1e-2


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows_without_layer_types_begin_at_max_window_layers(family: str, tmp_path: Path) -> None:
    """Configs that list no layer_types: the first max_window_layers layers see everything."""
    write_target(tmp_path, family, use_sliding_window=True, sliding_window=24, max_window_layers=3)
    listed = read_model_config(tmp_path).windows
    edit_json(tmp_path / "config.json", lambda c: c.pop("layer_types"))
    assert read_model_config(tmp_path).windows == listed == (0, 0, 0, 24, 24, 24, 24, 24)
    edit_json(tmp_path / "config.json", lambda c: c.update(max_window_layers=8))
    assert read_model_config(tmp_path).windows == ()
    edit_json(tmp_path / "config.json", lambda c: c.update(use_sliding_window=False, max_window_layers=0))
    assert read_model_config(tmp_path).windows == ()


def _old_style(config: dict[str, Any]) -> None:
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    config["torch_dtype"] = config.pop("dtype")


@pytest.mark.parametrize("rope", [None, LLAMA3, YARN, LINEAR], ids=["default", "llama3", "yarn", "linear"])
def test_old_style_config_reads_as_the_new_one(rope: dict[str, Any] | None, tmp_path: Path) -> None:
    reference = write_target(tmp_path, rope_parameters=rope)
    new = read_model_config(tmp_path)
    edit_json(tmp_path / "config.json", _old_style)
    assert read_model_config(tmp_path) == new
    assert worst(reference, load_target(tmp_path, dtype="float32"), random_tokens(80)) < 1e-4


def test_absent_fields_take_the_familys_defaults(tmp_path: Path) -> None:
    write_target(tmp_path, hidden_size=64)
    edit_json(tmp_path / "config.json", lambda c: [c.pop(k) for k in ("head_dim", "rope_parameters", "rms_norm_eps")])
    config = read_model_config(tmp_path)
    assert (config.head_dim, config.rope.theta, config.rms_norm_eps) == (16, 10000.0, 1e-6)
    edit_json(tmp_path / "config.json", lambda c: c.update(num_key_value_heads=None))
    assert read_model_config(tmp_path).num_kv_heads == 4


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "expected"),
    [(2, 2, (2,)), (2, [2, 5], (2, 5)), ([7, 3], None, (7, 3)), (None, None, ())],
)
def test_end_tokens_of_both_files(config_eos: Any, generation_eos: Any, expected: Any, tmp_path: Path) -> None:
    write_target(tmp_path, num_hidden_layers=1)
    edit_json(tmp_path / "config.json", lambda c: c.update(eos_token_id=config_eos))
    edit_json(tmp_path / "generation_config.json", lambda c: c.update(eos_token_id=generation_eos))
    assert read_model_config(tmp_path).eos_token_ids == expected
    (tmp_path / "generation_config.json").unlink()
    assert set(read_model_config(tmp_path).eos_token_ids) <= set(expected)


def test_an_end_token_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    """Of generation_config.json too: as an end token it would fail every step."""
    write_target(tmp_path, num_hidden_layers=1)
    edit_json(tmp_path / "generation_config.json", lambda c: c.update(eos_token_id=[2, 159]))
    assert read_model_config(tmp_path).eos_token_ids == (2, 159)
    edit_json(tmp_path / "generation_config.json", lambda c: c.update(eos_token_id=[2, 160]))
    message = r"generation_config\.json: eos_token_id=\[2, 160\] must be a token id below vocab_size=160"
    with pytest.raises(CheckpointError, match=message):
        read_model_config(tmp_path)


def test_sharded_equals_single(tmp_path: Path) -> None:
    whole = write_target(tmp_path / "one")
    write_target(tmp_path / "many", max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = load_target(tmp_path / "one", dtype="float32"), load_target(tmp_path / "many", dtype="float32")
    for (name, a), (_, b) in zip(one.named_parameters(), many.named_parameters(), strict=True):
        assert a.equal(b), name
    assert worst(whole, many, random_tokens(20)) < 1e-4


def test_storage_rounds_once_and_widens_exactly(tmp_path: Path) -> None:
    reference = write_target(tmp_path / "f32")
    stored = load_target(tmp_path / "f32")
    assert {p.dtype for p in stored.parameters()} == {torch.bfloat16}
    assert stored.embed.equal(reference.model.embed_tokens.weight.bfloat16())
    write_target(tmp_path / "bf16", dtype=torch.bfloat16)
    wide, narrow = load_target(tmp_path / "bf16", dtype="float32"), load_target(tmp_path / "bf16")
    for (name, a), (_, b) in zip(wide.named_parameters(), narrow.named_parameters(), strict=True):
        assert a.equal(b.float()), name
    assert not any(p.requires_grad for p in wide.parameters())
    assert torch.get_default_dtype() == torch.float32
    with pytest.raises(ValueError, match="float64"):
        load_target(tmp_path / "bf16", dtype="float64")


def test_features_are_the_outputs_of_the_captured_layers(tmp_path: Path) -> None:
    reference = write_target(tmp_path)
    model, tokens = load_target(tmp_path, dtype="float32", capture=(1, 3, 4)), random_tokens(30)
    states = reference(tokens, output_hidden_states=True).hidden_states  # [i] enters layer i, so [i + 1] leaves it
    positions = torch.arange(30)[None]
    features = model(tokens, positions, DenseAttention(model.config)).features
    assert (features - torch.cat([states[2], states[4], states[5]], -1)).abs().max() < 1e-4
    for bad in ((3, 1, 4), (1, 1, 4), (1, 3, 8), (-1, 3, 4)):
        with pytest.raises(ValueError, match="capture"):
            load_target(tmp_path, capture=bad)


def test_packed_documents_do_not_see_each_other(tmp_path: Path) -> None:
    write_target(tmp_path, "mistral", sliding_window=8)
    model = load_target(tmp_path, dtype="float32")
    a, b = random_tokens(13), random_tokens(20)
    packed, positions = torch.cat((a, b), 1), torch.cat((torch.arange(13), torch.arange(20)))[None]
    documents = torch.tensor([[0] * 13 + [1] * 20])
    out = model.logits(model(packed, positions, DenseAttention(model.config, documents)).hidden)
    assert (out[:, :13] - logits(model, a)).abs().max() < 1e-4
    assert (out[:, 13:] - logits(model, b)).abs().max() < 1e-4


def test_tied_checkpoint_may_ship_its_head_again(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_target(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load_target(tmp_path)
    assert model.head is model.embed


def test_every_parameter_is_filled_once_with_a_sharding_axis() -> None:
    """The weight map covers each parameter exactly; matrices name the axis tensor parallelism splits."""
    from aquiline.models.model_config import ModelConfig, RopeConfig

    config = ModelConfig("qwen3", 64, 32, 48, 2, 4, 2, 8, 64, 1e-6, RopeConfig(), True, True, True, True, True)
    model, filled = Decoder(config), {}
    entries = target_entries(config)
    for entry in entries:
        filled.setdefault(entry.target, []).append((entry.start, entry.start + entry.shape[0]))
        assert (entry.shard is None) == entry.target.endswith(("norm", ".o_bias", "down_bias")), entry
    for name, parameter in model.named_parameters():
        spans = sorted(filled.pop(name))
        assert spans[0][0] == 0 and spans[-1][1] == parameter.shape[0], name
        assert all(a[1] == b[0] for a, b in pairwise(spans)), name
    assert not filled
