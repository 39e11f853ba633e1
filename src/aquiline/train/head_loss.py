"""The draft's head and its loss, a few rows at a time: logits are never kept.

The logits of a training step would take more memory than everything else together, and most of a step's time goes
into them. So each chunk of rows goes forward, gets its loss and gradient, and goes backward at once; only the gradients
of the rows and of the head are kept. The target's logits of a position are computed once for all passes.

Two sizes matter on a CPU. A matrix product reorders the head once per call, so a chunk has many rows. Losses are
formed in blocks of few rows, whose logits, probabilities and gradients stay in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aquiline.train.losses import Loss, LossRows, softmax_with_sum

CHUNK_BYTES = 32 << 20
"""Size of one chunk's float32 logits."""
BLOCK_BYTES = 4 << 20
"""Size of one block's float32 logits on a CPU, a small share of the last-level cache. On a GPU a block is a chunk."""


@dataclass(frozen=True)
class TargetRows:
    """The target's distribution at n positions: hidden [n, H] times head [Vd, H] are its logits over the draft
    vocabulary, lse float32 [n] the log-sum-exp over the whole vocabulary."""

    hidden: Tensor
    lse: Tensor
    head: Tensor

    def logits(self, at: Tensor, dtype: torch.dtype) -> Tensor:
        """float32 [m, Vd] at the given positions."""
        return (self.hidden[at].to(dtype) @ self.head.to(dtype).T).float()


class HeadLoss(NamedTuple):
    """total: the weighted sum of losses, differentiable. values [R]: the loss of each row. correct [R]: whether the
    row's best guess is the target's; all False if that is not measured."""

    total: Tensor
    values: Tensor
    correct: Tensor


class _Settings(NamedTuple):
    loss: Loss
    dtype: torch.dtype
    measure: bool


def rows_of(logits: Tensor, target_logits: Tensor, lse: Tensor) -> LossRows:
    """Rows for a loss from both models' logits over the draft vocabulary [n, Vd]."""
    p, inside = softmax_with_sum(target_logits)
    return LossRows(logits, p, (inside - lse).exp_().clamp_max_(1.0))


def head_loss(
    a: Tensor, head: Tensor, target: TargetRows, at: Tensor, weight: Tensor, loss: Loss, *, measure: bool
) -> HeadLoss:
    """Sum of weight[i] * loss_i over normed rows a [R, H]. Loss i compares the logits a[i] @ head.T with the target's
    at position at[i].

    head [Vd, H]; at int64 [R], ascending. measure: whether best guesses are compared. Differentiable in a and head
    only. Computes in autocast's dtype if autocast is on, else in a's dtype."""
    kind = a.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else a.dtype
    with torch.autocast(kind, enabled=False):
        return HeadLoss(*_HeadLoss.apply(a, head, target, at, weight, _Settings(loss, dtype, measure)))  # type: ignore[no-untyped-call]


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        head: Tensor,
        target: TargetRows,
        at: Tensor,
        weight: Tensor,
        settings: _Settings,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = settings.dtype
        rows, kernel = a.to(dtype), head.to(dtype)
        grad_a, grad_head = torch.empty_like(rows), torch.zeros_like(kernel, dtype=torch.float32)
        values = torch.empty(len(a), device=a.device)
        correct = torch.zeros(len(a), dtype=torch.bool, device=a.device)
        size = max(16, CHUNK_BYTES // (4 * len(head)))
        for start in range(0, len(a), size):
            part = slice(start, start + size)
            logits = rows[part] @ kernel.T
            values[part], correct[part] = _grade(logits, target, at[part], settings)
            weighed = weight[part, None]
            grad_a[part] = (logits @ kernel).mul_(weighed)
            weighed_rows = (rows[part] * weighed).to(dtype)
            if dtype == torch.float32:
                grad_head.addmm_(logits.T, weighed_rows)
            else:
                grad_head += logits.T @ weighed_rows
        ctx.save_for_backward(grad_a, grad_head)
        ctx.dtypes = (a.dtype, head.dtype)
        ctx.mark_non_differentiable(values, correct)
        return (values * weight).sum(), values, correct

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_a, grad_head = ctx.saved_tensors
        return (grad_a * grad).to(ctx.dtypes[0]), (grad_head * grad).to(ctx.dtypes[1]), None, None, None, None


def _grade(logits: Tensor, target: TargetRows, at: Tensor, settings: _Settings) -> tuple[Tensor, Tensor]:
    """Losses of rows [n], and whether each row's best guess is the target's (False if that is not measured). Overwrites
    `logits` [n, Vd] with their gradients."""
    loss, dtype, measure = settings
    places, which = torch.unique_consecutive(at, return_inverse=True)
    told = target.logits(places, dtype)
    size = max(1, BLOCK_BYTES // (4 * logits.shape[1])) if logits.device.type == "cpu" else len(logits)
    values = torch.empty(len(logits), device=logits.device)
    correct = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    for start in range(0, len(logits), size):
        block = slice(start, start + size)
        own, mine = which[block], logits[block].float()
        seen = slice(int(own[0]), int(own[-1]) + 1)  # `at` ascends, so the positions of a block are adjacent
        own = own - seen.start
        if measure:
            correct[block] = mine.argmax(-1) == told[seen].argmax(-1)[own]
        rows = rows_of(mine, told[seen], target.lse[places[seen]])
        is_whole = len(rows.p) == len(own)
        graded = loss(rows if is_whole else LossRows(mine, rows.p[own], rows.inside[own]))
        values[block], logits[block] = graded.value, graded.grad
    return values, correct
