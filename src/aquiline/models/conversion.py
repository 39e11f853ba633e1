"""A draft in another producer's format: the same tensors, byte by byte, under that format's names and fields.

What is written is read again before it takes its place, and must be the same head: so a field that a format cannot say
is refused by name. What only the first format has - fields that no loader reads, how its JSON is laid out, dtypes of
vectors, whether t2d was there - travels as `provenance`, and the way back gives the same files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from aquiline.blocks import BLOCK_TYPES, Array
from aquiline.checks import parse_json
from aquiline.config import ConvertConfig
from aquiline.errors import CheckpointError
from aquiline.models.draft_config import NO_OVERRIDES, DraftOverrides, draft_reading
from aquiline.models.draft_fields import cannot_say, differences, draft_fields
from aquiline.models.files import Tensors, refuse, resolve
from aquiline.models.formats import (
    AS_TORCH,
    CONFIG,
    HEAD,
    MAP,
    MASK,
    DraftFiles,
    check_destination,
    open_draft,
    vocabulary_mask,
    write_files,
)
from aquiline.models.gguf.draft_file import PROVENANCE, GGUFDraft
from aquiline.models.json_fields import Raw
from aquiline.models.known_pairs import draft_of
from aquiline.models.load import read_model_config
from aquiline.models.model_config import LAYER_IDS, ModelConfig
from aquiline.models.parameters import OF_FILES
from aquiline.models.producers import FORMATS, GGUF, Format, read_draft_fields
from aquiline.writing import placing


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a draft was converted from: its config.json, verbatim, the prefix of its layer's tensors, the
    dtypes of its tensors by name, and what its file said beside them."""

    format: str
    config: str
    layer: str
    tensors: dict[str, str]
    metadata: dict[str, str] | None

    @classmethod
    def of(cls, found: DraftFiles) -> Origin:
        """The origin of what is converted from these files."""
        tensors = found.tensors
        dtypes = {name: tensors.dtype(name) for name in tensors.names}
        text = (found.place / CONFIG).read_bytes().decode("utf-8")
        metadata = tensors.metadata if isinstance(tensors, Tensors) else None
        return cls(found.reading.format.name, text, found.layer, dtypes, metadata)

    @classmethod
    def read(cls, text: object) -> Origin | None:
        """An origin that a config names; None if it is none: a config may have any field of that name."""
        raw = parsed(text) if isinstance(text, str) else text
        try:
            found = cls(**raw) if isinstance(raw, dict) else None
        except TypeError:  # other fields
            return None
        kinds = {"format": str, "config": str, "layer": str, "tensors": dict}
        if found is None or not all(isinstance(getattr(found, name), kind) for name, kind in kinds.items()):
            return None
        said = {} if found.metadata is None else found.metadata
        return found if isinstance(said, dict) and all(isinstance(value, str) for value in said.values()) else None

    def chain(self) -> Iterator[Origin]:
        """This origin, the one before it, and so on."""
        yield self
        found = Origin.read((parsed(self.config) or {}).get(PROVENANCE))
        if found is not None:
            yield from found.chain()


def parsed(text: str) -> Raw | None:
    """The fields of a JSON object; None of any other text."""
    try:
        found = parse_json(text.encode("utf-8"))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


@dataclass(frozen=True)
class Converted:
    """What a conversion read and wrote. is_restored: the files are those that the draft had in that format before.
    notices: fields of the source that have no effect, and dtypes that changed."""

    source: str
    declared: str
    destination: str
    path: str
    is_restored: bool
    notices: list[str]


def convert(
    source: str | Path,
    destination: Path,
    config: ConvertConfig,
    target: str | Path | None = None,
    overrides: DraftOverrides = NO_OVERRIDES,
) -> Converted:
    """Write the draft `source` in another format: a directory, or a file for gguf.

    `target` is needed where the draft or the format does not name the layers that are captured. Raises CheckpointError
    naming every field that is wrong or that the format cannot say, OSError for a destination that exists."""
    fmt = FORMATS[config.to]
    _check_destination(destination, fmt, config.force)
    model = None if target is None else read_model_config(target)
    found = open_draft(resolve(draft_of(source)), model, overrides)
    refuse(found.place, found.problems)
    earlier = _earlier(found, fmt, model)
    problems = cannot_say(found.config, fmt) if earlier is None else []
    if fmt is GGUF and found.has_tied_head:
        problems.append(
            f"tie_word_embeddings=true: {fmt.title} takes the target's head in place of one that is missing"
        )
    if not found.reading.layers_are_known:
        problems.append(f"target: only the target tells which layers {LAYER_IDS} means here; name it, or --capture")
    if fmt.ids_in is None and model is None:
        problems.append(f"target: {fmt.title} names no layers; name the target, whose default layers its drafts read")
    _refuse(found, fmt, problems)
    with placing(destination, is_folder=fmt is not GGUF) as part:
        if fmt is GGUF:
            _write_gguf(part, found)
        else:
            _write(part, found, fmt, earlier, None if target is None else str(target))
        again = open_draft(part, model, NO_OVERRIDES if earlier is None else _asked(found))
        assert again.has_tied_head == found.has_tied_head
        _refuse(found, fmt, [*again.problems, *differences(found.config, again.config)])
    reading, notices = found.reading, [*found.reading.notices, *_unpacked(found), *_not_run(found, fmt, model)]
    return Converted(
        reading.format.name, reading.declared, fmt.name, str(destination), earlier is not None, notices
    )  # fmt: skip


def _check_destination(destination: Path, fmt: Format, force: bool) -> None:
    """Refuse a destination of the wrong kind, and those that `check_destination` refuses."""
    if (fmt is GGUF) != (destination.suffix.lower() == ".gguf"):
        raise ValueError(f"DST={destination}: to={fmt.name} writes {'a .gguf file' if fmt is GGUF else 'a folder'}")
    check_destination(destination, force)


def _refuse(found: DraftFiles, fmt: Format, problems: list[str]) -> None:
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise CheckpointError(f"{found.place}: cannot be written for {fmt.title} ({len(problems)} problems):{lines}")


def _asked(found: DraftFiles) -> DraftOverrides:
    return DraftOverrides(found.config.capture, found.config.norm_feedback)


def _origin(found: DraftFiles) -> Origin | None:
    """What is kept of the source: itself, or, of a GGUF file, what that was converted from."""
    if found.reading.format is not GGUF:
        return Origin.of(found)
    return Origin.read(read_draft_fields(found.place).get(PROVENANCE))


def _earlier(found: DraftFiles, fmt: Format, model: ModelConfig | None) -> Origin | None:
    """The files that the draft is or was in that format, if they say the same head."""
    origin = _origin(found)
    for each in [] if origin is None else origin.chain():
        if each.format == fmt.name and _says(each, found, fmt, model):
            return each
    return None


def _says(origin: Origin, found: DraftFiles, fmt: Format, model: ModelConfig | None) -> bool:
    """Whether an earlier config says the head that these files hold, with the same tensors."""
    raw = parsed(origin.config)
    if raw is None or set(origin.tensors) - {MASK} != set(_tensors(found, fmt, origin.layer)) - {MASK}:
        return False
    try:
        plain = draft_reading(raw, found.place / CONFIG, model, NO_OVERRIDES)
        reading = draft_reading(raw, found.place / CONFIG, model, _asked(found)) if plain.problems else plain
    except CheckpointError:
        return False
    config, is_tied = reading.config, HEAD not in found.tensors and reading.tied_head
    if is_tied != found.has_tied_head:
        return False
    if not reading.vocab_is_named:
        config = replace(config, draft_vocab_size=found.config.draft_vocab_size)
    return not reading.problems and not differences(found.config, config)


def _tensors(found: DraftFiles, fmt: Format, layer: str) -> dict[str, Callable[[], Array]]:
    """What the files of a format hold, by its names; t2d is made where the format has it."""
    kept: dict[str, Callable[[], Array]] = {}
    for name in found.tensors.names:
        if name == MASK and not fmt.has_t2d:
            continue
        in_layer = name.startswith(f"{found.layer}.")
        kept[f"{layer}{name.removeprefix(found.layer)}" if in_layer else name] = partial(_stored, found, name)
    if fmt.has_t2d and MAP in kept:
        kept.setdefault(MASK, partial(vocabulary_mask, found.d2t, found.config.model.vocab_size))
    return kept


def _stored(found: DraftFiles, name: str) -> Array:
    """A tensor in the dtype of its file; blocks become float32."""
    values, kind = found.tensors.get(name), found.tensors.dtype(name)
    return values.astype(OF_FILES[kind], copy=False) if kind in OF_FILES else values


def _write_gguf(part: Path, found: DraftFiles) -> None:
    kept = {name: read() for name, read in _tensors(found, GGUF, GGUF.layer).items() if not name.endswith(".inv_freq")}
    origin = _origin(found)
    provenance = None if origin is None else json.dumps(asdict(origin))
    GGUFDraft(found.config, kept, provenance=provenance).write(part)


def _write(part: Path, found: DraftFiles, fmt: Format, earlier: Origin | None, verifier: str | None) -> None:
    """Write config and weights, those that the draft had in that format if it had any."""
    metadata: dict[str, str] | None = AS_TORCH
    if earlier is None:
        tensors = {name: read() for name, read in _tensors(found, fmt, fmt.layer).items()}
        dtype = tensors["fc.weight"].dtype.name
        raw = draft_fields(found.config, fmt, dtype, verifier=verifier, tied_head=found.has_tied_head)
        origin = _origin(found)
        raw |= {} if origin is None else {PROVENANCE: asdict(origin)}
        text = json.dumps(raw, indent=2) + "\n"
    else:
        there = _tensors(found, fmt, earlier.layer)
        tensors = {name: _in_dtype(there[name](), kind) for name, kind in earlier.tensors.items() if name in there}
        text, metadata = earlier.config, earlier.metadata
    write_files(part, tensors, text, metadata)


def _in_dtype(values: Array, kind: object) -> Array:
    """Values in the dtype that they had before, if that holds them."""
    if not isinstance(kind, str) or kind not in OF_FILES:
        return values
    stored = values.astype(OF_FILES[kind])
    return stored if np.array_equal(stored.astype(np.float32), values.astype(np.float32)) else values


def _not_run(found: DraftFiles, fmt: Format, model: ModelConfig | None) -> list[str]:
    """What a format says and its engine does not run: llama.cpp has the last layer's output of few targets, and of
    those that run here of gpt-oss alone (llama.cpp #25794)."""
    last = found.config.capture[-1]
    if fmt is not GGUF or model is None or model.family == "gpt_oss" or last < model.num_layers - 1:
        return []
    return [f"{LAYER_IDS}: llama.cpp has no output of layer {last}, the last one, for a target of {model.family}"]


def _unpacked(found: DraftFiles) -> list[str]:
    """The tensors in blocks, which become floats."""
    tensors = found.tensors
    blocks = [f"{name} ({tensors.dtype(name)})" for name in tensors.names if tensors.dtype(name) in BLOCK_TYPES]
    return [f"unpacked to float32: {', '.join(blocks)}"] if blocks else []
