"""Whether the rows of trees are sound: what attention reads by is checked on the device, where that is asked for."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from aquiline.ops.triton.launch import Launch, check_integers
from aquiline.ops.triton.rows import DeviceRows


@triton.jit
def check_kernel(
    slots, write, context_len, tail_len, path, page_table, broken, path_stride, table_stride, num_pages, limit,
    GROUP: tl.constexpr, LEVELS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_LEVELS: tl.constexpr,
):  # fmt: skip
    """The rows of one tree. Grid: trees."""
    tree = tl.program_id(0)
    node = tl.arange(0, BLOCK)
    row = tree * GROUP + node
    slot = tl.load(slots + row, mask=node < GROUP, other=-1)
    is_live = slot >= 0
    own = tl.max(slot, 0)
    context = tl.load(context_len + row, mask=is_live, other=1)
    tail = tl.load(tail_len + row, mask=is_live, other=0)
    index = tl.load(write + row, mask=is_live, other=0)
    is_bad = is_live & ((slot != own) | (context < 1) | (tail < 0) | (context + tail > limit))
    page = tl.load(page_table + own * table_stride + index // PAGE, mask=is_live & (index >= 0), other=0)
    is_bad = is_bad | (is_live & ((page < 0) | (page >= num_pages)))
    if LEVELS > 0:
        level = tl.arange(0, BLOCK_LEVELS)[None, :]
        is_there = is_live[:, None] & (level < tl.minimum(tail, LEVELS)[:, None])
        at = path + row[:, None] * path_stride + level
        here = tl.load(at, mask=is_there, other=1)
        above = tl.load(at - 1, mask=is_there & (level > 0), other=0)
        is_order = is_there & ((here <= above) | (here >= GROUP))
        last = tl.max(tl.where(is_there, here, 0), 1)
        is_own = (index < 0) | (context - 1 + last == index)
        is_bad = is_bad | (is_live & ((tail > LEVELS) | (tl.max(is_order.to(tl.int32), 1) > 0) | (is_own == 0)))
    else:
        is_bad = is_bad | (is_live & ((tail > 0) | ((index >= 0) & (context != index + 1))))
    tl.store(broken + tree, tl.sum(is_bad.to(tl.int32), 0))


def check_rows(rows: DeviceRows, num_pages: int, limit: int, broken: Tensor) -> Launch:
    """broken int32 [B] = how many rows of each group are not sound: rows of two slots in a group, a path that is not a
    tree's or does not end at the row's own key, a key in no page, or more keys than `limit`. Raises ValueError for
    tensors that do not fit."""
    B = rows.num // rows.group
    check_integers("broken", broken, B, like=rows.slots)
    path = rows.slots if rows.path is None else rows.path
    constants = {"GROUP": rows.group, "LEVELS": rows.levels, "PAGE": rows.page_size}
    constants |= {
        "BLOCK": triton.next_power_of_2(rows.group),
        "BLOCK_LEVELS": triton.next_power_of_2(max(1, rows.levels)),
    }
    return Launch(
        "CHECK_ROWS", check_kernel, (B,),
        (rows.slots, rows.write, rows.context_len, rows.tail_len, path, rows.page_table, broken, path.stride(0),
         rows.page_table.stride(0), num_pages, limit), constants, bytes=4 * rows.num * (5 + rows.levels),
    )  # fmt: skip
