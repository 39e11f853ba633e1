"""What one step computes: draft, verify, accept, keep. Given a plan it needs no word from the host until the next one.

Owns the models' storage and the static buffers. Decoding one token at a time is speculation with a one-node tree, so
the baseline, the chain and the trees are values of SpecConfig in the same step, never code paths beside it; sequences
with different drafters, and chunks of prompts, share its one target forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from aquiline.config import MAX_DEPTH, EngineConfig
from aquiline.engine import slots as binding
from aquiline.engine.model import LoadedModels
from aquiline.engine.scheduler import Chunk, StepPlan
from aquiline.engine.sequence import LogitAdjustments, Sequence, TokenLogprobs
from aquiline.engine.slots import Slots
from aquiline.kv.pool import PagePool
from aquiline.metrics import Meter
from aquiline.ops.cycle import Cycled, NativeCycle
from aquiline.spec.drafters import Chain, Drafter, DraftSession, Pending, Roots
from aquiline.spec.tree import DraftTree, chain_topology, join
from aquiline.types import AcceptResult, Int32, Rows, RowSampling

NO_TOKENS = np.zeros(0, np.int32)
NOTHING = AcceptResult(np.zeros((0, 1), np.int32), np.zeros((0, 1), np.int32), np.zeros(0, np.int32))
"""The outcome of a step in which nobody decodes."""

LOGPROB_ROWS = 64
"""Rows whose logits are looked at together."""


@dataclass(eq=False)
class Outcome:
    """What a step decided. decoding: the plan's sequences in the order of the tree's slots; slots and positions: where
    their roots stood; kept: what each of them gained, accepted drafts, then the bonus; num_drafted: what it was
    offered; first_tokens: per chunk of the plan the token its last row drew, where it draws.

    trees tells of nodes and paths, which only few ask for."""

    plan: StepPlan
    decoding: tuple[Sequence, ...]
    slots: list[int]
    positions: list[int]
    kept: list[list[int]]
    num_drafted: list[int]
    trees: Callable[[], tuple[DraftTree, AcceptResult]]
    first_tokens: dict[int, int] = field(default_factory=dict)  # by chunk number
    logprobs: dict[Sequence, list[TokenLogprobs]] = field(default_factory=dict)

    @property
    def num_decode_rows(self) -> int:
        """Rows of the trees."""
        return len(self.decoding) + sum(self.num_drafted)

    @cached_property
    def tree(self) -> DraftTree:
        """The trees that were verified."""
        return self.trees()[0]

    @cached_property
    def result(self) -> AcceptResult:
        """What was kept of them."""
        return self.trees()[1]

    def by_slot(self, num_slots: int) -> dict[str, NDArray[np.signedinteger]]:
        """Per slot of the batch, dead ones included: accepted [S] (0), draft tokens [S, N] (-1), mask [S, N, W] (0)."""
        shape, slots = self.tree.topology, np.array(self.slots, np.int32)
        owner, local = shape.owner, shape.local
        width = int(local.max(initial=0)) + 1
        accepted = np.zeros(num_slots, np.int32)
        draft = np.full((num_slots, width), -1, np.int32)
        mask = np.zeros((num_slots, width, shape.ancestors.shape[1]), np.int64)
        accepted[slots] = self.result.num_accepted
        drafted = local > 0
        draft[slots[owner[drafted]], local[drafted]] = self.tree.tokens[drafted]
        mask[slots[owner], local] = shape.ancestors
        return {"accepted": accepted, "draft": draft, "mask": mask}


class Stepper:
    """Runs plans over loaded models. Everything it reads of the batch's past is in `slots` and the caches."""

    def __init__(self, models: LoadedModels, config: EngineConfig, pool: PagePool) -> None:
        self.models, self.pool, self.target = models, pool, models.target
        self.kv = models.new_target_kv(pool.num_pages, config.page_size)
        self.rows = Rows(models.max_rows, MAX_DEPTH + 1, pool.table)
        self.places = np.arange(models.max_rows, dtype=np.int32)
        self.slots = Slots(pool, MAX_DEPTH + 1, models.target.features.shape[1])
        self.session: DraftSession | None = None
        if models.draft is not None:
            kv = models.new_draft_kv(pool.num_pages, config.page_size)
            rows = Rows(models.max_rows, MAX_DEPTH + 1, pool.table)
            self.session = DraftSession(models.draft, kv, rows, self.slots.first_draft_key, self.slots.sampling)
        self.cycle = models.new_cycle(self.rows, self.kv, self.slots, self.session)

    def run(self, plan: StepPlan, meter: Meter) -> Outcome:
        """Run one step: one target forward, and the draft passes of the drafters in it."""
        for chunk in plan.chunks:
            if chunk.start <= chunk.sequence.num_hit:
                self.slots.admit(chunk)
        groups = by_drafter(plan.decoding)
        decoding = tuple(s for group in groups.values() for s in group)
        slots = [s.slot for s in decoding]
        if self.cycle is not None and (length := chain_length(plan, groups)) is not None:
            outcome = self._cycle(self.cycle, plan, decoding, slots, length)
            meter.split(self.cycle.stages)
            return outcome
        roots = self.slots.roots(np.array(slots, np.int32))
        meter.lap("host")
        tree = self._propose(groups, roots)
        meter.lap("draft")
        binding.bind_tree(self.rows, tree, roots)
        firsts = binding.bind_chunks(self.rows, plan.chunks)
        meter.lap("masks")
        self.target.forward(self.rows, self.kv)
        meter.lap("verify")
        drawn, first_tokens = self._draw(tree, decoding, plan.chunks, firsts)
        result = self.models.accept(tree, drawn) if decoding else NOTHING
        ends = (result.num_accepted + 1).tolist()
        outcome = Outcome(
            plan, decoding, slots, roots.positions.tolist(),
            kept=[tokens[:end] for tokens, end in zip(result.tokens.tolist(), ends, strict=True)],
            num_drafted=(np.diff(tree.topology.offsets) - 1).tolist(),
            trees=lambda: (tree, result),
            first_tokens=first_tokens,
        )  # fmt: skip
        self._read_logprobs(outcome)
        self._read_chunk_logprobs(outcome, firsts)
        meter.lap("accept")
        if decoding:
            self._keep(outcome, roots)
        meter.lap("commit")
        if plan.chunks:
            self._start(outcome, firsts)
            meter.lap("draft")
        return outcome

    def complete_draft(self, sequence: Sequence) -> None:
        """Write the draft's keys of committed tokens that the next step would have written, so that a cached page of a
        sequence that ends has them."""
        assert self.session is not None
        roots = self.slots.roots(np.array([sequence.slot], np.int32))
        pending = self.slots.pending(roots)
        wanted = pending.positions < sequence.num_cached - 1  # the last one's token may have been cut
        if wanted.any():
            self.session.feed(pending.select(wanted))

    def _cycle(
        self, cycle: NativeCycle, plan: StepPlan, decoding: tuple[Sequence, ...], slots: list[int], length: int
    ) -> Outcome:
        """All of a step's stages in one call, which leaves hidden rows and slots as the single ones do."""
        cycled = cycle(slots, length, self.models.forced(len(slots), length))
        if self.session is not None:
            self.session.num_rows += cycle.num_draft_rows
        outcome = Outcome(
            plan, decoding, slots, [c.position for c in cycled],
            kept=[[*c.chain[1 : c.num_accepted + 1], c.bonus] for c in cycled],
            num_drafted=[length] * len(slots),
            trees=partial(chains, cycled),
        )  # fmt: skip
        self._read_logprobs(outcome)
        return outcome

    def _propose(self, groups: dict[Drafter | None, list[Sequence]], roots: Roots) -> DraftTree:
        trees, first = [], 0
        for drafter, group in groups.items():
            own = roots if len(groups) == 1 else roots.part(first, first + len(group))
            first += len(group)
            if drafter is None:
                trees.append(DraftTree(chain_topology(len(group), 1), own.tokens))
            else:
                assert self.session is not None
                trees.append(drafter.propose(self.session, self.slots.pending(own), own))
        return join(trees)

    def _draw(
        self, tree: DraftTree, decoding: tuple[Sequence, ...], chunks: tuple[Chunk, ...], firsts: Int32
    ) -> tuple[Int32, dict[int, int]]:
        """The target's own token at every row of the tree, and by number those of the chunks that draw."""
        num_nodes = len(tree.tokens)
        drawing = [number for number, chunk in enumerate(chunks) if chunk.draws]
        rows = self.places[:num_nodes]
        if drawing:
            lasts = [int(firsts[i]) + chunks[i].end - chunks[i].start - 1 for i in drawing]
            rows = np.concatenate((rows, np.array(lasts, np.int32)))
        adjusted = list(adjusted_rows(tree, decoding, [chunks[i].sequence for i in drawing]))
        if not len(rows):
            return NO_TOKENS, {}
        if not adjusted:
            drawn = self.target.draw(rows, self._sampling(rows))
        else:
            drawn = np.empty(len(rows), np.int32)
            plain = np.ones(len(rows), np.bool_)
            for adjustments, places, paths in adjusted:
                logits = adjustments.apply(self.target.logits(rows[places]), paths)
                drawn[places] = self.target.draw_from(logits, self._sampling(rows[places]))
                plain[places] = False
            if plain.any():
                drawn[plain] = self.target.draw(rows[plain], self._sampling(rows[plain]))
        return drawn[:num_nodes], dict(zip(drawing, drawn[num_nodes:].tolist(), strict=True))

    def _sampling(self, rows: Int32) -> RowSampling:
        return self.slots.sampling(self.rows.slots[rows], self.rows.positions[rows])

    def _keep(self, outcome: Outcome, roots: Roots) -> None:
        """Make the winning paths contiguous: node i of level d moves from KV index root + i to root + d, d <= i. Then
        move every slot to its next root."""
        tree, result = outcome.tree, outcome.result
        if not tree.topology.is_chain:
            levels = np.arange(result.path.shape[1], dtype=np.int32)
            moved = (levels <= result.num_accepted[:, None]) & (result.path != levels)
            slot, level = np.nonzero(moved)
            base = roots.positions[slot]
            self.models.move_kv(
                self.kv, self.pool.table, roots.slots[slot], base + result.path[slot, level], base + levels[level]
            )
        self.slots.advance(roots, result)
        if self.session is not None:
            self.slots.carry(roots, tree, result, self.target.features)
        for sequence, kept in zip(outcome.decoding, outcome.kept, strict=True):
            if sequence.adjustments is not None:
                sequence.adjustments.count(kept)

    def _start(self, outcome: Outcome, firsts: Int32) -> None:
        """Draft rows of the step's chunks, at once; a prompt's last token waits for the token that follows it."""
        chunks, rows, features = outcome.plan.chunks, self.rows, self.target.features
        pending = []
        for number, (chunk, first) in enumerate(zip(chunks, firsts.tolist(), strict=True)):
            sequence, end = chunk.sequence, first + chunk.end - chunk.start
            feature = features[end - 1] if sequence.drafter is not None else None
            if chunk.is_last:
                token = outcome.first_tokens.get(number, sequence.tokens[-1])
                self.slots.start(chunk, token, feature)
                if chunk.draws and sequence.adjustments is not None:
                    sequence.adjustments.count([max(token, 0)])
            if self.session is not None:
                self.slots.keep_page_features(rows.slots[first:end], rows.positions[first:end], features[first:end])
            if sequence.drafter is None:
                continue
            if 0 < chunk.start == sequence.num_hit:
                pending.append(self.slots.before(chunk))
            known = slice(first, end - chunk.is_last)
            if known.start < known.stop:
                following = sequence.tokens[chunk.start + 1 : chunk.end + 1 - chunk.is_last]
                pending.append(Pending(
                    slots=rows.slots[known], positions=rows.positions[known], tokens=np.array(following, np.int32),
                    features=features[known],
                ))  # fmt: skip
        if pending:
            assert self.session is not None
            self.session.feed(Pending.join(pending))

    def _read_logprobs(self, outcome: Outcome) -> None:
        for b, sequence in enumerate(outcome.decoding):
            if sequence.request.sampling.logprobs is not None:
                kept = np.array(outcome.kept[b], np.int32)
                rows = outcome.tree.topology.offsets[b] + outcome.result.path[b, : len(kept)]
                outcome.logprobs[sequence] = self._logprobs(rows, kept, sequence.request.sampling.logprobs)

    def _read_chunk_logprobs(self, outcome: Outcome, firsts: Int32) -> None:
        for number, (chunk, first) in enumerate(zip(outcome.plan.chunks, firsts.tolist(), strict=True)):
            sequence, sampling = chunk.sequence, chunk.sequence.request.sampling
            if sampling.prompt_logprobs is not None:
                # Row i tells of token i + 1; what an earlier stay has read is not read again.
                begin, end = len(sequence.prompt_logprobs), min(chunk.end, sequence.num_prompt - 1)
                begin = max(begin, chunk.start)
                for at in range(begin, end, LOGPROB_ROWS):
                    until = min(end, at + LOGPROB_ROWS)
                    rows = np.arange(first + at - chunk.start, first + until - chunk.start, dtype=np.int32)
                    chosen = np.array(sequence.tokens[at + 1 : until + 1], np.int32)
                    sequence.prompt_logprobs += self._logprobs(rows, chosen, sampling.prompt_logprobs)
            if chunk.draws and sampling.logprobs is not None:
                row = np.array([first + chunk.end - chunk.start - 1], np.int32)
                chosen = np.array([outcome.first_tokens[number]], np.int32)
                outcome.logprobs[sequence] = self._logprobs(row, chosen, sampling.logprobs)

    def _logprobs(self, rows: Int32, chosen: Int32, k: int) -> list[TokenLogprobs]:
        found = self.target.logprobs(rows.astype(np.int32), np.maximum(chosen, 0), min(k, self.models.vocab_size))
        return [
            TokenLogprobs(token, logprob, rank, dict(zip(ids, logprobs, strict=True)))
            for token, logprob, rank, ids, logprobs in zip(
                chosen.tolist(), found.chosen.tolist(), found.rank.tolist(), found.top.ids.tolist(),
                found.top.logprobs.tolist(), strict=True,
            )
        ]  # fmt: skip


def adjusted_rows(
    tree: DraftTree, decoding: tuple[Sequence, ...], first: list[Sequence]
) -> Iterator[tuple[LogitAdjustments, slice, list[Int32]]]:
    """Rows whose logits depend on their own path: places among all that draw, the tokens of each path, root excluded.
    Those of `first`, a row each behind the tree's, draw the first token."""
    shape = tree.topology
    for b, sequence in enumerate(decoding):
        if sequence.adjustments is not None:
            begin, end = int(shape.offsets[b]), int(shape.offsets[b + 1])
            paths = [tree.tokens[begin + shape.paths[r, 1 : shape.depths[r] + 1]] for r in range(begin, end)]
            yield sequence.adjustments, slice(begin, end), paths
    for place, sequence in enumerate(first, len(tree.tokens)):
        if sequence.adjustments is not None:
            yield sequence.adjustments, slice(place, place + 1), [NO_TOKENS]


def by_drafter(sequences: tuple[Sequence, ...]) -> dict[Drafter | None, list[Sequence]]:
    """Sequences that draft in the same passes, each group in slot order."""
    groups: dict[Drafter | None, list[Sequence]] = {}
    for sequence in sequences:
        groups.setdefault(sequence.drafter, []).append(sequence)
    return groups


def chains(cycled: list[Cycled]) -> tuple[DraftTree, AcceptResult]:
    """The trees of a cycle and what was kept of them."""
    num_accepted = np.array([c.num_accepted for c in cycled], np.int32)
    tokens = np.array([c.chain for c in cycled], np.int32)
    levels = np.arange(tokens.shape[1], dtype=np.int32)
    kept = np.where(levels < num_accepted[:, None], np.roll(tokens, -1, axis=1), np.int32(-1))
    kept[np.arange(len(cycled)), num_accepted] = [c.bonus for c in cycled]
    path = np.where(levels <= num_accepted[:, None], levels, np.int32(0))
    return DraftTree(chain_topology(*tokens.shape), tokens.ravel()), AcceptResult(path, kept, num_accepted)


def chain_length(plan: StepPlan, groups: dict[Drafter | None, list[Sequence]]) -> int | None:
    """Tokens that every sequence of the plan drafts, if all it does is decode chains of one length, 0 included, and
    nobody's logits are changed; else None."""
    if plan.chunks or len(groups) != 1:
        return None
    (drafter,) = groups
    if any(s.adjustments is not None for s in plan.decoding):
        return None
    if drafter is None:
        return 0
    return drafter.num_spec_tokens if isinstance(drafter, Chain) else None
