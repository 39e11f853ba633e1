"""Losses between a draft's logits and the target's distribution over the draft vocabulary, one value per row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]
"""(draft logits [..., Vd], target probabilities [..., Vd] summing to 1) -> float32 [...]."""

LK_MIX = 0.5


class _SoftCrossEntropy(torch.autograd.Function):
    """-sum q log softmax(logits), whose gradient softmax(logits) - q is formed without a graph of its own."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, q: Tensor) -> Tensor:
        probs = torch.softmax(logits, -1, dtype=torch.float32)
        peak, index = logits.max(-1)
        lse = peak.float() - probs.gather(-1, index[..., None]).squeeze(-1).log()
        ctx.save_for_backward(probs, q)
        ctx.dtype = logits.dtype
        return lse - torch.einsum("...v,...v->...", q.float(), logits.float())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        probs, q = ctx.saved_tensors
        return probs.sub(q).mul_(grad[..., None]).to(ctx.dtype), None


def soft_cross_entropy(logits: Tensor, q: Tensor) -> Tensor:
    """Cross-entropy against soft targets. Not differentiable in q."""
    loss: Tensor = _SoftCrossEntropy.apply(logits, q)  # type: ignore[no-untyped-call]
    return loss


def kl(logits: Tensor, q: Tensor) -> Tensor:
    """KL(q || p): cross-entropy less the target's entropy, which moves no gradient but makes 0 the optimum."""
    entropy: Tensor = torch.special.entr(q.float()).sum(-1)
    return soft_cross_entropy(logits, q) - entropy


def overlap(logits: Tensor, q: Tensor) -> Tensor:
    """alpha = sum min(p, q): the best acceptance rate any lossless verifier gives a token sampled from p."""
    return torch.minimum(torch.softmax(logits.float(), -1), q.float()).sum(-1)


def lk(logits: Tensor, q: Tensor) -> Tensor:
    """-log alpha."""
    return -overlap(logits, q).clamp_min(1e-6).log()


def lk_mix(logits: Tensor, q: Tensor) -> Tensor:
    """w KL + (1 - w)(1 - alpha): KL guides where p and q hardly meet and alpha's gradient is flat."""
    return LK_MIX * kl(logits, q) + (1 - LK_MIX) * (1 - overlap(logits, q))


LOSSES: dict[str, Loss] = {"ce": soft_cross_entropy, "kl": kl, "lk": lk, "lk-mix": lk_mix}
