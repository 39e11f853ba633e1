"""A draft's files as the reference reads them, a second time and by itself, from what each producer's trainer does with
its fields. It shares no code with what it judges.

Source: EAGLE, SpecForge, speculators and ModelOpt for the directories; llama.cpp's src/models/eagle3.cpp for GGUF.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from aquiline.parity.reference_draft import Array, Layer, ReferenceDraft, ReferenceRope

Fields = Mapping[str, Any]
Tensors = dict[str, NDArray[Any]]

_IDS = "eagle_aux_hidden_state_layer_ids"
_NVIDIAS = {
    "use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm", "next_layer_regular",
    "parallel_draft_step", "parallel_draft_heads_num_layers", "eh_proj_before_attn", "return_hidden_post_norm",
}  # fmt: skip
"""Fields of eagle_config that ModelOpt alone writes."""
_IN_GGUF = {
    "attn_norm": "input_layernorm", "attn_norm_2": "hidden_norm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
_BESIDE = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head", "enc.output_norm": "input_norm"}
_GGUF_FIELDS = {
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "rope_theta": "rope.freq_base",
    "norm_before_residual": "norm_before_residual",
}  # fmt: skip


def read_reference(
    place: Path, num_layers: int, embed: Array, head: Array,
    capture: tuple[int, ...] | None = None, norm_feedback: bool | None = None,
) -> ReferenceDraft:  # fmt: skip
    """The head of a checkpoint directory or a GGUF file, for a target of that many layers, whose embedding and head are
    given.

    capture and norm_feedback replace what the checkpoint says. Raises ValueError for what it cannot read."""
    is_file = place.suffix == ".gguf"
    raw, tensors = _read_gguf(place) if is_file else (_read_config(place), read_tensors(place))
    producer = "gguf" if is_file else _producer(raw)
    fields, eagle = raw.get("transformer_layer_config") or raw, raw.get("eagle_config") or {}
    prefix = next(name.partition("self_attn.")[0] for name in tensors if "self_attn." in name)
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    layer = _layer(fields, own, _rope(fields, producer), _window(fields, producer))
    embed = tensors.get("embed_tokens.weight", embed)
    offsets = tensors.get("d2t", np.zeros(len(embed), np.int64)).astype(np.int64)
    ids = offsets + np.arange(len(offsets))
    shared = embed if raw.get("tie_word_embeddings") else head
    fc_norms = [tensors[name] for i in range(8) if (name := f"fc_norm.{i}.weight") in tensors]
    feeds_normed = eagle.get("return_hidden_post_norm") or raw.get("norm_output")
    return ReferenceDraft(
        layer, tensors["fc.weight"], own["hidden_norm.weight"], tensors["norm.weight"], embed,
        tensors["lm_head.weight"] if "lm_head.weight" in tensors else shared[ids], ids,
        capture or _capture(eagle.get(_IDS, raw.get(_IDS)), producer, num_layers),
        tensors.get("input_norm.weight"), np.stack(fc_norms) if fc_norms else None,
        bool(raw.get("norm_before_residual")), bool(feeds_normed) if norm_feedback is None else norm_feedback,
    )  # fmt: skip


def _read_config(directory: Path) -> Fields:
    found: Fields = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return found


def read_tensors(directory: Path) -> Tensors:
    """Every tensor of a checkpoint, floats as float32. Raises ValueError if there is none."""
    from safetensors import safe_open

    assert np.dtype("bfloat16") == ml_dtypes.bfloat16, "numpy knows bfloat16 by ml_dtypes"
    found: Tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "np") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    if not found and (file := directory / "pytorch_model.bin").exists():
        import torch

        for name, tensor in torch.load(file, weights_only=True).items():
            found[name] = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    if not found:
        raise ValueError(f"{directory}: holds neither *.safetensors nor pytorch_model.bin")
    for name in [name.removesuffix(".int4") for name in found if name.endswith(".int4")]:
        pairs, scales = found.pop(f"{name}.int4"), found.pop(f"{name}.scales").astype(np.float32)
        codes = np.stack([pairs % 16, pairs // 16], axis=2).reshape(len(pairs), -1, 32).astype(np.float32) - 8
        found[name] = (codes * scales[:, :, None]).reshape(len(pairs), -1)
    return {name: tensor if tensor.dtype.kind in "iub" else tensor.astype(np.float32) for name, tensor in found.items()}


def _read_gguf(file: Path) -> tuple[Fields, Tensors]:
    """The fields and tensors of a llama.cpp draft by a directory's names. Its d2t are ids, and each of its heads has
    the two rows that rotate together side by side."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(file)
    said = {name[7:]: field.contents() for name, field in reader.fields.items() if name.startswith("eagle3.")}
    fields = {name: said[theirs] for name, theirs in _GGUF_FIELDS.items() if theirs in said}
    kind, factor = said.get("rope.scaling.type", "linear"), said.get("rope.scaling.factor") or 1.0
    if kind not in ("none", "linear"):
        raise ValueError(
            f"{file}: rope.scaling.type={kind!r}: the reference reads GGUF drafts with none or linear; write the draft "
            "as a directory, with `aquiline convert DRAFT DIR --to aquiline`, and compare that one"
        )
    scaling: dict[str, Any] = {"rope_type": "linear", "factor": 1.0 if kind == "none" else factor}
    tensors: Tensors = {}
    for tensor in reader.tensors:
        values = tensor.data if tensor.name == "d2t" else dequantize(tensor.data, tensor.tensor_type)
        stem, _, ending = tensor.name.rpartition(".")
        short = stem.removeprefix("blk.0.")
        if tensor.name == "rope_freqs.weight":
            scaling = {"rope_type": "factors", "factors": values.tolist()}
        elif tensor.name == "d2t":
            tensors["d2t"] = values.astype(np.int64) - np.arange(len(values))
        elif short in _IN_GGUF:
            if short in ("attn_q", "attn_k"):
                heads = fields["num_attention_heads" if short == "attn_q" else "num_key_value_heads"]
                values = values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
            tensors[f"layers.0.{_IN_GGUF[short]}.{ending}"] = values
        else:
            tensors[f"{_BESIDE.get(stem, stem)}.{ending}"] = values
    return fields | {"rope_scaling": scaling, _IDS: said["target_layers"]}, tensors


def _layer(fields: Fields, own: Mapping[str, Array], rope: ReferenceRope, window: int) -> Layer:
    names = dict.fromkeys("qkvo", "self_attn") | dict.fromkeys(("gate", "up", "down"), "mlp")
    biases = {n: own[at] for n, block in names.items() if (at := f"{block}.{n}_proj.bias") in own}
    matrices: dict[str, Any] = {name: own[f"{block}.{name}_proj.weight"] for name, block in names.items()}
    heads = fields["num_attention_heads"]
    return Layer(
        **matrices, biases=biases, input_norm=own["input_layernorm.weight"],
        post_norm=own["post_attention_layernorm.weight"], num_heads=heads,
        num_kv_heads=fields.get("num_key_value_heads") or heads, eps=fields.get("rms_norm_eps", 1e-6), rope=rope,
        window=window,
    )  # fmt: skip


def _producer(raw: Fields) -> str:
    if raw.get("speculators_config") or raw.get("speculators_model_type"):
        return "speculators"
    if raw.get("producer") == "aquiline":
        return "aquiline"
    if _NVIDIAS & set(raw.get("eagle_config") or ()):
        return "nvidia"
    is_specforge = "LlamaForCausalLMEagle3" in (raw.get("architectures") or []) or "eagle_config" in raw
    return "specforge" if is_specforge else "safeailab"


def _capture(ids: list[int] | None, producer: str, num_layers: int) -> tuple[int, ...]:
    """Outputs of layers. SafeAILab, speculators and llama.cpp name the layer that a feature enters; ModelOpt's exports
    do if L is among the ids, which no output has."""
    if ids is None:
        return 1, num_layers // 2 - 1, num_layers - 4
    enters = producer in ("speculators", "safeailab", "gguf") or (producer == "nvidia" and num_layers in ids)
    return tuple(i - enters for i in ids)


def _rope(fields: Fields, producer: str) -> ReferenceRope:
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    kind, theta = scaling.get("rope_type", scaling.get("type", "default")), fields.get("rope_theta") or 10000.0
    numbers = {name: float(v) for name, v in scaling.items() if isinstance(v, int | float) and name != "rope_theta"}
    numbers.setdefault("original_max_position_embeddings", fields.get("max_position_embeddings") or 2048)
    if kind in ("linear", "yarn") and producer in ("specforge", "safeailab"):
        theta = 10000.0  # their scaled embeddings are built at their default base
    factors = tuple(scaling.get("factors") or ())
    rope = ReferenceRope(float(scaling.get("rope_theta") or theta), kind, numbers, factors)
    if kind != "yarn" or producer != "specforge":
        return rope
    # SpecForge scales by m(mscale) / m(mscale_all_dim) whatever they are, and always truncates.
    growth = 0.1 * math.log(max(1.0, numbers["factor"]))
    scale = (1 + growth * numbers.get("mscale", 1.0)) / (1 + growth * numbers.get("mscale_all_dim", 0.0))
    return replace(rope, parameters=numbers | {"attention_factor": scale, "truncate": 1.0})


def _window(fields: Fields, producer: str) -> int:
    is_on = fields.get("use_sliding_window", True)
    if producer == "speculators":
        is_on = fields.get("layer_types") == ["sliding_attention"]
    return int(fields.get("sliding_window") or 0) if is_on and producer in ("aquiline", "speculators") else 0
