"""Dense attention over packed rows [B, T], for the frozen target and for the draft's training-time test.

Owns the masks of packed documents and the one softmax that joins a step's causal keys with its own earlier steps.
Knows nothing of losses. Rows of a batch hold whole documents or prefixes of them, so a row sees the earlier positions
of its own document only; training attends as serving does.

The training-time test may attend in three other ways, over all keys at once under one mask: readable, torch's own, and
FlexAttention. They are the oracle of the first, and GPUs have kernels for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aquiline.models.model_config import ModelConfig

CHUNK = 128
"""Queries of one chunk. Keys after the last position of a chunk are not multiplied at all."""


@dataclass(frozen=True)
class QueryChunk:
    """A run of queries [start, stop) that sees no key at or beyond num_keys."""

    start: int
    stop: int
    num_keys: int


@dataclass(frozen=True)
class Visibility:
    """Which keys each query position sees: additive bias [B, N, T] (0 or -inf) and the query chunks."""

    bias: Tensor
    chunks: tuple[QueryChunk, ...]


def visibility(document: Tensor, queries: Tensor, window: int = 0) -> Visibility:
    """A query sees earlier keys of its own document, and only the last `window` of them if `window` is not 0. document
    int [B, T]; queries int [N], ascending."""
    keys = torch.arange(document.shape[1], device=document.device)
    seen = (keys[None, :] <= queries[:, None]) & (document[:, queries, None] == document[:, None, :])
    if window:
        seen &= keys[None, :] > queries[:, None] - window
    bias = torch.zeros(seen.shape, device=document.device).masked_fill_(~seen, -torch.inf)
    last = queries.tolist()
    starts = range(0, len(last), CHUNK)
    stops = [min(s + CHUNK, len(last)) for s in starts]
    return Visibility(bias, tuple(QueryChunk(a, b, last[b - 1] + 1) for a, b in zip(starts, stops, strict=True)))


class PackedAttention:
    """The target's attention over a packed batch: no cache, no gradient needed; one mask per distinct window."""

    def __init__(self, config: ModelConfig, document: Tensor) -> None:
        self.config = config
        queries = torch.arange(document.shape[1], device=document.device)
        windows = {config.window(i) for i in range(config.num_layers)}
        self.masks = {w: visibility(document, queries, w) for w in windows}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """q [B, T, Hq, Dh], k and v [B, T, Hkv, Dh] -> [B, T, Hq * Dh]."""
        assert sinks is None, "training reads targets without sinks"
        return step_attention(q, [k], [v], self.masks[self.config.window(layer)])


class TTTAttention:
    """The draft's attention during training-time test (arXiv 2503.01840): call `begin(step)` before each pass.

    Step 0 covers all T positions and attends causally. Step k >= 1 covers the positions `queries` [N] only; each sees
    the step-0 keys up to its own position and, on the diagonal, its own keys of steps 1 .. k. At step k a row stands k
    positions further on, as it does when drafting, and a window counts back from there. A window must be longer than
    there are steps.

    kind: "fused" is `step_attention`; eager, sdpa and flex are those of `full_attention`."""

    def __init__(self, document: Tensor, queries: Tensor, window: int = 0, kind: str = "fused") -> None:
        self.document, self.queries, self.window, self.kind = document, queries, window, kind
        self.every = torch.arange(document.shape[1], device=document.device)
        self.step = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.seen = visibility(document, self.every, window) if kind == "fused" else None

    def begin(self, step: int) -> None:
        """Start pass `step`; passes come in order."""
        assert step == len(self.keys), f"step {step} follows {len(self.keys)} passes"
        assert not self.window or step < self.window, f"step {step} in a window of {self.window}"
        self.step = step
        is_new = step > 0 and (self.window > 0 or (step == 1 and len(self.queries) < len(self.every)))
        if self.seen is not None and is_new:
            self.seen = visibility(self.document, self.queries, self.window - step if self.window else 0)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """q [B, N, Hq, Dh], k and v [B, N, Hkv, Dh] of this step's rows -> [B, N, Hq * Dh]; keeps k and v."""
        assert len(self.keys) == self.step, "begin(step) must precede each pass"
        assert sinks is None, "a draft has no sinks"
        self.keys.append(k)
        self.values.append(v)
        if self.seen is not None:
            return step_attention(q, self.keys, self.values, self.seen)
        rows = self.queries if self.step else self.every
        seen = StepKeys(self.document, rows, self.step, self.window)
        return full_attention(self.kind, q, self.keys, self.values, seen)


def _dtype_of(q: Tensor) -> torch.dtype:
    """What is computed in: bfloat16 under autocast, else q's dtype."""
    device = q.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else q.dtype


def step_attention(q: Tensor, keys: list[Tensor], values: list[Tensor], seen: Visibility) -> Tensor:
    """One softmax over keys[0] [B, T, Hkv, Dh] under `seen` and the diagonals keys[1:] [B, N, Hkv, Dh].

    q [B, N, Hq, Dh] -> [B, N, Hq * Dh]. Computes in bfloat16 under autocast, else in q's dtype; no [T, (k+1) T] mask
    or score matrix is built."""
    dtype = _dtype_of(q)
    B, N, Hq, Dh = q.shape
    Hkv = keys[0].shape[2]
    with torch.autocast(q.device.type, enabled=False):
        grouped = q.to(dtype).reshape(B, N, Hkv, Hq // Hkv, Dh).permute(0, 2, 3, 1, 4)  # [B, Hkv, G, N, Dh]
        flat = [t.to(dtype).transpose(1, 2) for t in (*keys, *values)]  # [B, Hkv, T or N, Dh]
        out: Tensor = _StepAttention.apply(grouped * Dh**-0.5, seen, *flat)  # type: ignore[no-untyped-call]
        return out.permute(0, 3, 1, 2, 4).reshape(B, N, Hq * Dh)


class _StepAttention(torch.autograd.Function):
    """Causal scores as two matrix products, k diagonal scores beside them, merged through the causal log-sum-exp.

    With w = softmax([lse, d_1 .. d_k]) the output is w_0 O_0 + sum w_j v_j; backward needs the causal probabilities
    P_0, w, and D = sum(dO * O): dS = w_0 P_0 (dO V' - D), dd_j = w_j (dO v_j - D)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, seen: Visibility, *flat: Tensor) -> Tensor:
        n = len(flat) // 2
        k, v, own_k, own_v = flat[0], flat[n], flat[1:n], flat[n + 1 :]
        diagonal = [(q * t[:, :, None]).sum(-1, dtype=torch.float32) for t in own_k]
        out, probs, lse = torch.empty_like(q), [], []
        for c in seen.chunks:
            shape = (*q.shape[:3], c.stop - c.start, -1)
            scores = (_rows(q, c) @ k[:, :, : c.num_keys].mT).view(shape)
            scores += seen.bias[:, None, None, c.start : c.stop, : c.num_keys].to(scores.dtype)
            p = torch.softmax(scores, -1)
            if own_k:  # max(s) - log max(p) is the log-sum-exp, for the price of two cheap reductions
                lse.append(scores.amax(-1).float() - p.amax(-1).float().log())
            out[:, :, :, c.start : c.stop] = (p.flatten(2, 3) @ v[:, :, : c.num_keys]).view(shape)
            probs.append(p)
        weights = q.new_ones(0)
        if own_k:
            weights = torch.softmax(torch.stack((torch.cat(lse, -1), *diagonal), -1), -1).to(q.dtype)
            out *= weights[..., :1]
            for j, t in enumerate(own_v, 1):
                out += weights[..., j : j + 1] * t[:, :, None]
        if any(ctx.needs_input_grad):
            ctx.seen, ctx.n = seen, n
            ctx.save_for_backward(q, out, weights, *probs, *flat)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, out, weights, *rest = ctx.saved_tensors
        seen, n = ctx.seen, ctx.n
        probs, flat = rest[: len(seen.chunks)], rest[len(seen.chunks) :]
        k, v, own_k, own_v = flat[0], flat[n], flat[1:n], flat[n + 1 :]
        inner = (grad * out).sum(-1, keepdim=True)
        scaled = grad * weights[..., :1] if own_k else grad
        scaled_inner = inner * weights[..., :1] if own_k else inner
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for c, p in zip(seen.chunks, probs, strict=True):
            rows, out_grad = _rows(q, c), _rows(scaled, c)
            dv[:, :, : c.num_keys] += p.flatten(2, 3).mT @ out_grad
            ds = out_grad @ v[:, :, : c.num_keys].mT
            ds -= _rows(scaled_inner, c)
            ds *= p.flatten(2, 3)
            shape = (*q.shape[:3], c.stop - c.start, -1)
            dq[:, :, :, c.start : c.stop] = (ds @ k[:, :, : c.num_keys]).view(shape)
            dk[:, :, : c.num_keys] += ds.mT @ rows
        dk_own, dv_own = [], []
        for j, (kj, vj) in enumerate(zip(own_k, own_v, strict=True), 1):
            w = weights[..., j : j + 1]
            dd = w * ((grad * vj[:, :, None]).sum(-1, keepdim=True) - inner)
            dq += dd * kj[:, :, None]
            dk_own.append((dd * q).sum(2))
            dv_own.append((w * grad).sum(2))
        return dq, None, dk, *dk_own, dv, *dv_own


def _rows(x: Tensor, c: QueryChunk) -> Tensor:
    """x [B, Hkv, G, N, W] -> the chunk's [B, Hkv, G * n, W], one matrix per key/value head."""
    return x[:, :, :, c.start : c.stop].flatten(2, 3)


@dataclass(frozen=True)
class StepKeys:
    """Which keys the rows of pass `step` see: document int [B, T]; rows int64 [N], their positions in step 0.

    Of step 0, a row sees the keys of its own document up to its own position; of later steps, its own keys only. A
    window counts back from the row's present position, `step` positions further on; 0 is no window."""

    document: Tensor
    rows: Tensor
    step: int
    window: int

    def sees(self, b: Tensor, row: Tensor, key: Tensor) -> Tensor:
        """Whether rows see keys: bool, for batch entries b, rows (numbers within the pass) and keys whose shapes
        broadcast."""
        T, N = self.document.shape[1], len(self.rows)
        place, first = self.rows[row], key.clamp_max(T - 1)
        seen = (first <= place) & (self.document[b, first] == self.document[b, place])
        if self.window:
            seen = seen & (first > place + self.step - self.window)
        return torch.where(key < T, seen, (key - T) % N == row)

    def mask(self) -> Tensor:
        """bool [B, N, T + step * N]."""
        device, num_keys = self.document.device, self.document.shape[1] + self.step * len(self.rows)
        b = torch.arange(len(self.document), device=device)[:, None, None]
        row = torch.arange(len(self.rows), device=device)[:, None]
        return self.sees(b, row, torch.arange(num_keys, device=device))


def full_attention(kind: str, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], seen: StepKeys) -> Tensor:
    """q [B, N, Hq, Dh] over keys[0] [B, T, Hkv, Dh] and keys[1:] [B, N, Hkv, Dh] -> [B, N, Hq * Dh].

    kind: eager, sdpa or flex. Computes in bfloat16 under autocast, else in q's dtype."""
    dtype = _dtype_of(q)
    k, v = (torch.cat(list(parts), 1).to(dtype).transpose(1, 2) for parts in (keys, values))
    with torch.autocast(q.device.type, enabled=False):
        out = KINDS[kind](q.to(dtype).transpose(1, 2), k, v, seen)
    return out.transpose(1, 2).flatten(2)


def _eager(q: Tensor, k: Tensor, v: Tensor, seen: StepKeys) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen.mask()[:, None], -torch.inf)
    return torch.softmax(scores, -1) @ v


def _sdpa(q: Tensor, k: Tensor, v: Tensor, seen: StepKeys) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen.mask()[:, None], enable_gqa=True)


def _flex(q: Tensor, k: Tensor, v: Tensor, seen: StepKeys) -> Tensor:
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(b: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return seen.sees(b, row, key)

    blocks = create_block_mask(visible, len(q), None, q.shape[2], k.shape[2], device=str(q.device))
    out: Tensor = _flex_kernel(q.device.type)(q, k, v, block_mask=blocks, enable_gqa=True)
    return out


@lru_cache
def _flex_kernel(device: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if device == "cuda" else flex_attention


KINDS: dict[str, Callable[[Tensor, Tensor, Tensor, StepKeys], Tensor]] = {"eager": _eager, "sdpa": _sdpa, "flex": _flex}


def check_attention(kind: str, device: str) -> None:
    """Raises ValueError for a kind of attention that cannot train on this device."""
    if kind == "flex" and torch.device(device).type == "cpu":
        raise ValueError("attention='flex': torch has no backward pass for it on a CPU; take fused, sdpa or eager")
