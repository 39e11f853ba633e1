"""Targets with random weights on disk, which every peer can read, from a config.json or a shape with a name."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from aquiline.bench.suite.scenarios import random_config
from aquiline.models.load import target_entries
from conversions.converted import cached

SEED = 0
SCALE = 0.02
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 64, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16",
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama-230m": LLAMA
    | {
        "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8,
        "intermediate_size": 2816, "vocab_size": 32_000,
    },
    "llama-494m": LLAMA
    | {
        "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "intermediate_size": 4864, "vocab_size": 151_936, "tie_word_embeddings": True,
    },
    "llama-32m": LLAMA
    | {
        "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
        "intermediate_size": 1408, "vocab_size": 8192,
    },
}  # fmt: skip
"""llama-230m has 460 MB in bfloat16, more than any cache holds, so that a step's time is that of reading the weights;
llama-494m has the geometry of Qwen2.5-0.5B without its biases, for which no kernel was tuned; llama-32m has 64 MB."""


def random_target(name: str) -> Path:
    """The directory of a bfloat16 checkpoint with normally distributed weights from a fixed seed, written if it is not
    there.

    name: a key of SHAPES, a config.json or the directory of one. Raises ValueError or CheckpointError otherwise."""
    if name in SHAPES:
        raw = SHAPES[name]
    else:
        path = Path(name)
        if not path.exists():
            raise ValueError(f"random_weights={name!r}: must be {', '.join(SHAPES)} or a config.json")
        random_config(name)
        raw = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    text = json.dumps(raw | {"dtype": "bfloat16"}, indent=1, sort_keys=True)

    def write(directory: Path) -> None:
        (directory / "config.json").write_text(text)
        save_file(_tensors(directory), directory / "model.safetensors", metadata={"format": "pt"})

    return cached(f"random-{SEED}-{hashlib.sha256(text.encode()).hexdigest()[:24]}", write)


def _tensors(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a target with the config in `directory`, in a fixed order: norms are 1, biases 0, other weights
    normally distributed."""
    generator = torch.Generator().manual_seed(SEED)
    tensors = {}
    for entry in target_entries(random_config(str(directory))):
        if entry.source.endswith("bias"):
            tensor = torch.zeros(entry.shape)
        elif len(entry.shape) == 1:
            tensor = torch.ones(entry.shape)
        else:
            tensor = torch.randn(entry.shape, generator=generator) * SCALE
        tensors[entry.source] = tensor.to(torch.bfloat16)
    return tensors
