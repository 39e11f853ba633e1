"""What a draft checkpoint says it is: producers as data, their two capture-layer numberings, one DraftConfig.

Which numbering a producer uses is a fact about its code, not a guess. "input" ids name the layer that the feature
ENTERS, "output" ids the layer it LEAVES; input id i is output id i - 1, and outputs are the canonical form.

- SafeAILab/EAGLE, eagle/model/modeling_llama_kv.py@f2f2366, LlamaModel.forward keeps the hidden state before layers
  {2, L//2, L-3} run. Hard-coded: its configs name no layers.
- sgl-project/SpecForge, specforge/modeling/target/eagle3_target_model.py@00c4bba, HFEagle3TargetModel hooks the
  OUTPUTS of eagle_config.eagle_aux_hidden_state_layer_ids, by default {1, L//2-1, L-4}: the same three vectors.
- vllm-project/vllm #16937 and speculators count what enters a layer, {2, L//2, L-3} by default (id L: what leaves the
  last one). sglang #25454 met both numberings under one field and lost acceptance by guessing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from aquiline.errors import CheckpointError
from aquiline.models.config import DraftConfig, ModelConfig, default_capture
from aquiline.models.families import EOS, geometry, read_model_config, refuse_features
from aquiline.models.fields import Raw, count, flag, nested, texts, token_ids
from aquiline.models.files import is_gguf, read_json, refuse, resolve

Numbering = Literal["input", "output"]
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
PRODUCER = "aquiline"
FC_NORM_FLAGS = ("norm_before_fc", "fc_norm")


@dataclass(frozen=True)
class Format:
    """One producer's layout. `layer` prefixes the decoder layer's tensors; `section` holds its geometry, "" the top.

    `norm_output_is_feedback`: whether the flag norm_output means that the normed output is fed back; None where the
    producer changed its mind (SpecForge #879) and the caller has to say."""

    name: str
    architectures: tuple[str, ...]
    layer: str
    numbering: Numbering
    norm_output_is_feedback: bool | None
    section: str = ""


SAFEAILAB = Format("SafeAILab", ("LlamaForCausalLM", "Eagle3LlamaForCausalLM"), "midlayer", "input", None)
SPECFORGE = Format("SpecForge", ("LlamaForCausalLMEagle3",), "midlayer", "output", None)
AQUILINE = Format("aquiline", ("LlamaForCausalLMEagle3",), "midlayer", "output", True)
SPECULATORS = Format("speculators", ("Eagle3Speculator",), "layers.0", "input", True, "transformer_layer_config")
FORMATS = (SAFEAILAB, SPECFORGE, AQUILINE, SPECULATORS)

_EAGLE_FIELDS = {LAYER_IDS, "use_aux_hidden_state", *FC_NORM_FLAGS}


@dataclass(frozen=True)
class DraftOverrides:
    """What the caller knows better than the checkpoint: capture layers (outputs, ascending) and the fed-back norm."""

    capture: tuple[int, ...] | None = None
    norm_feedback: bool | None = None


NO_OVERRIDES = DraftOverrides()


@dataclass(frozen=True)
class DraftReading:
    """A draft config as read, and everything about it that does not fit its target, one line each.

    `vocab_is_named`: the config gives draft_vocab_size; otherwise the length of d2t does."""

    format: Format
    config: DraftConfig
    problems: list[str]
    vocab_is_named: bool = True


def read_draft_config(
    path: str | Path,
    target: ModelConfig | str | Path,
    *,
    capture: tuple[int, ...] | None = None,
    norm_feedback: bool | None = None,
) -> DraftConfig:
    """The DraftConfig of a draft directory or hub id beside its target (a config, or where it is); opens no weights.

    `capture` overrides the checkpoint's capture layers, as output-of-layer indices; `norm_feedback` overrides its
    EAGLE-3.1 flag. Raises CheckpointError listing every mismatch with the target."""
    directory = resolve(path)
    model = target if isinstance(target, ModelConfig) else read_model_config(target)
    reading = read_draft(directory, model, DraftOverrides(capture, norm_feedback))
    refuse(directory, reading.problems)
    return reading.config


def read_draft(directory: Path, target: ModelConfig, overrides: DraftOverrides) -> DraftReading:
    """Read a draft's config.json; mismatches with the target are collected, what cannot be read at all is raised."""
    if is_gguf(directory):
        raise CheckpointError(f"{directory}: drafts are read from directories with a config.json, not from GGUF files")
    file = directory / "config.json"
    raw = read_json(file)
    fmt = find_format(raw, file)
    eagle = _eagle_section(raw, file)
    section = nested(raw, file, fmt.section) if fmt.section else raw
    if not section:
        raise CheckpointError(f"{file}: {fmt.section} is missing; a {fmt.name} config has its geometry there")
    refuse_features(section, file)
    model = _geometry(section, file)
    problems: list[str] = []
    ids = eagle.get(LAYER_IDS, raw.get(LAYER_IDS))
    layers = canonical_capture(ids, fmt, target.num_layers, overrides.capture, problems)
    target_hidden = count(raw, file, "target_hidden_size", model.hidden_size)
    config = DraftConfig(
        model=model,
        draft_vocab_size=count(raw, file, "draft_vocab_size", model.vocab_size),
        target_hidden_size=target_hidden,
        capture=layers,
        norm_before_fc=flag(raw | eagle, file, "norm_before_fc"),
        fc_norm=flag(raw | eagle, file, "fc_norm"),
        norm_before_residual=_norm_before_residual(raw, fmt, file),
        norm_feedback=_norm_feedback(raw, fmt, file, overrides.norm_feedback, problems),
    )
    if config.norm_before_fc and config.fc_norm:
        problems.append("norm_before_fc and fc_norm are both true; a head has one or the other")
    if model.vocab_size != target.vocab_size:
        problems.append(f"vocab_size={model.vocab_size}, the target has {target.vocab_size}")
    if target_hidden != target.hidden_size:
        name = "target_hidden_size" if raw.get("target_hidden_size") else "hidden_size"
        problems.append(f"{name}={target_hidden}, the target has {target.hidden_size}")
    if config.draft_vocab_size > model.vocab_size:
        problems.append(f"draft_vocab_size={config.draft_vocab_size} exceeds vocab_size={model.vocab_size}")
    return DraftReading(fmt, config, problems, raw.get("draft_vocab_size") is not None)


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


def canonical_capture(
    ids: object, fmt: Format, num_layers: int, override: tuple[int, ...] | None, problems: list[str]
) -> tuple[int, ...]:
    """A checkpoint's capture layers as outputs, ascending; the override if there is one, EAGLE's default without ids.

    Ids that are exactly the OTHER numbering's default are a known trap (sglang #25454) and need the override. Appends
    to `problems` what does not fit; the result then only serves to look for further problems."""
    if override is not None:
        layers = tuple(override)
    elif ids is None:
        if num_layers < 7:
            problems.append(f"{LAYER_IDS} is missing and a target of {num_layers} layers has no default: pass capture=")
            return (0, 1, 2)
        layers = default_capture(num_layers)
    elif not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        problems.append(f"{LAYER_IDS}={ids!r} must be a list of layer numbers")
        return (0, 1, 2)
    else:
        layers = tuple(i - (fmt.numbering == "input") for i in ids)
        problems += _numbering_trap(tuple(ids), fmt, num_layers)
    if list(layers) != sorted({i for i in layers if 0 <= i < num_layers}):
        named = f"capture={override}" if override is not None else f"{LAYER_IDS}={ids} ({fmt.numbering} numbering)"
        problems.append(f"{named}: must be ascending layers of the target, whose outputs are 0 .. {num_layers - 1}")
    return layers


def _numbering_trap(ids: tuple[int, ...], fmt: Format, num_layers: int) -> list[str]:
    if fmt is AQUILINE or num_layers < 7:
        return []
    default = default_capture(num_layers)
    other = "input" if fmt.numbering == "output" else "output"
    if ids != tuple(i + (other == "input") for i in default):
        return []
    declared = tuple(i - (fmt.numbering == "input") for i in ids)
    return [
        f"{LAYER_IDS}={list(ids)} is EAGLE's default in the {other} numbering, but {fmt.name} declares the "
        f"{fmt.numbering} numbering: pass capture={default} (the default) or capture={declared} (as declared)"
    ]


def _geometry(section: Raw, file: Path) -> ModelConfig:
    """The draft layer: Llama with its own RoPE (base 10000 unless named) and, if it trained with one, its window."""
    if section.get("model_type", "llama") != "llama":
        raise CheckpointError(f"{file}: model_type={section['model_type']!r}; supported draft layers are 'llama'")
    if count(section, file, "num_hidden_layers") != 1:
        raise CheckpointError(f"{file}: num_hidden_layers={section['num_hidden_layers']}; supported is 1")
    model = replace(geometry(section, file, "llama", token_ids(section, file, EOS)), tied_head=False)
    if section.get("sliding_window") is None or not flag(section, file, "use_sliding_window", True):
        return model
    return replace(model, windows=(count(section, file, "sliding_window"),))


def _eagle_section(raw: Raw, file: Path) -> Raw:
    eagle = nested(raw, file, "eagle_config")
    unknown = sorted(set(eagle) - _EAGLE_FIELDS)
    if unknown:
        known = ", ".join(sorted(_EAGLE_FIELDS))
        raise CheckpointError(f"{file}: eagle_config has {', '.join(unknown)}; known are {known}")
    if not flag(eagle, file, "use_aux_hidden_state", True):
        raise CheckpointError(f"{file}: eagle_config.use_aux_hidden_state is off: that is no EAGLE-3 head")
    return eagle


def _norm_before_residual(raw: Raw, fmt: Format, file: Path) -> bool:
    if raw.get("norm_before_residual") is None and fmt is SPECULATORS:  # speculators defaults it to false, vLLM to true
        raise CheckpointError(f"{file}: norm_before_residual is missing; a speculators config must say true or false")
    return flag(raw, file, "norm_before_residual")


def _norm_feedback(raw: Raw, fmt: Format, file: Path, override: bool | None, problems: list[str]) -> bool:
    if override is not None:
        return override
    if not flag(raw, file, "norm_output"):
        return False
    if fmt.norm_output_is_feedback is None:
        problems.append(
            f"norm_output=true means two things in {fmt.name} checkpoints: pass norm_feedback=False if it was trained "
            "before SpecForge #879 (2026-09), where the raw output is fed back, norm_feedback=True after it"
        )
    return bool(fmt.norm_output_is_feedback)
