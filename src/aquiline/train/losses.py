"""Losses between a draft's distribution and the target's, with their gradients, one value per row; and the loss of a
draft's head, a few rows at a time.

p is the target's distribution over the whole vocabulary, q the draft's over the draft vocabulary. A draft can never
match the tokens outside its vocabulary. There are three acceptance rates:

    overlap      sum min(p, q): what rejection sampling accepts (LK losses, arXiv 2602.23881)
    agreement    sum_i 1 / sum_j max(p_j / p_i, q_j / q_i): how often target and draft draw the same token with shared
                 noise, which is what this engine accepts (Daliri, Musco, Suresh, arXiv 2408.07978)
    best guess   whether the two argmaxes are the same: what is accepted at temperature 0

The logits of a training step would take more memory than everything else together, and most of a step's time goes
into them. So each chunk of rows goes forward, gets its loss and its gradient, formed without autograd, and goes
backward at once; only the gradients of the rows and of the head are kept. The target's logits of a position are
computed once for all passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

LK_RATE = 3.0
"""KL's weight in `lk-mix` is exp(-3 overlap): KL while p and q hardly meet, then the overlap itself (2602.23881)."""
TINY = 1e-30
CHUNK_BYTES = 32 << 20
"""Size of one chunk's float32 logits. A matrix product reorders the head once per call, so a chunk has many rows."""
BLOCK_BYTES = 4 << 20
"""Size of one block's float32 logits on a CPU, a small share of the last-level cache: a loss is formed in blocks of few
rows, whose logits, probabilities and gradients stay in the cache. On a GPU a block is a chunk."""


class LossRows(NamedTuple):
    """n rows: logits float32 [n, Vd] of the draft; p float32 [n, Vd], the target's distribution over the draft
    vocabulary, summing to 1; inside float32 [n], the target's mass in that vocabulary, so that p * inside is its share
    of the whole vocabulary's distribution."""

    logits: Tensor
    p: Tensor
    inside: Tensor


def rows_of(logits: Tensor, target_logits: Tensor, lse: Tensor) -> LossRows:
    """Rows for a loss from both models' logits over the draft vocabulary [n, Vd]."""
    p, inside = softmax_with_sum(target_logits)
    return LossRows(logits, p, (inside - lse).exp_().clamp_max_(1.0))


class Graded(NamedTuple):
    """value float32 [n], and its gradient by the row's logits [n, Vd]."""

    value: Tensor
    grad: Tensor


Loss = Callable[[LossRows], Graded]


def soft_cross_entropy(rows: LossRows) -> Graded:
    """-sum p log q over the draft vocabulary."""
    q, log_sum = softmax_with_sum(rows.logits)
    return Graded(log_sum - torch.linalg.vecdot(rows.p, rows.logits), q.sub_(rows.p))


def softmax_with_sum(logits: Tensor) -> tuple[Tensor, Tensor]:
    """softmax [n, V] and log-sum-exp [n] of logits [n, V]. The log-sum-exp is the largest logit minus the logarithm of
    its probability."""
    q = torch.softmax(logits, -1)
    return q, logits.amax(-1) - q.amax(-1).log()


def kl(rows: LossRows) -> Graded:
    """KL(p || q): the cross-entropy minus the entropy of p. It has the gradient of the cross-entropy and optimum 0."""
    value, grad = soft_cross_entropy(rows)
    return Graded(value - torch.special.entr(rows.p).sum(-1), grad)


def overlap(rows: LossRows) -> Graded:
    """sum min(p, q) over the whole vocabulary, and its gradient."""
    q, p = torch.softmax(rows.logits, -1), rows.p * rows.inside[:, None]
    return Graded(torch.minimum(p, q).sum(-1), _through_softmax(q, (q < p).float()))


def agreement(rows: LossRows) -> Graded:
    """How often target and draft draw the same token with shared noise, and its gradient.

    Sort the tokens by falling r = p / q. Then the sum over j splits at i: before i a cumulative sum of p, with p's mass
    outside the draft vocabulary, and after i the rest of q. So a row takes one sort."""
    q, p = torch.softmax(rows.logits, -1), rows.p * rows.inside[:, None]
    order = (p / q.clamp_min(TINY)).argsort(-1, descending=True)
    ps, qs = p.gather(-1, order), q.gather(-1, order)
    ahead = ps.cumsum(-1) + (1 - rows.inside)[:, None]
    behind = (1 - qs.cumsum(-1)).clamp_min(0)
    share = ps / (ahead * qs + behind * ps).clamp_min(TINY)
    matched = share * qs
    pushed = (qs * share.square()).cumsum(-1)
    slope = behind * share.square() - (pushed - qs * share.square())
    return Graded(matched.sum(-1), _through_softmax(q, torch.empty_like(q).scatter_(-1, order, slope)))


def _mixed(divergence: Graded, accepted: Graded) -> Graded:
    """w KL + (1 - w)(1 - accepted) with w = exp(-3 accepted), held constant in the gradient."""
    w = (-LK_RATE * accepted.value).exp()
    grad = divergence.grad.mul_(w[:, None]).addcmul_(accepted.grad, (w - 1)[:, None])
    return Graded(w * divergence.value + (1 - w) * (1 - accepted.value), grad)


def _through_softmax(q: Tensor, slope: Tensor) -> Tensor:
    """The gradient by logits, given the gradient by q = softmax(logits)."""
    return slope.sub_((slope * q).sum(-1, keepdim=True)).mul_(q)


def _negative_log(accepted: Graded) -> Graded:
    value = accepted.value.clamp_min(1e-6)
    return Graded(-value.log(), accepted.grad.div_(-value[:, None]))


LOSSES: dict[str, Loss] = {
    "ce": soft_cross_entropy,
    "kl": kl,
    "lk": lambda rows: _negative_log(overlap(rows)),
    "lk-mix": lambda rows: _mixed(kl(rows), overlap(rows)),
    "agree": lambda rows: _negative_log(agreement(rows)),
    "agree-mix": lambda rows: _mixed(kl(rows), agreement(rows)),
}
"""`agree` fits this engine's verification."""
TAKES_ALL_ROWS = frozenset({"agree", "agree-mix"})
"""Losses that count the target's probability outside the draft vocabulary. With other losses a row does not count if
its best token is outside."""


def matched_given(rows: LossRows, drawn: Tensor) -> Tensor:
    """The probability that the draft draws the token that the target drew, given that token: float32 [n].

    drawn int64 [n]: draft ids, -1 for a token outside the draft vocabulary, which the draft never draws. The mean of
    this probability over tokens drawn from p is `agreement`."""
    q, p = torch.softmax(rows.logits, -1), rows.p * rows.inside[:, None]
    at = drawn.clamp_min(0)[:, None]
    own_p, own_q = p.gather(-1, at), q.gather(-1, at)
    total = torch.maximum(p, q * (own_p / own_q.clamp_min(TINY))).sum(-1) + (1 - rows.inside)
    return torch.where(drawn >= 0, 1 / total.clamp_min(1.0), 0.0)


@dataclass(frozen=True)
class TargetBatch:
    """What the frozen target computed over a batch of tokens [B, T]. features float32 [B, T, C * H]; in_vocab bool
    [B, T]: whether its best token is in the draft vocabulary. Its distributions at the B * T positions, one after the
    other: hidden [B * T, H] times head [Vd, H] are the logits over the draft vocabulary, lse float32 [B * T] the
    log-sum-exp over the whole vocabulary."""

    features: Tensor
    hidden: Tensor
    lse: Tensor
    head: Tensor
    in_vocab: Tensor

    def logits(self, at: Tensor, dtype: torch.dtype) -> Tensor:
        """float32 [m, Vd] at the given positions."""
        return (self.hidden[at].to(dtype) @ self.head.to(dtype).T).float()


class HeadLoss(NamedTuple):
    """total: the weighted sum of losses, differentiable. values [R]: the loss of each row. correct [R]: whether the
    row's best guess is the target's; all False if that is not measured."""

    total: Tensor
    values: Tensor
    correct: Tensor


def head_loss(
    a: Tensor, head: Tensor, target: TargetBatch, at: Tensor, weight: Tensor, loss: Loss, *, measure: bool
) -> HeadLoss:
    """Sum of weight[i] * loss_i over normed rows a [R, H]. Loss i compares the logits a[i] @ head.T with the target's
    at position at[i].

    head [Vd, H]; at int64 [R], ascending. measure: whether best guesses are compared. Differentiable in a and head
    only. Computes in autocast's dtype if autocast is on, else in a's dtype."""
    kind = a.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else a.dtype
    with torch.autocast(kind, enabled=False):
        return HeadLoss(*_HeadLoss.apply(a, head, target, at, weight, loss, dtype, measure))  # type: ignore[no-untyped-call]


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a: Tensor, head: Tensor, target: TargetBatch, at: Tensor, weight: Tensor, loss: Loss,
        dtype: torch.dtype, measure: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        rows, kernel = a.to(dtype), head.to(dtype)
        grad_a, grad_head = torch.empty_like(rows), torch.zeros_like(kernel, dtype=torch.float32)
        values = torch.empty(len(a), device=a.device)
        correct = torch.zeros(len(a), dtype=torch.bool, device=a.device)
        size = max(16, CHUNK_BYTES // (4 * len(head)))
        for start in range(0, len(a), size):
            part = slice(start, start + size)
            logits = rows[part] @ kernel.T
            values[part], correct[part] = _grade(logits, target, at[part], loss, measure)
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
        return (grad_a * grad).to(ctx.dtypes[0]), (grad_head * grad).to(ctx.dtypes[1]), *[None] * 6


def _grade(logits: Tensor, target: TargetBatch, at: Tensor, loss: Loss, measure: bool) -> tuple[Tensor, Tensor]:
    """Losses of rows [n], and whether each row's best guess is the target's (False if that is not measured). Overwrites
    `logits` [n, Vd] with their gradients."""
    places, which = torch.unique_consecutive(at, return_inverse=True)
    told = target.logits(places, logits.dtype)
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
