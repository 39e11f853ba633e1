"""Trees of several slots as padded tensors: ancestors, paths, and which path is kept.

Sample and match (docs/decisions, 1), in symbols: for node i with parent p(i), ok(i) = token(i) ==
drawn(p(i)); i is kept iff ok holds on its whole path; the token drawn at the deepest kept node follows that node.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from aquiline.spec.tree import DraftTree


@dataclass(frozen=True)
class Trees:
    """B trees of N nodes each, the root first, a parent before its children; nodes past sizes[b] only fill the shape.

    tokens, parents (slot-local), depths [B, N]; sizes: known to the host; max_depth: an upper bound of depths;
    is_chain: True only if every node hangs below the one before it, so that a kept path need not be moved. counts [B]:
    the nodes of each tree where only the device knows them; sizes are then upper bounds."""

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    sizes: tuple[int, ...]
    max_depth: int
    is_chain: bool = False
    counts: Tensor | None = None

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.tokens.shape[1]

    def is_node(self) -> Tensor:
        """bool [B, N]: True for nodes of a tree, False for those that only fill the shape."""
        sizes = torch.tensor(self.sizes, device=self.tokens.device) if self.counts is None else self.counts
        return torch.arange(self.num_nodes, device=self.tokens.device) < sizes[:, None]

    def counted(self) -> Trees:
        """The same trees with sizes that the host knows. Waits for the device if it alone knows them."""
        return self if self.counts is None else replace(self, sizes=tuple(self.counts.tolist()), counts=None)

    def ancestors(self) -> Tensor:
        """bool [B, N, N]: whether node m lies on the path of node n, n itself and the root included."""
        B, N = self.tokens.shape
        on_path = torch.eye(N, dtype=torch.bool, device=self.tokens.device).expand(B, N, N)
        jump = self.parents
        for _ in range(self.max_depth.bit_length()):  # doubling: after round i the nearest 2^i ancestors are known
            on_path = on_path | on_path.gather(1, jump[..., None].expand(B, N, N))
            jump = jump.gather(1, jump)
        return on_path

    def levels(self, on_path: Tensor) -> Tensor:
        """[B, N, D + 1]: the node at each level of each node's path; 0 past its own level."""
        level = torch.arange(self.max_depth + 1, device=self.tokens.device)
        is_at = on_path[..., None] & (self.depths[:, None, :, None] == level)
        return is_at.int().argmax(2)


def padded(tree: DraftTree, device: torch.device) -> Trees:
    """Trees that the host made or changed, as padded tensors."""
    shape = tree.topology
    sizes = np.diff(shape.offsets)
    where = shape.owner, shape.local
    columns = np.zeros((3, len(sizes), int(sizes.max(initial=1))), np.int64)
    for column, values in zip(columns, (tree.tokens, shape.parents, shape.depths), strict=True):
        column[where] = values
    tokens, parents, depths = torch.from_numpy(columns).to(device)
    return Trees(tokens, parents, depths, tuple(sizes.tolist()), shape.max_depth, shape.is_chain)


def joined(parts: list[tuple[list[int], Trees]], num_slots: int, device: torch.device) -> Trees:
    """The trees of several groups of slots as one Trees. Each part names the places that its trees take."""
    num_nodes = max((trees.num_nodes for _, trees in parts), default=1)
    columns = torch.zeros(3, num_slots, num_nodes, dtype=torch.int64, device=device)
    sizes, max_depth = [1] * num_slots, 0
    for places, trees in parts:
        for column, values in zip(columns, (trees.tokens, trees.parents, trees.depths), strict=True):
            column[places, : trees.num_nodes] = values
        max_depth = max(max_depth, trees.max_depth)
        for place, size in zip(places, trees.sizes, strict=True):
            sizes[place] = size
    is_chain = all(trees.is_chain for _, trees in parts)
    counts = None
    if any(trees.counts is not None for _, trees in parts):
        counts = torch.tensor(sizes, device=device)
        for places, trees in parts:
            if trees.counts is not None:
                counts[places] = trees.counts
    return Trees(columns[0], columns[1], columns[2], tuple(sizes), max_depth, is_chain, counts)


@dataclass(frozen=True)
class Kept:
    """What B slots keep. num_accepted [B]; path [B, D + 1]: nodes from the root down, 0 past num_accepted; tokens
    [B, D + 1]: the accepted tokens, then the target's own, then -1; is_kept [B, D + 1]: which of these are tokens."""

    num_accepted: Tensor
    path: Tensor
    tokens: Tensor
    is_kept: Tensor


def accept(trees: Trees, on_path: Tensor, drawn: Tensor) -> Kept:
    """Keep the deepest path whose tokens the target drew too. drawn [B, N]: the target's own token after each node."""
    B, N = trees.tokens.shape
    nodes = torch.arange(N, device=drawn.device)
    ok = (trees.tokens == drawn.gather(1, trees.parents)) & trees.is_node()
    ok[:, 0] = True
    is_accepted = ~(on_path & ~ok[:, None]).any(-1)
    # Siblings carry different tokens, so one path is accepted; were two equal, the first is as good as any.
    best = (is_accepted * (trees.depths * N + (N - nodes))).argmax(-1)
    num_accepted = trees.depths.gather(1, best[:, None])[:, 0]
    path = trees.levels(on_path)[torch.arange(B, device=drawn.device), best]
    level = torch.arange(trees.max_depth + 1, device=drawn.device)
    following = torch.cat((trees.tokens.gather(1, path)[:, 1:], torch.full((B, 1), -1, device=drawn.device)), 1)
    own = drawn.gather(1, best[:, None])
    tokens = torch.where(level < num_accepted[:, None], following, torch.where(level == num_accepted[:, None], own, -1))
    return Kept(num_accepted, path, tokens, level <= num_accepted[:, None])
