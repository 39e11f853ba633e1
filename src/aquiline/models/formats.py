"""Draft heads in and out of checkpoints: read in any format of producers.py, saved in our own.

`draft_config.py` reads what a checkpoint says it is; here its tensors become DraftWeights. `conversion.py` writes other
formats. Nothing falls back to random, zeros or identity: a head, an embedding or a vocabulary that is absent comes from
the target by a rule, or is an error.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from aquiline.blocks import Array, Parts, Weight, floats_of
from aquiline.models.draft_config import DraftOverrides, DraftReading, read_draft, read_draft_config
from aquiline.models.draft_fields import draft_fields
from aquiline.models.files import ROWS, Entry, TensorSource, check_entries, is_gguf, refuse, resolve
from aquiline.models.gguf.draft_file import GGUFDraftTensors
from aquiline.models.int4_files import Int4Tensors
from aquiline.models.known_pairs import draft_of
from aquiline.models.load import layer_entries, layer_weights
from aquiline.models.model_config import DraftConfig, ModelConfig
from aquiline.models.model_weights import DraftWeights, ModelWeights
from aquiline.models.parameters import Parameters
from aquiline.models.producers import AQUILINE, Format
from aquiline.types import Bool, Int64, storage_dtype
from aquiline.writing import check_new, placing

__all__ = ["draft_entries", "draft_weights", "read_draft_config", "read_draft_weights", "save_draft"]

logger = logging.getLogger(__name__)

EMBED, HEAD, MAP, MASK = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
CONFIG, WEIGHTS = "config.json", "model.safetensors"
AS_TORCH = {"format": "pt"}
"""What a file of weights says beside them, where nothing else is to be said; transformers asks for it."""
_OTHER_WEIGHTS = ("model.safetensors.index.json", "pytorch_model.bin")


def draft_entries(config: DraftConfig, layer: str, *, embed: bool, head: bool) -> list[Entry]:
    """The weight map of a draft whose decoder layer's names start with `layer`; d2t and t2d are not parameters.

    `embed` and `head`: whether the checkpoint holds its own."""
    V, H, Ht = config.model.vocab_size, config.model.hidden_size, config.target_hidden_size
    K = len(config.capture)
    entries = [
        Entry("fc.weight", "fc", (H, K * Ht)),
        *layer_entries(config.model, layer, "layer", 2 * H),
        Entry(f"{layer}.hidden_norm.weight", "layer.hidden_norm", (H,)),
        Entry("norm.weight", "norm", (H,)),
    ]
    if config.norm_before_fc:
        entries.append(Entry("input_norm.weight", "input_norm", (K * Ht,)))
    if config.fc_norm:
        entries += [Entry(f"fc_norm.{i}.weight", "fc_norm", (Ht,), i) for i in range(K)]
    if embed:
        entries.append(Entry(EMBED, "embed", (V, H), 0, ROWS))
    if head:
        entries.append(Entry(HEAD, "head", (config.draft_vocab_size, H), 0, ROWS))
    return entries


def read_draft_weights(
    path: str | Path,
    target: ModelWeights,
    *,
    dtype: str | None = None,
    capture: tuple[int, ...] | None = None,
    norm_feedback: bool | None = None,
) -> DraftWeights:
    """The weights of a draft head for `target` from a directory or hub id, stored in `dtype` (default: the dtype of the
    target's embedding, bfloat16 if it is in blocks).

    `capture` (output-of-layer indices, ascending) and `norm_feedback` override what the checkpoint declares; see
    producers.py for who trains drafts and their numberings. An absent embedding is the target's own, shared where the
    dtypes agree; an absent lm_head is rows chosen by d2t, of the draft's own embedding if the config says
    tie_word_embeddings, else of the target's head; an absent d2t is the identity only if the draft vocabulary is the
    whole one. Raises CheckpointError listing EVERY mismatch with the target and every missing, unexpected or mis-shaped
    tensor; reading a weight raises it for tensors with a NaN or an infinity."""
    found = open_draft(resolve(draft_of(path)), target.config, DraftOverrides(capture, norm_feedback))
    if target.capture and target.capture != found.config.capture:
        wanted = found.config.capture
        found.problems.append(f"it needs capture={wanted}, the target was loaded with capture={target.capture}")
    refuse(found.place, found.problems)
    for notice in found.reading.notices:
        logger.warning("%s: %s", found.place, notice)

    dtype = dtype or ("bfloat16" if target.embed[0].is_blocks else target.embed[0].kind)
    own, stored, d2t = Parameters(found.tensors, found.entries, dtype), storage_dtype(dtype), found.d2t
    embed = own.matrix("embed") if EMBED in found.tensors else shared_embedding(target.embed, stored)
    lender = embed if found.has_tied_head else target.head
    head = own.matrix("head") if HEAD in found.tensors else _rows_of(lender, d2t, stored)
    return draft_weights(found.config, own, embed, head, d2t)


@dataclass(frozen=True, eq=False)
class DraftFiles:
    """A draft's checkpoint, opened: what it says it is, its tensors and their weight map, and everything about it that
    does not fit itself or its target. d2t: offsets int64 [Vd], the identity where there are none."""

    place: Path
    reading: DraftReading
    config: DraftConfig
    tensors: TensorSource
    layer: str
    entries: list[Entry]
    d2t: Int64
    problems: list[str]

    @property
    def has_tied_head(self) -> bool:
        """Whether the head is rows of the draft's own embedding."""
        return HEAD not in self.tensors and self.reading.tied_head


def open_draft(place: Path, target: ModelConfig | None, overrides: DraftOverrides) -> DraftFiles:
    """Open a draft that `resolve` found; without a target, as `read_draft` reads it. Raises CheckpointError for what
    cannot be read at all."""
    reading = read_draft(place, target, overrides)
    tensors: TensorSource = GGUFDraftTensors(place) if is_gguf(place) else Int4Tensors(place)
    config, problems = reading.config, list(reading.problems)
    if not reading.vocab_is_named and MAP in tensors:
        config = replace(config, draft_vocab_size=tensors.shape(MAP)[0])
    own_embed, own_head = EMBED in tensors, HEAD in tensors
    if config.target_hidden_size != config.model.hidden_size:
        needs = [name for name, own in ((EMBED, own_embed), (HEAD, own_head or reading.tied_head)) if not own]
        problems += [f"missing tensor {name}: a draft of another hidden_size must ship its own" for name in needs]
    layer = _layer_prefix(reading.format, tensors)
    entries = draft_entries(config, layer, embed=own_embed, head=own_head)
    problems += check_entries(tensors, entries, is_beside)
    d2t = _read_d2t(config, tensors, problems)
    return DraftFiles(place, reading, config, tensors, layer, entries, d2t, problems)


def is_beside(name: str) -> bool:
    """Whether a tensor is none of the parameters: a map between vocabularies, or frequencies that are computed."""
    return name in (MAP, MASK) or name.endswith(".inv_freq")


def _layer_prefix(fmt: Format, tensors: TensorSource) -> str:
    """What the names of the decoder layer's tensors begin with."""
    other = fmt.other_layer
    return other if other is not None and any(name.startswith(f"{other}.") for name in tensors.names) else fmt.layer


def draft_weights(config: DraftConfig, own: Parameters, embed: Parts, head: Parts, d2t: Int64) -> DraftWeights:
    """The weights of a draft head, from its parameters."""
    fc_norm = own.vector("fc_norm")
    model = ModelWeights(
        config.model, embed, (layer_weights(own, "layer", config.model, 0),), own.needed("norm"), head,
        is_draft=True, norm_before_residual=config.norm_before_residual,
    )  # fmt: skip
    return DraftWeights(
        config, model, own.matrix("fc"), d2t, own.vector("input_norm"),
        None if fc_norm is None else fc_norm.reshape(len(config.capture), -1),
    )  # fmt: skip


def shared_embedding(embed: Parts, stored: np.dtype[Any]) -> Parts:
    """The target's embedding as a draft has it: the same, or a copy in the draft's dtype where the dtypes differ."""
    [table] = embed
    if table.is_blocks or table.kind == stored.name:
        return embed
    return (Weight(stored.name, table.shape, lambda: table.values.astype(stored)),)


def _rows_of(parts: Parts, d2t: Int64, stored: np.dtype[Any]) -> Parts:
    """The rows of a head [V, H] or an embedding that the draft's vocabulary has, as a head [Vd, H]."""
    shape = len(d2t), parts[0].shape[1]
    return (Weight(stored.name, shape, lambda: floats_of(parts)[head_rows(d2t)].astype(stored)),)


def head_rows(d2t: Int64) -> Int64:
    """Target ids [Vd] of all draft ids, from offsets [Vd]."""
    return np.arange(len(d2t)) + d2t


def check_d2t(d2t: Int64, vocab_size: int, problems: list[str]) -> None:
    """Append to `problems` whatever is wrong with int64 offsets [Vd]: ids outside the vocabulary, or not increasing."""
    ids = head_rows(d2t)
    outside = int(((ids < 0) | (ids >= vocab_size)).sum())
    if outside:
        problems.append(f"d2t maps {outside} draft ids outside the target's vocabulary [0, {vocab_size})")
    falls = np.flatnonzero(ids[1:] <= ids[:-1])
    if len(falls):
        at = int(falls[0]) + 1
        before, after = int(ids[at - 1]), int(ids[at])
        problems.append(f"d2t is not strictly increasing: draft id {at} maps to {after} after {before}")


def _read_d2t(config: DraftConfig, tensors: TensorSource, problems: list[str]) -> Int64:
    """The offsets int64 [Vd], checked against the vocabulary and t2d."""
    Vd, V = config.draft_vocab_size, config.model.vocab_size
    identity = np.zeros(Vd, np.int64)
    if MAP not in tensors:
        if Vd < V:
            problems.append(f"missing tensor d2t: draft_vocab_size={Vd} is smaller than vocab_size={V}")
        return identity
    if tensors.dtype(MAP) not in ("I64", "int64") or tensors.shape(MAP) != (Vd,):
        found = f"{tensors.dtype(MAP)} {list(tensors.shape(MAP))}"
        problems.append(f"tensor d2t is {found}; expected int64 offsets [{Vd}]")
        return identity
    d2t: Int64 = tensors.get(MAP)
    before = len(problems)
    check_d2t(d2t, V, problems)
    if MASK in tensors and len(problems) == before:
        if tensors.dtype(MASK) not in ("BOOL", "bool") or tensors.shape(MASK) != (V,):
            found = f"{tensors.dtype(MASK)} {list(tensors.shape(MASK))}"
            problems.append(f"tensor t2d is {found}; expected bool [{V}]")
        elif differ := int((tensors.get(MASK) != vocabulary_mask(d2t, V)).sum()):
            problems.append(f"t2d and d2t disagree on {differ} target ids")
    return d2t


def vocabulary_mask(d2t: Int64, vocab_size: int) -> Bool:
    """t2d, bool [V]: which target ids offsets [Vd] reach."""
    t2d = np.zeros(vocab_size, np.bool_)
    t2d[head_rows(d2t)] = True
    return t2d


def draft_arrays(head: DraftWeights, layer: str, *, embed: bool) -> dict[str, Array]:
    """A head's tensors by a checkpoint's names, in the order of its weight map, without maps of vocabularies."""
    own = {"fc": head.fc, "input_norm": head.input_norm, "fc_norm": head.fc_norm, "norm": head.model.final_norm}
    own |= {"embed": head.model.embed, "head": head.model.head}
    own |= {f"layer.{name}": weight for name, weight in head.model.layers[0].named()}
    arrays = {name: floats_of(weight) if isinstance(weight, tuple) else weight for name, weight in own.items()}
    found: dict[str, Array] = {}
    for entry in draft_entries(head.config, layer, embed=embed, head=True):
        whole = arrays[entry.target]
        assert whole is not None, entry.target
        rows = entry.shape[0] if whole.ndim == len(entry.shape) else 1  # a stack of vectors has one row each
        found[entry.source] = whole[entry.start : entry.start + rows].reshape(entry.shape)
    return found


def save_draft(head: DraftWeights, directory: str | Path, *, target: ModelWeights | None = None) -> None:
    """Write a head in this project's own format: config.json and model.safetensors, each put in place by a rename.

    The embedding is left out if it is `target`'s. Loading the result gives bit-equal parameters in the same dtype. The
    layout is SpecForge's. The config declares this producer, so that norm_output keeps its one meaning here (the normed
    output is fed back); layer ids are in SpecForge's numbering, which is the canonical one."""
    omit = target is not None and _is_same(floats_of(head.model.embed), target.embed)
    tensors = {MAP: head.d2t, MASK: vocabulary_mask(head.d2t, head.config.model.vocab_size)}
    tensors |= draft_arrays(head, AQUILINE.layer, embed=not omit)
    config = json.dumps(draft_fields(head.config, AQUILINE, head.fc[0].kind), indent=2, sort_keys=True) + "\n"
    with placing(Path(directory).absolute(), is_folder=True) as part:
        write_files(part, tensors, config, AS_TORCH)


def write_files(folder: Path, tensors: dict[str, Array], config: str, metadata: dict[str, str] | None) -> None:
    """Write a draft's weights, with what the file says beside them, and its config."""
    save_file({name: np.array(values, order="C") for name, values in tensors.items()}, folder / WEIGHTS, metadata)
    (folder / CONFIG).write_bytes(config.encode("utf-8"))


def check_destination(folder: Path, force: bool) -> None:
    """Refuse a folder that exists, unless it may be replaced, or that holds weights which would be read in place of
    those to be written. Raises OSError."""
    check_new(folder, force)
    for name in _OTHER_WEIGHTS:
        if (folder / name).exists():
            raise OSError(f"{folder}: holds {name}, which would lie beside {WEIGHTS}; name another folder")


def _is_same(embed: Array, target: Parts) -> bool:
    """Whether an embedding is the target's, rounded to the embedding's dtype."""
    if target[0].shape != embed.shape:
        return False
    return np.array_equal(embed, floats_of(target).astype(embed.dtype, copy=False))
