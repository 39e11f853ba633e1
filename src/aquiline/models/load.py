"""Targets from Hugging Face checkpoints and GGUF files: the weight map, as data, and the strict, memory-lean loader.

`families.py` reads the config, `files.py` and `gguf/tensors.py` the tensors; drafts are `formats.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from aquiline.blocks import GGUF_BLOCKS, MXFP4, PACKED, Array
from aquiline.errors import CheckpointError, OutOfMemory
from aquiline.models.expert_entries import ExpertLayout, expert_entries, expert_layout, mlp_entries
from aquiline.models.families import FAMILIES, read_model_config
from aquiline.models.files import (
    BYTES,
    COLUMNS,
    ROWS,
    Entry,
    Tensors,
    TensorSource,
    check_entries,
    is_gguf,
    refuse,
    resolve,
)
from aquiline.models.gguf.tensors import GGUFTensors
from aquiline.models.model_config import ModelConfig
from aquiline.models.model_weights import AttentionWeights, DenseWeights, LayerWeights, ModelWeights, MoeWeights
from aquiline.models.parameters import OF_FILES, Parameters
from aquiline.ops.control_groups import free_memory
from aquiline.types import storage_dtype

__all__ = [
    "check_fits", "layer_entries", "layer_weights", "open_tensors", "read_model_config", "read_target", "resolve",
    "target_entries", "target_of", "target_weights",
]  # fmt: skip


def layer_entries(
    config: ModelConfig, source: str, target: str, in_features: int, layout: ExpertLayout = "separate"
) -> list[Entry]:
    """The weight map of one decoder layer, from names under `source` to parameters under `target`.

    The names are those of every Llama-like checkpoint, target or draft; in_features is 2H in a draft."""
    H, mlp = config.hidden_size, f"{source}.mlp"
    before_mlp = "pre_feedforward" if config.output_norms else "post_attention"
    is_dense = config.experts is None
    entries = [
        *_attention_entries(config, f"{source}.self_attn", target, in_features),
        *(_dense_entries(config, mlp, target) if is_dense else expert_entries(config, mlp, target, layout)),
        Entry(f"{source}.input_layernorm.weight", f"{target}.input_norm", (H,)),
        Entry(f"{source}.{before_mlp}_layernorm.weight", f"{target}.post_norm", (H,)),
    ]
    if config.output_norms:
        entries += [
            Entry(f"{source}.post_attention_layernorm.weight", f"{target}.attention_out_norm", (H,)),
            Entry(f"{source}.post_feedforward_layernorm.weight", f"{target}.mlp_out_norm", (H,)),
        ]
    return entries


def _attention_entries(config: ModelConfig, attn: str, target: str, in_features: int) -> list[Entry]:
    H, Dh = config.hidden_size, config.head_dim
    q, kv = config.num_heads * Dh, config.num_kv_heads * Dh
    parts = (("q", 0, q), ("k", q, kv), ("v", q + kv, kv))
    entries = [
        Entry(f"{attn}.{name}_proj.weight", f"{target}.qkv", (rows, in_features), start, ROWS)
        for name, start, rows in parts
    ]
    if config.qkv_bias:
        entries += [
            Entry(f"{attn}.{name}_proj.bias", f"{target}.qkv_bias", (rows,), start, ROWS) for name, start, rows in parts
        ]
    if config.o_bias:
        entries.append(Entry(f"{attn}.o_proj.bias", f"{target}.o_bias", (H,)))
    if config.sinks:
        entries.append(Entry(f"{attn}.sinks", f"{target}.sinks", (config.num_heads,), 0, ROWS))
    if config.qk_norm:
        entries += [Entry(f"{attn}.{name}_norm.weight", f"{target}.{name}_norm", (Dh,)) for name in "qk"]
    return [*entries, Entry(f"{attn}.o_proj.weight", f"{target}.o", (H, q), 0, COLUMNS)]


def _dense_entries(config: ModelConfig, mlp: str, target: str) -> list[Entry]:
    entries, inner = mlp_entries(config, mlp, f"{target}.gate_up", f"{target}.down"), config.intermediate_size
    if config.mlp_bias:
        entries += [
            Entry(f"{mlp}.gate_proj.bias", f"{target}.gate_up_bias", (inner,), 0, ROWS),
            Entry(f"{mlp}.up_proj.bias", f"{target}.gate_up_bias", (inner,), inner, ROWS),
            Entry(f"{mlp}.down_proj.bias", f"{target}.down_bias", (config.hidden_size,)),
        ]
    return entries


def target_entries(config: ModelConfig, tensors: TensorSource | None = None) -> list[Entry]:
    """The weight map of a whole target, its experts as these tensors have them; without tensors, as checkpoints of
    floats have them. A tied head has no entry: it is the embedding.

    Raises CheckpointError for packed experts whose rows are no whole blocks."""
    V, H = config.vocab_size, config.hidden_size
    layout = expert_layout(config, tensors)
    entries = [Entry("model.embed_tokens.weight", "embed", (V, H), 0, ROWS)]
    for i in range(config.num_layers):
        entries += layer_entries(config, f"model.layers.{i}", f"layers.{i}", H, layout)
    entries.append(Entry("model.norm.weight", "final_norm", (H,)))
    if not config.tied_head:
        entries.append(Entry("lm_head.weight", "head", (V, H), 0, ROWS))
    if not FAMILIES[config.family].norms_from_one:
        return entries
    offset = 0.0 if tensors is not None and is_gguf(tensors.path) else 1.0  # GGUF's converter has added the 1
    return [replace(entry, offset=offset) if entry.target.endswith("norm") else entry for entry in entries]


def open_tensors(checkpoint: Path) -> TensorSource:
    """The tensors of a checkpoint that `resolve` found. Raises CheckpointError on missing or broken files."""
    return GGUFTensors(checkpoint) if is_gguf(checkpoint) else Tensors(checkpoint)


def read_target(checkpoint: Path, *, dtype: str = "bfloat16", capture: tuple[int, ...] = ()) -> ModelWeights:
    """The weights of a target from a directory or GGUF file that `resolve` found, floats stored in `dtype` (bfloat16,
    float16 or float32). With int8 and int4 the weights are bfloat16 here: the backend's Pair rounds the linears. With
    "packed" the weights of a GGUF file, and of a checkpoint whose experts are in MXFP4, stay as they are: blocks are
    blocks, floats have their own dtype. Experts in MXFP4 stay blocks in any dtype: their values are exact.

    `capture` names the layers whose outputs are features, ascending. Linears and embeddings are read when the backend
    packs them, one tensor or one expert at a time. float32 files and GGUF's packed blocks round to bfloat16 storage;
    into float32 everything is exact.
    Raises CheckpointError listing every missing, unexpected and mis-shaped tensor, or naming the broken file or the
    unsupported field; reading a weight raises it for tensors that are not finite or that float16 cannot hold. Raises
    ValueError for an unknown dtype or capture layers out of range."""
    return target_of(read_model_config(checkpoint), open_tensors(checkpoint), dtype=dtype, capture=capture)


def is_spare(config: ModelConfig, name: str) -> bool:
    """Whether a target's checkpoint may hold a tensor of this name that is not read."""
    return name.endswith("rotary_emb.inv_freq") or (config.tied_head and name == "lm_head.weight")


def target_of(
    config: ModelConfig, tensors: TensorSource, *, dtype: str = "bfloat16", capture: tuple[int, ...] = ()
) -> ModelWeights:
    """The weights of a target from its geometry and its tensors, wherever they are. The rest is as in `read_target`."""
    storage_dtype(dtype)
    if list(capture) != sorted({i for i in capture if 0 <= i < config.num_layers}):
        raise ValueError(f"capture={capture}: name different layers of 0 .. {config.num_layers - 1}, ascending")
    entries = target_entries(config, tensors)
    refuse(tensors.path, check_entries(tensors, entries, partial(is_spare, config)))
    _check_tied(config, tensors)
    return target_weights(config, Parameters(tensors, entries, dtype), capture)


def target_weights(config: ModelConfig, own: Parameters, capture: tuple[int, ...]) -> ModelWeights:
    """The weights of a target, from its parameters."""
    embed = own.matrix("embed")
    return ModelWeights(
        config, embed, tuple(layer_weights(own, f"layers.{i}", config, i) for i in range(config.num_layers)),
        own.needed("final_norm"), embed if config.tied_head else own.matrix("head"), capture,
    )  # fmt: skip


def layer_weights(own: Parameters, name: str, config: ModelConfig, index: int) -> LayerWeights:
    """The decoder layer whose parameters' names begin with `name`."""

    def vectors(*names: str) -> dict[str, Array | None]:
        return {each: own.vector(f"{name}.{each}") for each in names}

    attention = AttentionWeights(
        own.matrix(f"{name}.qkv"), own.matrix(f"{name}.o"),
        **vectors("qkv_bias", "o_bias", "q_norm", "k_norm", "sinks"), window=config.window(index),
    )  # fmt: skip
    mlp: DenseWeights | MoeWeights
    if config.experts is None:
        mlp = DenseWeights(
            own.matrix(f"{name}.gate_up"), own.matrix(f"{name}.down"), **vectors("gate_up_bias", "down_bias")
        )
    else:
        gate_up, down = (own.experts(f"{name}.{each}", config.experts.count) for each in ("gate_up", "down"))
        biases = vectors("router_bias", "gate_up_bias", "down_bias")
        mlp = MoeWeights(own.matrix(f"{name}.router"), gate_up, down, **biases)
    norms = own.needed(f"{name}.input_norm"), own.needed(f"{name}.post_norm")
    others = (own.vector(f"{name}.{each}") for each in ("hidden_norm", "attention_out_norm", "mlp_out_norm"))
    return LayerWeights(attention, mlp, *norms, *others)


def check_fits(sources: Mapping[TensorSource, str]) -> None:
    """Raises OutOfMemory if the weights of these models, each in its dtype, do not fit into the free memory beside the
    largest tensor, or the largest expert of stacked ones, which is there twice while it is packed."""
    wanted = largest = 0
    for tensors, dtype in sources.items():
        sizes = {name: _stored_bytes(tensors, name, dtype) for name in tensors.names}
        wanted += tensors.path.stat().st_size if dtype == PACKED and is_gguf(tensors.path) else sum(sizes.values())
        largest = max([largest, *(size // _num_parts(tensors, name) for name, size in sizes.items())])
    free = free_memory()
    if wanted + largest > free:
        kinds = " and ".join(dict.fromkeys(sources.values()))
        raise OutOfMemory(
            f"{', '.join(str(tensors.path) for tensors in sources)}: {wanted / 1e9:.2f} GB of weights as {kinds} take "
            f"{(wanted + largest) / 1e9:.2f} GB while they are packed, and {free / 1e9:.2f} GB are free; free memory "
            "or take a smaller model"
        )


def _num_parts(tensors: TensorSource, name: str) -> int:
    """How many matrices a tensor holds that are read one at a time: those of stacked experts alone have three axes."""
    shape = tensors.shape(name)
    return max(1, shape[0]) if len(shape) > 2 else 1


def _stored_bytes(tensors: TensorSource, name: str, dtype: str) -> int:
    """Bytes of a tensor in the memory of a model with this `dtype`. Experts in MXFP4 stay as they are."""
    num_values, kind = math.prod(tensors.shape(name)), tensors.dtype(name)
    if kind in BYTES:
        return num_values
    if kind == MXFP4 and len(tensors.shape(name)) > 2:
        return num_values // GGUF_BLOCKS[MXFP4].inputs * GGUF_BLOCKS[MXFP4].num_bytes
    stored = OF_FILES.get(kind, storage_dtype(dtype)) if dtype == PACKED else storage_dtype(dtype)
    return num_values * stored.itemsize


def _check_tied(config: ModelConfig, tensors: TensorSource) -> None:
    """A tied checkpoint may ship its head again, but not another one."""
    name = "lm_head.weight"
    if (
        config.tied_head
        and name in tensors
        and not np.array_equal(tensors.get(name), tensors.get("model.embed_tokens.weight"))
    ):
        raise CheckpointError(
            f"{tensors.path}: tie_word_embeddings=true, but {name} differs from model.embed_tokens.weight; "
            "set it to false or drop the tensor"
        )
