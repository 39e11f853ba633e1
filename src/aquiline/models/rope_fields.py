"""The rotations that a config.json names, old and transformers-5 style, as RopeConfigs. Knows no family.

Source: transformers 5.23, modeling_rope_utils.py; models/gemma3/configuration_gemma3.py for rotations by layer type.
"""

from __future__ import annotations

from pathlib import Path

from aquiline.errors import CheckpointError
from aquiline.models.json_fields import Raw, count, flag, nested, number
from aquiline.models.model_config import RopeConfig

_ORIGINAL = "original_max_position_embeddings"
_MAY_BE_ZERO = ("mscale", "mscale_all_dim", "truncate")
_ROPE_FIELDS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate",
    },
    "factors": {"factors"},
}  # fmt: skip
_ROPE_REQUIRED = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor"},
    "factors": {"factors"},
}


_LAYER_TYPES = ("full_attention", "sliding_attention")


def read_ropes(
    raw: Raw, file: Path, max_positions: int, default: Raw, local_default: Raw
) -> tuple[RopeConfig, RopeConfig | None]:
    """The RoPE of all layers, and None; with a `local_default`, those of layers without and with a window.

    transformers 5 has these in rope_parameters by layer type. Before, rope_theta and rope_scaling were those of layers
    without a window, rope_local_base_freq the base of the others. Raises as read_rope."""
    if not local_default:
        return read_rope(raw, file, max_positions, default), None
    by_type = nested(raw, file, "rope_parameters")
    if not set(by_type) <= set(_LAYER_TYPES):
        raise CheckpointError(
            f"{file}: rope_parameters={by_type!r}; supported here is an object with {' and '.join(_LAYER_TYPES)}"
        )
    whole, local = (raw | {"rope_parameters": nested(by_type, file, name)} for name in _LAYER_TYPES)
    local |= {"rope_scaling": None, "rope_theta": raw.get("rope_local_base_freq")}
    return read_rope(whole, file, max_positions, default), read_rope(local, file, max_positions, local_default)


def read_rope(raw: Raw, file: Path, max_positions: int, default: Raw) -> RopeConfig:
    """RoPE from rope_parameters (transformers 5) or rope_theta and rope_scaling; `default` where a config names none,
    and base 10000 where none is named there either.

    Source: transformers 5.23 RotaryEmbeddingConfigMixin (rope_scaling wins; original_max_position_embeddings falls
    back to max_position_embeddings). Raises CheckpointError for schemes and fields that are not supported."""
    name, kind, theta, fields = _rope_fields(raw, file, default)
    if kind == "default":
        return RopeConfig(theta)
    unknown, missing = sorted(set(fields) - _ROPE_FIELDS[kind]), sorted(_ROPE_REQUIRED[kind] - set(fields))
    if unknown or missing:
        raise CheckpointError(f"{file}: {name} of type {kind!r}: unknown fields {unknown}, missing fields {missing}")
    if kind == "factors":
        return RopeConfig(theta, kind, factors=_factors(fields["factors"], file, f"{name}.factors"))
    if kind in ("llama3", "yarn"):
        fields.setdefault(_ORIGINAL, count(raw, file, _ORIGINAL, max_positions))
    if "truncate" in fields:
        fields["truncate"] = int(flag(fields, file, "truncate"))
    parameters = {
        key: number(value, file, f"{name}.{key}", may_be_zero=key in _MAY_BE_ZERO) for key, value in fields.items()
    }
    if kind == "llama3" and parameters["low_freq_factor"] >= parameters["high_freq_factor"]:
        raise CheckpointError(
            f"{file}: {name}.low_freq_factor={fields['low_freq_factor']} must be below "
            f"high_freq_factor={fields['high_freq_factor']}"
        )
    return RopeConfig(theta, kind, parameters)


def _rope_fields(raw: Raw, file: Path, default: Raw) -> tuple[str, str, float, Raw]:
    """Where a config has its RoPE, the scheme, the base, and the fields that are the scheme's own."""
    name = "rope_scaling" if nested(raw, file, "rope_scaling") else "rope_parameters"
    fields = nested(raw, file, name) or {key: value for key, value in default.items() if key != "rope_theta"}
    if any(isinstance(value, dict) for value in fields.values()):
        raise CheckpointError(f"{file}: {name}={fields!r}; one flat set of parameters for all layers is supported")
    fields = {key: value for key, value in fields.items() if value is not None}
    kind = fields.pop("rope_type", fields.pop("type", "default"))
    fields.pop("type", None)
    own = raw.get("rope_theta")
    fallback = default.get("rope_theta", 10000.0) if own is None else own
    theta = number(fields.pop("rope_theta", fallback), file, "rope_theta")
    if theta <= 1:
        raise CheckpointError(f"{file}: rope_theta={theta} must be above 1; its powers are the rotation's wavelengths")
    partial = fields.pop("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial is not None and (isinstance(partial, bool) or partial != 1):
        raise CheckpointError(f"{file}: partial_rotary_factor={partial!r}; supported is 1.0")
    if not isinstance(kind, str) or kind not in _ROPE_FIELDS:
        raise CheckpointError(f"{file}: {name} rope_type={kind!r}; supported are {', '.join(_ROPE_FIELDS)}")
    return name, kind, theta, fields


def _factors(value: object, file: Path, name: str) -> tuple[float, ...]:
    if not isinstance(value, list):
        raise CheckpointError(f"{file}: {name}={value!r} must be a list of positive numbers")
    return tuple(number(factor, file, name) for factor in value)
