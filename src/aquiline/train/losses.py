"""Losses between a draft's distribution and the target's, with their gradients, one value per row.

p is the target's distribution over the whole vocabulary, q the draft's over the draft vocabulary. A draft can never
match the tokens outside its vocabulary. There are three acceptance rates:

    overlap      sum min(p, q): what rejection sampling accepts (LK losses, arXiv 2602.23881)
    agreement    sum_i 1 / sum_j max(p_j / p_i, q_j / q_i): how often target and draft draw the same token with shared
                 noise, which is what this engine accepts (Daliri, Musco, Suresh, arXiv 2408.07978)
    best guess   whether the two argmaxes are the same: what is accepted at temperature 0

A gradient is formed beside its loss, without autograd, so that a chunk of logits never leaves the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

LK_RATE = 3.0
"""KL's weight in `lk-mix` is exp(-3 overlap): KL while p and q hardly meet, then the overlap itself (2602.23881)."""
TINY = 1e-30


class LossRows(NamedTuple):
    """n rows: logits float32 [n, Vd] of the draft; p float32 [n, Vd], the target's distribution over the draft
    vocabulary, summing to 1; inside float32 [n], the target's mass in that vocabulary, so that p * inside is its share
    of the whole vocabulary's distribution."""

    logits: Tensor
    p: Tensor
    inside: Tensor


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
    outside the draft vocabulary, and behind i the rest of q. So a row takes one sort."""
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


def lk(rows: LossRows) -> Graded:
    """-log overlap."""
    return _negative_log(overlap(rows))


def lk_mix(rows: LossRows) -> Graded:
    """w KL + (1 - w)(1 - overlap) with w = exp(-3 overlap), held constant in the gradient."""
    divergence, accepted = kl(rows), overlap(rows)
    w = (-LK_RATE * accepted.value).exp()
    grad = divergence.grad.mul_(w[:, None]).addcmul_(accepted.grad, (w - 1)[:, None])
    return Graded(w * divergence.value + (1 - w) * (1 - accepted.value), grad)


def agree(rows: LossRows) -> Graded:
    """-log agreement, the loss that fits this engine's verification."""
    return _negative_log(agreement(rows))


def agree_mix(rows: LossRows) -> Graded:
    """w KL + (1 - w)(1 - agreement) with w = exp(-3 agreement), held constant in the gradient."""
    divergence, accepted = kl(rows), agreement(rows)
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
    "ce": soft_cross_entropy, "kl": kl, "lk": lk, "lk-mix": lk_mix, "agree": agree, "agree-mix": agree_mix,
}  # fmt: skip

TAKES_ALL_ROWS = frozenset({"agree", "agree-mix"})
"""Losses that know what the target has outside the draft vocabulary; others skip rows whose best token is there."""


def matched_given(rows: LossRows, drawn: Tensor) -> Tensor:
    """The probability that the draft draws the token that the target drew, given that token: float32 [n].

    drawn int64 [n]: draft ids, -1 for a token outside the draft vocabulary, which the draft never draws. The mean of
    this probability over tokens drawn from p is `agreement`."""
    q, p = torch.softmax(rows.logits, -1), rows.p * rows.inside[:, None]
    at = drawn.clamp_min(0)[:, None]
    own_p, own_q = p.gather(-1, at), q.gather(-1, at)
    total = torch.maximum(p, q * (own_p / own_q.clamp_min(TINY))).sum(-1) + (1 - rows.inside)
    return torch.where(drawn >= 0, 1 / total.clamp_min(1.0), 0.0)
