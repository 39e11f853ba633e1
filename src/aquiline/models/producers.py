"""Who trains drafts: their marks, their layouts, and what their trainers make of a config's fields.

Which numbering a producer uses is a fact about its code, not a guess. "input" ids name the layer that the feature
ENTERS, "output" ids the layer it LEAVES; input id i is output id i - 1, and outputs are the canonical form.

- SafeAILab/EAGLE, eagle/model/modeling_llama_kv.py@f2f2366, LlamaModel.forward keeps the hidden state before layers
  {2, L//2, L-3} run. Hard-coded: its configs name no layers.
- sgl-project/SpecForge, specforge/modeling/target/eagle3_target_model.py@00c4bba, HFEagle3TargetModel hooks the
  OUTPUTS of eagle_config.eagle_aux_hidden_state_layer_ids, by default {1, L//2-1, L-4}: the same three vectors.
- vllm-project/vllm #16937 and speculators count what enters a layer, {2, L//2, L-3} by default (id L: what leaves the
  last one). sglang #25454 met both numberings under one field and lost acceptance by guessing.

Configs carry fields that their trainer never reads, copied from the target's. A draft is read as it was trained:

- `sliding_window`: SafeAILab (eagle/model/cnets.py@148042c) and SpecForge (specforge/modeling/draft/llama3_eagle.py
  @89241ea) attend to everything; speculators (src/speculators/models/eagle3/core.py, since #684) windows a layer whose
  `layer_types` says sliding_attention; `aquiline train` windows by the field alone.
- `rope_theta` beside linear or YaRN scaling: the two files named above build scaled embeddings at their default base,
  10000, and pass the field on for plain and llama3 ones only.
- YaRN's factor on cos and sin: SpecForge's LlamaYarnRotaryEmbedding takes m(mscale) / m(mscale_all_dim), with
  m(x) = 0.1 x ln(factor) + 1, for all values, and knows neither `attention_factor` nor `truncate`; transformers leaves
  mscale out where one of the two is 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from aquiline.errors import CheckpointError
from aquiline.models.files import is_gguf, read_json
from aquiline.models.json_fields import Raw, flag, texts
from aquiline.models.model_config import RopeConfig

Numbering = Literal["input", "output"]
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
PRODUCER = "aquiline"
_NOT_IN_SPECFORGES_YARN = ("attention_factor", "truncate", "mscale", "mscale_all_dim")


@dataclass(frozen=True)
class Format:
    """One producer's layout. `layer` prefixes the decoder layer's tensors; `section` holds its geometry, "" the top.

    `norm_output_is_feedback`: whether the flag norm_output means that the normed output is fed back; None where the
    producer changed its mind (SpecForge #879) and the caller has to say. `window`: which field makes the trainer
    attend within sliding_window. `scaled_theta`: the base of linear and YaRN embeddings whatever rope_theta says, None
    where rope_theta is followed."""

    name: str
    architectures: tuple[str, ...]
    layer: str
    numbering: Numbering
    norm_output_is_feedback: bool | None
    section: str = ""
    window: Literal["none", "sliding_window", "layer_types"] = "none"
    scaled_theta: float | None = None


SAFEAILAB = Format(
    "SafeAILab", ("LlamaForCausalLM", "Eagle3LlamaForCausalLM"), "midlayer", "input", None, scaled_theta=10000.0
)
SPECFORGE = Format("SpecForge", ("LlamaForCausalLMEagle3",), "midlayer", "output", None, scaled_theta=10000.0)
AQUILINE = Format("aquiline", ("LlamaForCausalLMEagle3",), "midlayer", "output", True, window="sliding_window")
SPECULATORS = Format(
    "speculators", ("Eagle3Speculator",), "layers.0", "input", True, "transformer_layer_config", window="layer_types"
)
FORMATS = (SAFEAILAB, SPECFORGE, AQUILINE, SPECULATORS)


def draft_mark(raw: Raw) -> str | None:
    """The field by which a config says that it is a draft's, as NAME=VALUE; None if it says nothing of the kind."""
    for name in ("speculators_model_type", "speculators_config", "eagle_config", "draft_vocab_size", LAYER_IDS):
        if raw.get(name) is not None:
            return f"{name}={raw[name]!r}" if isinstance(raw[name], str | int) else name
    names = raw.get("architectures")
    is_eagle = isinstance(names, list) and any(isinstance(name, str) and "eagle" in name.lower() for name in names)
    return f"architectures={names!r}" if is_eagle else None


def read_draft_fields(file: Path) -> Raw:
    """The fields of a draft's config.json. Raises CheckpointError for a file that is missing or broken, and for a
    target where a draft is wanted."""
    told = "name a draft that was trained for the target, or none"
    if is_gguf(file):
        raise CheckpointError(
            f"{file}: this is no draft: a GGUF file is read as a target, and drafts are directories with a "
            f"config.json; {told}"
        )
    raw = read_json(file)
    layers = raw.get("num_hidden_layers")
    if type(layers) is int and layers > 1 and draft_mark(raw) is None:
        raise CheckpointError(
            f"{file}: this is no draft: num_hidden_layers={layers}, and an EAGLE-3 draft has one layer, so it is a "
            f"target; {told}"
        )
    return raw


def find_format(raw: Raw, file: Path) -> Format:
    """The producer a config declares: its own mark, else its architecture. Raises CheckpointError if unknown."""
    architectures = texts(raw, file, "architectures")
    if raw.get("speculators_config") or raw.get("speculators_model_type"):
        kind = raw.get("speculators_model_type", "eagle3")
        if kind != "eagle3":
            raise CheckpointError(f"{file}: speculators_model_type={kind!r}; supported is 'eagle3'")
        return SPECULATORS
    known = sorted({name for fmt in FORMATS for name in fmt.architectures})
    if not set(architectures) <= set(known):
        raise CheckpointError(f"{file}: architectures={architectures!r}; supported drafts are {', '.join(known)}")
    if raw.get("producer") == PRODUCER:
        return AQUILINE
    if SPECFORGE.architectures[0] in architectures or "eagle_config" in raw:
        return SPECFORGE
    return SAFEAILAB


def is_windowed(section: Raw, fmt: Format, file: Path) -> bool:
    """Whether the draft layer attends within sliding_window. Raises CheckpointError for other layer types."""
    if fmt.window == "layer_types":
        types = texts(section, file, "layer_types") or ["full_attention"]
        if types not in (["full_attention"], ["sliding_attention"]):
            raise CheckpointError(
                f"{file}: layer_types={types!r}; supported is one entry, full_attention or sliding_attention"
            )
        return types == ["sliding_attention"]
    is_off = section.get("sliding_window") is None or not flag(section, file, "use_sliding_window", True)
    return fmt.window == "sliding_window" and not is_off


def trained_rope(rope: RopeConfig, section: Raw, fmt: Format, notices: list[str]) -> RopeConfig:
    """The rotary embedding as the format's trainer builds it; what has no effect there is added to `notices`.

    `section`: the fields that `rope` was read from; their types have been checked already."""
    if fmt.scaled_theta is None or rope.kind not in ("linear", "yarn"):
        return rope
    scaling: Raw = section.get("rope_scaling") or section.get("rope_parameters") or {}
    if rope.theta != fmt.scaled_theta and scaling.get("rope_theta") is None:
        notices.append(
            f"rope_theta={rope.theta:g} has no effect: {fmt.name} trains {rope.kind} scaling at base "
            f"{fmt.scaled_theta:g}; for a draft of another trainer write rope_theta into rope_scaling"
        )
        rope = replace(rope, theta=fmt.scaled_theta)
    if fmt is not SPECFORGE or rope.kind != "yarn":
        return rope
    known = {name: value for name, value in rope.parameters.items() if name not in _NOT_IN_SPECFORGES_YARN}
    growth = 0.1 * math.log(max(1.0, known["factor"]))
    numerator = 1.0 + growth * rope.parameters.get("mscale", 1.0)
    scale = numerator / (1.0 + growth * rope.parameters.get("mscale_all_dim", 0.0))
    return replace(rope, parameters=known | {"attention_factor": scale})
