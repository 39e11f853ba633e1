"""Training-time test: the draft head runs S passes on its own outputs, as it will when drafting. Source: EAGLE3.md §7.

Position i at step k takes token x[i+1+k] (teacher forced) and its own previous output, at rotary position i + k, and
predicts x[i+2+k], whose target distribution is z[i+1+k]. Uses the serving class `DraftHead` unchanged; only the
attention behind the seam differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from aquiline.models.eagle import DraftHead
from aquiline.train.attention import TTTAttention
from aquiline.train.losses import Loss


@dataclass(frozen=True)
class TokenBatch:
    """Packed rows: tokens and positions int64 [B, T], document int64 [B, T] (negative: padding), mask bool [B, T].

    mask says which tokens count when predicted; positions restart at 0 with each document."""

    tokens: Tensor
    document: Tensor
    positions: Tensor
    mask: Tensor


@dataclass(frozen=True)
class TargetView:
    """What the frozen target says of a TokenBatch: features [B, T, 3H]; of its next-token distribution at each
    position, `probs` [B, T, Vd] over the draft vocabulary, renormalised, and whether its argmax lies in it [B, T]."""

    features: Tensor
    probs: Tensor
    in_vocab: Tensor


@dataclass(frozen=True)
class StepLoss:
    """One step: mean loss over `count` rows, and the share whose best token is the target's (NaN if not measured)."""

    loss: Tensor
    count: int
    accuracy: float


def num_rows(context: int, num_steps: int) -> int:
    """Positions of a row for which every step's predicted token lies inside the row."""
    return context - 1 - num_steps


def counted(batch: TokenBatch, rows: Tensor, step: int) -> Tensor:
    """bool [B, N]: does row i's prediction at `step`, the token at i + 2 + step, count?

    The mask of the PREDICTED token decides, and it must stand in the row's own document."""
    predicted = rows + 2 + step
    same = batch.document[:, rows] == batch.document[:, predicted]
    return batch.mask[:, predicted] & same & (batch.document[:, rows] >= 0)


def passes(
    head: DraftHead, batch: TokenBatch, features: Tensor, num_steps: int, late_rows: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (row positions [N], a [B, N, H]) of each step.

    Step 0 covers every position that has all its steps; the later ones `late_rows` (ascending, a subset) if given."""
    every = torch.arange(num_rows(batch.tokens.shape[1], num_steps), device=batch.tokens.device)
    late = every if late_rows is None else late_rows
    attn = TTTAttention(batch.document[:, : len(every)], late, head.config.model.window(0))
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
    head: DraftHead,
    batch: TokenBatch,
    view: TargetView,
    num_steps: int,
    loss: Loss,
    *,
    late_rows: Tensor | None = None,
    measure: bool = False,
) -> list[StepLoss]:
    """The loss of each step, averaged over the positions that count (and whose target argmax the draft can name).

    `measure` also compares argmaxes, which costs a pass over the logits."""
    results = []
    for step, (rows, a) in enumerate(passes(head, batch, view.features, num_steps, late_rows)):
        logits = head.logits(a)
        shifted = rows + 1 + step
        contiguous = len(rows) == int(rows[-1] - rows[0]) + 1
        span = slice(int(shifted[0]), int(shifted[-1]) + 1)
        q = view.probs[:, span] if contiguous else view.probs[:, shifted]
        counts = counted(batch, rows, step) & view.in_vocab[:, shifted]
        count = int(counts.sum())
        mean = (loss(logits, q) * counts).sum() / max(count, 1)
        accuracy = float("nan")
        if measure:
            accuracy = float(((logits.argmax(-1) == q.argmax(-1)) & counts).sum()) / max(count, 1)
        results.append(StepLoss(mean, count, accuracy))
    return results


def total_loss(steps: list[StepLoss], decay: float) -> Tensor:
    """sum decay^k loss_k."""
    return torch.stack([s.loss * decay**k for k, s in enumerate(steps)]).sum()
