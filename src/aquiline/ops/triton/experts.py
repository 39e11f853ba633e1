"""Mixtures of experts for few rows, whose weights stay packed in MXFP4 until a tile is computed.

The router's best experts of each row become *pairs*, number row * P + rank for the P experts of a row. Pairs with one
expert form a *group*: its weights are unpacked once for all rows that chose it. A pair's result depends on its row and
its expert alone, and a row adds its pairs up in the router's order. Twins: `route` in backends/torch/reference.py and
`mixture` in backends/torch/decoder.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from aquiline.ops.triton.activation import KINDS, activated
from aquiline.ops.triton.expert_routing import group_kernel, route_kernel
from aquiline.ops.triton.launch import Launch, check_float32, check_floats, check_integers, size_of
from aquiline.ops.triton.linear import LinearTiles
from aquiline.ops.triton.mxfp4 import BLOCK_BYTES, BLOCK_INPUTS, packed_product
from aquiline.ops.triton.products import TILE_ROWS, operand_dtype

EXPERT_TILES = LinearTiles(block_n=32, block_k=64)
"""Tiles of an expert's linears. Not measured."""

MOST_PAIRS = 512
"""Pairs that one launch groups: 64 rows with 8 experts each."""
COMPARED = 2048
"""Pairs of pairs that one program compares at once: more do not fit in its registers."""
COLUMNS = 1024
"""Outputs of a row that one program adds up."""


@dataclass(frozen=True, eq=False)
class ExpertBlocks:
    """One linear of E experts. nibbles uint8 [E, N, K / 2]: byte i of 16 has inputs i (low) and i + 16 of its block of
    32, as GGUF packs them; scales uint8 [E, N, K / 32]: a block's values are 2^(scale - 128) times -12 to 12; bias
    float [E, N]. Of gate and up, the gate's rows come first."""

    nibbles: Tensor
    scales: Tensor
    bias: Tensor | None = None

    @classmethod
    def of(cls, blocks: Tensor, bias: Tensor | None = None) -> ExpertBlocks:
        """From blocks uint8 [E, N, 17 K / 32], each a scale and 16 bytes (blocks.py, `mxfp4_blocks`)."""
        each = blocks.unflatten(-1, (-1, 1 + BLOCK_BYTES.value))
        return cls(each[..., 1:].flatten(-2).contiguous(), each[..., 0].contiguous(), bias)

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, N and K."""
        E, N, half = self.nibbles.shape
        return E, N, 2 * half


@dataclass(frozen=True, eq=False)
class ExpertRoutes:
    """Which experts compute which rows. experts int32 and weights float32 [R, P]: of each row, the highest logit first,
    -1 for a dead row. By group, G of them: group_experts int32 [G], -1 behind the last; counts int32 [G]: pairs of the
    group; pairs int32 [G, R]: their numbers."""

    experts: Tensor
    weights: Tensor
    group_experts: Tensor
    counts: Tensor
    pairs: Tensor

    @classmethod
    def new(cls, num_rows: int, count: int, per_token: int, device: torch.device) -> ExpertRoutes:
        """Room for the routes of rows among `count` experts. Raises ValueError for more rows than one launch groups."""
        if num_rows * per_token > MOST_PAIRS:
            raise ValueError(
                f"{num_rows} rows with {per_token} experts each; give at most {MOST_PAIRS // per_token} rows at once"
            )
        groups = min(count, num_rows * per_token)
        integers: dict[str, Any] = {"dtype": torch.int32, "device": device}
        return cls(
            torch.empty(num_rows, per_token, **integers), torch.empty(num_rows, per_token, device=device),
            torch.empty(groups, **integers), torch.empty(groups, **integers), torch.empty(groups, num_rows, **integers),
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def expert_kernel(
    x, nibbles, scales, bias, group_experts, counts, pairs, out, num_rows, x_stride, out_stride, limit,
    N: tl.constexpr, K: tl.constexpr, PER_ROW: tl.constexpr, IS_GATED: tl.constexpr, KIND: tl.constexpr,
    TILE: tl.constexpr, BLOCK_N: tl.constexpr, BYTES: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """A tile of one group's pairs times a block of its expert's outputs. IS_GATED: out has the activation of gate and
    up, x a row for PER_ROW pairs; else x has a row for each pair. Grid: output blocks, groups, tiles of pairs."""
    group = tl.program_id(1)
    expert = tl.load(group_experts + group).to(tl.int64)
    if expert < 0:
        return
    count = tl.load(counts + group)
    member = tl.program_id(2) * TILE + tl.arange(0, TILE)
    if tl.program_id(2) * TILE >= count:
        return
    is_pair = member < count
    pair = tl.load(pairs + group * num_rows + member, mask=is_pair, other=0)
    x_rows = x + (pair // PER_ROW)[:, None].to(tl.int64) * x_stride
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < N
    WIDTH: tl.constexpr = 2 * N if IS_GATED else N
    own_nibbles = nibbles + expert * (WIDTH * (K // 2))
    own_scales = scales + expert * (WIDTH * (K // BLOCK_INPUTS))
    total = tl.zeros((TILE, BLOCK_N), tl.float32)
    above = tl.zeros((TILE, BLOCK_N), tl.float32)
    for first in range(0, K // 2, BYTES):
        total = packed_product(
            total, x_rows, is_pair, own_nibbles, own_scales, column, is_column, first, K, BYTES, OPERAND
        )
        if IS_GATED:
            above = packed_product(
                above, x_rows, is_pair, own_nibbles, own_scales, N + column, is_column, first, K, BYTES, OPERAND
            )
    if bias is not None:
        own_bias = bias + expert * WIDTH + column
        total += tl.load(own_bias, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if IS_GATED:
            above += tl.load(own_bias + N, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if IS_GATED:
        total = activated(total, above, limit, KIND)
    target = out + pair[:, None].to(tl.int64) * out_stride + column[None, :]
    tl.store(target, total, mask=is_pair[:, None] & is_column[None, :])


@triton.jit
def sum_kernel(outputs, weights, slots, out, in_stride, out_stride, H, PER_ROW: tl.constexpr, BLOCK: tl.constexpr):
    """One block of one row, its experts in order. Grid: rows, blocks of outputs."""
    row = tl.program_id(0)
    if tl.load(slots + row) < 0:
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(PER_ROW):
        own = outputs + (row * PER_ROW + j).to(tl.int64) * in_stride + column
        values = tl.load(own, mask=column < H, other=0.0).to(tl.float32)
        total += tl.load(weights + row * PER_ROW + j) * values
    tl.store(out + row.to(tl.int64) * out_stride + column, total, mask=column < H)


def route(name: str, logits: Tensor, slots: Tensor, routes: ExpertRoutes, *, over_all: bool) -> tuple[Launch, Launch]:
    """Choose the experts of each row by the router's logits float32 [R, E], ties to the lowest, and group the pairs.

    slots int32 [R]: a row whose slot is negative routes to no expert. over_all: weights are softmax probabilities among
    all experts, not among the chosen ones. Raises ValueError for buffers that do not fit."""
    (R, E), P = logits.shape, routes.experts.shape[1]
    check_float32(f"{name}'s logits", logits, R, E)
    check_integers(f"{name}'s slots", slots, R, like=logits)
    _check_routes(name, routes, R, P, logits)
    if not 1 <= P <= E or len(routes.counts) != min(E, R * P):
        raise ValueError(f"{name}'s routes have {P} experts a row in {len(routes.counts)} groups; make them for {R} "
                         f"rows among {E} experts")  # fmt: skip
    written = routes.group_experts, routes.counts, routes.pairs
    first = Launch(
        name, route_kernel, (R,), (logits, slots, routes.experts, routes.weights),
        {"E": E, "PER_ROW": P, "OVER_ALL": over_all, "BLOCK": triton.next_power_of_2(E)},
        bytes=size_of(logits, routes.experts, routes.weights),
    )  # fmt: skip
    block = triton.next_power_of_2(R * P)
    second = Launch(
        f"{name}.groups", group_kernel, (1,), (routes.experts, *written, R * P, R),
        {"GROUPS": len(routes.counts), "BLOCK": block, "PART": max(1, min(block, COMPARED // block))},
        bytes=size_of(routes.experts, *written),
    )  # fmt: skip
    return first, second


def expert_gate_up(
    name: str,
    x: Tensor,
    experts: ExpertBlocks,
    routes: ExpertRoutes,
    inner: Tensor,
    *,
    kind: str,
    limit: float = 0.0,
    tiles: LinearTiles = EXPERT_TILES,
) -> Launch:
    """inner [R P, I] = the activation of the experts' gate and up for rows x [R, H]; experts are [E, 2 I, H].

    kind and limit as in `activation`. Raises ValueError for buffers that do not fit."""
    if kind not in KINDS:
        raise ValueError(f"{name}: kind={kind!r} is no activation; give one of {', '.join(KINDS)}")
    how = {"IS_GATED": True, "KIND": KINDS.index(kind), "PER_ROW": routes.experts.shape[1]}
    return _expert(name, x, experts, routes, inner, how, limit, tiles)


def expert_down(
    name: str,
    inner: Tensor,
    experts: ExpertBlocks,
    routes: ExpertRoutes,
    outputs: Tensor,
    *,
    tiles: LinearTiles = EXPERT_TILES,
) -> Launch:
    """outputs [R P, H] = the experts' down for their own inner [R P, I]; experts are [E, H, I]. Raises ValueError for
    buffers that do not fit."""
    return _expert(name, inner, experts, routes, outputs, {"IS_GATED": False, "KIND": 0, "PER_ROW": 1}, 0.0, tiles)


def sum_experts(name: str, outputs: Tensor, routes: ExpertRoutes, slots: Tensor, out: Tensor) -> Launch:
    """out [R, H] = each live row's outputs [R P, H], weighted, added up in the router's order. Raises ValueError for
    buffers that do not fit."""
    (R, H), P = out.shape, routes.experts.shape[1]
    check_floats(f"{name}'s outputs", outputs, R * P, H)
    check_floats(f"{name}'s out", out, R, H, like=outputs)
    check_integers(f"{name}'s slots", slots, R, like=outputs)
    _check_routes(name, routes, R, P, outputs)
    block = min(COLUMNS, triton.next_power_of_2(H))
    return Launch(
        name, sum_kernel, (R, triton.cdiv(H, block)),
        (outputs, routes.weights, slots, out, outputs.stride(0), out.stride(0), H), {"PER_ROW": P, "BLOCK": block},
        bytes=size_of(outputs, out), flops=2 * R * P * H,
    )  # fmt: skip


def _expert(
    name: str,
    x: Tensor,
    experts: ExpertBlocks,
    routes: ExpertRoutes,
    out: Tensor,
    how: dict[str, int],
    limit: float,
    tiles: LinearTiles,
) -> Launch:
    (E, width, K), (num_pairs, N), (R, P) = experts.shape, out.shape, routes.experts.shape
    if width != (2 * N if how["IS_GATED"] else N) or K % BLOCK_INPUTS.value:
        raise ValueError(f"{name}'s experts have the shape {experts.shape}; out has {N} outputs, and inputs come in "
                         f"blocks of {BLOCK_INPUTS.value}")  # fmt: skip
    check_floats(f"{name}'s x", x, R * P // how["PER_ROW"], K)
    check_floats(f"{name}'s out", out, R * P, N, like=x)
    _check_routes(name, routes, R, P, x)
    for label, tensor, last in (("nibbles", experts.nibbles, K // 2), ("scales", experts.scales, K // 32)):
        if tensor.shape != (E, width, last) or tensor.dtype != torch.uint8 or not tensor.is_contiguous():
            raise ValueError(
                f"{name}'s {label} are {tensor.dtype} {tuple(tensor.shape)}; make them with ExpertBlocks.of"
            )
    if experts.bias is not None:
        check_floats(f"{name}'s bias", experts.bias, E, width, like=x)
    constants = how | {"N": N, "K": K, "TILE": TILE_ROWS, "BLOCK_N": tiles.block_n, "BYTES": tiles.block_k // 2}
    each = (size_of(experts.nibbles, experts.scales, experts.bias)) // E
    return Launch(
        name, expert_kernel, (triton.cdiv(N, tiles.block_n), len(routes.counts), triton.cdiv(R, TILE_ROWS)),
        (x, experts.nibbles, experts.scales, experts.bias, routes.group_experts, routes.counts, routes.pairs, out, R,
         x.stride(0), out.stride(0), float(limit)),
        constants | {"OPERAND": operand_dtype(x.dtype)}, tiles.num_warps, tiles.num_stages,
        bytes=P * each + size_of(x, out), flops=2 * num_pairs * width * K,
    )  # fmt: skip


def _check_routes(name: str, routes: ExpertRoutes, R: int, P: int, like: Tensor) -> None:
    groups = len(routes.counts)
    check_integers(f"{name}'s experts", routes.experts, R, P, like=like)
    check_float32(f"{name}'s weights", routes.weights, R, P, like=like)
    for label, tensor in (("group_experts", routes.group_experts), ("counts", routes.counts)):
        check_integers(f"{name}'s {label}", tensor, groups, like=like)
    check_integers(f"{name}'s pairs", routes.pairs, groups, R, like=like)
