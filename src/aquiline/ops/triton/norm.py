"""Root-mean-square norms, with what a layer does around them: adding to the residual, keeping features."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from aquiline.ops.triton.launch import Launch, check_floats, check_integers, size_of

VALUES = 512
"""Values of a row that one warp holds, at least."""


@triton.jit
def normed(values, weight, columns, H, eps):
    """The norm of a row's values, float32, zeros from column H on, times its weight [H]."""
    mean = tl.sum(values * values, 0) / H
    weights = tl.load(weight + columns, mask=columns < H, other=0.0).to(tl.float32)
    return values * tl.rsqrt(mean + eps) * weights


@triton.jit
def norm_kernel(
    x, weight, own_weight, residual, feature, slots, out, eps, x_stride, residual_stride, feature_stride, out_stride,
    H, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(slots + row) < 0:
        return
    columns = tl.arange(0, BLOCK)
    is_own = columns < H
    values = tl.load(x + row * x_stride + columns, mask=is_own, other=0.0).to(tl.float32)
    if own_weight is not None:
        values = normed(values, own_weight, columns, H, eps)
    if residual is not None:
        stream = residual + row * residual_stride + columns
        values += tl.load(stream, mask=is_own, other=0.0).to(tl.float32)
        values = values.to(residual.dtype.element_ty).to(tl.float32)
        tl.store(stream, values, mask=is_own)
    if feature is not None:
        tl.store(feature + row * feature_stride + columns, values, mask=is_own)
    if out is not None:
        tl.store(out + row * out_stride + columns, normed(values, weight, columns, H, eps), mask=is_own)


def norm(
    name: str,
    x: Tensor,
    weight: Tensor | None,
    out: Tensor | None,
    slots: Tensor,
    *,
    eps: float,
    residual: Tensor | None = None,
    own_weight: Tensor | None = None,
    feature: Tensor | None = None,
) -> Launch:
    """out [M, H] = the RMS norm of x [M, H], or of the residual stream that x is added to, times weight [H].

    For rows whose slots [M] int32 are not negative. residual [M, H]: x is added to it first, in place, rounded to its
    dtype; own_weight [H]: x is normed by it before that, as Gemma does; feature [M, H] takes a copy of the sum, which
    is a feature of the draft. weight and out are both None where nothing is normed: after the last captured layer of
    a draft, say. Buffers may be slices of wider ones. Raises ValueError for buffers that do not fit."""
    M, H = x.shape
    if (weight is None) != (out is None):
        raise ValueError(f"{name} has only one of weight and out; give both, or neither")
    for label, buffer in (("x", x), ("out", out), ("residual", residual), ("feature", feature)):
        if buffer is not None:
            check_floats(f"{name}'s {label}", buffer, M, H, like=x)
    for label, vector in (("weight", weight), ("own_weight", own_weight)):
        if vector is not None:
            check_floats(f"{name}'s {label}", vector, H, like=x)
    check_integers(f"{name}'s slots", slots, M, like=x)
    block = triton.next_power_of_2(H)
    strides = (0 if buffer is None else buffer.stride(0) for buffer in (residual, feature, out))
    return Launch(
        name, norm_kernel, (M,),
        (x, weight, own_weight, residual, feature, slots, out, float(eps), x.stride(0), *strides, H),
        {"BLOCK": block}, num_warps=min(16, max(4, block // VALUES)),
        bytes=size_of(x, weight, own_weight, out, residual, residual, feature), flops=4 * M * H,
    )  # fmt: skip
