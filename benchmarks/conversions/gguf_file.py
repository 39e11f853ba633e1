"""Our decoders and EAGLE-3 heads as GGUF files, the format that llama.cpp reads: token ids in and out.

A head's file is `GGUFDraft`'s, which `aquiline convert --to gguf` writes too (models/gguf/draft_file.py). What every
file has, the tokenizer of llama.cpp's own tests included, is models/gguf/writer.py's.

Source: the names and the order of query and key rows are those of llama.cpp's converter, as the gguf package (0.19) and
the loader of llama.cpp in llama-cpp-python 0.3.36 have them.
"""

from __future__ import annotations

from pathlib import Path

import torch
from gguf import GGUFWriter
from torch import Tensor

from aquiline.backends.torch.decoder import Decoder, DecoderLayer, load_target
from aquiline.backends.torch.eagle import DraftHead, load_draft
from aquiline.bench.peers.peer import stored_dtype
from aquiline.blocks import PACKED
from aquiline.models.draft_fields import cannot_say
from aquiline.models.formats import EMBED, MAP, draft_arrays
from aquiline.models.gguf.draft_file import GGUFDraft
from aquiline.models.gguf.writer import add_decoder, add_rope, add_tensor, finish
from aquiline.models.model_config import ModelConfig
from aquiline.models.producers import GGUF
from aquiline.ops.torch_arrays import array_of
from conversions.converted import converted, shares_embedding

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
BESIDE_PACKED = "int4"
"""How a draft is stored beside a GGUF file that runs as it is: in 4.5 bits, as our own draft beside packed blocks."""


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
    """Write a target. stored: how its matrices are stored, a key of STORED in models/gguf/writer.py.

    Raises ValueError for features that this file cannot express, such as sliding windows."""
    config = decoder.config
    _refuse_attention("target", config)
    writer = GGUFWriter(file, ARCHITECTURES[config.family])
    add_decoder(writer, config)
    tensors: dict[str, Tensor] = {"token_embd.weight": decoder.embed, "output_norm.weight": decoder.final_norm}
    if not config.tied_head:
        tensors["output.weight"] = decoder.head
    for index, layer in enumerate(decoder.layers):
        assert isinstance(layer, DecoderLayer)
        tensors |= _layer_tensors(layer, config, index)
    for name, tensor in tensors.items():
        add_tensor(writer, name, array_of(tensor), stored)
    add_rope(writer, config)
    finish(writer)


def write_draft_gguf(head: DraftHead, decoder: Decoder, file: Path, stored: str) -> None:
    """Write an EAGLE-3 head for the target `decoder`. stored: how its matrices are stored, a key of STORED.

    Raises ValueError for heads and targets that llama.cpp cannot draft with."""
    _refuse_head(head, decoder)
    weights = head.weights()
    tensors = draft_arrays(weights, GGUF.layer, embed=True)
    if shares_embedding(head, decoder):  # without an embedding llama.cpp takes the target's
        del tensors[EMBED]
    GGUFDraft(head.config, tensors | {MAP: weights.d2t}, stored).write(file)


def _refuse_attention(what: str, config: ModelConfig) -> None:
    if config.windows or config.rope.kind == "yarn":
        found = "a sliding window" if config.windows else "rope_type=yarn"
        raise ValueError(f"{what}: {found}; the llama.cpp peer writes {what}s without it")
    for name in ("o_bias", "mlp_bias", "sinks", "output_norms"):
        if getattr(config, name):
            raise ValueError(f"{what}: {name}=true; the llama.cpp peer writes {what}s without it")


def _refuse_head(head: DraftHead, decoder: Decoder) -> None:
    problems = cannot_say(head.config, GGUF)
    if problems:
        raise ValueError(f"draft: {problems[0]}")
    if head.config.capture[-1] == decoder.config.num_layers - 1:
        raise ValueError("draft: reads what leaves the target's last layer; llama.cpp gives a head what enters layers")
    if ARCHITECTURES[decoder.config.family] == "qwen2":
        raise ValueError("target: of the qwen2 family; llama.cpp drafts with EAGLE-3 for llama, mistral and qwen3 here")


def _layer_tensors(layer: DecoderLayer, config: ModelConfig, index: int) -> dict[str, Tensor]:
    """A layer's tensors by GGUF's names. The llama architecture rotates neighbouring rows, so rows of queries and keys
    are reordered for it; the others rotate halves, as checkpoints do."""
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
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
