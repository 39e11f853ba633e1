"""Training-time test: the draft runs S passes on its own outputs, as it does when drafting. Source: arXiv 2503.01840.

Position i at step k takes token x[i+1+k] (teacher forced) and its own previous output, at rotary position i + k, and
predicts x[i+2+k], whose target distribution is z[i+1+k]. Uses the class that serves, `DraftHead`, unchanged; only the
object that computes its attention differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aquiline.backends.torch.eagle import DraftHead
from aquiline.train.losses import HeadLoss, Loss, TargetBatch, head_loss
from aquiline.train.pass_attention import TTTAttention


@dataclass(frozen=True)
class TokenBatch:
    """Packed rows: tokens and positions int64 [B, T], document int64 [B, T] (negative: padding), mask bool [B, T].

    mask: which tokens count when they are predicted. rejected bool [B, T]: which tokens a draft missed in serving, None
    if that is not known. positions restart at 0 with each document."""

    tokens: Tensor
    document: Tensor
    positions: Tensor
    mask: Tensor
    rejected: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Positions that are not padding."""
        return int((self.document >= 0).sum())


@dataclass(frozen=True)
class Objective:
    """What a training step minimises: the sum over passes k of decay^k times the mean loss of the rows that count.

    The mean is weighted: a row whose predicted token a draft missed in serving weighs `replay`, any other row 1.
    needs_best: rows for which the target's best token is outside the draft vocabulary do not count. attention: how the
    passes compute attention (pass_attention.py)."""

    loss: Loss
    num_steps: int
    decay: float
    needs_best: bool = True
    attention: str = "fused"
    replay: float = 1.0


@dataclass(frozen=True)
class PassRows:
    """The rows of one pass. rows int64 [N]: their positions, the same in every row of the batch; counts bool [B, N]:
    which of them count; weights float32 [B, N]: how much, 0 for rows that do not count."""

    rows: Tensor
    counts: Tensor
    weights: Tensor


@dataclass(frozen=True)
class TTTResult:
    """The training loss and its figures. total: the loss, differentiable. Per pass: losses, the mean loss; accuracy,
    the share of rows whose best guess is the target's; conditional, that share among rows whose guesses in all earlier
    passes were right; NaN where no row counts. counted: the rows that losses and accuracy are means of; alive: the
    rows that conditional is a mean of."""

    total: Tensor
    losses: tuple[float, ...]
    accuracy: tuple[float, ...]
    conditional: tuple[float, ...]
    counted: tuple[int, ...]
    alive: tuple[int, ...]


def num_rows(context: int, num_steps: int) -> int:
    """Positions of a row for which every step's predicted token lies inside the row."""
    return context - 1 - num_steps


def counted(batch: TokenBatch, rows: Tensor, step: int) -> Tensor:
    """bool [B, N]: whether row i's prediction at `step`, the token at i + 2 + step, counts.

    The mask of the PREDICTED token decides, and that token must stand in the row's own document."""
    predicted = rows + 2 + step
    same = batch.document[:, rows] == batch.document[:, predicted]
    return batch.mask[:, predicted] & same & (batch.document[:, rows] >= 0)


def plan(
    batch: TokenBatch, target: TargetBatch, objective: Objective, late_rows: Tensor | None = None
) -> list[PassRows]:
    """The rows of every pass: which positions it covers, which of them count, and how much. late_rows: the positions of
    all passes but the first; None takes every position."""
    every = torch.arange(num_rows(batch.tokens.shape[1], objective.num_steps), device=batch.tokens.device)
    late = every if late_rows is None else late_rows
    passes = []
    for step in range(objective.num_steps):
        rows = every if step == 0 else late
        counts = counted(batch, rows, step)
        if objective.needs_best:
            counts &= target.in_vocab[:, rows + 1 + step]
        weights = counts.float()
        if batch.rejected is not None:
            weights[counts & batch.rejected[:, rows + 2 + step]] = objective.replay
        passes.append(PassRows(rows, counts, weights))
    return passes


def passes(
    head: DraftHead, batch: TokenBatch, features: Tensor, num_steps: int, late_rows: Tensor | None = None,
    attention: str = "fused",
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """Yield (row positions [N], a [B, N, H]) of each step.

    Step 0 covers every position for which all steps lie inside the row. Later steps cover `late_rows`, an ascending
    subset of these positions, if it is given."""
    every = torch.arange(num_rows(batch.tokens.shape[1], num_steps), device=batch.tokens.device)
    late = every if late_rows is None else late_rows
    attn = TTTAttention(batch.document[:, : len(every)], late, head.config.model.window(0), attention)
    g = head.fuse(features[:, : len(every)]).float()
    rows = every
    for step in range(num_steps):
        attn.begin(step)
        a = head(g, batch.tokens[:, rows + 1 + step], batch.positions[:, rows] + step, attn)
        yield rows, a
        g = head.feedback(a)
        if step == 0 and late_rows is not None:
            rows, g = late, g[:, late]


def ttt_loss(
    head: DraftHead, batch: TokenBatch, target: TargetBatch, objective: Objective, planned: Sequence[PassRows],
    totals: Sequence[float] | None = None, *, measure: bool = True,
) -> TTTResult:  # fmt: skip
    """The training loss of a batch. `planned` is `plan`'s result.

    totals: per pass, the weight of all rows that the mean is over, if this batch is a part of a larger one; by default
    the weight of this batch's rows. Without `measure` the figures per pass are NaN, which saves a pass over the
    logits."""
    late = planned[1].rows if len(planned) > 1 and len(planned[1].rows) < len(planned[0].rows) else None
    T, outputs, chosen, places, weights = batch.tokens.shape[1], [], [], [], []
    num_outputs = 0
    first = torch.arange(len(batch.tokens), device=batch.tokens.device)[:, None] * T
    run = passes(head, batch, target.features, objective.num_steps, late, objective.attention)
    for step, (rows, a) in enumerate(run):
        counts, weight = planned[step].counts, planned[step].weights
        outputs.append(a.flatten(0, 1))
        chosen.append(num_outputs + counts.flatten().nonzero().squeeze(1))
        num_outputs += counts.numel()
        places.append((first + rows + 1 + step)[counts])
        total = max(1.0, float(weight.sum()) if totals is None else totals[step])
        weights.append(weight[counts] * (objective.decay**step / total))
    at, order = torch.cat(places).sort(stable=True)
    weight = torch.cat(weights)[order]
    taken: Tensor = _Taken.apply(torch.cat(outputs), torch.cat(chosen)[order])  # type: ignore[no-untyped-call]
    normed = head.layer.norm(taken, head.norm)
    scored = head_loss(normed, head.head, target, at, weight, objective.loss, measure=measure)
    return _result(scored, order, planned, measure)


class _Taken(torch.autograd.Function):
    """x[at] of rows x [n, H], where `at` names no row twice. So the backward pass copies gradients to their rows; that
    of plain indexing adds them up, with one thread on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, at: Tensor) -> Tensor:
        ctx.at, ctx.shape = at, x.shape
        return x.index_select(0, at)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_zeros(ctx.shape).index_copy_(0, ctx.at, grad), None


def _result(scored: HeadLoss, order: Tensor, planned: Sequence[PassRows], measure: bool) -> TTTResult:
    if not measure:
        unknown, none = (float("nan"),) * len(planned), (0,) * len(planned)
        return TTTResult(scored.total, unknown, unknown, unknown, none, none)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    sizes = [int(p.counts.sum()) for p in planned]
    values, correct = torch.split(scored.values[back], sizes), torch.split(scored.correct[back], sizes)
    B, width = planned[0].counts.shape
    alive = torch.ones(B, width, dtype=torch.bool, device=order.device)
    accuracy, conditional, num_alive = [], [], []
    for p, right in zip(planned, correct, strict=True):
        was = alive[:, p.rows][p.counts]
        accuracy.append(_mean(right))
        conditional.append(_mean(right[was]))
        num_alive.append(int(was.sum()))
        now = torch.zeros_like(p.counts)
        now[p.counts] = right & was
        alive = torch.zeros_like(alive)
        alive[:, p.rows] = now
    losses = tuple(_mean(v) for v in values)
    return TTTResult(scored.total, losses, tuple(accuracy), tuple(conditional), tuple(sizes), tuple(num_alive))


def _mean(values: Tensor) -> float:
    return float(values.float().mean()) if len(values) else float("nan")
