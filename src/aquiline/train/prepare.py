"""Everything a run needs before its first step: target, documents, vocabulary, head, held-out material."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aquiline.errors import CheckpointError
from aquiline.models.config import default_capture
from aquiline.models.decoder import Decoder
from aquiline.models.eagle import DraftHead
from aquiline.models.families import read_model_config
from aquiline.models.files import resolve
from aquiline.models.formats import head_rows, load_draft
from aquiline.models.load import load_target
from aquiline.train.config import TrainConfig
from aquiline.train.data import TokenIds, load_split, token_ids
from aquiline.train.evaluate import HeldOut
from aquiline.train.packing import Batches, cut, gather, pack
from aquiline.train.start import new_head
from aquiline.train.target import TargetTeacher, argmax_counts, autocast, feature_scale
from aquiline.train.vocabulary import choose_vocabulary
from aquiline.types import Int64

VOCABULARY_BATCHES = 8
STATE = Path("last") / "training.pt"


@dataclass(frozen=True)
class Prepared:
    """A run ready to start. `state` is what a resumed run continues from."""

    target: Decoder
    head: DraftHead
    teacher: TargetTeacher
    batches: Batches
    held_out: HeldOut
    device: str
    state: dict[str, Any] | None


def keep_memory() -> None:
    """Tell glibc to keep freed memory: page faults otherwise take most of a training step (CPU.md, measured)."""
    if not sys.platform.startswith("linux"):
        return
    m_trim_threshold, m_top_pad, m_mmap_max = -1, -2, -4
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)
        mallopt(m_top_pad, 2**28)


def prepare(config: TrainConfig, say: Callable[[str], None]) -> Prepared:
    """Load, read, choose. Raises ValueError or CheckpointError for what the user can mend."""
    keep_memory()
    torch.manual_seed(config.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    state = _read_state(config) if config.resume else None
    directory = resolve(config.target)
    geometry = read_model_config(directory)
    capture = config.capture or default_capture(geometry.num_layers)
    dtype = "bfloat16" if device == "cuda" else "float32"  # on a CPU bfloat16 weights would be cast at every use
    target = load_target(directory, dtype=dtype, capture=tuple(capture)).to(device)
    ids = token_ids(directory, geometry.vocab_size, geometry.bos_token_id, geometry.eos_token_ids)
    split = load_split(config.data, config.held_out, ids, config.loss_on)
    batches = Batches(split.train, config.context, config.batch_size, config.ttt_steps, config.seed)
    say(
        f"{split.train.num_documents} documents, {split.train.num_longer(config.context)} of them longer than "
        f"{config.context} tokens and cut; {len(split.train.tokens)} tokens, {split.train.mask.mean():.0%} counted; "
        f"{batches.steps_in_first_epoch} steps an epoch; held out {split.held_out.num_documents} documents"
    )
    if split.rejects.counts:
        say(f"not used: {split.rejects}")
    with autocast(device):
        scale = feature_scale(target, batches.at(0, device))
    if state is not None:
        scale = state["scale"].to(device)
    head = _head(config, target, batches, ids, scale, say).to(device)
    if head.config.norm_before_fc or head.config.fc_norm:
        scale = torch.ones_like(scale)  # the head norms its input itself
    head.fc.data /= scale
    teacher = TargetTeacher(target, head_rows(head.d2t.cpu()).to(device), scale)
    shortest = config.ttt_steps + 3
    rows = pack(cut(split.held_out, config.context, shortest, None), config.context)
    chosen = np.random.default_rng(0).permutation(len(rows))[: config.eval_rows]
    batch = gather(split.held_out, [rows[i] for i in sorted(chosen)], config.context, device)
    with autocast(device):
        held_out = HeldOut(teacher, batch, config.ttt_steps, config.seed)
    return Prepared(target, head, teacher, batches, held_out, device, state)


def _read_state(config: TrainConfig) -> dict[str, Any]:
    path = config.out / STATE
    if not path.is_file():
        raise ValueError(f"--resume: {path} does not exist; start without --resume")
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _head(
    config: TrainConfig,
    target: Decoder,
    batches: Batches,
    ids: TokenIds,
    scale: Tensor,
    say: Callable[[str], None],
) -> DraftHead:
    """The draft to train: a resumed, an --init or a new one. Only a new one chooses its vocabulary: a head's rows
    mean nothing under another."""
    source = config.out / "last" if config.resume else config.init
    if source is not None:
        head = load_draft(source, target, dtype="float32")
        wanted = {
            "draft_vocab_size": (config.draft_vocab_size, head.config.draft_vocab_size),
            "intermediate_size": (config.intermediate_size, head.config.model.intermediate_size),
        }
        for name, (asked, has) in wanted.items():
            if asked is not None and asked != has:
                raise ValueError(f"{name}={asked}: the draft at {source} has {has}; drop the option")
        if head.embed is target.embed:  # two owners of one parameter would save and count it twice
            head.embed = torch.nn.Parameter(target.embed.detach().clone(), requires_grad=False)
        return head.train()
    counts = _counts(config, target, batches, next(target.parameters()).device.type)
    vocabulary = choose_vocabulary(counts, ids.special, config.draft_vocab_size)
    say(f"draft vocabulary: {len(vocabulary.ids)} of {len(counts)} tokens cover {100 * vocabulary.coverage:.2f} %")
    if config.draft_vocab_size and vocabulary.coverage < 0.5:
        raise CheckpointError(f"draft_vocab_size={config.draft_vocab_size} covers under half of the text; raise it")
    head = new_head(
        target,
        torch.from_numpy(vocabulary.ids).to(target.embed.device),
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        seed=config.seed,
        size=1 / float(scale[-1]),
    )
    head.fc.data *= scale.to(head.fc.device)  # new_head is made for features of unit size; a draft takes them raw
    return head


def _counts(config: TrainConfig, target: Decoder, batches: Batches, device: str) -> Int64:
    """What the target likes to say, on a sample of batches; every token of the corpus breaks ties."""
    number = min(VOCABULARY_BATCHES, batches.steps_in_first_epoch)
    with autocast(device):
        best = argmax_counts(target, (batches.at(i, device) for i in range(number)))
    seen = np.bincount(batches.corpus.tokens[batches.corpus.mask], minlength=len(best))
    sampled = config.batch_size * config.context * number
    scale = sampled / max(1, int(seen.sum()))
    return np.round(1000 * (best + scale * seen)).astype(np.int64)
