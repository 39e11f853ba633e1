"""Where checkpoints have their experts: the part of the weight map that families and files lay out each in its way.

Every layout fills the same parameters: `gate_up` and `down` with a weight per expert, or `gate_up.0`, `gate_up.1`, ...
where every expert has tensors of its own. Source: transformers 5.23, models/{gpt_oss,qwen3_moe}; gguf-py 0.19,
tensor_mapping.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from aquiline.blocks import GGUF_BLOCKS, MXFP4
from aquiline.errors import CheckpointError
from aquiline.models.files import COLUMNS, ROWS, Entry, TensorSource, is_gguf
from aquiline.models.model_config import Experts, ModelConfig

ExpertLayout = Literal["separate", "stacked", "transposed", "mxfp4"]
"""separate: each expert's tensors (qwen3_moe). stacked: gate, up and down of all, [E, outputs, inputs] (GGUF).
transposed: gate_up and down, [E, inputs, outputs], outputs of gate and up in turn (gpt_oss). mxfp4: gate_up and down,
[E, outputs, inputs] in nibbles and scales, outputs of gate and up in turn (gpt_oss)."""

_INPUTS, _NUM_NIBBLES = GGUF_BLOCKS[MXFP4].inputs, GGUF_BLOCKS[MXFP4].num_bytes - 1


def expert_layout(config: ModelConfig, tensors: TensorSource | None = None) -> ExpertLayout:
    """How these tensors have their experts; without tensors, how the family's checkpoints have experts of floats.

    Raises CheckpointError for packed experts whose rows are no whole blocks."""
    if tensors is not None and is_gguf(tensors.path):
        return "stacked"
    if config.family != "gpt_oss":
        return "separate"
    if tensors is None or not any(name.endswith("_proj_blocks") for name in tensors.names):
        return "transposed"
    for name, value in (("hidden_size", config.hidden_size), ("intermediate_size", config.intermediate_size)):
        if value % _INPUTS:
            raise CheckpointError(f"{tensors.path}: {name}={value}; experts in MXFP4 need a multiple of {_INPUTS}")
    return "mxfp4"


def mlp_entries(config: ModelConfig, source: str, gate_up: str, down: str) -> list[Entry]:
    """Gate, up and down of one MLP, from names under `source`."""
    H, inner = config.hidden_size, config.intermediate_size
    return [
        Entry(f"{source}.gate_proj.weight", gate_up, (inner, H), 0, ROWS),
        Entry(f"{source}.up_proj.weight", gate_up, (inner, H), inner, ROWS),
        Entry(f"{source}.down_proj.weight", down, (H, inner), 0, COLUMNS),
    ]


def expert_entries(config: ModelConfig, source: str, target: str, layout: ExpertLayout) -> list[Entry]:
    """The router and the experts of one layer, from names under `source` to parameters under `target`."""
    experts = config.experts
    assert experts is not None
    router = f"{source}.{'gate' if layout == 'separate' else 'router'}"
    entries = [Entry(f"{router}.weight", f"{target}.router", (experts.count, config.hidden_size))]
    if experts.has_bias:
        entries.append(Entry(f"{router}.bias", f"{target}.router_bias", (experts.count,)))
    own = f"{source}.experts"
    if layout == "separate":
        for i in range(experts.count):
            entries += mlp_entries(config, f"{own}.{i}", f"{target}.gate_up.{i}", f"{target}.down.{i}")
        return entries
    if layout == "stacked":
        return entries + _stacked(config, experts, own, target)
    weights = _transposed if layout == "transposed" else _mxfp4
    return entries + weights(config, experts, own, target) + _fused_biases(config, experts, own, target)


def _stacked(config: ModelConfig, experts: Experts, source: str, target: str) -> list[Entry]:
    E, H, inner = experts.count, config.hidden_size, config.intermediate_size
    entries = [
        replace(entry, shape=(E, *entry.shape), shard=1 + (entry.shard or 0), is_stacked=True)
        for entry in mlp_entries(config, source, f"{target}.gate_up", f"{target}.down")
    ]
    if experts.has_bias:
        entries += [
            Entry(f"{source}.gate_proj.bias", f"{target}.gate_up_bias", (E, inner), 0, 1),
            Entry(f"{source}.up_proj.bias", f"{target}.gate_up_bias", (E, inner), inner, 1),
            Entry(f"{source}.down_proj.bias", f"{target}.down_bias", (E, H)),
        ]
    return entries


def _transposed(config: ModelConfig, experts: Experts, source: str, target: str) -> list[Entry]:
    E, H, inner = experts.count, config.hidden_size, config.intermediate_size
    gate_up = Entry(f"{source}.gate_up_proj", f"{target}.gate_up", (E, H, 2 * inner), 0, 2, True, True, pairs=-1)
    return [gate_up, Entry(f"{source}.down_proj", f"{target}.down", (E, inner, H), 0, 1, True, True)]


def _mxfp4(config: ModelConfig, experts: Experts, source: str, target: str) -> list[Entry]:
    E, H, inner = experts.count, config.hidden_size, config.intermediate_size
    entries = []
    for name, rows, inputs, shard, pairs in (("gate_up", 2 * inner, H, 1, 0), ("down", H, inner, 2, None)):
        stem, part, shape = f"{source}.{name}_proj", f"{target}.{name}", (E, rows, inputs // _INPUTS)
        scales = Entry(f"{stem}_scales", part, shape, 0, shard, True, pairs=pairs, holds="scales")
        nibbles = replace(scales, source=f"{stem}_blocks", shape=(*shape, _NUM_NIBBLES), holds="nibbles")
        entries += [nibbles, scales]
    return entries


def _fused_biases(config: ModelConfig, experts: Experts, source: str, target: str) -> list[Entry]:
    E, inner = experts.count, config.intermediate_size
    if not experts.has_bias:
        return []
    return [
        Entry(f"{source}.gate_up_proj_bias", f"{target}.gate_up_bias", (E, 2 * inner), 0, 1, pairs=-1),
        Entry(f"{source}.down_proj_bias", f"{target}.down_bias", (E, config.hidden_size)),
    ]
