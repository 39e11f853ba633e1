"""Attention over keys and values in eight bits, rule by rule (csrc/kernels/attention_codes.h): one row and head after
the other in numpy, with the library's own exp, the same bits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from native_calls import exp_log

from aquiline.backends.cpu.native_pages import new_pages
from aquiline.types import KVGroup

BLOCK, SPAN = 64, 512
F = np.float32
DUST = F(2.0**-120)


def head_codes(x):
    """Codes [..., Dh] and scales [...] of heads x [..., Dh]."""
    with np.errstate(all="ignore"):
        amax = np.abs(x).max(-1)
        odd, zero = ~np.isfinite(x).all(-1), ~(amax >= DUST)
        codes = np.rint(x * (F(127) / amax)[..., None]).astype(F)
        codes[odd | zero] = 0
        scales = np.where(zero, F(0), amax / F(127)).astype(F)
    scales[odd] = np.nan
    return codes, scales


@dataclass
class CodedCache:
    """native_calls.Cache in codes: all bytes are set and all scales NaN until written, pages are scattered."""

    group: KVGroup
    table: np.ndarray

    @staticmethod
    def new(capacity, kv_heads, dim, page_size=16, slots=1, seed=0):
        per_slot = -(-capacity // page_size)
        pages = per_slot * slots + 3
        group = new_pages(pages, 1, kv_heads, dim, page_size, "int8")
        group.k[...], group.v[...], group.k_scales[...], group.v_scales[...] = 0, -128, np.nan, np.nan
        order = np.random.default_rng(seed).permutation(pages)[: per_slot * slots].astype(np.int32)
        return CodedCache(group, order.reshape(slots, per_slot).copy())

    def place(self, slot, indices):
        indices, size = np.asarray(indices, np.int64), self.group.page_size
        return self.table[slot].astype(np.int64)[indices // size], indices % size

    def write(self, slot, indices, k, v):
        """Store k, v [R, Hkv, Dh]."""
        (pages, at), group, n = self.place(slot, indices), self.group, len(k)
        codes, scales = head_codes(np.asarray(k, F))
        fours = (codes + 128).astype(np.uint8).reshape(n, k.shape[1], -1, 4)
        group.k[pages, 0, :, at // 16, :, at % 16] = fours
        group.k_scales[pages, 0, :, at] = scales
        codes, scales = head_codes(np.asarray(v, F))
        group.v[pages, 0, :, at // 4, :, at % 4] = codes.astype(np.int8)
        group.v_scales[pages, 0, :, at] = scales

    def read(self, slot, indices):
        """Codes k [T, Hkv, Dh], scales [T, Hkv], and the same of values."""
        (pages, at), group = self.place(slot, indices), self.group
        k = group.k[pages, 0, :, at // 16, :, at % 16].astype(np.int64) - 128
        v = group.v[pages, 0, :, at // 4, :, at % 4].astype(np.int64)
        return (
            k.reshape(len(at), k.shape[1], -1), group.k_scales[pages, 0, :, at], v, group.v_scales[pages, 0, :, at]
        )  # fmt: skip


def exp(x):
    return exp_log(np.ascontiguousarray(x, F).reshape(-1))[0].reshape(np.shape(x))


def fma(a, b, c):
    """a * b + c of float32, rounded once: the sum in double is rounded to odd, so that rounding again is harmless."""
    product, c = np.multiply(a, b, dtype=np.float64), np.asarray(c, np.float64)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    is_even = (total.view(np.int64) & 1) == 0
    return np.where((error != 0) & is_even, np.nextafter(total, np.copysign(np.inf, error)), total).astype(F)


def sum_lanes(x):
    """64 numbers: by groups of 16, then halves with halves."""
    a, b, c, d = x.reshape(4, 16)
    lanes = (a + b) + (c + d)
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return lanes[0]


def block(q, sq, k, sk, v, sv, positions):
    """One head over what a row sees of a block: its maximum, sum and accumulator [Dh]."""
    score = (k @ q).astype(F) * (sq * sk)
    m = score.max()
    e = exp(score - m)
    lanes = np.zeros(BLOCK, F)
    lanes[positions % BLOCK] = e
    product = e * sv
    most, nothing = product.max(), np.zeros(v.shape[1], F)
    if np.isnan(product).any():
        return m, sum_lanes(lanes), nothing + F(np.nan)
    if not most >= F(2.0**-100):
        return m, sum_lanes(lanes), nothing
    w = np.rint(product * (F(127) / most)).astype(np.int64)
    assert w.min() >= 0 and w.max() == 127
    return m, sum_lanes(lanes), (w @ v).astype(F) * (most / F(127))


EMPTY = F(-np.inf), F(0)


def fold(state, later):
    (m, total, own), (later_m, later_total, other) = state, later
    top = max(m, later_m)
    a, b = exp(np.array([m - top, later_m - top], F))
    return top, total * a + later_total * b, fma(own, a, other * b)


def row_head(q, scale, k, sk, v, sv, low, sink):
    """One row and head: q [Dh], keys and values of positions from `low` on. Returns [Dh]."""
    codes, amax = head_codes(q)
    codes, sq, positions = codes.astype(np.int64), amax * F(scale), low + np.arange(len(k))
    empty = (*EMPTY, np.zeros_like(q))
    total = empty
    for span in range(low // SPAN, (positions[-1] // SPAN) + 1):
        state = empty
        for first in range(span * SPAN, (span + 1) * SPAN, BLOCK):
            seen = np.flatnonzero((positions >= first) & (positions < first + BLOCK))
            if len(seen):
                state = fold(state, block(codes, sq, k[seen], sk[seen], v[seen], sv[seen], positions[seen]))
        if state[1] != 0:
            total = fold(total, state)
    m, total_sum, own = total
    if sink is not None:
        top = max(m, F(sink))
        a, b = exp(np.array([m - top, F(sink) - top], F))
        total_sum, own = total_sum * a + b, own * a
    return own / total_sum


def coded_attention(cache, specs, q, scale, window=0, sinks=None):
    """What native_calls.attention must return over a CodedCache."""
    out, group = np.empty(q.shape, F), q.shape[1] // cache.group.k.shape[2]
    with np.errstate(all="ignore"):
        for r, spec in enumerate(specs):
            path = spec.path(window)
            low = spec.context_len + len(spec.tail) - len(path)
            stored = cache.read(spec.slot, path)
            for h in range(q.shape[1]):
                sink = None if sinks is None else sinks[h]
                out[r, h] = row_head(q[r, h], scale, *(a[:, h // group] for a in stored), low, sink)
    return out.reshape(len(q), -1)
