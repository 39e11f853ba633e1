"""The metadata of a GGUF file as the fields of a config.json: geometry, rotation, special tokens.

`families.py` turns the result into a ModelConfig, as it does for a config.json. A field of the architecture that is not
known here may change what the model computes, so it is refused by name.

Source: gguf-py 0.19 constants.py for the names; ggml-org/llama.cpp@00ad355, src/llama-vocab.cpp and
src/llama-hparams.cpp for what holds where a field is missing.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from aquiline.errors import CheckpointError
from aquiline.models.gguf.reader import GGUFFile
from aquiline.models.model_config import RopeConfig
from aquiline.models.rope import rotary

ARCHITECTURES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gpt-oss": "gpt_oss", "qwen3moe": "qwen3_moe",
    "gemma3": "gemma3_text",
}  # fmt: skip
"""Hugging Face's model types by GGUF's names. GGUF calls Mistral's models llama."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Types of tokens in tokenizer.ggml.token_type."""
END_TEXTS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>", "<end_of_turn>", "<EOT>",
)  # fmt: skip
"""Control tokens that end a turn or a text wherever a vocabulary has them."""
HARMONY_ENDS = ("<|return|>", "<|call|>", "<|endoftext|>")
"""Those of a vocabulary with the first of them: OpenAI's Harmony ends messages with <|end|>, and the turn goes on."""
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor that the rotation's frequencies are divided by."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192.0}
"""The llama3 scaling of every Llama since 3.1; only its `factor` differs. GGUF keeps the resulting factors alone."""

_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
}
_OF_EXPERTS = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
_OF_ARCHITECTURE = {
    "gpt-oss": _OF_EXPERTS | {
        "intermediate_size": "expert_feed_forward_length", "sliding_window": "attention.sliding_window",
    },
    "qwen3moe": _OF_EXPERTS | {"moe_intermediate_size": "expert_feed_forward_length"},
    "gemma3": {"sliding_window": "attention.sliding_window"},
}  # fmt: skip
"""Sizes that only these architectures have, or have elsewhere."""
_OTHERS = {
    "attention.value_length", "attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base",
    "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.attn_factor", "rope.scaling.finetuned", "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "tensor_data_layout",
}  # fmt: skip
_LOCAL_BASE = "rope.freq_base_swa"
_NEUTRAL = {
    "attention.causal": True, "expert_count": 0, "expert_used_count": 0, "expert_weights_norm": True,
    "rope.scaling.yarn_ext_factor": 1.0, "rope.scaling.yarn_log_multiplier": 0.0,
}  # fmt: skip
"""Fields of which one value is supported, the one that changes nothing."""
_SPM_IDS = {"bos": 1, "eos": 2, "unknown": 0}


def config_fields(gguf: GGUFFile) -> dict[str, Any]:
    """The fields of the config.json that this model would have.

    Raises CheckpointError naming file, field and value for an architecture, a feature or a value that is not
    supported."""
    return dict(_config_fields(gguf))


@lru_cache(maxsize=4)  # whoever loads a pair asks twice, and each time the vocabulary would be searched
def _config_fields(gguf: GGUFFile) -> dict[str, Any]:
    arch = gguf.text("general.architecture")
    if arch not in ARCHITECTURES:
        raise CheckpointError(f"{gguf.path}: general.architecture={arch!r}; supported are {', '.join(ARCHITECTURES)}")
    if gguf.fields.get("split.count", 1) not in (0, 1):
        raise CheckpointError(
            f"{gguf.path}: split.count={gguf.fields['split.count']}; one file is read: merge them with "
            "llama-gguf-split --merge"
        )
    fields, ids = decoder_fields(gguf, arch), special_ids(gguf)
    if arch == "gemma3":
        fields |= {"query_pre_attn_scalar": _attention_scalar(fields)}
        local = {"rope_theta": _number(gguf, arch, own_fields(gguf, arch), _LOCAL_BASE, 10000.0)}
        fields |= {"rope_parameters": {"full_attention": fields["rope_parameters"], "sliding_attention": local}}
    return fields | {
        "model_type": ARCHITECTURES[arch],
        "norm_topk_prob": True,  # as llama.cpp weights experts
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "bos_token_id": ids.get("bos"),
        "eos_token_id": end_ids(gguf),
    }


def own_fields(gguf: GGUFFile, arch: str) -> dict[str, Any]:
    """The metadata of an architecture, without its name in front of theirs."""
    return {name.removeprefix(f"{arch}."): v for name, v in gguf.fields.items() if name.startswith(f"{arch}.")}


def decoder_fields(gguf: GGUFFile, arch: str, others: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The fields of a config.json that every decoder has: sizes, norm, rotation. `others`: metadata that the caller
    reads.

    Raises CheckpointError for any other field of the architecture, and for values that are not supported."""
    own = own_fields(gguf, arch)
    _refuse_unknown(gguf, arch, {name: value for name, value in own.items() if name not in others})
    sizes = _sizes(gguf, arch, own)
    return sizes | {
        "rms_norm_eps": _number(gguf, arch, own, "attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(gguf, arch, own, sizes["head_dim"]),
    }


def _attention_scalar(sizes: dict[str, Any]) -> int:
    """Gemma 3's query_pre_attn_scalar, which no field says. It is the width of a head but for 27B, told by its layers.

    Source: ggml-org/llama.cpp, src/llama-model.cpp, LLM_ARCH_GEMMA3."""
    is_27b = sizes["num_hidden_layers"] == 62
    return int(sizes["hidden_size"] // sizes["num_attention_heads"] if is_27b else sizes["head_dim"])


def head_counts(gguf: GGUFFile) -> tuple[int, int]:
    """Heads of the queries, and of keys and values."""
    arch = gguf.text("general.architecture")
    heads = gguf.fields[f"{arch}.attention.head_count"]
    return heads, gguf.fields.get(f"{arch}.attention.head_count_kv", heads)


def special_ids(gguf: GGUFFile) -> dict[str, int]:
    """Ids of bos, eos, eot, eom, unknown and padding tokens, as far as there are any."""
    model = gguf.text("tokenizer.ggml.model")
    found = dict(_SPM_IDS) if model == "llama" else {}
    for name in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        value = gguf.fields.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            continue
        if type(value) is not int or value < 0:
            raise CheckpointError(f"{gguf.path}: tokenizer.ggml.{name}_token_id={value!r} must be a token id")
        found[name] = value
    return found


def end_ids(gguf: GGUFFile) -> list[int]:
    """Tokens that end a text or the model's turn: eos, eot and eom of the metadata, then END_TEXTS or HARMONY_ENDS."""
    ids = special_ids(gguf)
    found = [ids[name] for name in ("eos", "eot", "eom") if name in ids]
    if "tokenizer.ggml.token_type" in gguf.fields:
        tokens = gguf.strings("tokenizer.ggml.tokens")
        kinds = gguf.numbers("tokenizer.ggml.token_type", len(tokens))
        control = {tokens[i]: i for i, kind in enumerate(kinds) if kind == CONTROL}
        is_harmony = HARMONY_ENDS[0] in control
        ends = HARMONY_ENDS if is_harmony else END_TEXTS
        goes_on = {control.get("<|end|>")} if is_harmony else set()
        found = [i for i in found if i not in goes_on] + [i for text, i in control.items() if text in ends]
    return list(dict.fromkeys(found))


def _refuse_unknown(gguf: GGUFFile, arch: str, own: dict[str, Any]) -> None:
    if arch not in _OF_ARCHITECTURE and own.get("expert_count"):
        raise CheckpointError(
            f"{gguf.path}: {arch}.expert_count={own['expert_count']}; mixture-of-experts layers are not supported"
        )
    known = {*_SIZES.values(), *_OF_ARCHITECTURE.get(arch, {}).values(), *_OTHERS}
    known |= {_LOCAL_BASE} if arch == "gemma3" else set()
    odd = [name for name, value in own.items() if name not in known and _NEUTRAL.get(name) != value]
    if odd:
        named = ", ".join(f"{arch}.{name}={own[name]!r}" for name in sorted(odd))
        raise CheckpointError(f"{gguf.path}: {named}: not supported, and it may change what the model computes")


def _sizes(gguf: GGUFFile, arch: str, own: dict[str, Any]) -> dict[str, int]:
    """The fields of _SIZES and _OF_ARCHITECTURE; a missing field gets the value that llama.cpp assumes."""
    special = _OF_ARCHITECTURE.get(arch, {})
    keys = _SIZES | special
    found = {name: own[key] for name, key in keys.items() if key in own}
    for name, value in found.items():
        if type(value) is not int or value < 1:
            raise CheckpointError(f"{gguf.path}: {arch}.{keys[name]}={value!r} must be a positive integer")
    missing = [name for name in ("hidden_size", "num_attention_heads", *special) if name not in found]
    if missing:
        raise CheckpointError(f"{gguf.path}: {arch}.{keys[missing[0]]} is missing")
    found.setdefault("num_key_value_heads", found["num_attention_heads"])
    found.setdefault("head_dim", found["hidden_size"] // found["num_attention_heads"])
    if "vocab_size" not in found:
        found["vocab_size"] = len(gguf.strings("tokenizer.ggml.tokens"))
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, found["head_dim"]) != found["head_dim"]:
            raise CheckpointError(
                f"{gguf.path}: {arch}.{key}={own[key]!r}; supported is that of the keys, {found['head_dim']}"
            )
    return found


def _number(gguf: GGUFFile, arch: str, own: dict[str, Any], key: str, default: float | None = None) -> float:
    """A float32 of the metadata as the shortest decimal that rounds to it, which is what a config.json says."""
    value = own.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(f"{gguf.path}: {arch}.{key}={value!r} must be a finite number")
    return float(str(np.float32(value)))


def _rope(gguf: GGUFFile, arch: str, own: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """The rotation as rope_parameters."""
    theta = _number(gguf, arch, own, "rope.freq_base", 10000.0)
    factor = _number(gguf, arch, own, "rope.scaling.factor", own.get("rope.scale_linear", 0.0))
    kind = own.get("rope.scaling.type", "linear")
    attention = _number(gguf, arch, own, "rope.scaling.attn_factor", 1.0)
    attention *= _number(gguf, arch, own, "rope.scaling.yarn_attn_factor", 1.0)
    if kind not in ("none", "linear", "yarn"):
        raise CheckpointError(f"{gguf.path}: {arch}.rope.scaling.type={kind!r}; supported are none, linear, yarn")
    if factor < 0:
        raise CheckpointError(f"{gguf.path}: {arch}.rope.scaling.factor={factor} must not be negative")
    if kind != "yarn" and attention != 1.0:
        raise CheckpointError(f"{gguf.path}: {arch}.rope.scaling.attn_factor={attention}; supported beside yarn alone")
    found: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    if kind != "none" and factor not in (0.0, 1.0):
        found |= {"rope_type": kind, "factor": factor}
    if found["rope_type"] == "yarn":
        found |= _yarn(gguf, arch, own, factor, attention)
    if ROPE_FACTORS not in gguf.tensors:
        return found
    if found["rope_type"] != "default":
        raise CheckpointError(f"{gguf.path}: {ROPE_FACTORS} beside {arch}.rope.scaling.type={kind!r}; one is supported")
    return found | _from_factors(gguf, theta, head_dim)


def _yarn(gguf: GGUFFile, arch: str, own: dict[str, Any], factor: float, attention: float) -> dict[str, Any]:
    """Yarn's own fields. `attention` multiplies what a config.json calls attention_factor."""
    names = {
        "original_max_position_embeddings": "rope.scaling.original_context_length",
        "beta_fast": "rope.scaling.yarn_beta_fast",
        "beta_slow": "rope.scaling.yarn_beta_slow",
    }
    found = {name: _number(gguf, arch, own, key) for name, key in names.items() if key in own}
    if arch == "gpt-oss":
        found["truncate"] = False  # the metadata cannot say it
    if attention != 1.0:
        found["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    return found


def _from_factors(gguf: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """The llama3 scaling that gives the file's factors, or else the factors themselves."""
    info = gguf.tensors[ROPE_FACTORS]
    if info.type_name != "F32" or info.shape != (head_dim // 2,):
        raise CheckpointError(
            f"{gguf.path}: {ROPE_FACTORS} is {info.type_name} {list(info.shape)}; expected F32 [{head_dim // 2}]"
        )
    factors: list[float] = gguf.raw(info).view(np.float32).tolist()
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise CheckpointError(f"{gguf.path}: {ROPE_FACTORS} holds {min(factors)}; factors are positive numbers")
    llama3 = LLAMA3 | {"factor": max(factors)}
    plain = rotary(RopeConfig(theta), head_dim, 0).inv_freq
    scaled = rotary(RopeConfig(theta, "llama3", llama3), head_dim, 0).inv_freq
    if np.allclose(plain / scaled, factors, rtol=1e-5, atol=0):
        return {"rope_type": "llama3", **llama3}
    return {"rope_type": "factors", "factors": factors}
