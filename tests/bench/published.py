"""Configurations of published models, the fields that say how big they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN_7B: dict[str, Any] = {
    "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 32768,
    "sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28, "torch_dtype": "bfloat16",
}  # fmt: skip
GPT_OSS_120B: dict[str, Any] = {
    "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128, "attention_bias": True,
    "layer_types": ["sliding_attention", "full_attention"] * 18, "max_position_embeddings": 131072,
    "tie_word_embeddings": False, "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
GPT_OSS_20B = GPT_OSS_120B | {
    "num_hidden_layers": 24, "num_local_experts": 32, "layer_types": ["sliding_attention", "full_attention"] * 12,
}  # fmt: skip
MIXTRAL_8X7B: dict[str, Any] = {
    "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
    "num_experts_per_tok": 2, "sliding_window": None, "max_position_embeddings": 32768,
}  # fmt: skip
QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "max_position_embeddings": 40960,
}  # fmt: skip

LLAMA_8B_HEAD: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128256, "draft_vocab_size": 32000, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
GPT_OSS_HEAD: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 201088, "draft_vocab_size": 32000, "hidden_size": 2880,
    "intermediate_size": 17280, "num_hidden_layers": 1, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 64,
}  # fmt: skip


def write_config(directory: Path, fields: dict[str, Any]) -> Path:
    """A directory that holds nothing but a config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields))
    return directory
