"""Draft heads in and out of checkpoints: load (SafeAILab, SpecForge, speculators), save (SpecForge), start anew.

`draft_config.py` reads what a checkpoint says it is; here its tensors become a DraftHead. Nothing falls back to random,
zeros or identity: a head, an embedding or a vocabulary that is absent comes from the target by a rule, or is an error.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from aquiline.blocks import dequantised
from aquiline.models.decoder import Decoder
from aquiline.models.draft_config import DraftOverrides, read_draft, read_draft_config
from aquiline.models.eagle import DraftHead
from aquiline.models.files import Entry, Tensors, check_entries, fill, parameters_in, refuse, resolve
from aquiline.models.known_pairs import draft_of
from aquiline.models.load import ROWS, layer_entries
from aquiline.models.model_config import DraftConfig, RopeConfig
from aquiline.models.producers import LAYER_IDS, PRODUCER, SPECFORGE
from aquiline.types import storage_dtype

__all__ = ["draft_entries", "load_draft", "read_draft_config", "save_draft", "share_embedding"]

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
        Entry(f"{layer}.hidden_norm.weight", "hidden_norm", (H,)),
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


def load_draft(
    path: str | Path,
    target: Decoder,
    *,
    dtype: str | None = None,
    capture: tuple[int, ...] | None = None,
    norm_feedback: bool | None = None,
) -> DraftHead:
    """A draft head for `target` from a directory or hub id, stored in `dtype` (default: the target's).

    `capture` (output-of-layer indices, ascending) and `norm_feedback` override what the checkpoint declares; see
    producers.py for who trains drafts and their numberings. An absent embedding is the target's own, shared where the
    dtypes agree; an absent lm_head is rows chosen by d2t, of the draft's own embedding if the config says
    tie_word_embeddings, else of the target's head; an absent d2t is the identity only if the draft vocabulary is the
    whole one. The embedding is frozen, the rest can be trained. Raises CheckpointError listing EVERY mismatch with the
    target and every missing, unexpected or mis-shaped tensor, or every tensor with a NaN or an infinity."""
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

    with parameters_in(target.embed.dtype if dtype is None else storage_dtype(dtype)):
        head = DraftHead(config)
    fill(head, tensors, entries)
    head.d2t.copy_(d2t)
    if not own_embed:
        share_embedding(head, target)
    if not own_head:
        source = head.embed if reading.tied_head else target.head
        packed = target.packed.get("embed" if reading.tied_head else "head") if source.is_meta else None
        values = source.data if packed is None else dequantised(packed)
        head.head.data.copy_(values[head_rows(d2t)])
    head.embed.requires_grad_(False)
    return head.eval()


def share_embedding(head: DraftHead, target: Decoder) -> None:
    """Make the target's embedding the head's: the same parameter, or a rounded copy where the dtypes differ."""
    head.packed_embed = target.packed.get("embed")
    same = target.embed.dtype == head.fc.dtype or target.embed.is_meta
    head.embed = target.embed if same else nn.Parameter(target.embed.data.to(head.fc.dtype))
    head.embed.requires_grad_(False)


def head_rows(d2t: Tensor) -> Tensor:
    """Target ids [Vd] of all draft ids, from offsets [Vd]."""
    return torch.arange(len(d2t)) + d2t


def check_d2t(d2t: Tensor, vocab_size: int, problems: list[str]) -> None:
    """Append to `problems` whatever is wrong with int64 offsets [Vd]: ids outside the vocabulary, or not increasing."""
    ids = head_rows(d2t)
    outside = int(((ids < 0) | (ids >= vocab_size)).sum())
    if outside:
        problems.append(f"d2t maps {outside} draft ids outside the target's vocabulary [0, {vocab_size})")
    falls = (ids[1:] <= ids[:-1]).nonzero()
    if len(falls):
        at = int(falls[0]) + 1
        before, after = int(ids[at - 1]), int(ids[at])
        problems.append(f"d2t is not strictly increasing: draft id {at} maps to {after} after {before}")


def _read_d2t(config: DraftConfig, tensors: Tensors, problems: list[str]) -> Tensor:
    """The offsets int64 [Vd], checked against the vocabulary and t2d."""
    Vd, V = config.draft_vocab_size, config.model.vocab_size
    identity = torch.zeros(Vd, dtype=torch.int64)
    if "d2t" not in tensors:
        if Vd < V:
            problems.append(f"missing tensor d2t: draft_vocab_size={Vd} is smaller than vocab_size={V}")
        return identity
    d2t = tensors.get("d2t")
    if d2t.dtype != torch.int64 or d2t.shape != (Vd,):
        problems.append(f"tensor d2t is {d2t.dtype} {list(d2t.shape)}; expected torch.int64 offsets [{Vd}]")
        return identity
    before = len(problems)
    check_d2t(d2t, V, problems)
    if "t2d" in tensors and len(problems) == before:
        t2d = tensors.get("t2d")
        if t2d.dtype != torch.bool or t2d.shape != (V,):
            problems.append(f"tensor t2d is {t2d.dtype} {list(t2d.shape)}; expected torch.bool [{V}]")
        elif not t2d.equal(_t2d(d2t, V)):
            differ = int((t2d != _t2d(d2t, V)).sum())
            problems.append(f"t2d and d2t disagree on {differ} target ids")
    return d2t


def _t2d(d2t: Tensor, vocab_size: int) -> Tensor:
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[head_rows(d2t)] = True
    return t2d


def save_draft(head: DraftHead, directory: str | Path, *, target: Decoder | None = None) -> None:
    """Write a head in SpecForge's layout: config.json and model.safetensors, each put in place by a rename.

    The embedding is left out if it is `target`'s. Loading the result gives bit-equal parameters in the same dtype. The
    config declares this producer, so that norm_output keeps its one meaning here (the normed output is fed back);
    layer ids are in SpecForge's numbering, which is the canonical one."""
    place = Path(directory)
    place.mkdir(parents=True, exist_ok=True)
    shares = target is not None and head.embed.shape == target.embed.shape
    omit = target is not None and shares and head.embed.equal(target.embed.to(head.embed.dtype))
    parameters = dict(head.named_parameters(remove_duplicate=False))
    tensors = {"d2t": head.d2t, "t2d": _t2d(head.d2t.cpu(), head.config.model.vocab_size)}
    for entry in draft_entries(head.config, SPECFORGE.layer, embed=not omit, head=True):
        whole = parameters[entry.target].detach()
        rows = entry.shape[0] if whole.dim() == len(entry.shape) else 1
        tensors[entry.source] = whole.narrow(0, entry.start, rows).reshape(entry.shape)
    tensors = {name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    config = json.dumps(_config_json(head), indent=2, sort_keys=True) + "\n"

    weights_tmp, config_tmp = place / "model.safetensors.tmp", place / "config.json.tmp"
    save_file(tensors, weights_tmp, metadata={"format": "pt"})
    config_tmp.write_text(config, encoding="utf-8")
    os.replace(weights_tmp, place / "model.safetensors")
    os.replace(config_tmp, place / "config.json")


def _config_json(head: DraftHead) -> dict[str, object]:
    c, m = head.config, head.config.model
    fields: dict[str, object] = {
        "architectures": list(SPECFORGE.architectures),
        "producer": PRODUCER,
        "model_type": "llama",
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": str(head.fc.dtype).removeprefix("torch."),
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
