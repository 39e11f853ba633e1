"""Our decoders and EAGLE-3 heads as GGUF files, the format that llama.cpp reads: token ids in and out.

llama.cpp's server runs no model without a tokenizer. So every written file has the tokenizer of llama.cpp's own tests:
a token's text is its id in hex, and no token ends a text.

Source: the names, fields and the order of query and key rows are those of llama.cpp's converter, as the gguf package
(0.19) and the loader of llama.cpp in llama-cpp-python 0.3.36 have them; src/models/eagle3.cpp there for heads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import quants
from torch import Tensor

from aquiline.backends.torch.decoder import Decoder, DecoderLayer, load_target
from aquiline.backends.torch.eagle import DraftHead, load_draft
from aquiline.bench.peers.peer import stored_dtype
from aquiline.blocks import PACKED
from aquiline.models.model_config import ModelConfig
from aquiline.models.rope import rotary
from conversions.converted import converted, shares_embedding

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
STORED = {
    "float32": gguf.GGMLQuantizationType.F32,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
    "int8": gguf.GGMLQuantizationType.Q8_0,
    "int4": gguf.GGMLQuantizationType.Q4_0,
}
"""How matrices are stored. int8 and int4: in blocks of 32 values, each with a scale. Vectors are always float32."""
BESIDE_PACKED = "int4"
"""How a draft is stored beside a GGUF file that runs as it is: in 4.5 bits, as our own draft beside packed blocks."""
NUM_FEATURES = 3
"""How many layers of the target llama.cpp gives to an EAGLE-3 head."""


def target_file(target: Path, dtype: str) -> Path:
    """A target's file, written if it is not there."""

    def write(directory: Path) -> None:
        write_gguf(load_target(target, dtype=stored_dtype(target)), directory / "model.gguf", dtype)

    return converted([target], f"gguf-{dtype}", write) / "model.gguf"


def draft_file(target: Path, draft: Path, dtype: str) -> Path:
    """The file of a target's draft beside a target of that dtype, written if it is not there."""
    stored = BESIDE_PACKED if dtype == PACKED else dtype

    def write(directory: Path) -> None:
        decoder = load_target(target, dtype=stored_dtype(target))
        head = load_draft(draft, decoder, dtype=stored_dtype(draft))
        write_draft_gguf(head, decoder, directory / "draft.gguf", stored)

    return converted([target, draft], f"gguf-eagle3-{stored}", write) / "draft.gguf"


def write_gguf(decoder: Decoder, file: Path, stored: str) -> None:
    """Write a target. stored: how its matrices are stored, a key of STORED.

    Raises ValueError for features that this file cannot express, such as sliding windows."""
    config = decoder.config
    _refuse_attention("target", config)
    writer = gguf.GGUFWriter(file, ARCHITECTURES[config.family])
    _write_fields(writer, config)
    tensors: dict[str, Tensor] = {"token_embd.weight": decoder.embed, "output_norm.weight": decoder.final_norm}
    if not config.tied_head:
        tensors["output.weight"] = decoder.head
    for index, layer in enumerate(decoder.layers):
        assert isinstance(layer, DecoderLayer)
        tensors |= _layer_tensors(layer, config, index)
    _write_tensors(writer, tensors | _rope_tensors(config), STORED[stored])


def write_draft_gguf(head: DraftHead, decoder: Decoder, file: Path, stored: str) -> None:
    """Write an EAGLE-3 head for the target `decoder`. stored: how its matrices are stored, a key of STORED.

    Raises ValueError for heads and targets that llama.cpp cannot draft with."""
    config = head.config
    _refuse_head(head, decoder)
    writer = gguf.GGUFWriter(file, "eagle3")
    _write_fields(writer, config.model)
    writer.add_array("eagle3.target_layers", [layer + 1 for layer in config.capture])  # it counts what enters a layer
    writer.add_uint32("eagle3.target_hidden_size", config.target_hidden_size)
    writer.add_bool("eagle3.norm_before_residual", config.norm_before_residual)
    writer.add_bool("eagle3.norm_before_fc", config.norm_before_fc)
    tensors: dict[str, Tensor] = {
        "fc.weight": head.fc, "output_norm.weight": head.norm, "output.weight": head.head,
        "blk.0.attn_norm_2.weight": head.hidden_norm,
    }  # fmt: skip
    if head.input_norm is not None:
        tensors["enc.output_norm.weight"] = head.input_norm
    if not shares_embedding(head, decoder):  # without an embedding llama.cpp takes the target's
        tensors["token_embd.weight"] = head.embed
    writer.add_tensor("d2t", head.target_ids(torch.arange(config.draft_vocab_size)).numpy())  # not an offset, the id
    tensors |= _layer_tensors(head.layer, config.model, 0) | _rope_tensors(config.model)
    _write_tensors(writer, tensors, STORED[stored])


def _refuse_attention(what: str, config: ModelConfig) -> None:
    if config.windows or config.rope.kind == "yarn":
        found = "a sliding window" if config.windows else "rope_type=yarn"
        raise ValueError(f"{what}: {found}; the llama.cpp peer writes {what}s without it")
    for name in ("o_bias", "mlp_bias", "sinks", "output_norms"):
        if getattr(config, name):
            raise ValueError(f"{what}: {name}=true; the llama.cpp peer writes {what}s without it")


def _refuse_head(head: DraftHead, decoder: Decoder) -> None:
    config = head.config
    _refuse_attention("draft", config.model)
    for name, has_it in (
        ("fc_norm=true", config.fc_norm),
        ("norm_output=true", config.norm_feedback),
        ("attention_bias=true", head.layer.qkv_bias is not None),
    ):
        if has_it:
            raise ValueError(f"draft: {name}; llama.cpp runs EAGLE-3 heads without it")
    if len(config.capture) != NUM_FEATURES:
        raise ValueError(
            f"draft: reads {len(config.capture)} layers of the target; llama.cpp runs EAGLE-3 heads that read "
            f"{NUM_FEATURES}"
        )
    if config.capture[-1] == decoder.config.num_layers - 1:
        raise ValueError("draft: reads what leaves the target's last layer; llama.cpp gives a head what enters layers")
    if ARCHITECTURES[decoder.config.family] == "qwen2":
        raise ValueError("target: of the qwen2 family; llama.cpp drafts with EAGLE-3 for llama, mistral and qwen3 here")


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
    writer.add_tokenizer_model("test")
    writer.add_token_list([f"{token:x}" for token in range(config.vocab_size)])


def _write_tensors(writer: Any, tensors: dict[str, Tensor], kind: Any) -> None:
    """Add all tensors and write the file."""
    for name, tensor in tensors.items():
        _add(writer, name, tensor, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _layer_tensors(layer: DecoderLayer, config: ModelConfig, index: int) -> dict[str, Tensor]:
    """A layer's tensors by GGUF's names. GGUF's llama and eagle3 architectures rotate neighbouring rows, so the rows of
    queries and keys are reordered for them; the others rotate halves, as checkpoints do."""
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
    return {f"blk.{index}.{name}": tensor for name, tensor in tensors.items()}


def _neighbours(weight: Tensor, heads: int) -> Tensor:
    """The weight with rows i and i + Dh / 2 of each head next to each other."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _rope_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """The tensor of factors by which llama.cpp divides the plain rotary frequencies; none for a plain rotation."""
    if config.rope.kind == "default":
        return {}
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    plain = config.rope.theta**-exponents
    factors = plain / torch.from_numpy(rotary(config.rope, config.head_dim, config.max_positions).inv_freq)
    return {"rope_freqs.weight": factors.float()}


def _add(writer: Any, name: str, tensor: Tensor, kind: Any) -> None:
    """Add one tensor to the file: a vector as float32, a matrix as `kind`."""
    data = tensor.detach().float().contiguous().numpy()
    if data.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, data)
    else:
        writer.add_tensor(name, quants.quantize(data, kind), raw_dtype=kind)
