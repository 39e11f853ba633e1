"""A target of a few thousand parameters, its files and some text, for every test of training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from aquiline.backends.torch import reference as ops
from aquiline.backends.torch.decoder import Decoder
from aquiline.backends.torch.eagle import DraftHead
from aquiline.models.model_config import ModelConfig, RopeConfig
from aquiline.train import teacher
from aquiline.train.losses import TargetBatch
from aquiline.train.pass_attention import PackedAttention
from aquiline.train.start import new_head
from aquiline.train.train_config import TrainConfig
from aquiline.train.ttt import TokenBatch

CONFIG = ModelConfig(
    family="llama", vocab_size=48, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=4, num_kv_heads=2,
    head_dim=16, max_positions=256, rms_norm_eps=1e-5, rope=RopeConfig(), eos_token_ids=(0,), bos_token_id=0,
)  # fmt: skip
CAPTURE = (0, 1, 2)


@contextmanager
def in_float32() -> Iterator[None]:
    """For comparisons that bfloat16 rounds away: training computes in float32 inside, on every CPU."""
    with patch.object(teacher, "has_bfloat16", lambda device: False):
        yield


def target(seed: int = 0) -> Decoder:
    model = Decoder(CONFIG, CAPTURE)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.1 * noise if parameter.ndim == 1 else 0.3 * noise
    return model.requires_grad_(False)


def head(model: Decoder, num_ids: int = 32, seed: int = 0) -> DraftHead:
    """A draft away from its orderly beginning, so that every weight matters."""
    draft = new_head(model, torch.arange(num_ids) * 48 // num_ids, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in draft.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return draft


def features_of(model: Decoder, batch: TokenBatch) -> Tensor:
    return model(batch.tokens, batch.positions, PackedAttention(model.config, batch.document)).features


def target_of(model: Decoder, batch: TokenBatch, vocab: Tensor) -> TargetBatch:
    """What the target says of a batch, by the decoder and in float32."""
    out = model(batch.tokens, batch.positions, PackedAttention(model.config, batch.document))
    hidden = ops.rms_norm(out.hidden, model.final_norm, model.config.rms_norm_eps)
    logits = hidden @ model.head.T
    inside = torch.zeros(model.config.vocab_size, dtype=torch.bool)
    inside[vocab] = True
    lse = torch.logsumexp(logits, -1).flatten()
    return TargetBatch(out.features, hidden.flatten(0, 1), lse, model.head[vocab], inside[logits.argmax(-1)])


def write_target(directory: Path) -> Path:
    """The tiny target as a Hugging Face folder."""
    model, c = target(), CONFIG
    q, kv, inner = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size
    tensors = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.final_norm}
    tensors["lm_head.weight"] = model.head
    for i, layer in enumerate(model.layers):
        name = f"model.layers.{i}"
        for part, weight in zip("qkv", layer.qkv.split([q, kv, kv]), strict=True):
            tensors[f"{name}.self_attn.{part}_proj.weight"] = weight
        gate, up = layer.gate_up.split([inner, inner])
        tensors |= {
            f"{name}.self_attn.o_proj.weight": layer.o, f"{name}.mlp.gate_proj.weight": gate,
            f"{name}.mlp.up_proj.weight": up, f"{name}.mlp.down_proj.weight": layer.down,
            f"{name}.input_layernorm.weight": layer.input_norm,
            f"{name}.post_attention_layernorm.weight": layer.post_norm,
        }  # fmt: skip
    directory.mkdir(parents=True, exist_ok=True)
    save_file({n: t.detach().clone().contiguous() for n, t in tensors.items()}, directory / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size, "intermediate_size": inner, "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads, "num_key_value_heads": c.num_kv_heads, "head_dim": c.head_dim,
        "max_position_embeddings": c.max_positions, "rms_norm_eps": c.rms_norm_eps, "hidden_act": "silu",
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0, "torch_dtype": "float32",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_bin(path: Path, documents: int, seed: int = 0) -> Path:
    """Documents of 20 to 60 tokens, each a noisy walk, behind id 0."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(documents):
        steps = rng.integers(1, 4, rng.integers(20, 60))
        out += [np.zeros(1, np.int64), 1 + np.cumsum(steps) % 47]
    np.concatenate(out).astype(np.uint16).tofile(path)
    return path


def run_config(folder: Path) -> TrainConfig:
    """A run of thirty steps over files it writes into `folder`."""
    return TrainConfig(
        target=write_target(folder / "target"), data=(write_bin(folder / "train.bin", 60),),
        held_out=(write_bin(folder / "held.bin", 12, seed=1),), out=folder / "out", capture=CAPTURE,
        draft_vocab_size=40, context=48, batch_size=4, ttt_steps=4, steps=30, lr=5e-3, log_every=1, eval_every=10,
        eval_rows=8, eval_tokens=16, seed=3,
    )  # fmt: skip


def all_ids(draft: DraftHead) -> torch.Tensor:
    """The target ids of all draft ids."""
    return draft.target_ids(torch.arange(len(draft.d2t)))
