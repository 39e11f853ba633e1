"""Kernels of heads, draws, trees, accepted paths and experts compile for the cards that are supported, without stack,
within their shared memory. See test_cross_compile.py."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="not installed: triton")

from tests.ops.compiling import SHARED_BYTES, compiled

from aquiline.ops.triton.accept import KeptPaths, accept_paths, copy_rows, keep_paths, move_keys
from aquiline.ops.triton.experts import (
    ExpertBlocks,
    ExpertRoutes,
    expert_down,
    expert_gate_up,
    route,
    sum_experts,
)
from aquiline.ops.triton.head_draw import (
    DrawRows,
    TileBest,
    VocabularyHead,
    best_by_tile,
    best_of_logits,
    head_logits,
    pick_children,
    pick_draws,
)
from aquiline.ops.triton.launch import Launch
from aquiline.ops.triton.rows import DeviceRows
from aquiline.ops.triton.tree_growth import (
    Beam,
    Candidates,
    TreeNodes,
    choose_nodes,
    grow_beam,
    num_candidates,
    take_candidates,
)
from aquiline.ops.triton.tree_rows import DeviceSlots, lag_rows, level_rows, tree_rows

pytestmark = pytest.mark.rare
EACH_CARD = pytest.mark.parametrize("capability", list(SHARED_BYTES), ids=str)
META = torch.device("meta")


def halves(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=META)


def floats(*shape: int) -> Tensor:
    return torch.empty(shape, device=META)


def int32(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=META)


def check_fits(launches: Iterable[Launch], capability: int, is_product: bool = False) -> None:
    for launch in launches:
        taken = compiled(launch, capability)
        assert taken.stack == 0, launch.name
        assert taken.shared <= SHARED_BYTES[capability], launch.name
        assert not is_product or ("cp.async" in taken.ptx and "m16n8k16" in taken.ptx), launch.name


@EACH_CARD
@pytest.mark.parametrize(("V", "H", "count"), [(128256, 4096, 1), (201088, 2880, 2), (32000, 4096, 10)])
def test_heads_and_draws_fit(V: int, H: int, count: int, capability: int) -> None:
    R = 10
    x, head = halves(R, H), VocabularyHead(halves(V, H), int32(V) if count > 2 else None)
    rows, best = DrawRows(int32(R), int32(R), floats(64), int32(64, 2)), TileBest.new(R, V, count, META)
    check_fits([best_by_tile(x, head, rows, best), head_logits(x, head, rows.slots, floats(R, V))], capability, True)
    if count > 2:
        picked = pick_children(best, rows.slots, int32(1, R * count), floats(1, R * count), above=floats(R))
    else:
        tokens = int32(R) if count == 1 else int32(R, 2)
        picked = pick_draws(best, rows.slots, tokens, margins=None if count == 1 else floats(R))
    check_fits([best_of_logits(floats(R, V), rows, best), picked], capability)


@EACH_CARD
@pytest.mark.parametrize(("k", "depth", "N"), [(10, 5, 60), (16, 16, 256)])
def test_trees_fit_from_their_beams_to_the_kept_keys(k: int, depth: int, N: int, capability: int) -> None:
    B, trees = 8, int32(8)
    candidates, beams = Candidates.new(B, num_candidates(k, depth), META), [Beam.new(B, depth + 1, k, META)] * 2
    nodes = TreeNodes.empty(B, N, min(depth + 1, N - 1), META)
    width = nodes.paths.shape[2]
    kept, drawn = KeptPaths.new(B, width, META), int32(B, N)
    state = DeviceSlots(int32(64), int32(64), int32(64), int32(64, 8193), int32(64, 512), 16)
    rows = DeviceRows(*(int32(B * N) for _ in range(6)), int32(B * N, width - 1), state.page_table, 16, N)
    alone = DeviceRows(*(int32(B) for _ in range(6)), None, state.page_table, 16, 1)
    cache = halves(32, 8192, 8, 128)
    check_fits(
        [
            grow_beam(trees, candidates, 1, beams[0], None), grow_beam(trees, candidates, 2, beams[1], beams[0]),
            choose_nodes(trees, candidates, k, nodes), take_candidates(trees, candidates.tokens, int32(k), int32(B, k)),
            tree_rows(trees, state, nodes, rows), level_rows(trees, state, 3, 3, alone),
            lag_rows(trees, state, int32(B), int32(B), int32(B), alone),
            accept_paths(trees, nodes, drawn, int32(64), kept), keep_paths(trees, state, N, kept),
            move_keys(cache, cache, kept), copy_rows(halves(8192, 4096), halves(B, 4096), from_rows=trees),
        ], capability,
    )  # fmt: skip


@EACH_CARD
def test_experts_of_gpt_oss_fit(capability: int) -> None:
    E, H, P, num_rows = 128, 2880, 4, 60
    blocks = (torch.empty(E, n, H // 32 * 17, dtype=torch.uint8, device=META) for n in (2 * H, H))
    up, down = (ExpertBlocks.of(own, halves(E, own.shape[1])) for own in blocks)
    routes, x, slots = ExpertRoutes.new(num_rows, E, P, META), halves(num_rows, H), int32(num_rows)
    inner, outputs = halves(num_rows * P, H), floats(num_rows * P, H)
    products = [
        expert_gate_up("UP", x, up, routes, inner, kind="clamped", limit=7.0),
        expert_down("DOWN", inner, down, routes, outputs),
    ]  # fmt: skip
    check_fits(products, capability, True)
    others = route("ROUTE", floats(num_rows, E), slots, routes, over_all=False)
    check_fits([*others, sum_experts("SUM", outputs, routes, slots, floats(num_rows, H))], capability)
