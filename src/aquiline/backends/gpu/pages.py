"""Keys and values in pages as kernels read them, and the rows of a forward as device buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aquiline.backends.torch import reference as ops
from aquiline.backends.torch.slot_state import SlotState
from aquiline.backends.torch.torch_pages import TorchPages
from aquiline.backends.torch.torch_rows import RowBlock
from aquiline.config import MAX_DEPTH, MAX_NODES
from aquiline.models.model_config import Experts, ModelConfig, RopeConfig
from aquiline.models.rope import rotary
from aquiline.ops.triton.experts import MOST_PAIRS
from aquiline.ops.triton.rows import DeviceRows

MOST_ROWS = 512
"""Rows of one forward at most. More rows run one piece after the other, in order, so that each finds the keys of those
before it."""
MOST_GROUPED = 16
"""Rows that share a slot and are attended together outside of programs."""


def most_rows(experts: Experts | None) -> int:
    """Rows of one forward at most, where each chooses among experts."""
    return MOST_ROWS if experts is None else min(MOST_ROWS, MOST_PAIRS // bucket(experts.per_token))


def bucket(count: int) -> int:
    """The least power of two from count on."""
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True, eq=False)
class RotationTable:
    """cos and sin float32 [positions, Dh / 2]."""

    cos: Tensor
    sin: Tensor


class GpuPages(TorchPages):
    """Pages whose layers are [places, Hkv, Dh] each. full: the rotation of layers without a window; local: of those
    with one."""

    def __init__(
        self, config: ModelConfig, state: SlotState, dtype: torch.dtype, key_shifts: Tensor | None = None
    ) -> None:  # fmt: skip
        super().__init__(config, state, dtype, key_shifts)
        self.full = self._rotation(config.rope)
        self.local = self.full if config.local_rope is None else self._rotation(config.local_rope)

    def _rotation(self, rope: RopeConfig) -> RotationTable:
        own = rotary(rope, self.config.head_dim, self.config.max_positions)
        positions = torch.arange(self.state.sizes.max_context + MAX_NODES)
        cos, sin = ops.rope_cos_sin(positions, torch.from_numpy(own.inv_freq), own.scale)
        return RotationTable(cos.contiguous().to(self.state.device), sin.contiguous().to(self.state.device))

    def attention(self, blocks: Sequence[RowBlock]) -> EagerRows:  # type: ignore[override]  # the models call no attend
        """The flat rows of several blocks, one block after the other."""
        return EagerRows.of(self, blocks)


@dataclass(frozen=True, eq=False)
class RowBuffers:
    """The rows of a forward and their tokens int32 [R]. columns [7, R]: all of them but the paths."""

    rows: DeviceRows
    tokens: Tensor
    columns: Tensor

    @classmethod
    def new(cls, state: SlotState, num_rows: int, levels: int, group: int) -> RowBuffers:
        """Dead rows, whose paths have room for `levels`."""
        columns = torch.full((7, num_rows), -1, dtype=torch.int32, device=state.device)
        columns[4:] = 0  # key_start, tail_len and tokens
        slots, positions, write, context_len, key_start, tail_len, tokens = columns
        path = torch.zeros(num_rows, levels, dtype=torch.int32, device=state.device) if levels else None
        size = state.sizes.page_size
        table = state.table
        rows = DeviceRows(slots, positions, write, key_start, context_len, tail_len, path, table, size, group)
        return cls(rows, tokens, columns)


@dataclass(frozen=True, eq=False)
class EagerRows:
    """The rows of a forward outside of programs. columns int32 [7, M]: slots, positions, write, context_len, key_start,
    tail_len and tokens of rows in groups of `group`, those that fill a group dead; path int32 [M, levels], levels 0
    where no row has a tail; places [R]: where the R rows stand among the M; longest: as in RowBlock."""

    pages: GpuPages
    columns: Tensor
    path: Tensor
    places: Tensor
    group: int
    longest: int

    @classmethod
    def of(cls, pages: GpuPages, blocks: Sequence[RowBlock]) -> EagerRows:
        """The rows of blocks, each slot's filled up to whole groups."""
        device, most = pages.state.device, max(block.tokens.shape[1] for block in blocks)
        group = min(MOST_GROUPED, bucket(most))
        levels = MAX_DEPTH if any(block.path.shape[2] > 1 for block in blocks) else 0
        columns, paths, places, first = [], [], [], 0
        for block in blocks:
            b, n = block.tokens.shape
            context = torch.minimum(block.base, block.order) + 1
            own = torch.stack([
                block.slots[:, None].expand(b, n), block.positions, block.keys, context,
                block.first[:, None].expand(b, n), block.order + 1 - context, block.tokens,
            ]).int()  # fmt: skip
            filled = -(-n // group) * group
            columns.append(torch.nn.functional.pad(own, (0, filled - n), value=-1).flatten(1))
            wanted = (0, levels - block.path.shape[2] + 1, 0, filled - n)
            paths.append(torch.nn.functional.pad(block.path[..., 1:].int(), wanted).flatten(0, 1))
            own_places = torch.arange(first, first + b * filled, device=device)
            places.append(own_places.view(b, filled)[:, :n].flatten())
            first += b * filled
        longest = max(block.longest for block in blocks)
        return cls(pages, torch.cat(columns, 1), torch.cat(paths), torch.cat(places), group, longest)

    def pieces(self, experts: Experts | None) -> Iterator[slice]:
        """Ranges of as many of the M rows as one forward has, in order."""
        most = most_rows(experts)
        for first in range(0, self.columns.shape[1], most):
            yield slice(first, first + most)

    def fill(self, at: RowBuffers, piece: slice) -> None:
        """Write a piece into the rows of a forward; the rows that are left are dead."""
        columns, path = self.columns[:, piece], self.path[piece]
        at.columns.fill_(-1)
        at.columns[:, : columns.shape[1]] = columns
        if at.rows.path is not None:
            at.rows.path[: len(path)] = path
