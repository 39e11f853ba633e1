"""What a checkpoint is, told from its config and the headers of its tensors: a draft beside its target, or a target.

Nothing is loaded, and no weight is read. What does not fit is listed; only what cannot be told at all is raised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from aquiline.blocks import BLOCK_TYPES, GGUF_BLOCKS
from aquiline.errors import CheckpointError
from aquiline.models.draft_config import NO_OVERRIDES, DraftOverrides, DraftReading, read_draft
from aquiline.models.draft_fields import extras
from aquiline.models.families import config_file, has_blocks, read_model_config
from aquiline.models.files import BYTES, TensorSource, check_entries, is_gguf, read_json, resolve
from aquiline.models.formats import EMBED, HEAD, MAP, DraftFiles, head_rows, is_beside, open_draft
from aquiline.models.gguf.draft_file import is_draft_file
from aquiline.models.gguf.reader import read_gguf
from aquiline.models.known_pairs import draft_of
from aquiline.models.load import is_spare, open_tensors, target_entries
from aquiline.models.model_config import DraftConfig, ModelConfig, RopeConfig, default_capture
from aquiline.models.parameters import OF_FILES
from aquiline.models.producers import draft_mark
from aquiline.types import Int64

Facts = dict[str, object]
_HEAD_OF_TARGET = "rows of the target's"


@dataclass(frozen=True, eq=False)
class Inspection:
    """Facts by section, everything that does not fit, and what has no effect. draft_ids: target ids [Vd] of a draft's
    vocabulary; None for a target, and for a draft whose vocabulary cannot be read."""

    kind: str
    path: str
    sections: dict[str, Facts]
    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    draft_ids: Int64 | None = None

    def as_dict(self) -> Facts:
        """The inspection as JSON has it."""
        return {
            "kind": self.kind, "path": self.path, **self.sections, "problems": self.problems, "notices": self.notices,
        }  # fmt: skip


def inspect_checkpoint(
    path: str | Path, target: str | Path | None = None, overrides: DraftOverrides = NO_OVERRIDES
) -> Inspection:
    """What `path` is. Raises CheckpointError naming file, field and value where that cannot be told."""
    place = resolve(draft_of(path) if target is not None else path)
    if target is None and not is_draft(place):
        return _target(place)
    model = None if target is None else read_model_config(target)
    reading = read_draft(place, model, overrides)
    sections = _draft_sections(reading.config, reading)
    try:
        found = open_draft(place, model, overrides)
    except CheckpointError as error:  # its config is told all the same
        return Inspection("draft", str(place), sections, [*reading.problems, str(error)], reading.notices)
    sections |= {"vocabulary": _vocabulary(found), "tensors": _tensors(found)}
    ids = None if found.problems else head_rows(found.d2t)
    return Inspection("draft", str(place), sections, found.problems, reading.notices, ids)


def is_draft(place: Path) -> bool:
    """Whether a checkpoint that `resolve` found looks like a draft: by a mark of one, or by its single layer.

    Raises CheckpointError for a config that cannot be read."""
    file = config_file(place)
    if is_gguf(file):
        return is_draft_file(read_gguf(file))
    raw = read_json(file)
    return draft_mark(raw) is not None or raw.get("num_hidden_layers") == 1


def _draft_sections(config: DraftConfig, reading: DraftReading) -> dict[str, Facts]:
    model = config.model
    beyond = extras(config)
    layers = _layers(config.capture if reading.layers_are_known else ())
    return {
        "producer": {"format": reading.format.title, "told by": reading.declared},
        "geometry": _geometry(model) | {"target hidden": config.target_hidden_size},
        "rope": _rope(model.rope, model),
        "norms": {
            "before fc": "one" if config.norm_before_fc else "one per layer" if config.fc_norm else "none",
            "residual": "normed" if config.norm_before_residual else "plain",
            "fed back": "normed" if config.norm_feedback else "plain",
            "eps": model.rms_norm_eps,
        },
        "biases": {name: name in beyond for name in ("attention_bias", "mlp_bias")},
        "capture": layers,
    }  # fmt: skip


def _layers(capture: tuple[int, ...]) -> Facts:
    """Captured layers in both numberings; None where they are not known."""
    return {"outputs": list(capture) or None, "inputs": [layer + 1 for layer in capture] or None}


def _geometry(model: ModelConfig) -> Facts:
    return {
        "hidden": model.hidden_size,
        "mlp": model.intermediate_size,
        "layers": model.num_layers,
        "heads": model.num_heads,
        "kv heads": model.num_kv_heads,
        "head dim": model.head_dim,
        "window": max(model.windows, default=0) or None,
    }


def _rope(rope: RopeConfig, model: ModelConfig) -> Facts:
    return {"scheme": rope.kind, "base": rope.theta, **rope.parameters, "positions": model.max_positions}


def _vocabulary(found: DraftFiles) -> Facts:
    Vd, V = found.config.draft_vocab_size, found.config.model.vocab_size
    tied = "its embedding" if found.reading.tied_head else _HEAD_OF_TARGET
    return {
        "draft": Vd,
        "target": V,
        "share": Vd / V,
        "map": MAP if MAP in found.tensors else "identity",
        "head": "its own" if HEAD in found.tensors else tied,
        "embedding": "its own" if EMBED in found.tensors else "the target's",
    }


def _tensors(found: DraftFiles) -> Facts:
    """Sizes in the file, and what one pass reads: fc, layer, norms, head, and a row of the embedding."""
    tensors, config = found.tensors, found.config
    stored = sum(tensor_bytes(tensors, name) for name in tensors.names)
    parameters = sum(math.prod(tensors.shape(name)) for name in tensors.names if not is_beside(name))
    read = [name for name in tensors.names if not is_beside(name) and name != EMBED]
    width = (
        tensor_bytes(tensors, "fc.weight") / max(1, math.prod(tensors.shape("fc.weight")))
        if "fc.weight" in tensors
        else 0
    )
    row = config.model.hidden_size * width
    head = 0 if HEAD in tensors else config.draft_vocab_size * row
    return {
        "parameters": parameters,
        "dtypes": sorted({tensors.dtype(name) for name in tensors.names}),
        "file bytes": stored,
        "bytes of a pass": round(sum(tensor_bytes(tensors, name) for name in read) + head + row),
    }


def tensor_bytes(tensors: TensorSource, name: str) -> int:
    """Bytes of a tensor in its file."""
    count, kind = math.prod(tensors.shape(name)), tensors.dtype(name)
    if kind in BLOCK_TYPES:
        return count // GGUF_BLOCKS[kind].inputs * GGUF_BLOCKS[kind].num_bytes
    others = {"I64": 8, "int64": 8, "I32": 4, "int32": 4, "BOOL": 1, "bool": 1} | dict.fromkeys(BYTES, 1)
    return count * (OF_FILES[kind].itemsize if kind in OF_FILES else others.get(kind, 4))


def _target(place: Path) -> Inspection:
    """A target by itself: what runs, and what a draft of it captures by default."""
    model = read_model_config(place)
    sections = {
        "model": {"family": model.family, "blocks": has_blocks(place)},
        "geometry": _geometry(model),
        "rope": _rope(model.rope, model),
        "vocabulary": {
            "target": model.vocab_size,
            "end tokens": list(model.eos_token_ids),
            "tied head": model.tied_head,
        },
        "default capture": _layers(default_capture(model.num_layers) if model.num_layers >= 7 else ()),
    }
    if model.experts is not None:
        sections["experts"] = {"count": model.experts.count, "per token": model.experts.per_token}
    try:
        tensors = open_tensors(place)
        problems = check_entries(tensors, target_entries(model, tensors), partial(is_spare, model))
        sections["tensors"] = {
            "parameters": sum(math.prod(tensors.shape(name)) for name in tensors.names),
            "dtypes": sorted({tensors.dtype(name) for name in tensors.names}),
            "file bytes": sum(tensor_bytes(tensors, name) for name in tensors.names),
        }
    except CheckpointError as error:
        problems = [str(error)]
    return Inspection("target", str(place), sections, problems)
