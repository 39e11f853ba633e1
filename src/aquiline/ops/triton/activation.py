"""The activation of an MLP's gate and up."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from aquiline.ops.triton.launch import Launch, check_floats, check_integers, size_of

COLUMNS = 1024
"""Outputs that one program computes at most."""
KINDS = ("swiglu", "geglu", "clamped")
"""The activations of `Activation` in models/model_config.py."""


@triton.jit
def activated(gate, up, limit, KIND: tl.constexpr):
    """The activation of gate and up, float32 of any shape; KIND counts in KINDS."""
    if KIND == 0:
        return gate * tl.sigmoid(gate) * up
    if KIND == 1:  # tanh(y) = 2 sigmoid(2 y) - 1
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * tl.sigmoid(2.0 * inner) * up
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    return (up + 1.0) * (gate * tl.sigmoid(1.702 * gate))


@triton.jit
def activation_kernel(
    gate_up, slots, out, limit, in_stride, out_stride, inner, KIND: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One block of one row. Grid: rows, blocks of outputs."""
    row = tl.program_id(0)
    if tl.load(slots + row) < 0:
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = gate_up + row.to(tl.int64) * in_stride + columns
    gate = tl.load(own, mask=columns < inner, other=0.0).to(tl.float32)
    up = tl.load(own + inner, mask=columns < inner, other=0.0).to(tl.float32)
    result = activated(gate, up, limit, KIND)
    tl.store(out + row.to(tl.int64) * out_stride + columns, result, mask=columns < inner)


def activation(
    name: str, gate_up: Tensor, out: Tensor, slots: Tensor, *, kind: str = "swiglu", limit: float = 0.0
) -> Launch:  # fmt: skip
    """out [M, I] = the activation of gate_up [M, 2 I], gate first, for rows whose slots [M] are not negative.

    kind: an `Activation`; limit: of the clamped one. Raises ValueError for buffers that do not fit."""
    M, inner = out.shape
    if kind not in KINDS:
        raise ValueError(f"{name}: kind={kind!r} is no activation; give one of {', '.join(KINDS)}")
    check_floats(f"{name}'s gate_up", gate_up, M, 2 * inner)
    check_floats(f"{name}'s out", out, M, inner, like=gate_up)
    check_integers(f"{name}'s slots", slots, M, like=gate_up)
    block = min(COLUMNS, triton.next_power_of_2(inner))
    return Launch(
        name, activation_kernel, (M, triton.cdiv(inner, block)),
        (gate_up, slots, out, float(limit), gate_up.stride(0), out.stride(0), inner),
        {"KIND": KINDS.index(kind), "BLOCK": block}, bytes=size_of(gate_up, out), flops=5 * M * inner,
    )  # fmt: skip
