"""What happens to queries, keys and values between the projection and the attention: norms, rotation, the cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from aquiline.ops.triton.launch import Launch, check_contiguous, check_float32, check_floats, check_integers, size_of
from aquiline.ops.triton.rows import DeviceRows

LARGEST_HEAD = 256
"""Values of the largest head that attention has tiles for."""


@triton.jit
def rotated_heads(
    source, first_target, weight, cos, sin, eps, num_stored,
    NUM: tl.constexpr, NUM_PADDED: tl.constexpr, D: tl.constexpr, HALF_PADDED: tl.constexpr,
):  # fmt: skip
    """Norm (where there is a weight [D]) and rotate NUM heads [NUM, D] at source; store the first num_stored of them at
    first_target."""
    head = tl.arange(0, NUM_PADDED)[:, None]
    column = tl.arange(0, HALF_PADDED)
    half = D // 2
    is_half = column < half
    is_own = (head < NUM) & is_half[None, :]
    at = head * D + column[None, :]
    low = tl.load(source + at, mask=is_own, other=0.0).to(tl.float32)
    high = tl.load(source + at + half, mask=is_own, other=0.0).to(tl.float32)
    if weight is not None:
        mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D
        factor = tl.rsqrt(mean + eps)[:, None]
        low = low * factor * tl.load(weight + column, mask=is_half, other=0.0).to(tl.float32)[None, :]
        high = high * factor * tl.load(weight + half + column, mask=is_half, other=0.0).to(tl.float32)[None, :]
    c = tl.load(cos + column, mask=is_half, other=0.0)[None, :]
    s = tl.load(sin + column, mask=is_half, other=0.0)[None, :]
    tl.store(first_target + at, low * c - high * s, mask=is_own & (head < num_stored))
    tl.store(first_target + at + half, high * c + low * s, mask=is_own & (head < num_stored))


@triton.jit
def heads_kernel(
    qkv, q_weight, k_weight, cos, sin, slots, positions, write, page_table, q, k_cache, v_cache, eps,
    qkv_stride, cos_stride, table_stride,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, HQ_PADDED: tl.constexpr, HKV_PADDED: tl.constexpr,
    HALF_PADDED: tl.constexpr, V_PADDED: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """One row, all its heads. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    index = tl.load(write + row)
    is_written = index >= 0
    num_stored = tl.where(is_written, HKV, 0)
    page = tl.load(page_table + slot * table_stride + index // PAGE, mask=is_written, other=0).to(tl.int64)
    place = (page * PAGE + index % PAGE) * (HKV * D)
    position = tl.load(positions + row)
    own_cos, own_sin = cos + position * cos_stride, sin + position * cos_stride
    queries = qkv + row * qkv_stride
    keys = queries + HQ * D
    rotated_heads(queries, q + row * (HQ * D), q_weight, own_cos, own_sin, eps, HQ, HQ, HQ_PADDED, D, HALF_PADDED)
    rotated_heads(keys, k_cache + place, k_weight, own_cos, own_sin, eps, num_stored, HKV, HKV_PADDED, D, HALF_PADDED)
    column = tl.arange(0, V_PADDED)
    values = tl.load(keys + HKV * D + column, mask=column < HKV * D, other=0.0).to(tl.float32)
    tl.store(v_cache + place + column, values, mask=column < num_stored * D)


def heads(
    name: str,
    qkv: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: DeviceRows,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
) -> Launch:
    """Norm and rotate the queries and keys of qkv [M, (Hq + 2 Hkv) * D], queries first; store queries in q [M, Hq, D]
    and keys and values in the pages of k_cache and v_cache [places, Hkv, D], place = page * page_size + offset.

    cos and sin [positions, D / 2] float32: the rotation; q_weight and k_weight [D]: norms of each head, with eps, both
    or neither. A row whose `write` is negative has its queries computed and no key written. Raises ValueError for
    buffers that do not fit."""
    M, Hq, D = q.shape
    Hkv = k_cache.shape[1]
    check_head_size(name, D)
    check_floats(f"{name}'s qkv", qkv, M, (Hq + 2 * Hkv) * D)
    check_floats(f"{name}'s q", q, M, Hq, D, like=qkv)
    check_contiguous(f"{name}'s q", q)
    check_cache(name, k_cache, v_cache, Hkv, D, qkv)
    check_float32(f"{name}'s cos", cos, cos.shape[0], D // 2, like=qkv)
    check_float32(f"{name}'s sin", sin, *cos.shape, like=qkv)
    check_integers(f"{name}'s slots", rows.slots, M, like=qkv)
    if (q_weight is None) != (k_weight is None):
        raise ValueError(f"{name} has only one of q_weight and k_weight; give both, or neither")
    for label, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            check_floats(f"{name}'s {label}", weight, D, like=qkv)
    return Launch(
        name, heads_kernel, (M,),
        (qkv, q_weight, k_weight, cos, sin, rows.slots, rows.positions, rows.write, rows.page_table, q, k_cache,
         v_cache, float(eps), qkv.stride(0), cos.stride(0), rows.page_table.stride(0)),
        {"HQ": Hq, "HKV": Hkv, "D": D, "HQ_PADDED": triton.next_power_of_2(Hq),
         "HKV_PADDED": triton.next_power_of_2(Hkv), "HALF_PADDED": triton.next_power_of_2(D // 2),
         "V_PADDED": triton.next_power_of_2(Hkv * D), "PAGE": rows.page_size},
        bytes=size_of(qkv, q) + 2 * M * Hkv * D * k_cache.element_size(), flops=3 * M * (Hq + Hkv) * D,
    )  # fmt: skip


def check_head_size(name: str, D: int) -> None:
    """Raise ValueError for a head size that no tile is for."""
    if D % 16 or not 0 < D <= LARGEST_HEAD:
        raise ValueError(f"{name}: head_dim={D} has no kernel; heads are multiples of 16 up to {LARGEST_HEAD}; run "
                         f"this model with device='cpu'")  # fmt: skip


def check_cache(name: str, k_cache: Tensor, v_cache: Tensor, Hkv: int, D: int, like: Tensor) -> None:
    """Raise ValueError unless both hold the keys and values of whole places."""
    for label, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_floats(f"{name}'s {label}", cache, len(k_cache), Hkv, D, like=like)
        check_contiguous(f"{name}'s {label}", cache)
        if cache.dtype != k_cache.dtype:
            raise ValueError(f"{name}'s {label} is {cache.dtype}, k_cache {k_cache.dtype}; give both one dtype")
