"""Plain torch in float32, against which every faster path is tested, and which training differentiates.

Owns no state. Each function has a native twin of the same name in csrc/api/aquiline.h.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from aquiline.models.model_config import Activation
from aquiline.types import Logprobs, TopK

_MASK32 = 0xFFFFFFFF
GOLDEN = 0x9E3779B9


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times weight [N, K], computed in x's dtype."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, statistics in float32."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def activate(gate_up: Tensor, activation: Activation = "swiglu", limit: float = 0.0) -> Tensor:
    """The activation of gate_up [..., 2 I], gate first. limit: of the clamped one."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "swiglu":
        return F.silu(gate) * up
    if activation == "geglu":
        return F.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(1.702 * gate))


def route(logits: Tensor, per_token: int, over_all: bool) -> tuple[Tensor, Tensor]:
    """The ids int64 [R, per_token] of the highest of a router's logits [R, E], descending, ties to the lowest id, and
    the experts' weights: their softmax probabilities among all experts (over_all) or among the chosen ones."""
    best, ids = (each[:, :per_token] for each in torch.sort(logits, dim=-1, descending=True, stable=True))
    return ids, torch.softmax(logits, -1).gather(1, ids) if over_all else torch.softmax(best, -1)


def rope_cos_sin(positions: Tensor, inv_freq: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """cos and sin [..., Dh / 2] of positions [...]; the angle is rounded to float32 as transformers does."""
    angle = positions.to(torch.float32)[..., None] * inv_freq.to(torch.float32)
    return angle.double().cos().float() * scale, angle.double().sin().float() * scale


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [..., heads, Dh] by cos, sin [..., Dh / 2], halves paired as in Hugging Face's Llama."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
    """One row: q [Hq, Dh] over its own keys k, v [T, Hkv, Dh], all visible. Returns [Hq * Dh].

    sinks [Hq] are logits that join the softmax denominator only (gpt-oss)."""
    groups = q.shape[0] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = torch.einsum("hd,thd->ht", q.float(), k) * scale
    if sinks is not None:
        scores = torch.cat((scores, sinks.float()[:, None]), dim=1)
    probs = torch.softmax(scores, dim=-1)[:, : k.shape[0]]
    return torch.einsum("ht,thd->hd", probs, v).reshape(-1)


def head_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Heads x [..., Dh] in eight bits: codes [..., Dh], whole numbers in float32, and scales [...] by which they are
    multiplied. Dust becomes zeros, and the scale of a head with a NaN or an infinity NaN."""
    amax = x.abs().amax(-1)
    is_odd, is_zero = ~torch.isfinite(x).all(-1), ~(amax >= 2.0**-120)
    factor = (127 / amax).masked_fill(is_odd | is_zero, 0)
    codes = torch.nan_to_num(torch.round(x * factor[..., None]), nan=0.0)
    return codes, (amax / 127).masked_fill(is_zero, 0).masked_fill(is_odd, math.nan)


def coded_softmax(
    scores: Tensor, v_scales: Tensor, positions: Tensor, visible: Tensor, sinks: Tensor | None = None
) -> Tensor:
    """What the codes of values are multiplied with, [..., T], from scores [..., T] of keys at absolute positions, whole
    weights of seven bits within blocks of 64: see csrc/kernels/attention_codes.h. The other arguments are broadcast to
    the scores; sinks [..., 1] are logits that join the denominator only."""
    scores = scores.masked_fill(~visible, -math.inf)
    blocks = (positions // 64).expand(scores.shape)
    num_blocks = int(positions.max()) // 64 + 1

    def per_block(x: Tensor, least: float) -> Tensor:
        """The maximum of x within each key's block, for every key."""
        found = x.new_full((*x.shape[:-1], num_blocks), least).scatter_reduce(-1, blocks, x, "amax")
        return found.gather(-1, blocks)

    top = per_block(scores, -math.inf)
    e = torch.exp(scores - top).masked_fill(~visible, 0)
    product = e * v_scales.expand(scores.shape).masked_fill(~visible, 0)
    most = per_block(product, 0.0)
    is_nothing = most < 2.0**-100
    weights = torch.round(product * (127 / most)).masked_fill(is_nothing, 0) * (most / 127)
    highest = scores.amax(-1, keepdim=True)
    if sinks is not None:
        highest = torch.maximum(highest, sinks)
    shrunk = torch.exp(top - highest).masked_fill(~visible, 0)
    total = (e * shrunk).sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - highest)
    return weights * shrunk / total


def lowbias32(x: Tensor) -> Tensor:
    """A 32-bit mixing function on int64 tensors holding uint32 values. Source: C. Wellons, hash-prospector."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK32
    x = x ^ (x >> 15)
    x = (x * (0x846CA68B - (1 << 32))) & _MASK32  # the signed twin of the multiplier keeps int64 from overflowing
    return x ^ (x >> 16)


def gumbel(seed: int, position: int, ids: Tensor) -> Tensor:
    """Gumbel noise of token ids int64 [n] for the token drawn at an absolute position.

    Counter-based: bits = lowbias32(lowbias32(id * golden + a) ^ b) with (a, b) hashed from seed and position. The
    uniform (bits + 1/2) / 2^32 lies in the open interval and is resolved at both ends: its exponential -log(u) is
    taken as -log1p(-(1 - u)) above one half, so that neither tail collapses."""
    words = torch.tensor([seed & _MASK32, (seed >> 32) & _MASK32, position & _MASK32])
    a = lowbias32(lowbias32(words[0] ^ 0x243F6A88) ^ words[1])
    b = lowbias32(lowbias32(a ^ words[2]) ^ 0x85A308D3)
    bits = lowbias32(lowbias32((ids * GOLDEN + a) & _MASK32) ^ b)
    low = -torch.log((bits.double() + 0.5) / 2**32)
    high = -torch.log1p(-((2**32 - bits).double() - 0.5) / 2**32)
    exponential = torch.where(bits < 2**31, low, high).float()
    return -torch.log(exponential)


def filter_logits(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """One row's logits [V] over temperature with everything filtered set to -inf: top-k, then top-p, then min-p.

    Top-k keeps exactly k, ties to the lowest id. Top-p keeps an id while the probability mass ranked before it, among
    what top-k left, is below top_p. Min-p keeps probabilities of at least min_p times the largest."""
    scaled = logits.float() / temperature
    order = torch.argsort(scaled, descending=True, stable=True)
    keep = torch.ones(len(order), dtype=torch.bool)
    if 0 < top_k < len(order):
        keep[top_k:] = False
    ranked = scaled[order].masked_fill(~keep, -math.inf)
    if top_p < 1.0:
        probs = torch.softmax(ranked, dim=-1)
        keep &= (torch.cumsum(probs, 0) - probs) < top_p
    if min_p > 0.0:
        keep &= ranked >= ranked[0] + math.log(min_p)
    keep[0] = True
    filtered = torch.full_like(scaled, -math.inf)
    filtered[order[keep]] = scaled[order[keep]]
    return filtered


def draw(
    logits: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    position: int,
    ids: Tensor | None = None,
) -> int:
    """The token id drawn from one row of logits [V]: argmax at temperature 0, Gumbel-argmax otherwise.

    ids int64 [V]: the token of each column, ascending, where that is not its number: a draft's, as target ids. Ties go
    to the lowest id. Returns -1 if a logit is NaN or none is finite."""
    return best_two(logits, temperature, top_k, top_p, min_p, seed, position, ids)[0]


def best_two(
    logits: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    position: int,
    ids: Tensor | None = None,
) -> tuple[int, int, float]:
    """The token that `draw` draws, the one with the second best score (-1: no other was possible), and by how much the
    best score exceeds it. -1, -1 and 0 if a logit is NaN or none is finite."""
    ids = torch.arange(len(logits)) if ids is None else ids
    if torch.isnan(logits).any() or not torch.isfinite(logits).any():
        return -1, -1, 0.0
    scores = logits
    if temperature != 0.0:
        scores = filter_logits(logits, temperature, top_k, top_p, min_p) + gumbel(seed, position, ids)
    best = int(torch.argmax((scores == scores.max()).int()))
    others = scores.clone()
    others[best] = -math.inf
    second = int(torch.argmax((others == others.max()).int()))
    runner_up = int(ids[second]) if others[second] > -math.inf else -1
    return int(ids[best]), runner_up, float(scores[best] - others[second])


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best ids (int64) of logits [R, V] and their log-probabilities, descending, ties to the lowest id."""
    logprobs = _log_softmax(logits)
    ids = torch.argsort(logits, dim=-1, descending=True, stable=True)[:, :k]
    return ids, logprobs.gather(1, ids)


def _log_softmax(logits: Tensor) -> Tensor:
    """Summed in float64: torch's float32 sum over 50,000 logits is off by 1.2e-5 on some CPUs."""
    return torch.log_softmax(logits.double(), dim=-1).float()


def logprobs(logits: Tensor, chosen: Tensor, k: int) -> Logprobs:
    """The log-probabilities and ranks of the ids chosen int64 [R], and the k best ids, of logits [R, V]."""
    column = chosen[:, None]
    own = logits.gather(1, column)
    is_before = (logits > own) | ((logits == own) & (torch.arange(logits.shape[1]) < column))
    ids, best = top_k(logits, k)
    return Logprobs(
        chosen=_log_softmax(logits).gather(1, column)[:, 0].numpy(),
        rank=(1 + is_before.sum(-1)).int().numpy(),
        top=TopK(ids.int().numpy(), best.numpy()),
    )
