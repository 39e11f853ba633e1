"""Draft heads in and out of checkpoints: read (SafeAILab, SpecForge, speculators), save (SpecForge).

`draft_config.py` reads what a checkpoint says it is; here its tensors become DraftWeights. Nothing falls back to
random, zeros or identity: a head, an embedding or a vocabulary that is absent comes from the target by a rule, or is an
error.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from aquiline.blocks import Array, Parts, Weight, floats_of
from aquiline.models.draft_config import DraftOverrides, read_draft, read_draft_config
from aquiline.models.files import ROWS, Entry, Tensors, check_entries, refuse, resolve
from aquiline.models.known_pairs import draft_of
from aquiline.models.load import layer_entries, layer_weights
from aquiline.models.model_config import DraftConfig, RopeConfig
from aquiline.models.model_weights import DraftWeights, ModelWeights
from aquiline.models.parameters import Parameters
from aquiline.models.producers import LAYER_IDS, PRODUCER, SPECFORGE
from aquiline.types import Bool, Int64, storage_dtype

__all__ = ["draft_entries", "draft_weights", "read_draft_config", "read_draft_weights", "save_draft"]

logger = logging.getLogger(__name__)

EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"


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
    directory = resolve(draft_of(path))
    reading = read_draft(directory, target.config, DraftOverrides(capture, norm_feedback))
    config, problems, tensors = reading.config, reading.problems, Tensors(directory)
    if not reading.vocab_is_named and "d2t" in tensors:
        config = replace(config, draft_vocab_size=tensors.shape("d2t")[0])
    if target.capture and target.capture != config.capture:
        problems.append(f"it needs capture={config.capture}, the target was loaded with capture={target.capture}")
    own_embed, own_head = EMBED in tensors, HEAD in tensors
    if config.target_hidden_size != config.model.hidden_size:
        needs = [name for name, own in ((EMBED, own_embed), (HEAD, own_head or reading.tied_head)) if not own]
        problems += [f"missing tensor {name}: a draft of another hidden_size must ship its own" for name in needs]
    entries = draft_entries(config, reading.format.layer, embed=own_embed, head=own_head)
    problems += check_entries(tensors, entries, lambda name: name in ("d2t", "t2d") or name.endswith(".inv_freq"))
    d2t = _read_d2t(config, tensors, problems)
    refuse(directory, problems)
    for notice in reading.notices:
        logger.warning("%s: %s", directory, notice)

    dtype = dtype or ("bfloat16" if target.embed[0].is_blocks else target.embed[0].kind)
    own, stored = Parameters(tensors, entries, dtype), storage_dtype(dtype)
    embed = own.matrix("embed") if own_embed else shared_embedding(target.embed, stored)
    head = own.matrix("head") if own_head else _rows_of(embed if reading.tied_head else target.head, d2t, stored)
    return draft_weights(config, own, embed, head, d2t)


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


def _read_d2t(config: DraftConfig, tensors: Tensors, problems: list[str]) -> Int64:
    """The offsets int64 [Vd], checked against the vocabulary and t2d."""
    Vd, V = config.draft_vocab_size, config.model.vocab_size
    identity = np.zeros(Vd, np.int64)
    if "d2t" not in tensors:
        if Vd < V:
            problems.append(f"missing tensor d2t: draft_vocab_size={Vd} is smaller than vocab_size={V}")
        return identity
    if tensors.dtype("d2t") not in ("I64", "int64") or tensors.shape("d2t") != (Vd,):
        found = f"{tensors.dtype('d2t')} {list(tensors.shape('d2t'))}"
        problems.append(f"tensor d2t is {found}; expected int64 offsets [{Vd}]")
        return identity
    d2t: Int64 = tensors.get("d2t")
    before = len(problems)
    check_d2t(d2t, V, problems)
    if "t2d" in tensors and len(problems) == before:
        if tensors.dtype("t2d") not in ("BOOL", "bool") or tensors.shape("t2d") != (V,):
            found = f"{tensors.dtype('t2d')} {list(tensors.shape('t2d'))}"
            problems.append(f"tensor t2d is {found}; expected bool [{V}]")
        elif differ := int((tensors.get("t2d") != _t2d(d2t, V)).sum()):
            problems.append(f"t2d and d2t disagree on {differ} target ids")
    return d2t


def _t2d(d2t: Int64, vocab_size: int) -> Bool:
    t2d = np.zeros(vocab_size, np.bool_)
    t2d[head_rows(d2t)] = True
    return t2d


def save_draft(head: DraftWeights, directory: str | Path, *, target: ModelWeights | None = None) -> None:
    """Write a head in SpecForge's layout: config.json and model.safetensors, each put in place by a rename.

    The embedding is left out if it is `target`'s. Loading the result gives bit-equal parameters in the same dtype. The
    config declares this producer, so that norm_output keeps its one meaning here (the normed output is fed back);
    layer ids are in SpecForge's numbering, which is the canonical one."""
    place = Path(directory)
    place.mkdir(parents=True, exist_ok=True)
    own = {"fc": head.fc, "input_norm": head.input_norm, "fc_norm": head.fc_norm, "norm": head.model.final_norm}
    own |= {"embed": head.model.embed, "head": head.model.head}
    own |= {f"layer.{name}": weight for name, weight in head.model.layers[0].named()}
    arrays = {name: floats_of(weight) if isinstance(weight, tuple) else weight for name, weight in own.items()}
    omit = target is not None and _is_same(floats_of(head.model.embed), target.embed)
    tensors: dict[str, Array] = {"d2t": head.d2t, "t2d": _t2d(head.d2t, head.config.model.vocab_size)}
    for entry in draft_entries(head.config, SPECFORGE.layer, embed=not omit, head=True):
        whole = arrays[entry.target]
        assert whole is not None, entry.target
        rows = entry.shape[0] if whole.ndim == len(entry.shape) else 1  # a stack of vectors has one row each
        tensors[entry.source] = whole[entry.start : entry.start + rows].reshape(entry.shape)
    config = json.dumps(_config_json(head), indent=2, sort_keys=True) + "\n"

    weights_tmp, config_tmp = place / "model.safetensors.tmp", place / "config.json.tmp"
    save_file({name: np.array(tensor, order="C") for name, tensor in tensors.items()}, weights_tmp, {"format": "pt"})
    config_tmp.write_text(config, encoding="utf-8")
    os.replace(weights_tmp, place / "model.safetensors")
    os.replace(config_tmp, place / "config.json")


def _is_same(embed: Array, target: Parts) -> bool:
    """Whether an embedding is the target's, rounded to the embedding's dtype."""
    if target[0].shape != embed.shape:
        return False
    return np.array_equal(embed, floats_of(target).astype(embed.dtype, copy=False))


def _config_json(head: DraftWeights) -> dict[str, object]:
    c, m = head.config, head.config.model
    fields: dict[str, object] = {
        "architectures": list(SPECFORGE.architectures),
        "producer": PRODUCER,
        "model_type": "llama",
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": head.fc[0].kind,
        "vocab_size": m.vocab_size,
        "draft_vocab_size": c.draft_vocab_size,
        "hidden_size": m.hidden_size,
        "intermediate_size": m.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": m.num_heads,
        "num_key_value_heads": m.num_kv_heads,
        "head_dim": m.head_dim,
        "max_position_embeddings": m.max_positions,
        "rms_norm_eps": m.rms_norm_eps,
        "rope_theta": m.rope.theta,
        "rope_scaling": _rope_scaling(m.rope),
        "bos_token_id": m.bos_token_id,
        "eos_token_id": list(m.eos_token_ids) or None,
        "eagle_config": {LAYER_IDS: list(c.capture)},
    }
    if c.target_hidden_size != m.hidden_size:
        fields["target_hidden_size"] = c.target_hidden_size
    if m.window(0):  # both fields, so that readers that go by either of them window it
        fields |= {"sliding_window": m.window(0), "layer_types": ["sliding_attention"]}
    flags = {
        "norm_before_fc": c.norm_before_fc,
        "fc_norm": c.fc_norm,
        "norm_before_residual": c.norm_before_residual,
        "norm_output": c.norm_feedback,
    }
    return fields | {name: True for name, on in flags.items() if on}


def _rope_scaling(rope: RopeConfig) -> dict[str, object] | None:
    if rope.kind == "default":
        return None
    fields: dict[str, object] = {"rope_type": rope.kind, **rope.parameters}
    if "truncate" in fields:  # a number among numbers in RopeConfig, a flag in a checkpoint
        fields["truncate"] = bool(fields["truncate"])
    if rope.factors:
        fields["factors"] = list(rope.factors)
    return fields
