"""Static per-slot state of the running batch, and the flat arrays a step binds from it.

Fills the rows of every target forward and keeps, per slot, how tokens are drawn and the features the draft still has
to see. Knows no model and makes no decision.
"""

from __future__ import annotations

import numpy as np

from aquiline.config import SamplingParams
from aquiline.engine.scheduler import Chunk
from aquiline.engine.sequence import Sequence
from aquiline.spec.drafters import Pending, Roots
from aquiline.spec.tree import DraftTree
from aquiline.types import AcceptResult, Float32, Int32, Rows, RowSampling


class Slots:
    """S slots; `carried` [S, C, F] holds the features of a slot's last `num_carried` cached tokens."""

    def __init__(self, num_slots: int, max_carry: int, feature_width: int) -> None:
        self.temperature = np.zeros(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int32)
        self.top_p = np.ones(num_slots, np.float32)
        self.min_p = np.zeros(num_slots, np.float32)
        self.seed = np.zeros(num_slots, np.uint64)
        self.carried = np.empty((num_slots, max_carry, feature_width), np.float32)
        self.num_carried = np.zeros(num_slots, np.int32)
        self.carry_places = np.arange(num_slots * max_carry, dtype=np.int32)

    def admit(self, slot: int, sampling: SamplingParams) -> None:
        """Take over a request's sampling settings."""
        assert sampling.seed is not None, "the engine resolves seeds"
        self.temperature[slot] = sampling.temperature
        self.top_k[slot] = sampling.top_k
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.seed[slot] = sampling.seed
        self.num_carried[slot] = 0

    def sampling(self, slots: Int32, positions: Int32) -> RowSampling:
        """How rows of the given slots draw the token after their own position."""
        return RowSampling(
            self.temperature[slots], self.top_k[slots], self.top_p[slots], self.min_p[slots], self.seed[slots],
            positions + np.int32(1),
        )  # fmt: skip

    def roots(self, sequences: tuple[Sequence, ...]) -> Roots:
        """Root rows of decoding sequences."""
        return Roots(
            slots=np.array([s.slot for s in sequences], np.int32),
            tokens=np.array([s.tokens[-1] for s in sequences], np.int32),
            positions=np.array([s.num_cached for s in sequences], np.int32),
        )

    def pending(self, sequences: tuple[Sequence, ...], roots: Roots) -> Pending:
        """The draft rows that end right before each root: carried features beside the tokens that follow them."""
        counts = self.num_carried[roots.slots]
        slots = np.repeat(roots.slots, counts)
        places = self.carry_places[: len(slots)] - np.repeat(np.cumsum(counts) - counts, counts)
        tokens = [t for s, n in zip(sequences, counts.tolist(), strict=True) for t in s.tokens[-n:]]
        return Pending(
            slots=slots,
            positions=np.repeat(roots.positions - counts, counts) + places,
            tokens=np.array(tokens, np.int32),
            features=self.carried[slots, places],
        )

    def carry(self, slots: Int32, tree: DraftTree, result: AcceptResult, features: Float32) -> None:
        """Keep the features of each slot's accepted path, root included, for the draft's next extend pass."""
        rows = tree.topology.offsets[:-1, None] + result.path
        self.carried[slots, : rows.shape[1]] = features[rows]
        self.num_carried[slots] = result.num_accepted + 1

    def carry_one(self, slot: int, feature: Float32) -> None:
        """Keep the feature of a prompt's last token."""
        self.carried[slot, 0] = feature
        self.num_carried[slot] = 1


def bind_tree(rows: Rows, tree: DraftTree, roots: Roots) -> None:
    """Rows of a verify forward. Node i of a slot is written at KV index root + i and stands at position root + depth;
    a chain's two coincide, any other tree reads what lies behind its root along each node's own path."""
    shape, n = tree.topology, len(tree.tokens)
    base = roots.positions[shape.owner]
    rows.num = n
    rows.tokens[:n] = tree.tokens
    rows.positions[:n] = base + shape.depths
    rows.slots[:n] = roots.slots[shape.owner]
    rows.write[:n] = base + shape.local
    rows.key_start[:n] = 0
    if shape.is_chain:
        rows.context_len[:n] = rows.write[:n] + 1
        rows.tail_len[:n] = 0
    else:
        rows.context_len[:n] = base
        rows.tail[:n, : shape.max_depth + 1] = base[:, None] + shape.paths
        rows.tail_len[:n] = shape.depths + 1


def bind_chunks(rows: Rows, chunks: tuple[Chunk, ...]) -> Int32:
    """Rows of a prefill forward; returns the row of each chunk's last token, int32 [number of chunks]."""
    lengths = [c.end - c.start for c in chunks]
    n = sum(lengths)
    positions = np.concatenate([np.arange(c.start, c.end, dtype=np.int32) for c in chunks])
    rows.num = n
    rows.tokens[:n] = [t for c in chunks for t in c.sequence.tokens[c.start : c.end]]
    rows.positions[:n] = positions
    rows.slots[:n] = np.repeat([c.sequence.slot for c in chunks], lengths)
    rows.write[:n] = positions
    rows.key_start[:n] = 0
    rows.context_len[:n] = positions + 1
    rows.tail_len[:n] = 0
    return (np.cumsum(lengths) - 1).astype(np.int32)
