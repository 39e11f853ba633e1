"""A DraftConfig as the fields of a config.json in any format of producers.py, and what a format cannot say of it."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from aquiline.models.gguf.draft_file import NUM_FEATURES
from aquiline.models.json_fields import Raw
from aquiline.models.model_config import LAYER_IDS, DraftConfig, ModelConfig, RopeConfig
from aquiline.models.producers import EAGLE_SECTION, FC_NORM_FLAGS, GGUF, NVIDIA, POST_NORM, PRODUCER, Format
from aquiline.models.rope import rotary

_SAME_FREQUENCY = 1e-6
_FLAGS = (*FC_NORM_FLAGS, "norm_before_residual", "norm_output")
_NAMES = {
    "capture": LAYER_IDS, "norm_feedback": "norm_output", "windows": "sliding_window", "rope": "rope_scaling",
    "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads",
    "max_positions": "max_position_embeddings", "qkv_bias": "attention_bias", "o_bias": "attention_bias",
}  # fmt: skip
_NOT_COMPARED = {"eos_token_ids", "bos_token_id", "tied_head"}
"""Fields that no draft pass reads."""


def extras(config: DraftConfig) -> Raw:
    """What a head has beyond a plain one, by the names of the fields that say it; a scaled rotation by its scheme."""
    model = config.model
    found: Raw = {
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_feedback,
        "sliding_window": model.window(0),
        "attention_bias": model.qkv_bias,
        "mlp_bias": model.mlp_bias,
        "target_hidden_size": config.target_hidden_size != model.hidden_size and config.target_hidden_size,
        model.rope.kind: model.rope.kind != "default",
    }
    return {name: value for name, value in found.items() if value}


def cannot_say(config: DraftConfig, fmt: Format) -> list[str]:
    """What of a head a format's checkpoints have no field for, one line each."""
    problems = []
    for name, value in extras(config).items():
        if name in fmt.knows:
            continue
        shown = f"rope_type={name!r}" if name == config.model.rope.kind else f"{name}={value!r}".replace("True", "true")
        problems.append(f"{shown}: {fmt.title} has no field that says it")
    if fmt is GGUF and len(config.capture) != NUM_FEATURES:
        problems.append(f"{LAYER_IDS}={list(config.capture)}: {fmt.title} runs heads that read {NUM_FEATURES} layers")
    return problems


def draft_fields(
    config: DraftConfig, fmt: Format, dtype: str, *, verifier: str | None = None, tied_head: bool = False
) -> Raw:
    """The fields of a config.json that says `config` in that format. dtype: that of the tensors; verifier: where the
    target is, for formats that name it; tied_head: a head that is not there is the draft's own embedding. What the
    format cannot say is left out."""
    if fmt.section:
        return _nested_fields(config, fmt, dtype, verifier) | {"tie_word_embeddings": tied_head}
    fields: Raw = {"architectures": list(fmt.architectures[:1])}
    fields |= {"producer": PRODUCER} if fmt.name == PRODUCER else {}
    fields |= _geometry(config.model, dtype) | {
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": tied_head,
        "bos_token_id": config.model.bos_token_id,
        "eos_token_id": list(config.model.eos_token_ids) or None,
    }
    if fmt.ids_in == EAGLE_SECTION:
        fields[EAGLE_SECTION] = _ids(config, fmt)
    if fmt is NVIDIA:
        fields[EAGLE_SECTION] |= _marks(config)
    return fields | _window(config, fmt) | _said(config, fmt)


def _nested_fields(config: DraftConfig, fmt: Format, dtype: str, verifier: str | None) -> Raw:
    """The fields of a speculators config, whose layer has a section of its own."""
    method = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": list(fmt.architectures[:1]),
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
        "draft_vocab_size": config.draft_vocab_size,
        "torch_dtype": dtype,
        fmt.section: _geometry(config.model, dtype) | _window(config, fmt),
        **_ids(config, fmt),
        "norm_before_residual": False,
        **_said(config, fmt),
    }


def _geometry(model: ModelConfig, dtype: str) -> Raw:
    return {
        "model_type": "llama",
        "attention_bias": model.qkv_bias,
        "mlp_bias": model.mlp_bias,
        "hidden_act": "silu",
        "torch_dtype": dtype,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_positions,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope.theta,
        "rope_scaling": _rope_scaling(model.rope),
    }


def _ids(config: DraftConfig, fmt: Format) -> Raw:
    return {LAYER_IDS: [layer + (fmt.numbering == "input") for layer in config.capture]}


def _marks(config: DraftConfig) -> Raw:
    """ModelOpt's section, in which norms that a head has beyond a plain one are named too."""
    written = {name: mark.values[0] if mark.values else 1 for name, mark in NVIDIA.marks.items()}
    written |= {"use_aux_hidden_state": True, "next_layer_regular": True, POST_NORM: config.norm_feedback}
    return written | {name: True for name in ("norm_before_fc",) if getattr(config, name)}


def _window(config: DraftConfig, fmt: Format) -> Raw:
    """Both fields, so that readers that go by either of them attend within the window."""
    window = config.model.window(0)
    if not window or fmt.window == "none":
        return {}
    return {"sliding_window": window, "layer_types": ["sliding_attention"]}


def _said(config: DraftConfig, fmt: Format) -> Raw:
    """Flags that are on, and the target's width where it is another."""
    found = {name: value for name, value in extras(config).items() if name in fmt.knows}
    told = {
        name: True
        for name in _FLAGS
        if name in found and not (fmt is NVIDIA and name in ("norm_before_fc", "norm_output"))
    }
    return told | {name: found[name] for name in ("target_hidden_size",) if name in found}


def _rope_scaling(rope: RopeConfig) -> Raw | None:
    if rope.kind == "default":
        return None
    fields: Raw = {"rope_type": rope.kind, **rope.parameters}
    if "truncate" in fields:  # a number among numbers in RopeConfig, a flag in a checkpoint
        fields["truncate"] = bool(fields["truncate"])
    if rope.factors:
        fields["factors"] = list(rope.factors)
    return fields


def differences(one: DraftConfig, other: DraftConfig) -> list[str]:
    """How two heads differ in what a pass computes, one line each, by the names of a config's fields."""
    found = []
    for name, (before, after) in _differing(one, other).items():
        shown = _NAMES.get(name, name)
        found.append(f"{shown}={_shown(before)} would be read as {_shown(after)}")
    return list(dict.fromkeys(found))


def _differing(one: Any, other: Any) -> dict[str, tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = {}
    for each in fields(one):
        before, after = getattr(one, each.name), getattr(other, each.name)
        if each.name in _NOT_COMPARED or before == after:
            continue
        if isinstance(before, RopeConfig):
            if not _same_rotation(one, other):
                found[each.name] = before, after
        elif is_dataclass(before):
            found |= _differing(before, after)
        else:
            found[each.name] = before, after
    return found


def _same_rotation(one: ModelConfig, other: ModelConfig) -> bool:
    if one.head_dim != other.head_dim:
        return False
    a, b = (rotary(each.rope, each.head_dim, each.max_positions) for each in (one, other))
    return (
        np.allclose(a.inv_freq, b.inv_freq, rtol=_SAME_FREQUENCY, atol=0) and abs(a.scale - b.scale) < _SAME_FREQUENCY
    )


def _shown(value: Any) -> str:
    if isinstance(value, RopeConfig):
        return f"{value.kind} at base {value.theta:g}"
    if isinstance(value, float):
        return f"{value:g}"
    return repr(list(value) if isinstance(value, tuple) else value)
