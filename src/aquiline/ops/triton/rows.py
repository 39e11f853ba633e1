"""The rows of a forward as buffers on the device: whose they are, where their keys go and what they see.

The device's twin of `Rows` in types.py. Kernels read it while they run; the host fixes shapes and addresses alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from aquiline.ops.triton.launch import check_integers


@dataclass(frozen=True, eq=False)
class DeviceRows:
    """M rows in groups of `group`; the rows of a group belong to one slot, or are dead. All tensors are int32.

    A row sees the KV indices [key_start, context_len) of its slot, in order, then tail_len more along its path: the
    t-th of these is KV index context_len - 1 + path[row, t], the row's own key the last. Chains, prompts and plain
    rows have no tail: their context_len is their KV index + 1, tail_len 0. Where a group has tails, all its rows have
    the context_len of the tree's root, root + 1, and path names node numbers. Windows and the order of sums go by
    place: the t-th key of the tail stands at place context_len + t."""

    slots: Tensor  # [M]; -1: a dead row, which kernels neither read nor write
    positions: Tensor  # [M] rotary positions
    write: Tensor  # [M] KV index that the row's key and value go to; -1 writes nothing
    key_start: Tensor  # [M]
    context_len: Tensor  # [M]
    tail_len: Tensor  # [M]
    path: Tensor | None  # [M, most levels], None where no row has a tail
    page_table: Tensor  # [S, pages per slot]: page of a slot's KV indices [i * page_size, (i + 1) * page_size)
    page_size: int
    group: int

    def __post_init__(self) -> None:
        M = len(self.slots)
        if self.group < 1 or M % self.group:
            raise ValueError(f"group={self.group} does not divide {M} rows; give rows in whole groups")
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size={self.page_size}; make it a power of two")
        for name in ("slots", "positions", "write", "key_start", "context_len", "tail_len"):
            check_integers(name, getattr(self, name), M, like=self.slots)
        if self.path is not None:
            check_integers("path", self.path, M, self.path.shape[-1], like=self.slots)
        check_integers("page_table", self.page_table, *self.page_table.shape, like=self.slots)

    @property
    def num(self) -> int:
        """M."""
        return len(self.slots)

    @property
    def levels(self) -> int:
        """The longest tail that a row may have."""
        return 0 if self.path is None else self.path.shape[1]
