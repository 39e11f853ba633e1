"""Steps over the native library: StepInput in, StepOutput out. See backends/base.py, Backend.

Owns the memory that a step computes with; the library owns the slots (csrc/stages/batch.h).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import addressof, string_at
from ctypes import pointer as pointer_to
from typing import TYPE_CHECKING

import numpy as np

from aquiline.backends.base import (
    HEAD_ROWS,
    Decoded,
    Drafts,
    Prefilled,
    RowEdits,
    Scored,
    Sizes,
    StepInput,
    StepOutput,
    TokenMasks,
    VerifiedTrees,
)
from aquiline.backends.cpu.batch import NUM_TIMES, NativeBatch, new_tree
from aquiline.backends.cpu.buffers import address, describe_kv, pointer
from aquiline.backends.cpu.logprobs import LogprobReader
from aquiline.backends.cpu.native import AqBatchConfig
from aquiline.backends.cpu.native_pages import new_group
from aquiline.backends.cpu.native_weights import library
from aquiline.metrics import PARTS
from aquiline.spec.confidence import Guess
from aquiline.spec.tree import DraftTree
from aquiline.types import AcceptResult, Float32, Int32, KVGroup, Rows

if TYPE_CHECKING:
    from aquiline.backends.cpu.native_pair import CpuPair


NUM_LIBRARY_PARTS = len(PARTS) - 2
"""Parts that the library times by itself; rows and draws follow from the times of stages."""


class CpuDrafts:
    """Grown trees that wait in the library to be verified."""

    def __init__(self, batch: NativeBatch, step: StepInput) -> None:
        self._batch, self.step = batch, step
        self._tree: DraftTree | None = None

    def read(self) -> DraftTree:
        """The trees, in the order of the step's decodes. Raises ValueError once the step was verified."""
        if self._tree is None:
            self._tree = self._batch.read_trees(len(self.step.decodes))
        return self._tree


class CpuPending:
    """A step that has been computed."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def read(self) -> StepOutput:
        """What the step decided."""
        return self._output


class CpuBackend:
    """Runs steps over storage of its own."""

    is_async = False

    def __init__(self, pair: CpuPair, sizes: Sizes) -> None:
        self.sizes, self._pair = sizes, pair
        self._target = pair.target_model
        max_rows, width = sizes.max_rows, pair.target_model.hidden_size
        self.kv = new_group(pair.target, sizes.num_pages, sizes.page_size, pair.kv_dtype)
        self.draft_kv: KVGroup | None = None
        self.fused: Float32 | None = None  # [P, page_size, H]: by KV index, the target's features fused for the draft
        # What the rows of the last forward left, one after the other: read by whoever looks into a step.
        self.draft_hidden: Float32 | None = None
        self.hidden = np.empty((max_rows, width), np.float32)
        self.features = np.empty((max_rows, pair.target_model.num_capture * width), np.float32)
        config = AqBatchConfig(
            target=pointer_to(pair.target_model.struct),
            target_kv=pointer_to(describe_kv(self.kv)),
            hidden=pointer(self.hidden),
            features=pointer(self.features) if self.features.size else None,
            num_slots=sizes.num_slots, pages_per_slot=sizes.pages_per_slot, max_rows=max_rows,
        )  # fmt: skip
        kept: list[object] = [pair, self.kv, self.hidden, self.features]
        if pair.draft_model is not None:
            kept += self._add_draft(config)
        self._batch = NativeBatch(config, kept)
        self._drafts: CpuDrafts | None = None  # of the step that waits for its verify
        self._reader = LogprobReader(pair.target_model, self.hidden)
        self._parts: np.ndarray[tuple[int], np.dtype[np.float64]] | None = None
        self._rows: Rows | None = None  # of `score`

    def _add_draft(self, config: AqBatchConfig) -> list[object]:
        draft, sizes = self._pair.draft_model, self.sizes
        assert draft is not None
        width = draft.model.hidden_size
        self.draft_kv = new_group(draft.config.model, sizes.num_pages, sizes.page_size, self._pair.kv_dtype)
        self.fused = np.empty((sizes.num_pages, sizes.page_size, width), np.float32)
        self.draft_hidden = np.empty((sizes.max_rows, width), np.float32)
        config.draft = pointer_to(draft.model.struct)
        config.draft_kv = pointer_to(describe_kv(self.draft_kv))
        config.draft_hidden, config.fused = pointer(self.draft_hidden), pointer(self.fused)
        config.d2t = address("d2t", draft.d2t, np.int32)
        config.fusion, config.norm_feedback = draft.fusion, draft.config.norm_feedback
        return [draft, self.draft_kv, self.draft_hidden]

    def draft(self, step: StepInput) -> CpuDrafts:
        """Apply the step's extends, admits and pages, and grow a tree below the root of every Decode."""
        self._drafts = None
        if self._parts is not None:
            self._parts[:] = 0
        with self._timing():
            self._batch.draft(step)
        self._reader.admit(step.admits)
        self._drafts = CpuDrafts(self._batch, step)
        return self._drafts

    def verify(
        self, step: StepInput, drafts: Drafts | DraftTree, masks: TokenMasks | None = None, edits: RowEdits = ()
    ) -> CpuPending:
        """Run the target over the trees and the chunks, and make every slot ready for its next step.

        Raises ValueError if the step is not the one that was drafted last, or for trees, masks or edits that do not
        fit."""
        waiting = self._drafts
        if waiting is None or waiting.step is not step or not (drafts is waiting or isinstance(drafts, DraftTree)):
            raise ValueError("verify: takes the step that was drafted last, and its drafts or other trees for it")
        if isinstance(drafts, DraftTree):
            self._batch.replace_trees(drafts, len(step.decodes))
        with self._timing():
            self._batch.verify(masks, edits)
            self._drafts = None
            self._batch.keep()
        return self._finish(step, 1)[0]

    def features_of(self, num_rows: int) -> Float32:
        """The target's features [num_rows, num_capture * H] of the last step's rows, all of which the draft reads."""
        return self._batch.read_features(num_rows, self.features.shape[1])

    def step(self, step: StepInput) -> CpuPending:
        """Both, with nothing in between."""
        return self.repeat(step, 1)[0]

    def repeat(self, step: StepInput, most: int) -> list[CpuPending]:
        """The step, then its decodes again: see Backend. Log-probabilities and times of parts need each step by
        itself."""
        if step.admits or self._parts is not None:
            return [self.verify(step, self.draft(step))]
        self._drafts = None
        return self._finish(step, self._batch.step(step, 1 if self._reader.wishes else most))

    def score(self, documents: Sequence[Int32]) -> Scored:
        """Run whole documents, each from position 0, over the pages of all slots.

        Raises ValueError if they need more slots, rows or pages than there are."""
        sizes, used = self.sizes, self.sizes.pages_of(documents)
        lengths = [len(tokens) for tokens in documents]
        num = sum(lengths)
        rows = self._rows
        if rows is None:
            table = np.zeros((sizes.num_pages, -(-sizes.max_rows // sizes.page_size)), np.int32)
            rows = self._rows = Rows(sizes.max_rows, 1, table)
        page = 0
        for document, count in enumerate(used):
            rows.page_table[document, :count] = np.arange(page, page + count)
            page += count
        rows.num = num
        positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
        rows.tokens[:num] = np.concatenate(documents)
        rows.positions[:num] = rows.write[:num] = positions
        rows.slots[:num] = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        rows.context_len[:num] = positions + 1
        self._target.forward(self.kv, rows, self.hidden, self.features if self.features.size else None)
        index = np.arange(num, dtype=np.int32)
        parts = [self._target.top_k(self.hidden, index[i : i + HEAD_ROWS], 1) for i in range(0, num, HEAD_ROWS)]
        best, logprobs = (np.concatenate([getattr(p, name)[:, 0] for p in parts]) for name in ("ids", "logprobs"))
        return Scored(self.hidden[:num], self.features[:num], best, logprobs)

    def renew_draft(self, first_draft_keys: Mapping[int, int]) -> None:
        """Draft with the pair's present draft from now on. Raises ValueError if a step is in progress, or for a key
        whose feature no page holds."""
        draft = self._pair.draft_model
        assert draft is not None, "a pair without a draft model has none to replace"
        self._batch.renew_draft(draft.model.struct, first_draft_keys, draft)

    def time_parts(self, is_wanted: bool) -> None:
        """Whether StepOutput.parts is filled from now on."""
        self._parts = np.zeros(NUM_LIBRARY_PARTS) if is_wanted else None

    def _timed_parts(self, rows_s: float, draw_s: float) -> dict[str, float]:
        assert self._parts is not None
        found = [*self._parts.tolist(), rows_s, max(0.0, draw_s - self._parts[PARTS.index("target_head")])]
        return dict(zip(PARTS, found, strict=True))

    def close(self) -> None:
        """Give the storage back."""
        self._batch.close()
        self._drafts = None

    @contextmanager
    def _timing(self) -> Iterator[None]:
        if self._parts is None:
            yield
            return
        library().time_parts(pointer(self._parts))
        try:
            yield
        finally:
            library().time_parts(None)

    def _finish(self, step: StepInput, num_steps: int) -> list[CpuPending]:
        """The outcomes of steps as the library reported them, one behind the other."""
        found, at = list[CpuPending](), 0
        for number in range(num_steps):
            times = self._batch.seconds[number * NUM_TIMES : (number + 1) * NUM_TIMES]
            outcome, at = self._outcome(step, at, times)
            found.append(outcome)
        return found

    def _outcome(self, step: StepInput, begin: int, times: Sequence[float]) -> tuple[CpuPending, int]:
        """The outcome whose report begins at that place, with the log-probabilities that its sequences ask for; and
        where the report ends."""
        draft_s, rows_s, forward_s, draw_s, keep_s = times  # csrc/stages/batch.h, StageTime
        out, decodes, chunks = self._batch.out, [], []
        size, num_draft_rows, num_experts = out[begin : begin + 3]
        begin += 3
        found = out[begin : begin + size]
        at = tree_size = 0
        for decode in step.decodes:
            root, num_drafted, first_key, draft_end, features_end, num_kept = found[at : at + 6]
            at += 6 + num_kept
            kept, guesses = found[at - num_kept : at], list[Guess]()
            if decode.cut is not None:
                end = at + 1 + 3 * found[at]
                guesses = [*map(Guess, found[at + 1 : end : 3], found[at + 2 : end : 3], found[at + 3 : end : 3])]
                at = end
            decodes.append(Decoded(root, kept, num_drafted, draft_end, None, guesses, first_key, features_end))
            tree_size += 2 * (num_drafted + 1) + num_kept
        for _ in step.chunks:
            token, first_key, draft_end, features_end = found[at : at + 4]
            at += 4
            chunks.append(Prefilled(None if token == -2 else token, draft_end, None, [], first_key, features_end))
        begin += size
        trees = None
        if step.with_trees or self._reader.wishes:
            trees = read_trees(string_at(addressof(out) + 4 * begin, 4 * tree_size), decodes)
        if self._reader.wishes and trees is not None:
            began = time.perf_counter()
            decodes, chunks = self._reader.read(step, decodes, chunks, trees.kept.path)
            draw_s += time.perf_counter() - began
        seconds = {"draft": draft_s, "verify": rows_s + forward_s + draw_s, "keep": keep_s}
        parts = {} if self._parts is None else self._timed_parts(rows_s, draw_s)
        shown = trees if step.with_trees else None
        output = StepOutput(decodes, chunks, num_draft_rows, seconds, parts, shown, num_experts)
        return CpuPending(output), begin + tree_size


def read_trees(raw: bytes, decodes: list[Decoded]) -> VerifiedTrees:
    """The trees of a step and their kept paths, from the last part of the report of aq_keep."""
    flat = np.frombuffer(raw, np.int32)
    width = max((len(d.kept) for d in decodes), default=1)
    tokens, parents, offsets = [], [], [0]
    path, kept = np.zeros((len(decodes), width), np.int32), np.full((len(decodes), width), -1, np.int32)
    at = 0
    for b, decoded in enumerate(decodes):
        n, m = decoded.num_drafted + 1, len(decoded.kept)
        tokens.append(flat[at : at + n])
        parents.append(flat[at + n : at + 2 * n])
        path[b, :m], kept[b, :m] = flat[at + 2 * n : at + 2 * n + m], decoded.kept
        offsets.append(offsets[-1] + n)
        at += 2 * n + m
    empty = np.zeros(0, np.int32)
    tree = new_tree(np.concatenate([empty, *tokens]), np.concatenate([empty, *parents]), np.array(offsets, np.int32))
    return VerifiedTrees(tree, AcceptResult(path, kept, np.array([len(d.kept) - 1 for d in decodes], np.int32)))
