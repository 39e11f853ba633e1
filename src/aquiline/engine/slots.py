"""Static per-slot state of the running batch, and the flat arrays a step binds from it.

Holds what a step needs of its sequences so that the next one may start before anyone has read its outcome: root tokens
and positions, how tokens are drawn, the features the draft still has to see, and per page the last feature, with which
the draft resumes behind a cached prefix. Knows no model and makes no decision.
"""

from __future__ import annotations

import numpy as np

from aquiline.engine.scheduler import Chunk
from aquiline.kv.pool import PagePool
from aquiline.spec.drafters import Pending, Roots
from aquiline.spec.tree import DraftTree
from aquiline.types import SAMPLING, AcceptResult, Float32, Int32, Rows, RowSampling


class Slots:
    """S slots; `carried` [S, C, F] holds the features of a slot's last `num_carried` cached tokens, `carried_tokens`
    [S, C] the tokens after them."""

    def __init__(self, pool: PagePool, max_carry: int, feature_width: int) -> None:
        self.pool, num_slots = pool, len(pool.table)
        self.tokens = np.zeros(num_slots, np.int32)
        self.positions = np.zeros(num_slots, np.int32)
        self.settings: RowSampling = np.zeros(num_slots, SAMPLING)  # positions apart
        self.first_draft_key = np.ones(num_slots, np.int32)  # KV index; none below it is the draft's
        self.carried = np.empty((num_slots, max_carry, feature_width), np.float32)
        self.carried_tokens = np.zeros((num_slots, max_carry), np.int32)
        self.num_carried = np.zeros(num_slots, np.int32)
        self.page_features = np.empty((pool.num_pages, feature_width), np.float32)
        self.numbers = np.arange(num_slots, dtype=np.int32)
        self.levels = np.arange(max_carry, dtype=np.int32)

    def admit(self, chunk: Chunk) -> None:
        """Take over a sequence with its first chunk."""
        slot, sequence = chunk.slot, chunk.sequence
        sampling = sequence.request.sampling
        assert sampling.seed is not None, "the engine resolves seeds"
        for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
            self.settings[name][slot] = getattr(sampling, name)
        self.num_carried[slot] = 0
        # Draft keys are of use from the page after the last that has none. The first of them is that of the row right
        # before the page, computed from the feature at the end of the page before.
        first = len(sequence.nodes)
        while first > 0 and sequence.nodes[first - 1].has_draft:
            first -= 1
        self.first_draft_key[slot] = max(1, first * self.pool.page_size)

    def sampling(self, slots: Int32, positions: Int32) -> RowSampling:
        """How rows of the given slots draw the token after their own position."""
        found = self.settings[slots]
        found["position"] = positions + np.int32(1)
        return found

    def roots(self, slots: Int32) -> Roots:
        """Root rows of decoding slots."""
        return Roots(slots=slots, tokens=self.tokens[slots], positions=self.positions[slots])

    def pending(self, roots: Roots) -> Pending:
        """The draft rows that end right before each root: carried features beside the tokens that follow them."""
        counts = self.num_carried[roots.slots]
        root, place = np.nonzero(self.levels < counts[:, None])
        slots = roots.slots[root]
        return Pending(
            slots=slots,
            positions=(roots.positions - counts)[root] + self.levels[place],
            tokens=self.carried_tokens[slots, place],
            features=self.carried[slots, place],
        )

    def before(self, chunk: Chunk) -> Pending:
        """The draft row right before a chunk that starts behind cached pages."""
        at = chunk.start - 1
        page = self.pool.table[chunk.slot, at // self.pool.page_size]
        return Pending(
            slots=np.array([chunk.slot], np.int32),
            positions=np.array([at], np.int32),
            tokens=np.array([chunk.sequence.tokens[chunk.start]], np.int32),
            features=self.page_features[page][None],
        )

    def keep_page_features(self, slots: Int32, positions: Int32, features: Float32) -> None:
        """Keep those features, of committed tokens, that stand at the end of a page."""
        at_end = positions % self.pool.page_size == self.pool.page_size - 1
        if at_end.any():
            pages = self.pool.table[slots[at_end], positions[at_end] // self.pool.page_size]
            self.page_features[pages] = features[at_end]

    def advance(self, roots: Roots, result: AcceptResult) -> None:
        """Move every slot to its next root."""
        bonus = result.tokens[self.numbers[: len(roots.slots)], result.num_accepted]
        self.tokens[roots.slots] = np.maximum(bonus, 0)
        self.positions[roots.slots] += result.num_accepted + 1

    def carry(self, roots: Roots, tree: DraftTree, result: AcceptResult, features: Float32) -> None:
        """Keep the features of each slot's accepted path, root included, for the draft's next extend pass."""
        slots, accepted = roots.slots, result.num_accepted
        width = result.path.shape[1]
        path_features = features[tree.topology.offsets[:-1, None] + result.path]
        self.carried[slots, :width] = path_features
        self.carried_tokens[slots, :width] = result.tokens
        self.num_carried[slots] = accepted + 1
        size = self.pool.page_size
        if (roots.positions % size + accepted >= size - 1).any():  # a page ends here
            slot, level = np.nonzero(self.levels[:width] <= accepted[:, None])
            positions = roots.positions[slot] + self.levels[level]
            self.keep_page_features(slots[slot], positions, path_features[slot, level])

    def start(self, chunk: Chunk, token: int, feature: Float32 | None) -> None:
        """Begin to decode after the last chunk: its last row's feature waits for the root, which comes after it."""
        slot = chunk.slot
        self.tokens[slot] = max(token, 0)
        self.positions[slot] = chunk.end
        if feature is not None:
            self.carried[slot, 0] = feature
            self.carried_tokens[slot, 0] = max(token, 0)
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
    """Rows of prompt chunks, behind those that are bound; the first row of each, int32 [number of chunks].

    A row whose key is in a cached page reads it and does not write it."""
    firsts = []
    for chunk in chunks:
        first, sequence = rows.num, chunk.sequence
        firsts.append(first)
        rows.num += chunk.end - chunk.start
        here = slice(first, rows.num)
        rows.tokens[here] = sequence.tokens[chunk.start : chunk.end]
        positions = np.arange(chunk.start, chunk.end, dtype=np.int32)
        rows.positions[here] = positions
        rows.slots[here] = chunk.slot
        rows.write[here] = np.where(positions < sequence.num_hit, -1, positions)
        rows.key_start[here] = 0
        rows.context_len[here] = positions + 1
        rows.tail_len[here] = 0
    return np.array(firsts, np.int32)
