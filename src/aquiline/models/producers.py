"""Who trains drafts: their marks, their layouts, and what their trainers make of a config's fields.

Which numbering a producer uses is a fact about its code, not a guess. "input" ids name the layer that the feature
ENTERS, "output" ids the layer it LEAVES; input id i is output id i - 1, and outputs are the canonical form.

- SafeAILab/EAGLE, eagle/model/modeling_llama_kv.py@f2f2366, LlamaModel.forward keeps the hidden state before layers
  {2, L//2, L-3} run. Hard-coded: its configs name no layers.
- sgl-project/SpecForge, specforge/modeling/target/eagle3_target_model.py@00c4bba, HFEagle3TargetModel hooks the
  OUTPUTS of eagle_config.eagle_aux_hidden_state_layer_ids, by default {1, L//2-1, L-4}: the same three vectors.
- vllm-project/vllm #16937 and speculators count what enters a layer, {2, L//2, L-3} by default (id L: what leaves the
  last one). sglang #25454 met both numberings under one field and lost acceptance by guessing.
- NVIDIA/Model-Optimizer, modelopt/torch/speculative/plugins (HFEagleModel and megatron_eagle.py) hooks the OUTPUTS of
  its ids, by default {1, L//2-1, L-4}: 1, 17, 32 in gpt-oss-120b-Eagle3. No output has the number L, so a list with L
  in it counts what enters a layer: 24, 30, 36 in -Eagle3-v3, for which TensorRT-LLM is told to capture 23, 29, 35 and
  sglang #32334 reads boundaries.
- llama.cpp's eagle3.target_layers count what enters a layer (src/models/eagle3.cpp@00ad355).

Configs carry fields that their trainer never reads, copied from the target's. A draft is read as it was trained:

- `sliding_window`: SafeAILab (eagle/model/cnets.py@148042c) and SpecForge (specforge/modeling/draft/llama3_eagle.py
  @89241ea) attend to everything; speculators (src/speculators/models/eagle3/core.py, since #684) windows a layer whose
  `layer_types` says sliding_attention; `aquiline train` windows by the field alone.
- `rope_theta` beside linear or YaRN scaling: the two files named above build scaled embeddings at their default base,
  10000, and pass the field on for plain and llama3 ones only.
- YaRN's factor on cos and sin: SpecForge's LlamaYarnRotaryEmbedding takes m(mscale) / m(mscale_all_dim), with
  m(x) = 0.1 x ln(factor) + 1, for all values, and knows neither `attention_factor` nor `truncate`; transformers leaves
  mscale out where one of the two is 0.
- ModelOpt's marks in eagle_config switch norms, further layers and parallel heads on and off. With one layer
  `next_layer_regular` changes nothing, with one parallel step neither does the number of layers in parallel heads.
- Parallel heads put mask tokens where a chain has its own outputs. P-EAGLE has EAGLE-3's architecture and a field that
  names the mask token (vllm-project/vllm #32887: pard_token or ptd_token_id), DFlash a section of its own; speculators
  names the kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from aquiline.errors import CheckpointError
from aquiline.models.files import is_gguf, read_json
from aquiline.models.gguf.draft_file import fields_of_draft, is_draft_file
from aquiline.models.gguf.reader import read_gguf
from aquiline.models.json_fields import Raw, flag, nested, texts
from aquiline.models.model_config import LAYER_IDS, RopeConfig

Numbering = Literal["input", "output"]
EAGLE_SECTION = "eagle_config"
POST_NORM = "return_hidden_post_norm"
"""ModelOpt's name, in eagle_config, of norm_output."""
LATENT = "kv_lora_rank"
"""The field of every head whose keys and values are up-projected from one latent (DeepSeek's, Kimi's)."""
FC_NORM_FLAGS = ("norm_before_fc", "fc_norm")
PRODUCER = "aquiline"
PARALLEL_FIELDS = {
    "parallel_drafting": "P-EAGLE", "ptd_token_id": "P-EAGLE", "pard_token": "P-EAGLE", "dflash_config": "DFlash",
}  # fmt: skip
"""Fields of a config that only heads have which draft several tokens in a pass, and what these heads are called."""
PARALLEL_KINDS = {"peagle": "P-EAGLE", "dflash": "DFlash"}
"""The same of speculators_model_type."""
_NOT_IN_SPECFORGES_YARN = ("attention_factor", "truncate", "mscale", "mscale_all_dim")


@dataclass(frozen=True)
class FieldRule:
    """A field of eagle_config whose `values` mean the head that runs here; none: every value does. The first value is
    written; `otherwise` says what another value means."""

    values: tuple[bool | int, ...] = ()
    otherwise: str = ""

    def refusal(self, value: object) -> str | None:
        """Why a value is refused; None if it is not."""
        fits = not self.values or any(type(value) is type(known) and value == known for known in self.values)
        return None if fits or value is None else f"{self.otherwise}; supported is {self.values[0]!r}"


@dataclass(frozen=True)
class Format:
    """One producer's layout, as it is read and as it is written.

    `name` is what `aquiline convert --to` calls it, `title` what its users do. `architectures`: those that its configs
    name, the first one written. `layer` prefixes the decoder layer's tensors, `other_layer` does in older exports;
    `section` holds its geometry, "" the top. `last_is_input`: ids with the number of the target's layers among them
    are in the input numbering, whatever `numbering` says. `ids_in`: where the ids are written, None if nowhere.

    `norm_output_is_feedback`: whether the flag norm_output means that the normed output is fed back; None where the
    producer changed its mind (SpecForge #879) and the caller has to say. `window`: which field makes the trainer
    attend within sliding_window. `scaled_theta`: the base of linear and YaRN embeddings whatever rope_theta says, None
    where rope_theta is followed. `marks`: fields of eagle_config that tell this producer.

    `knows`: what its checkpoints can say beyond a plain head, by the names of `extras` in draft_fields.py. `has_t2d`:
    whether its checkpoints hold t2d, which d2t implies."""

    name: str
    title: str
    architectures: tuple[str, ...]
    layer: str
    numbering: Numbering
    norm_output_is_feedback: bool | None
    section: str = ""
    window: Literal["none", "sliding_window", "layer_types"] = "none"
    scaled_theta: float | None = None
    other_layer: str | None = None
    last_is_input: bool = False
    ids_in: str | None = EAGLE_SECTION
    marks: Mapping[str, FieldRule] = field(default_factory=dict)
    knows: frozenset[str] = frozenset()
    has_t2d: bool = True

    def numbering_of(self, ids: object, num_layers: int | None) -> Numbering:
        """How the ids of a config count, for a target of that many layers."""
        return "input" if self.last_is_input and isinstance(ids, list) and num_layers in ids else self.numbering


_SCALINGS = frozenset({"linear", "llama3", "yarn"})
SAFEAILAB = Format(
    "safeailab", "SafeAILab", ("LlamaForCausalLM", "Eagle3LlamaForCausalLM"), "midlayer", "input", None,
    scaled_theta=10000.0, ids_in=None, knows=_SCALINGS,
)  # fmt: skip
SPECFORGE = Format(
    "specforge", "SpecForge", ("LlamaForCausalLMEagle3",), "midlayer", "output", None, scaled_theta=10000.0,
    knows=_SCALINGS | {*FC_NORM_FLAGS, "norm_before_residual", "target_hidden_size"},
)  # fmt: skip
AQUILINE = Format(
    PRODUCER, PRODUCER, ("LlamaForCausalLMEagle3",), "midlayer", "output", True, window="sliding_window",
    knows=_SCALINGS | {
        *FC_NORM_FLAGS, "norm_before_residual", "norm_output", "sliding_window", "attention_bias", "mlp_bias",
        "target_hidden_size", "factors",
    },
)  # fmt: skip
SPECULATORS = Format(
    "speculators", "speculators", ("Eagle3Speculator",), "layers.0", "input", True, "transformer_layer_config",
    window="layer_types", ids_in="", knows=_SCALINGS | {
        *FC_NORM_FLAGS, "norm_before_residual", "norm_output", "sliding_window", "attention_bias", "mlp_bias",
        "target_hidden_size",
    },
)  # fmt: skip
NVIDIA = Format(
    "nvidia", "NVIDIA ModelOpt", ("LlamaForCausalLMEagle3",), "layers.0", "output", True, other_layer="midlayer",
    last_is_input=True, has_t2d=False,
    knows=_SCALINGS | {*FC_NORM_FLAGS, "norm_output", "attention_bias", "mlp_bias", "target_hidden_size"},
    marks={
        "use_input_layernorm_in_first_layer": FieldRule((True,), "embeddings then enter attention without their norm"),
        "use_last_layernorm": FieldRule((True,), "the head then reads hidden states without the final norm"),
        "use_mtp_layernorm": FieldRule((False,), "embeddings and hidden states then pass the norms of an MTP head"),
        "next_layer_regular": FieldRule(),
        "parallel_draft_step": FieldRule((1,), "parallel heads then draft several tokens in a pass"),
        "parallel_draft_heads_num_layers": FieldRule(),
        "eh_proj_before_attn": FieldRule((False,), "a projection then mixes embeddings and hidden states first"),
        POST_NORM: FieldRule((False, True), "it must be true or false"),
    },
)  # fmt: skip
GGUF = Format(
    "gguf", "llama.cpp", (), "layers.0", "input", True, ids_in="", has_t2d=False,
    knows=frozenset({"linear", "llama3", "factors", "norm_before_fc", "norm_before_residual", "target_hidden_size"}),
)  # fmt: skip
FORMATS = {fmt.name: fmt for fmt in (SAFEAILAB, SPECFORGE, SPECULATORS, NVIDIA, AQUILINE, GGUF)}
"""Every format by its name."""


def draft_mark(raw: Raw) -> str | None:
    """The field by which a config says that it is a draft's, as NAME=VALUE; None if it says nothing of the kind."""
    for name in (
        "speculators_model_type",
        "speculators_config",
        "eagle_config",
        "draft_vocab_size",
        *PARALLEL_FIELDS,
        LAYER_IDS,
    ):
        if raw.get(name) is not None:
            return f"{name}={raw[name]!r}" if isinstance(raw[name], str | int) else name
    names = raw.get("architectures")
    is_eagle = isinstance(names, list) and any(isinstance(name, str) and "eagle" in name.lower() for name in names)
    return f"architectures={names!r}" if is_eagle else None


def read_draft_fields(file: Path) -> Raw:
    """The fields of a draft's config.json, or those that a GGUF draft's metadata stand for. Raises CheckpointError for
    a file that is missing or broken, and for a target where a draft is wanted."""
    told = "name a draft that was trained for the target, or none"
    if is_gguf(file):
        gguf = read_gguf(file)
        if not is_draft_file(gguf):
            arch = gguf.text("general.architecture")
            raise CheckpointError(
                f"{file}: this is no draft: general.architecture={arch!r} is a target's, a draft's is 'eagle3'; {told}"
            )
        return fields_of_draft(gguf)
    raw = read_json(file)
    refuse_parallel(raw, file)
    layers = raw.get("num_hidden_layers")
    if type(layers) is int and layers > 1 and draft_mark(raw) is None:
        raise CheckpointError(
            f"{file}: this is no draft: num_hidden_layers={layers}, and an EAGLE-3 draft has one layer, so it is a "
            f"target; {told}"
        )
    return raw


def refuse_parallel(raw: Raw, file: Path) -> None:
    """Raise CheckpointError for a head that drafts several tokens in one pass. Some have EAGLE-3's architecture and
    tensors, and would run as a chain that they were not trained for."""
    kind = raw.get("speculators_model_type")
    is_set = {name: raw.get(name) is not None and raw[name] is not False for name in PARALLEL_FIELDS}
    named = {name: title for name, title in PARALLEL_FIELDS.items() if is_set[name]}
    if isinstance(kind, str) and kind in PARALLEL_KINDS:
        named = {"speculators_model_type": PARALLEL_KINDS[kind]}
    for name, title in named.items():
        told = "" if isinstance(raw[name], dict) else f"={raw[name]!r}"
        raise CheckpointError(
            f"{file}: {name}{told}: this is a {title} head, which drafts several tokens in one pass; heads here draft "
            "one token a pass. Name an EAGLE-3 head of this target, or train one with `aquiline train`"
        )


def find_format(raw: Raw, file: Path) -> tuple[Format, str]:
    """The producer that a config declares by its own mark, else by its architecture; and that mark, as NAME=VALUE.

    Raises CheckpointError if it is unknown."""
    if is_gguf(file):
        return GGUF, "general.architecture='eagle3'"
    architectures = texts(raw, file, "architectures")
    for section in (raw, nested(raw, file, SPECULATORS.section)):
        if section.get(LATENT) is not None:
            raise CheckpointError(
                f"{file}: {LATENT}={section[LATENT]!r}: its keys are latent (MLA), and drafts here keep keys and "
                "values per head; for long contexts train a draft with a window, `aquiline train --draft-window 128`"
            )
    if raw.get("speculators_config") or raw.get("speculators_model_type"):
        kind = raw.get("speculators_model_type", "eagle3")
        if kind != "eagle3":
            raise CheckpointError(f"{file}: speculators_model_type={kind!r}; supported is 'eagle3'")
        return SPECULATORS, "speculators_model_type" if "speculators_model_type" in raw else "speculators_config"
    known = sorted({name for fmt in FORMATS.values() for name in fmt.architectures})
    if not set(architectures) <= set(known):
        raise CheckpointError(f"{file}: architectures={architectures!r}; supported drafts are {', '.join(known)}")
    if raw.get("producer") == PRODUCER:
        return AQUILINE, f"producer={PRODUCER!r}"
    eagle = nested(raw, file, EAGLE_SECTION)
    for name in NVIDIA.marks:
        if name in eagle:
            return NVIDIA, f"{EAGLE_SECTION}.{name}={eagle[name]!r}"
    if SPECFORGE.architectures[0] in architectures or EAGLE_SECTION in raw:
        shown = EAGLE_SECTION if EAGLE_SECTION in raw else f"architectures={architectures!r}"
        return SPECFORGE, shown
    return SAFEAILAB, f"architectures={architectures!r} and no mark of another producer"


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
            f"rope_theta={rope.theta:g} has no effect: {fmt.title} trains {rope.kind} scaling at base "
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
