"""A running batch inside the native library (csrc/stages/stages.h), and a step as one message to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import addressof, byref, c_double, c_float, c_int32
from itertools import chain
from typing import Any
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from aquiline.backends.base import Admit, Decode, RowEdits, StepInput, TokenMasks
from aquiline.backends.cpu.buffers import address, pointer
from aquiline.backends.cpu.native import (
    AqAdmit,
    AqBatchConfig,
    AqConfidence,
    AqEdit,
    AqModel,
    AqSampling,
    AqShape,
)
from aquiline.backends.cpu.native_weights import library
from aquiline.config import MAX_DEPTH, MAX_NODES
from aquiline.errors import NativeError
from aquiline.spec.confidence import NUM_MARGINS, Cut
from aquiline.spec.drafting import Chain, Drafting, Dynamic, Static
from aquiline.spec.tree import DraftTree, Topology, static_shape
from aquiline.types import Float32, Int32

REFUSED = -1
"""What a stage returns where it refuses its input, and has changed nothing."""

CHAIN, STATIC, DYNAMIC = range(3)

NUM_TIMES = 5
"""Stages whose times a step reports (csrc/stages/batch.h, StageTime)."""


class NativeBatch:
    """The slots of one engine inside the library. `kept` keeps alive the arrays that the config points to.

    Each method that runs a stage raises ValueError if the library refuses its input; nothing has changed then. It
    raises NativeError if the stage fails inside. `out` holds the report of the last stage, or those of the last steps
    one after the other; `seconds` [steps, 5] the times of their stages."""

    def __init__(self, config: AqBatchConfig, kept: object) -> None:
        self._kept = config, kept
        self._library = lib = library()
        self.num_slots: int = config.num_slots
        self.vocab_size: int = config.target.contents.vocab
        self._shapes: dict[Drafting, int] = {}
        self._message = (c_int32 * 1024)()
        self._cuts, self._row_costs = (c_float * 1)(), (c_float * 1)()  # AqCuts, one after the other; of a step
        self._packed_cuts, self._packed_costs = list[Cut](), tuple[float, ...]()  # what is in them
        self._confidence = AqConfidence()
        self._num_done = c_int32()
        self._kept_draft: object = None
        self._make_room(1)
        self._handle = lib.open_batch(byref(config))
        if not self._handle:
            raise NativeError(f"aq_open_batch: {lib.last_error()}")
        self._closing = finalize(self, lib.close_batch, self._handle)

    def close(self) -> None:
        """Free the slots, as dropping the last reference to the batch does. Closing twice does nothing."""
        self._handle = None
        self._closing()

    def renew_draft(self, draft: AqModel, first_draft_keys: Mapping[int, int], kept: object) -> None:
        """Draft with these weights from now on (Backend.renew_draft); `kept` keeps them alive."""
        firsts = (c_int32 * self.num_slots)(*(first_draft_keys.get(slot, 0) for slot in range(self.num_slots)))
        self._check(self._library.renew_draft(self._handle, byref(draft), addressof(firsts)))
        self._kept_draft = kept

    def draft(self, step: StepInput) -> None:
        """Apply extends, admissions and pages, and grow the trees."""
        admits, kept = self._admits(step)
        message, confidence = self._pack(step), byref(self._confidence)
        self._check(self._library.draft(self._handle, message, confidence, admits, len(step.admits)))
        del kept

    def verify(self, masks: TokenMasks | None, edits: RowEdits = ()) -> None:
        """Run the target over the drafted step, draw, accept. Raises what an edit raises."""
        shape = (len(edits), 0) if masks is None else masks.shape
        at = None if masks is None else address("masks", masks, np.int32)
        if not edits:
            self._check(self._library.verify(self._handle, at, *shape, None, None))
            return
        if len(edits) != shape[0]:
            raise ValueError(f"{len(edits)} edits beside masks of {shape[0]} rows: must be one of each for a row")
        errors = list[BaseException]()

        def change(row: int, logits: Any) -> None:
            edit = edits[row]
            try:
                if edit is not None and not errors:
                    edit(np.ctypeslib.as_array(logits, (self.vocab_size,)))
            except BaseException as error:  # the library lets none through
                errors.append(error)

        edited = np.array([edit is not None for edit in edits], np.uint8)
        self._check(self._library.verify(self._handle, at, *shape, pointer(edited), AqEdit(change)))
        if errors:
            raise errors[0]

    def keep(self) -> None:
        """Move every slot of the verified step to its next root."""
        self._check(self._library.keep(self._handle, self.out, self.seconds))

    def step(self, step: StepInput, most: int = 1) -> int:
        """The three stages in one call, up to `most` times (Backend.repeat). Returns how often."""
        if most > self._room:
            self._make_room(most)
        admits, kept = self._admits(step) if step.admits else (None, None)
        message, confidence, num_done = self._pack(step), byref(self._confidence), self._num_done
        self._check(
            self._library.step(
                self._handle, message, confidence, admits, len(step.admits), most, self.out, self.seconds,
                byref(num_done),
            )
        )  # fmt: skip
        del kept
        return num_done.value

    def read_trees(self, count: int) -> DraftTree:
        """The trees of `count` decodes that were drafted and have not been verified yet."""
        self._check(self._library.read_trees(self._handle, self.out))
        offsets = np.array(self.out[: count + 1], np.int32)
        num = int(offsets[-1])
        tokens, parents = np.array(self.out[count + 1 : count + 1 + 2 * num], np.int32).reshape(2, num)
        return new_tree(tokens, parents, offsets)

    def read_features(self, num_rows: int, width: int) -> Float32:
        """The features [num_rows, width] of the last step's rows. Raises ValueError where the draft reads none."""
        out = np.empty((num_rows, width), np.float32)
        self._check(self._library.read_features(self._handle, num_rows, pointer(out)))
        return out

    def replace_trees(self, tree: DraftTree, count: int) -> None:
        """Verify these trees instead of the drafted ones. Raises ValueError for an invalid tree or another root."""
        shape = tree.topology
        if not len(shape.offsets) == count + 1 or not len(tree.tokens) == len(shape.parents) == shape.offsets[-1]:
            raise ValueError(
                f"trees of {len(tree.tokens)} nodes at {shape.offsets}: must be one for each of {count} decodes"
            )
        flat = np.concatenate((shape.offsets, tree.tokens, shape.parents)).astype(np.int32)
        self._check(self._library.replace_trees(self._handle, pointer(flat)))

    def _make_room(self, num_steps: int) -> None:
        self._room = num_steps
        report = 3 + self.num_slots * (9 + 2 * (MAX_DEPTH + 1) + 3 * MAX_DEPTH + 2 * MAX_NODES)
        self.out = (c_int32 * (num_steps * report))()
        self.seconds = (c_double * (num_steps * NUM_TIMES))()

    def _check(self, result: int) -> None:
        if result != 0:
            raise (ValueError if result == REFUSED else NativeError)(self._library.last_error())

    def _pack(self, step: StepInput) -> Any:
        """The step as the library reads it (stages.h, "A step is one array of int32"); its cuts and
        row_costs go into `_confidence`."""
        decodes, shapes = step.decodes, self._shapes
        message = [len(step.extends), len(step.chunks), len(decodes), len(step.pages)]
        message += chain.from_iterable(step.extends)
        message += chain.from_iterable(step.chunks)
        proposing, cuts = False, list[Cut]()
        for decode in decodes:
            slot, drafting, proposal, cut = decode
            number = shapes.get(drafting)
            if number is None:
                number = self._shape(drafting)
            count = -1
            if proposal is not None:
                proposing, count = True, len(proposal.tokens)
            message += (slot, number, count, cut is not None)
            if cut is not None:
                cuts.append(cut)
        for pages in step.pages:
            message += (pages.slot, pages.group, pages.first, len(pages.pages), *pages.pages)
        if proposing:
            message += proposals(decodes)
        confidence, row_costs = self._confidence, step.row_costs
        if cuts != self._packed_cuts:  # most are those of the last step
            floats = [*chain.from_iterable(map(floats_of, cuts))]
            self._cuts, self._packed_cuts = (c_float * len(floats))(*floats), cuts
            confidence.cuts, confidence.num_cuts = addressof(self._cuts) if cuts else None, len(cuts)
        if row_costs is not self._packed_costs:
            self._row_costs, self._packed_costs = (c_float * len(row_costs))(*row_costs), row_costs
            confidence.row_costs = addressof(self._row_costs) if row_costs else None
            confidence.num_row_costs = len(row_costs)
        if len(message) > len(self._message):
            self._message = (c_int32 * (2 * len(message)))()
        self._message[: len(message)] = message  # type: ignore[assignment]
        return self._message

    def _shape(self, drafting: Drafting) -> int:
        """The number under which the library knows a way to draft; -1 if it needs no draft model."""
        number = -1
        if drafting.needs_draft_model:
            found = c_int32()
            struct, kept = shape_of(drafting)
            self._check(self._library.add_shape(self._handle, byref(struct), byref(found)))
            number = found.value
            del kept
        self._shapes[drafting] = number
        return number

    def _admits(self, step: StepInput) -> tuple[Any, list[object]]:
        """The step's admissions, and the arrays that they point to."""
        kept: list[object] = []
        return (AqAdmit * len(step.admits))(*(admission(admit, kept) for admit in step.admits)), kept


def shape_of(drafting: Drafting) -> tuple[AqShape, object]:
    """A way to draft as the library's struct, and the arrays that it points to. Raises ValueError for a way to draft
    that the library cannot grow."""
    if isinstance(drafting, Chain):
        return AqShape(CHAIN, drafting.num_spec_tokens, 1, drafting.max_nodes), None
    if isinstance(drafting, Dynamic):
        return AqShape(DYNAMIC, drafting.depth, drafting.top_k, drafting.num_nodes), None
    if isinstance(drafting, Static):
        shape = static_shape(drafting.static_paths)
        arrays = np.array((shape.parents, shape.ranks), np.int32)
        at = [pointer(array) for array in arrays]
        return AqShape(STATIC, drafting.max_depth, drafting.width, drafting.max_nodes, *at), arrays
    raise ValueError(f"{drafting!r}: this backend does not know how to grow it; bring a proposal")


def admission(admit: Admit, kept: list[object]) -> AqAdmit:
    """An Admit as the library reads it; the arrays it points to are added to `kept`."""
    s = admit.sampling
    assert s.seed is not None, "the engine resolves seeds"

    def at(values: Any, dtype: type[np.generic] = np.int32) -> int | None:
        array: NDArray[Any] = np.array(values, dtype)
        kept.append(array)
        return pointer(array) if array.size else None

    words = [number for word in admit.bad_words for number in (len(word), *word)]
    return AqAdmit(
        slot=admit.slot, num_tokens=len(admit.tokens), num_prompt=admit.num_prompt, num_hit=admit.num_hit,
        drafts=admit.drafts, first_draft_key=admit.first_draft_key, draft_end=admit.draft_end, min_tokens=s.min_tokens,
        max_tokens=s.max_tokens, num_biases=len(s.logit_bias), num_end_tokens=len(admit.end_token_ids),
        bad_words_size=len(words),
        repetition_penalty=s.repetition_penalty, presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        sampling=AqSampling(s.temperature, s.top_p, s.min_p, s.top_k, 0, s.seed),
        tokens=at(admit.tokens), bias_tokens=at(list(s.logit_bias)),
        biases=at(list(s.logit_bias.values()), np.float32),
        end_tokens=at(sorted(admit.end_token_ids)), bad_words=at(words),
    )  # fmt: skip


def floats_of(cut: Cut) -> tuple[float, ...]:
    """A cut as the floats of AqCut. Raises ValueError for another number of chances than there are buckets."""
    chances, seconds, least_node, least_pass = cut
    if not len(chances) == len(seconds) == NUM_MARGINS:
        raise ValueError(f"{cut}: must have {NUM_MARGINS} chances and {NUM_MARGINS} seconds, one a bucket of margins")
    return (*chances, *seconds, least_node, least_pass)


def proposals(decodes: Sequence[Decode]) -> list[int]:
    """Tokens and parents, as node numbers, of each decode that brings a proposal."""
    message: list[int] = []
    for decode in decodes:
        if decode.proposal is not None:
            tokens, parents = decode.proposal.tokens, decode.proposal.parents
            if parents and len(parents) != len(tokens):
                raise ValueError(f"{decode.proposal}: must name a parent for every token, or for none")
            message += (*tokens, *((p + 1 for p in parents) if parents else range(len(tokens))))
    return message


def new_tree(tokens: Int32, parents: Int32, offsets: Int32) -> DraftTree:
    """Trees from their nodes, whose parents are slot-local and stand before them."""
    levels = [0] * len(tokens)
    for first, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        own = parents[first:end].tolist()
        for i in range(1, end - first):
            levels[first + i] = levels[first + own[i]] + 1
    return DraftTree(Topology(parents, np.array(levels, np.int32), offsets), tokens)
