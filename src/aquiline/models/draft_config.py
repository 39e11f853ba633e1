"""What a draft checkpoint says it is: one DraftConfig, and everything in it that does not fit its target.

producers.py knows who trains drafts and how each trainer reads the fields of a config.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from aquiline.errors import CheckpointError
from aquiline.models.families import EOS, FAMILIES, config_file, geometry, read_model_config, refuse_features
from aquiline.models.files import refuse, resolve
from aquiline.models.json_fields import Raw, count, flag, flag_or_none, nested, token_ids
from aquiline.models.known_pairs import draft_of
from aquiline.models.model_config import LAYER_IDS, DraftConfig, ModelConfig, default_capture
from aquiline.models.producers import (
    AQUILINE,
    EAGLE_SECTION,
    FC_NORM_FLAGS,
    GGUF,
    POST_NORM,
    SPECULATORS,
    Format,
    find_format,
    is_windowed,
    read_draft_fields,
    trained_rope,
)

_WITHOUT_FINAL_NORM = "its head was trained without the final norm, which is not supported; train it again"
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

    `declared`: the field by which the format was told. `vocab_is_named`: the config gives draft_vocab_size; otherwise
    the length of d2t does. `tied_head`: a head that the checkpoint does not hold is the draft's own embedding.
    `notices`: fields that have no effect, to be logged. `layers_are_known`: false without a target where only that
    tells which layers the config means; `config.capture` is then as long as theirs, and says nothing else."""

    format: Format
    declared: str
    config: DraftConfig
    problems: list[str]
    vocab_is_named: bool = True
    tied_head: bool = False
    notices: list[str] = field(default_factory=list)
    layers_are_known: bool = True


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
    directory = resolve(draft_of(path))
    model = target if isinstance(target, ModelConfig) else read_model_config(target)
    reading = read_draft(directory, model, DraftOverrides(capture, norm_feedback))
    refuse(directory, reading.problems)
    return reading.config


def read_draft(directory: Path, target: ModelConfig | None, overrides: DraftOverrides) -> DraftReading:
    """Read what a draft says it is; mismatches with the target are collected, what cannot be read at all is raised.
    Without a target nothing is compared with one."""
    file = config_file(directory)
    return draft_reading(read_draft_fields(file), file, target, overrides)


def draft_reading(raw: Raw, file: Path, target: ModelConfig | None, overrides: DraftOverrides) -> DraftReading:
    """The same of the fields of a config; `file` is named in errors."""
    fmt, declared = find_format(raw, file)
    eagle = _eagle_section(raw, fmt, file)
    section = nested(raw, file, fmt.section) if fmt.section else raw
    if not section:
        raise CheckpointError(f"{file}: {fmt.section} is missing; a {fmt.title} config has its geometry there")
    refuse_features(section, file, FAMILIES["llama"])
    problems: list[str] = []
    notices: list[str] = []
    model = _geometry(section, fmt, file, notices)
    ids = None if overrides.capture is not None else _layer_ids(raw, eagle, problems)
    is_known = target is not None or overrides.capture is not None or (ids is not None and not fmt.last_is_input)
    if is_known:
        num_layers = None if target is None else target.num_layers
        layers = canonical_capture(ids, fmt, num_layers, overrides.capture, problems)
    else:
        layers = tuple(range(len(ids) if isinstance(ids, list) and ids else 3))
    target_hidden = count(raw, file, "target_hidden_size", model.hidden_size)
    said = flag(eagle, file, POST_NORM) or flag_or_none(raw, file, "norm_output")
    config = DraftConfig(
        model=model,
        draft_vocab_size=count(raw, file, "draft_vocab_size", model.vocab_size),
        target_hidden_size=target_hidden,
        capture=layers,
        norm_before_fc=flag(raw | eagle, file, "norm_before_fc"),
        fc_norm=flag(raw | eagle, file, "fc_norm"),
        norm_before_residual=_norm_before_residual(raw, fmt, file),
        norm_feedback=_norm_feedback(said, fmt, overrides.norm_feedback, problems),
    )
    if config.norm_before_fc and config.fc_norm:
        problems.append("norm_before_fc and fc_norm are both true; a head has one or the other")
    if target is not None and model.vocab_size != target.vocab_size:
        problems.append(f"vocab_size={model.vocab_size}, the target has {target.vocab_size}")
    if target is not None and target_hidden != target.hidden_size:
        name = "target_hidden_size" if raw.get("target_hidden_size") else "hidden_size"
        problems.append(f"{name}={target_hidden}, the target has {target.hidden_size}")
    if config.draft_vocab_size > model.vocab_size:
        problems.append(f"draft_vocab_size={config.draft_vocab_size} exceeds vocab_size={model.vocab_size}")
    is_tied, vocab_is_named = flag(raw, file, "tie_word_embeddings"), raw.get("draft_vocab_size") is not None
    return DraftReading(fmt, declared, config, problems, vocab_is_named, is_tied, notices, is_known)


def canonical_capture(
    ids: object, fmt: Format, num_layers: int | None, override: tuple[int, ...] | None, problems: list[str]
) -> tuple[int, ...]:
    """A checkpoint's capture layers as outputs, ascending; the override if there is one, EAGLE's default without ids.
    num_layers: the target's, None if there is no target.

    Ids that are exactly the OTHER numbering's default are a known trap (sglang #25454) and need the override. Appends
    to `problems` what does not fit; the result then only serves to look for further problems."""
    if override is not None:
        layers = tuple(override)
    elif ids is None:
        assert num_layers is not None, "ids without a target"
        if num_layers < 7:
            problems.append(f"{LAYER_IDS} is missing and a target of {num_layers} layers has no default: pass capture=")
            return (0, 1, 2)
        layers = default_capture(num_layers)
    elif not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        problems.append(f"{LAYER_IDS}={ids!r} must be a list of layer numbers")
        return (0, 1, 2)
    else:
        layers = tuple(i - (fmt.numbering_of(ids, num_layers) == "input") for i in ids)
        problems += _numbering_trap(tuple(ids), fmt, num_layers)
    if list(layers) != sorted({i for i in layers if 0 <= i < (num_layers or i + 1)}):
        numbering = fmt.numbering_of(ids, num_layers)
        named = f"capture={override}" if override is not None else f"{LAYER_IDS}={ids} ({numbering} numbering)"
        outputs = "0 and up" if num_layers is None else f"0 .. {num_layers - 1}"
        problems.append(f"{named}: must be ascending layers of the target, whose outputs are {outputs}")
    return layers


def _numbering_trap(ids: tuple[int, ...], fmt: Format, num_layers: int | None) -> list[str]:
    if fmt in (AQUILINE, GGUF) or num_layers is None or num_layers < 7:
        return []
    default = default_capture(num_layers)
    other = "input" if fmt.numbering == "output" else "output"
    if ids != tuple(i + (other == "input") for i in default):
        return []
    declared = tuple(i - (fmt.numbering == "input") for i in ids)
    return [
        f"{LAYER_IDS}={list(ids)} is EAGLE's default in the {other} numbering, but {fmt.title} declares the "
        f"{fmt.numbering} numbering: pass capture={default} (the default) or capture={declared} (as declared)"
    ]


def _geometry(section: Raw, fmt: Format, file: Path, notices: list[str]) -> ModelConfig:
    """The draft layer: Llama with its own RoPE (base 10000 unless named) and, if it trained with one, its window."""
    if section.get("model_type", "llama") != "llama":
        raise CheckpointError(f"{file}: model_type={section['model_type']!r}; supported draft layers are 'llama'")
    if count(section, file, "num_hidden_layers") != 1:
        raise CheckpointError(f"{file}: num_hidden_layers={section['num_hidden_layers']}; supported is 1")
    model = replace(geometry(section, file, "llama", token_ids(section, file, EOS)), tied_head=False)
    model = _with_biases(replace(model, rope=trained_rope(model.rope, section, fmt, notices)), fmt, notices)
    window = section.get("sliding_window")
    if is_windowed(section, fmt, file):
        return replace(model, windows=(count(section, file, "sliding_window"),))
    if window is not None and flag(section, file, "use_sliding_window", True):
        told = "without layer_types=['sliding_attention']" if fmt is SPECULATORS else "whatever the config says"
        notices.append(f"sliding_window={window!r} has no effect: {fmt.title} trains without a window, {told}")
    return model


def _with_biases(model: ModelConfig, fmt: Format, notices: list[str]) -> ModelConfig:
    """The layer with the biases that its trainer gives it; flags that were copied from a target change nothing."""
    has_attention, has_mlp = (name in fmt.knows for name in ("attention_bias", "mlp_bias"))
    if model.qkv_bias and not has_attention:
        notices.append(f"attention_bias=true has no effect: {fmt.title} trains without biases")
    if model.mlp_bias and not has_mlp:
        notices.append(f"mlp_bias=true has no effect: {fmt.title} trains without biases")
    attention = model.qkv_bias and has_attention
    return replace(model, qkv_bias=attention, o_bias=attention, mlp_bias=model.mlp_bias and has_mlp)


def _layer_ids(raw: Raw, eagle: Raw, problems: list[str]) -> object:
    """The ids of the layers that are captured, None where the config names none."""
    others = [name for name in raw if name.endswith("layer_ids") and name != LAYER_IDS and raw[name] is not None]
    problems += [
        f"{name}={raw[name]!r} is not known here; captured layers are read from {LAYER_IDS}" for name in others
    ]
    inner, outer = eagle.get(LAYER_IDS), raw.get(LAYER_IDS)
    if inner is not None and outer is not None and inner != outer:
        problems.append(f"{LAYER_IDS}={outer} and eagle_config.{LAYER_IDS}={inner} differ; leave the right one")
    return outer if inner is None else inner


def _eagle_section(raw: Raw, fmt: Format, file: Path) -> Raw:
    eagle = nested(raw, file, EAGLE_SECTION)
    unknown = sorted(set(eagle) - _EAGLE_FIELDS - set(fmt.marks))
    if unknown:
        known = ", ".join(sorted({*_EAGLE_FIELDS, *fmt.marks}))
        raise CheckpointError(f"{file}: {EAGLE_SECTION} has {', '.join(unknown)}; known are {known}")
    if not flag(eagle, file, "use_aux_hidden_state", True):
        raise CheckpointError(
            f"{file}: {EAGLE_SECTION}.use_aux_hidden_state is off: the head reads the last hidden state alone, so that "
            "is no EAGLE-3 head"
        )
    for name, mark in fmt.marks.items():
        if (reason := mark.refusal(eagle.get(name))) is not None:
            raise CheckpointError(f"{file}: {EAGLE_SECTION}.{name}={eagle[name]!r}: {reason}")
    return eagle


def _norm_before_residual(raw: Raw, fmt: Format, file: Path) -> bool:
    value = flag_or_none(raw, file, "norm_before_residual")
    if value is None and fmt is SPECULATORS:  # speculators defaults it to false, vLLM to true
        raise CheckpointError(f"{file}: norm_before_residual is missing; a speculators config must say true or false")
    return bool(value)


def _norm_feedback(said: bool | None, fmt: Format, override: bool | None, problems: list[str]) -> bool:
    """Whether the normed output is fed back. Where SpecForge #879 (2026-09) gave both values another meaning, a config
    that says one needs the override; one that says nothing is plain EAGLE-3 before and after."""
    if override is not None:
        return override
    if said is None or fmt.norm_output_is_feedback is not None:
        return bool(said)
    plain, normed = "norm_feedback=False (--no-norm-feedback)", "norm_feedback=True (--norm-feedback)"
    before, after = (f"pass {plain}", f"pass {normed}") if said else (_WITHOUT_FINAL_NORM, f"pass {plain}")
    problems.append(
        f"norm_output={str(said).lower()} means two things in {fmt.title} checkpoints. Trained before SpecForge #879 "
        f"(2026-09): {before}. Trained after it: {after}"
    )
    return said
