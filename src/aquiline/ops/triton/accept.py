"""Which drafted tokens are kept, and what a slot becomes after a step.

Sample and match (docs/decisions, 1), in symbols: for node i with parent p(i), ok(i) = token(i) == drawn(p(i)); i is
kept iff ok holds on its whole path; the token drawn at the deepest kept node follows that node. Twins: `accept` in
backends/torch/trees.py, `_keep` in backends/torch/torch_backend.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from aquiline.ops.triton.launch import Launch, check_floats, check_integers, size_of
from aquiline.ops.triton.tree_growth import TreeNodes
from aquiline.ops.triton.tree_rows import DeviceSlots

COLUMNS = tl.constexpr(1024)
"""Values that one program copies at once."""


@dataclass(frozen=True, eq=False)
class KeptPaths:
    """What B slots keep, int32. num_accepted [B]; path [B, D + 1]: nodes from the root down, 0 past num_accepted;
    tokens [B, D + 1]: the accepted tokens, then the target's own, then -1. A dead tree keeps nothing: 0 and -1.

    Written by `keep_paths`: roots [B], before the step; rows [B, D + 1]: numbers of the kept nodes' rows; sources and
    targets [B, D + 1]: places of their keys, now and in order behind the root; all -1 past num_accepted."""

    num_accepted: Tensor
    path: Tensor
    tokens: Tensor
    roots: Tensor
    rows: Tensor
    sources: Tensor
    targets: Tensor

    @classmethod
    def new(cls, num_trees: int, width: int, device: torch.device) -> KeptPaths:
        """Room for trees whose paths have `width` levels, the root's included."""
        each, wide = (
            torch.full(s, -1, dtype=torch.int32, device=device) for s in ((2, num_trees), (5, num_trees, width))
        )
        path, tokens, rows, sources, targets = wide
        return cls(each[0], path, tokens, each[1], rows, sources, targets)


@triton.jit(do_not_specialize=["num_nodes"])
def accept_kernel(
    trees, tokens, parents, depths, paths, counts, drawn, limits, num_accepted, kept_path, kept_tokens, num_nodes,
    WIDTH: tl.constexpr, NODES: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """One tree. Grid: trees."""
    tree = tl.program_id(0)
    slot = tl.load(trees + tree)
    level = tl.arange(0, LEVELS)
    is_level = level < WIDTH
    out = tree * WIDTH + level
    if slot < 0:
        tl.store(num_accepted + tree, 0)
        tl.store(kept_path + out, tl.zeros((LEVELS,), tl.int32), mask=is_level)
        tl.store(kept_tokens + out, tl.zeros((LEVELS,), tl.int32) - 1, mask=is_level)
        return
    first = tree * num_nodes
    node = tl.arange(0, NODES)
    is_node = node < tl.load(counts + tree)
    depth = tl.load(depths + first + node, mask=is_node, other=0)
    is_on = is_node[:, None] & (level[None, :] >= 1) & (level[None, :] <= depth[:, None])
    on_path = tl.load(paths + (first + node)[:, None] * WIDTH + level[None, :], mask=is_on, other=0)
    above = tl.load(parents + first + on_path, mask=is_on, other=0)
    wanted = tl.load(drawn + first + above, mask=is_on, other=0)
    is_other = tl.where(is_on & (tl.load(tokens + first + on_path, mask=is_on, other=0) != wanted), 1, 0)
    is_accepted = is_node & (tl.max(is_other, 1) == 0)
    # Siblings carry different tokens, so one path is accepted; were two equal, the first is as good as any.
    best = tl.max(tl.where(is_accepted, depth * NODES + NODES - 1 - node, 0), 0)
    count = tl.minimum(best // NODES, tl.load(limits + slot))
    is_kept = is_level & (level <= count)
    deepest = first + NODES - 1 - best % NODES
    path = tl.load(paths + deepest * WIDTH + level, mask=is_kept, other=0)
    following = tl.load(paths + deepest * WIDTH + level + 1, mask=is_level & (level < count), other=0)
    token = tl.load(tokens + first + following, mask=is_level & (level < count), other=-1)
    own = tl.load(drawn + first + path, mask=is_level & (level == count), other=-1)
    tl.store(num_accepted + tree, count)
    tl.store(kept_path + out, path, mask=is_level)
    tl.store(kept_tokens + out, tl.where(level == count, own, token), mask=is_level)


@triton.jit(do_not_specialize=["num_nodes"])
def keep_kernel(
    trees, roots, history, page_table, num_accepted, kept_path, kept_tokens, old_roots, rows, sources, targets,
    num_nodes, history_stride, table_stride, PAGE: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """One slot. Grid: trees."""
    tree = tl.program_id(0)
    slot = tl.load(trees + tree)
    level = tl.arange(0, LEVELS)
    is_level = level < WIDTH
    out = tree * WIDTH + level
    if slot < 0:
        nothing = tl.zeros((LEVELS,), tl.int32) - 1
        tl.store(old_roots + tree, -1)
        tl.store(rows + out, nothing, mask=is_level)
        tl.store(sources + out, nothing, mask=is_level)
        tl.store(targets + out, nothing, mask=is_level)
        return
    root = tl.load(roots + slot)
    count = tl.load(num_accepted + tree)
    is_kept = is_level & (level <= count)
    path = tl.load(kept_path + out, mask=is_kept, other=0)
    table = page_table + slot.to(tl.int64) * table_stride
    source, target = root + path, root + level
    source_page = tl.load(table + source // PAGE, mask=is_kept, other=0)
    target_page = tl.load(table + target // PAGE, mask=is_kept, other=0)
    tl.store(rows + out, tl.where(is_kept, tree * num_nodes + path, -1), mask=is_level)
    tl.store(sources + out, tl.where(is_kept, source_page * PAGE + source % PAGE, -1), mask=is_level)
    tl.store(targets + out, tl.where(is_kept, target_page * PAGE + target % PAGE, -1), mask=is_level)
    token = tl.maximum(tl.load(kept_tokens + out, mask=is_kept, other=0), 0)
    tl.store(history + slot.to(tl.int64) * history_stride + target + 1, token, mask=is_kept)
    tl.store(old_roots + tree, root)
    tl.debug_barrier()  # all have read the root
    tl.store(roots + slot, root + count + 1)


@triton.jit
def move_kernel(
    k_cache, v_cache, sources, targets, layer_stride, PLACE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One block of the keys and values of one layer along one path. Grid: trees, layers, blocks of a place.

    A node stands at or behind its level, so no place is written before it is read. Each value is read and written by
    the same thread, level after level."""
    tree = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64) * layer_stride
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    for level in range(1, WIDTH):
        source = tl.load(sources + tree * WIDTH + level).to(tl.int64)
        target = tl.load(targets + tree * WIDTH + level).to(tl.int64)
        if (source >= 0) & (source != target):
            own, new = layer + source * PLACE + column, layer + target * PLACE + column
            tl.store(k_cache + new, tl.load(k_cache + own, mask=column < PLACE), mask=column < PLACE)
            tl.store(v_cache + new, tl.load(v_cache + own, mask=column < PLACE), mask=column < PLACE)


@triton.jit
def copy_kernel(source, target, from_rows, to_rows, source_stride, target_stride, width, BLOCK: tl.constexpr):
    """One block of one row. Grid: rows, blocks of its values."""
    row = tl.program_id(0)
    old, new = row, row
    if from_rows is not None:
        old = tl.load(from_rows + row)
    if to_rows is not None:
        new = tl.load(to_rows + row)
    if (old < 0) | (new < 0):
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + old.to(tl.int64) * source_stride + column, mask=column < width)
    tl.store(target + new.to(tl.int64) * target_stride + column, values, mask=column < width)


def accept_paths(trees: Tensor, nodes: TreeNodes, drawn: Tensor, limits: Tensor, kept: KeptPaths) -> Launch:
    """Keep the deepest path whose tokens the target drew too, `limits` tokens of it at most.

    trees int32 [B]: slots, -1 for a dead tree; drawn int32 [B, N]: the target's own token after each node; limits int32
    [S], by slot: 0 keeps the token alone that the root drew. Writes num_accepted, path and tokens of `kept`. Raises
    ValueError for tensors that do not fit."""
    B, N, width = nodes.paths.shape
    check_integers("trees", trees, B, like=nodes.tokens)
    for name in ("tokens", "parents", "depths"):
        check_integers(f"nodes.{name}", getattr(nodes, name), B, N, like=trees)
    check_integers("nodes.counts", nodes.counts, B, like=trees)
    check_integers("drawn", drawn, B, N, like=trees)
    check_integers("limits", limits, len(limits), like=trees)
    _check_kept(kept, B, width)
    written = kept.num_accepted, kept.path, kept.tokens
    return Launch(
        "EAGLE_ACCEPT", accept_kernel, (B,),
        (trees, nodes.tokens, nodes.parents, nodes.depths, nodes.paths, nodes.counts, drawn, limits, *written, N),
        {"WIDTH": width, "NODES": triton.next_power_of_2(N), "LEVELS": triton.next_power_of_2(width)},
        bytes=size_of(nodes.tokens, nodes.parents, nodes.depths, nodes.paths, drawn, *written),
    )  # fmt: skip


def keep_paths(trees: Tensor, state: DeviceSlots, num_nodes: int, kept: KeptPaths) -> Launch:
    """Enter the kept tokens in the slots' history, move their roots, and say which rows and keys are kept: roots, rows,
    sources and targets of `kept`. num_nodes: N of the trees. Raises ValueError for tensors that do not fit."""
    B, width = kept.path.shape
    check_integers("trees", trees, B, like=state.roots)
    _check_kept(kept, B, width)
    return Launch(
        "EAGLE_TAIL_COMMIT", keep_kernel, (B,),
        (trees, state.roots, state.history, state.page_table, kept.num_accepted, kept.path, kept.tokens, kept.roots,
         kept.rows, kept.sources, kept.targets, num_nodes, state.history.stride(0), state.page_table.stride(0)),
        {"PAGE": state.page_size, "WIDTH": width, "LEVELS": triton.next_power_of_2(width)},
        bytes=size_of(kept.path, kept.tokens, kept.rows, kept.sources, kept.targets),
    )  # fmt: skip


def move_keys(k_cache: Tensor, v_cache: Tensor, kept: KeptPaths) -> Launch:
    """Move the keys and values of kept nodes from `sources` to `targets` in all layers. Caches [L, places, Hkv, D],
    contiguous. A chain needs no move. Raises ValueError for tensors that do not fit."""
    L, places, heads, D = k_cache.shape
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_floats(name, cache, L, places, heads, D, like=kept.path)
        if not cache.is_contiguous() or cache.dtype != k_cache.dtype:
            raise ValueError(f"{name} is {cache.dtype} with the strides {cache.stride()}; make both caches contiguous "
                             "and of one dtype")  # fmt: skip
    (B, width), place = kept.path.shape, heads * D
    block = min(COLUMNS.value, triton.next_power_of_2(place))
    return Launch(
        "EAGLE_TAIL_COMMIT", move_kernel, (B, L, triton.cdiv(place, block)),
        (k_cache, v_cache, kept.sources, kept.targets, places * place),
        {"PLACE": place, "WIDTH": width, "BLOCK": block},
        bytes=4 * B * (width - 1) * L * place * k_cache.element_size(),
    )  # fmt: skip


def copy_rows(
    source: Tensor, target: Tensor, *, from_rows: Tensor | None = None, to_rows: Tensor | None = None
) -> Launch:
    """Copy rows of floats: row from_rows[i] of source [.., H] to row to_rows[i] of target [.., H], int32 [R]; i itself
    where there is no such tensor. Nothing is copied where either is negative. The dtype becomes the target's. Raises
    ValueError for tensors that do not fit."""
    R = next(len(rows) for rows in (from_rows, to_rows, source) if rows is not None)
    (_, H) = source.shape
    check_floats("source", source, len(source), H)
    check_floats("target", target, len(target), H, like=source)
    for name, rows, full in (("from_rows", from_rows, source), ("to_rows", to_rows, target)):
        if rows is not None:
            check_integers(name, rows, R, like=source)
        elif len(full) < R:
            raise ValueError(f"{name} is None and there are {len(full)} rows; give it for {R} rows")
    block = min(COLUMNS.value, triton.next_power_of_2(H))
    return Launch(
        "COPY_ROWS", copy_kernel, (R, triton.cdiv(H, block)),
        (source, target, from_rows, to_rows, source.stride(0), target.stride(0), H), {"BLOCK": block},
        bytes=R * H * (source.element_size() + target.element_size()),
    )  # fmt: skip


def _check_kept(kept: KeptPaths, B: int, width: int) -> None:
    for name in ("num_accepted", "roots"):
        check_integers(f"kept.{name}", getattr(kept, name), B, like=kept.path)
    for name in ("path", "tokens", "rows", "sources", "targets"):
        check_integers(f"kept.{name}", getattr(kept, name), B, width, like=kept.path)
