"""Our decoders as GGUF files, the format that llama.cpp reads: token ids in and out, no tokenizer.

Source: the names, fields and the order of query and key rows are those of llama.cpp's converter, as the gguf package
(0.19) and llama.cpp's loader have them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aquiline.bench.peers.base import library
from aquiline.models.config import ModelConfig
from aquiline.models.decoder import Decoder, DecoderLayer
from aquiline.models.rope import rotary

gguf = library("gguf")
quants = library("gguf.quants")

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
STORED = {
    "float32": gguf.GGMLQuantizationType.F32,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
    "int8": gguf.GGMLQuantizationType.Q8_0,
    "int4": gguf.GGMLQuantizationType.Q4_0,
}
"""How matrices are stored: int8 and int4 in blocks of 32 with a scale each. Vectors are float32."""


def write_gguf(decoder: Decoder, file: Path, stored: str) -> None:
    """Write a target, its matrices `stored` as a key of STORED.

    Raises ValueError for what GGUF's architectures cannot say."""
    config = decoder.config
    if config.windows or config.rope.kind == "yarn":
        what = "a sliding window" if config.windows else "rope_type=yarn"
        raise ValueError(f"target: {what}; the llama.cpp peer writes targets without it")
    writer = gguf.GGUFWriter(file, ARCHITECTURES[config.family])
    _write_fields(writer, config)
    tensors: dict[str, Tensor] = {"token_embd.weight": decoder.embed, "output_norm.weight": decoder.final_norm}
    if not config.tied_head:
        tensors["output.weight"] = decoder.head
    factors = _rope_factors(config)
    if factors is not None:
        tensors["rope_freqs.weight"] = factors
    for index, layer in enumerate(decoder.layers):
        assert isinstance(layer, DecoderLayer)
        tensors |= {f"blk.{index}.{name}": tensor for name, tensor in _layer_tensors(layer, config).items()}
    for name, tensor in tensors.items():
        _add(writer, name, tensor, STORED[stored])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_fields(writer: Any, config: ModelConfig) -> None:
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")


def _layer_tensors(layer: DecoderLayer, config: ModelConfig) -> dict[str, Tensor]:
    """A layer's tensors by GGUF's names. Only its llama architecture rotates neighbouring rows, which are put in order
    here; the others rotate halves, as checkpoints do."""
    turns = ARCHITECTURES[config.family] == "llama"
    heads = {"q": config.num_heads, "k": config.num_kv_heads}
    tensors = {}
    for part, weight in zip("qkv", torch.split(layer.qkv, layer.split), strict=True):
        tensors[f"attn_{part}.weight"] = _neighbours(weight, heads[part]) if turns and part in heads else weight
    if layer.qkv_bias is not None:
        for part, bias in zip("qkv", torch.split(layer.qkv_bias, layer.split), strict=True):
            tensors[f"attn_{part}.bias"] = bias
    gate, up = torch.chunk(layer.gate_up, 2)
    tensors |= {
        "attn_output.weight": layer.o, "ffn_gate.weight": gate, "ffn_up.weight": up, "ffn_down.weight": layer.down,
        "attn_norm.weight": layer.input_norm, "ffn_norm.weight": layer.post_norm,
    }  # fmt: skip
    if layer.q_norm is not None and layer.k_norm is not None:
        tensors |= {"attn_q_norm.weight": layer.q_norm, "attn_k_norm.weight": layer.k_norm}
    return tensors


def _neighbours(weight: Tensor, heads: int) -> Tensor:
    """Rows i and i + Dh / 2 of each head next to each other."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _rope_factors(config: ModelConfig) -> Tensor | None:
    """What llama.cpp divides the frequencies of the plain rotation by; None where they are those."""
    if config.rope.kind == "default":
        return None
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    plain = config.rope.theta**-exponents
    return (plain / rotary(config.rope, config.head_dim, config.max_positions).inv_freq).float()


def _add(writer: Any, name: str, tensor: Tensor, kind: Any) -> None:
    """Vectors stay float32, matrices are stored as `kind`."""
    data = tensor.detach().float().contiguous().numpy()
    if data.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, data)
    else:
        writer.add_tensor(name, quants.quantize(data, kind), raw_dtype=kind)
