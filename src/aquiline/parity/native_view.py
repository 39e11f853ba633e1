"""What the native library leaves to be read between its calls: it computes a forward in one call and shows no stage
inside it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np

from aquiline.backends.base import Pair, Sizes
from aquiline.backends.cpu.native_backend import CpuBackend
from aquiline.backends.cpu.native_pair import CpuPair
from aquiline.parity.observe import DraftRows, StepOf, inner_nodes
from aquiline.spec.drafting import Chain, Drafting
from aquiline.spec.tree import DraftTree
from aquiline.types import Float32, Int64

INSIDE = "the native library computes it inside one call"
STATES = "the native library keeps the states of roots and of a chain's nodes alone"


class NativeView:
    """A native backend: its buffers of the last forward, and the pages that it wrote."""

    def __init__(self, pair: Pair, sizes: Sizes) -> None:
        assert isinstance(pair, CpuPair), pair
        self.backend: CpuBackend = pair.open(sizes)
        self.pair, self.num_known = pair, 0
        self.unseen = {}
        if pair.draft_model is not None:
            self.unseen = {f"draft.{name}": INSIDE for name in ("qkv", "attn_out", "ffn_out")}
            self.unseen |= {f"draft.{name}": STATES for name in ("pre_head_hidden", "logits")}

    def watching(self) -> AbstractContextManager[object]:
        """Nothing has to be prepared."""
        return nullcontext()

    def target(self, num_rows: int) -> dict[str, Float32]:
        """The rows of the last step, as the library left them."""
        hidden = self.backend.hidden[:num_rows]
        logits = self.pair.target_model.logits(hidden, np.arange(num_rows, dtype=np.int32))
        return {"final_hidden": hidden, "logits": logits, "features": self.backend.features_of(num_rows)}

    def draft(self, step_of: StepOf, way: Drafting, root: int) -> tuple[DraftTree, list[DraftRows]]:
        """A pass leaves the states of its rows, so a chain is drafted level by level, each time from the root."""
        seen = []
        for level in range(way.max_depth if isinstance(way, Chain) else 1):
            self.backend.draft(step_of(Chain(level + 1)))
            seen.append(DraftRows([level - 1 if level else root - 1], level > 0, self._states()))
        tree = self.backend.draft(step_of(way)).read()
        window = 0 if self.pair.draft is None else self.pair.draft.model.window(0)
        first = max(self.num_known, root - window if window else 0)  # what no row sees has no features and no keys
        known, nodes = np.arange(first, root), np.arange(len(inner_nodes(tree)))
        self.num_known = root
        size = self.backend.sizes.page_size
        assert self.backend.fused is not None
        fused = self.backend.fused[known // size, known % size]
        seen.append(DraftRows(known.tolist(), False, {"fc_out": fused} | self._written(known + 1)))
        if len(nodes):
            seen.append(DraftRows(nodes.tolist(), True, self._written(root + 1 + nodes)))
        return tree, seen

    def _states(self) -> dict[str, Float32]:
        """Of the first row of the draft's last pass."""
        draft = self.pair.draft_model
        assert draft is not None and self.backend.draft_hidden is not None
        hidden = self.backend.draft_hidden[:1].copy()  # the next pass overwrites it
        return {"pre_head_hidden": hidden, "logits": draft.model.logits(hidden, np.zeros(1, np.int32))}

    def _written(self, index: Int64) -> dict[str, Float32]:
        """Keys and values [n, Hkv * Dh] of the draft at KV indices. The run's pages stand in their order."""
        kv = self.backend.draft_kv
        assert kv is not None
        size, group = self.backend.sizes.page_size, kv.k.shape[-1]
        page, place = index // size, index % size
        keys = kv.k[page, 0, :, place // group, :, place % group].astype(np.float32)
        values = kv.v[page, 0, :, place].astype(np.float32)
        return {"keys": keys.reshape(len(index), -1), "values": values.reshape(len(index), -1)}
