"""The frozen target's side of training: features and distributions of a batch, and the draft vocabulary."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch
from torch import Tensor

from aquiline.models.decoder import Decoder
from aquiline.ops import reference as ops
from aquiline.train.attention import PackedAttention
from aquiline.train.ttt import TargetView, TokenBatch
from aquiline.types import Int64


def has_bfloat16(device: str) -> bool:
    """Whether bfloat16 products are fast there; a CPU without the instructions emulates them (CPU.md)."""
    if device == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    return bool(torch.cpu._is_avx512_bf16_supported())


def autocast(device: str) -> contextlib.AbstractContextManager[object]:
    """bfloat16 autocast where the hardware has it, else nothing."""
    if not has_bfloat16(device):
        return contextlib.nullcontext()
    return torch.autocast(device, torch.bfloat16)


class TargetTeacher:
    """Runs the frozen target over packed batches, and keeps its head split into draft vocabulary and the rest.

    `scale` [3H] multiplies the features it shows; a draft trained on them has it folded into fc when it is saved."""

    def __init__(self, target: Decoder, vocab: Tensor, scale: Tensor | None = None) -> None:
        self.target = target
        self.scale = torch.ones((), device=vocab.device) if scale is None else scale
        rest = torch.ones(target.config.vocab_size, dtype=torch.bool)
        rest[vocab] = False
        self.inside = target.head.detach()[vocab].clone()
        self.outside = target.head.detach()[rest.nonzero().squeeze(1)].clone()

    @torch.no_grad()
    def view(self, batch: TokenBatch) -> TargetView:
        """One forward of the target over a batch. The caller decides on autocast."""
        out = self.target(batch.tokens, batch.positions, PackedAttention(self.target.config, batch.document))
        normed = ops.rms_norm(out.hidden, self.target.final_norm, self.target.config.rms_norm_eps)
        logits = ops.linear(normed, self.inside)
        in_vocab = torch.ones(batch.tokens.shape, dtype=torch.bool, device=batch.tokens.device)
        if len(self.outside):
            in_vocab = logits.amax(-1) >= ops.linear(normed, self.outside).amax(-1)
        return TargetView(out.features * self.scale, torch.softmax(logits, -1, dtype=torch.float32), in_vocab)


@torch.no_grad()
def feature_scale(target: Decoder, batch: TokenBatch) -> Tensor:
    """[3H]: one over the root mean square of each captured layer's features, over a batch's valid positions.

    A residual stream may run at 40 times unit size; left so, fc's share of every update is as much too large, and the
    draft's layer cannot be heard beside the residual it adds to."""
    features = target(batch.tokens, batch.positions, PackedAttention(target.config, batch.document)).features
    parts = features[batch.document >= 0].unflatten(-1, (len(target.capture), -1))
    scale: Tensor = parts.float().pow(2).mean((0, 2)).rsqrt()
    return scale.repeat_interleave(parts.shape[-1])


@torch.no_grad()
def argmax_counts(target: Decoder, batches: Iterable[TokenBatch]) -> Int64:
    """How often each token is the target's best guess over the counted positions: int64 [V]."""
    counts = torch.zeros(target.config.vocab_size, dtype=torch.int64)
    for batch in batches:
        attn = PackedAttention(target.config, batch.document)
        best = target.logits(target(batch.tokens, batch.positions, attn).hidden).argmax(-1)
        same = (batch.document[:, 1:] == batch.document[:, :-1]) & batch.mask[:, 1:]
        counts += torch.bincount(best[:, :-1][same].cpu(), minlength=len(counts))
    return counts.numpy()
