"""The weights of a GGUF file under Hugging Face's names, as the weight map of load.py asks for them.

Blocks are unpacked by gguf-py's own code when they are read, so their values are gguf-py's to the bit; rounding them to
the storage dtype is `parameters.py`'s. One tensor is read and unpacked at a time.

Source: gguf-py 0.19 tensor_mapping.py for names; ggml-org/llama.cpp@00ad355, convert_hf_to_gguf.py, LlamaModel.permute.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aquiline.blocks import FLOATS, GGUF_BLOCKS, GGUF_FLOATS, Array, Weight
from aquiline.models.gguf.metadata import ROPE_FACTORS, head_counts
from aquiline.models.gguf.reader import TensorInfo, read_gguf

TYPES = (*GGUF_FLOATS, *GGUF_BLOCKS)
_FLOATS = {"F32": FLOATS["float32"], "F16": FLOATS["float16"], "BF16": FLOATS["bfloat16"]}
DRAFT_ARCHITECTURE = "eagle3"
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_WHOLE_DRAFT = {
    "token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head", "enc.output_norm": "input_norm",
}  # fmt: skip
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_DENSE = {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_IN_LAYER = {
    "gpt-oss": _ATTENTION | _EXPERTS | {"post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn"},
    "qwen3moe": _ATTENTION | _EXPERTS | {"ffn_norm": "post_attention_layernorm"},
    "gemma3": _ATTENTION | _DENSE | {
        "ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    DRAFT_ARCHITECTURE: _ATTENTION | _DENSE | {"attn_norm_2": "hidden_norm"},
}  # fmt: skip
"""Names in a layer by GGUF's architecture, where they are not those of _ATTENTION and _DENSE."""
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)")
_ROTATED = re.compile(r"blk\.\d+\.attn_([qk])\.weight")
_NEIGHBOURS = ("llama", DRAFT_ARCHITECTURE)
"""Architectures that rotate neighbouring rows of queries and keys."""


class GGUFTensors:
    """The tensors of a GGUF file by Hugging Face's names: shapes without reading, contents one at a time, float32.

    A name that GGUF's decoders do not have stays as it is. Raises CheckpointError for a file that is truncated or
    corrupt."""

    readable: tuple[str, ...] = TYPES

    def __init__(self, path: Path) -> None:
        self.path = path
        self._gguf = read_gguf(path)
        infos, arch = self._gguf.tensors, self._gguf.text("general.architecture")
        self._infos = {hugging_face_name(name, arch): info for name, info in infos.items() if name != ROPE_FACTORS}

    @property
    def names(self) -> list[str]:
        """Every weight's name, sorted."""
        return sorted(self._infos)

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""
        return self._infos[name].shape

    def dtype(self, name: str) -> str:
        """How the file stores a tensor: F32, Q4_K, ..."""
        return self._infos[name].type_name

    def get(self, name: str, index: int | None = None) -> Array:
        """Unpack one tensor to float32, or the slice at an index of its first axis alone; the rows of queries and keys
        in a checkpoint's order. It is not kept."""
        info = self._infos[name]
        rows = self._rows(info, index)
        if info.type_name in GGUF_FLOATS:
            return rows.view(_FLOATS[info.type_name]).astype(np.float32)
        from gguf import GGMLQuantizationType, quants

        values = quants.dequantize(rows, GGMLQuantizationType[info.type_name])
        return np.require(values, np.float32, ["C", "W"])

    def blocks(self, name: str, index: int | None = None) -> Weight:
        """One tensor of a type of BLOCK_TYPES, or its slice, as its blocks; the rows of queries and keys in a
        checkpoint's order."""
        info = self._infos[name]
        num_rows, width = info.shape[-2:]
        return Weight(info.type_name, (num_rows, width), lambda: self._rows(info, index).reshape(num_rows, -1))

    def _rows(self, info: TensorInfo, index: int | None) -> NDArray[np.uint8]:
        rows = self._gguf.raw(info) if index is None else self._gguf.raw(info)[index]
        rotated = _ROTATED.fullmatch(info.name)
        if rotated and self._gguf.text("general.architecture") in _NEIGHBOURS:
            heads, kv_heads = head_counts(self._gguf)
            rows = as_halves(rows, heads if rotated[1] == "q" else kv_heads)
        return rows


def hugging_face_name(name: str, arch: str | None = None) -> str:
    """The name that a weight of GGUF's architecture has in a Hugging Face checkpoint; any other name as it is. Stacked
    experts are named as those of qwen3_moe, without a number."""
    stem, _, kind = name.rpartition(".")
    layer, known = _LAYER.fullmatch(stem), _IN_LAYER.get(arch or "", _ATTENTION | _DENSE)
    is_draft = arch == DRAFT_ARCHITECTURE
    if layer and layer[2] in known:
        layers = "layers" if is_draft else "model.layers"
        return f"{layers}.{layer[1]}.{known[layer[2]]}.{'sinks' if layer[2] == 'attn_sinks' else kind}"
    whole = _WHOLE_DRAFT if is_draft else _WHOLE
    return f"{whole[stem]}.{kind}" if stem in whole else name


def gguf_name(name: str) -> str:
    """GGUF's name of a draft's tensor, by its name in a checkpoint with `layers.0`."""
    stem, _, kind = name.rpartition(".")
    whole = {ours: theirs for theirs, ours in _WHOLE_DRAFT.items()}
    in_layer = {f"layers.0.{ours}": f"blk.0.{theirs}" for theirs, ours in _IN_LAYER[DRAFT_ARCHITECTURE].items()}
    known = whole | in_layer
    return f"{known[stem]}.{kind}" if stem in known else name


def as_neighbours(rows: Array, num_heads: int) -> Array:
    """Rows [heads * Dh, ...] in the order that GGUF's llama and eagle3 architectures have them: `as_halves` undone."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def as_halves(rows: NDArray[np.uint8], num_heads: int) -> NDArray[np.uint8]:
    """Rows [heads * Dh, ...] in a checkpoint's order, from GGUF's.

    A checkpoint rotates row i of a head with row i + Dh / 2. GGUF's llama architecture rotates neighbours, and its
    converter has put those two rows next to each other. Rows are packed one by one, so they move as bytes."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
