"""Drawing tokens by Gumbel-argmax, ranking a draft's children, log-probabilities: `reference.py` over many rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from aquiline.backends.torch.ranks import ALONE, Ranks
from aquiline.backends.torch.reference import GOLDEN, lowbias32
from aquiline.backends.torch.slot_state import MASK32, RowSampling
from aquiline.spec.confidence import MARGIN_BOUNDS


def gumbel(sampling: RowSampling, ids: Tensor) -> Tensor:
    """Gumbel noise [n, V] of token ids [V]; each row has its own seed and position. Twin: reference.gumbel."""
    low, high = sampling.seed[:, 0], sampling.seed[:, 1]
    a = lowbias32(lowbias32(low ^ 0x243F6A88) ^ high)
    b = lowbias32(lowbias32(a ^ (sampling.position & MASK32)) ^ 0x85A308D3)
    bits = lowbias32(lowbias32((ids * GOLDEN + a[:, None]) & MASK32) ^ b[:, None])
    low_tail = -torch.log((bits.double() + 0.5) / 2**32)
    high_tail = -torch.log1p(-((2**32 - bits).double() - 0.5) / 2**32)
    exponential = torch.where(bits < 2**31, low_tail, high_tail).float()
    return -torch.log(exponential)


def filtered(logits: Tensor, sampling: RowSampling) -> Tensor:
    """Logits [n, V] with -inf for what top-k, top-p and min-p exclude at the row's temperature; as they are where that
    is 0. Twin: filter_logits."""
    V, is_greedy = logits.shape[1], (sampling.temperature == 0)[:, None]
    scaled = logits / torch.where(is_greedy, 1.0, sampling.temperature[:, None])
    ranked, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    top_k = torch.where(sampling.top_k > 0, sampling.top_k, V)
    keep = torch.arange(V, device=scaled.device) < top_k[:, None]
    ranked = ranked.masked_fill(~keep, -math.inf)
    probs = torch.softmax(ranked, dim=-1)
    top_p = sampling.top_p[:, None]
    keep &= ((torch.cumsum(probs, -1) - probs) < top_p) | (top_p >= 1)
    min_p = sampling.min_p[:, None]
    keep &= (ranked >= ranked[:, :1] + torch.log(min_p)) | (min_p <= 0)
    keep[:, 0] = True
    is_kept = torch.zeros_like(keep).scatter(1, order, keep)
    return torch.where(is_greedy | is_kept, logits, -math.inf)


def scores(logits: Tensor, sampling: RowSampling, ids: Tensor, filters: bool) -> Tensor:
    """The scores [n, V] whose maximum is drawn: the logits at temperature 0, else logits / temperature + noise."""
    if filters:
        logits = filtered(logits, sampling)
    is_greedy = (sampling.temperature == 0)[:, None]
    scaled = logits / torch.where(is_greedy, 1.0, sampling.temperature[:, None])
    return torch.where(is_greedy, logits, scaled + gumbel(sampling, ids))


def draw(logits: Tensor, sampling: RowSampling, ids: Tensor, ranks: Ranks = ALONE) -> Tensor:
    """The token drawn from each row of logits [n, V]: one of ids [V], ties to the lowest id; -1 where a logit is NaN or
    no logit is finite. logits may also be this rank's columns of them: then the best of all ranks is drawn."""
    logits, ids, ranks = ranks.columns(logits, ids, sampling.filters)
    found = scores(logits, sampling, ids, sampling.filters)
    top = found.max(-1, keepdim=True).values
    best = ids[(found == top).int().argmax(-1)]
    is_odd, is_finite = logits.isnan().any(-1), logits.isfinite().any(-1)
    of_ranks = ranks.stacked(torch.stack((top[:, 0].double(), best.double(), is_odd.double(), is_finite.double())))
    top, best, is_odd, is_finite = of_ranks.unbind(1)
    first = (top == top.amax(0)).int().argmax(0, keepdim=True)  # ranks have their ids one after the other
    is_number = ~is_odd.any(0) & is_finite.any(0)
    return torch.where(is_number, best.gather(0, first)[0].long(), -1)


def guess(logits: Tensor, sampling: RowSampling, ids: Tensor, ranks: Ranks = ALONE) -> tuple[Tensor, Tensor, Tensor]:
    """What `draw` draws from each row of logits [n, V], the runner-up (-1: no other token was possible), and the bucket
    of the margin (spec/confidence.py). Where the token is -1 the other two are -1 and 0."""
    drawn, bounds = draw(logits, sampling, ids, ranks), torch.tensor(MARGIN_BOUNDS, device=logits.device)
    logits, ids, ranks = ranks.columns(logits, ids, sampling.filters)
    best, order = best_two(pad(scores(logits, sampling, ids, sampling.filters), (0, 1), value=-math.inf))
    of_ranks = ranks.stacked(torch.stack((best.double(), pad(ids, (0, 1))[order].double()))).permute(1, 2, 0, 3)
    two, tokens = of_ranks.flatten(2)
    best, order = best_two(two.float())
    margin = torch.where(drawn < 0, 0, best[:, 0] - best[:, 1])
    is_there = (drawn >= 0) & (best[:, 1] > -math.inf)
    runner_up = tokens.gather(1, order)[:, 1].long()
    return drawn, torch.where(is_there, runner_up, -1), (margin[:, None] >= bounds).sum(1)


def best_two(found: Tensor) -> tuple[Tensor, Tensor]:
    """The two best scores of each row [n, V] and their places [n, 2], ties to the lowest place."""
    best, order = torch.sort(found, dim=-1, descending=True, stable=True)
    return best[:, :2], order[:, :2]


def children(logits: Tensor, sampling: RowSampling, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best tokens of each row of a draft's logits [n, Vd], best first, and their log-probabilities [n, k].

    Tokens are ranked by the scores of a draw, logits / temperature + noise. The log-probabilities are the log-softmax
    of these scores. Top-k, top-p and min-p are not applied, so that a token beyond the filter still has a rank."""
    ranked = scores(logits, sampling, ids, filters=False)
    order = torch.argsort(ranked, dim=-1, descending=True, stable=True)[:, :k]
    return ids[order], torch.log_softmax(ranked.double(), -1).float().gather(1, order)


def logprobs(logits: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each row i of logits [n, V]: the log-probability of token chosen[i], its rank from 1, the k best ids, and
    their log-probabilities."""
    column = chosen[:, None]
    own = logits.gather(1, column)
    place = torch.arange(logits.shape[1], device=logits.device)
    is_before = (logits > own) | ((logits == own) & (place < column))
    every = torch.log_softmax(logits.double(), -1).float()
    ids = torch.argsort(logits, dim=-1, descending=True, stable=True)[:, :k]
    return every.gather(1, column)[:, 0], 1 + is_before.sum(-1), ids, every.gather(1, ids)
