"""Whole decode cycles natively: draft a chain, verify, draw, accept, keep, in one call over the batch's static arrays.

The single calls, which the engine makes for everything a cycle cannot do, give the same bits; but each costs the host a
few microseconds, and a cycle of a small model takes a thousand.
"""

from __future__ import annotations

from ctypes import byref, c_double, c_int32
from ctypes import pointer as pointer_to
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from aquiline.ops.buffers import address, describe_kv, describe_rows, pointer
from aquiline.ops.cpu import NativeModel
from aquiline.ops.native import AqCycle, AqFusion, AqSlots
from aquiline.ops.packed import PackedLinear, library
from aquiline.types import SAMPLING, Float32, Int32, KVGroup, Rows, RowSampling

_INTEGERS = ("tokens", "positions", "first_draft_key", "num_carried", "carried_tokens")
_FLOATS = ("carried", "page_features")


class NativeFusion:
    """Target features to a draft's input: optional norms over all of them [W] and over each part [parts, W / parts],
    then fc."""

    def __init__(self, fc: PackedLinear, norm: Float32 | None, part_norms: Float32 | None, eps: float) -> None:
        self._kept = fc, norm, part_norms
        self.num_inputs, self.num_outputs = fc.struct.k, fc.struct.n
        at = [None if w is None else address("norm", w, np.float32) for w in (norm, part_norms)]
        self.struct = AqFusion(fc.struct, *at, 0 if part_norms is None else len(part_norms), eps)

    def __call__(self, features: Float32) -> Float32:
        """[n, W] to a new array [n, H]."""
        n = len(features)
        assert features.shape == (n, self.num_inputs), (features.shape, self.num_inputs)
        g = np.empty((n, self.num_outputs), np.float32)
        library().fuse(byref(self.struct), address("features", features, np.float32), n, pointer(g))
        return g


@dataclass(frozen=True, eq=False)
class Side:
    """One model of a cycle: what it runs on, and hidden [max_rows, H], where its forwards leave their rows."""

    model: NativeModel
    kv: KVGroup
    rows: Rows
    hidden: Float32


@dataclass(frozen=True, eq=False)
class DraftSide(Side):
    """The draft: d2t [Vd] is added to its ids; with norm_feedback a pass reads the normed states of the one before."""

    fusion: NativeFusion
    d2t: Int32
    norm_feedback: bool


class SlotState(Protocol):
    """The arrays per slot that a cycle reads and advances: engine/slots.py, Slots."""

    tokens: Int32
    positions: Int32
    first_draft_key: Int32
    num_carried: Int32
    carried_tokens: Int32
    carried: Float32
    page_features: Float32
    settings: RowSampling


class Cycled(NamedTuple):
    """What a cycle did with a slot: where its root stood, drafts accepted, the target's own token behind them, and the
    tokens of the verified chain, root first."""

    position: int
    num_accepted: int
    bonus: int
    chain: list[int]


class NativeCycle:
    """Runs cycles over arrays that stay where they are. num_draft_rows: rows of the last one's draft passes.

    Arguments and results are ctypes arrays, which cost the caller less than numpy's."""

    def __init__(self, target: Side, features: Float32, state: SlotState, draft: DraftSide | None) -> None:
        self._library = library()
        self._kept = target, features, state, draft
        self._slots = (c_int32 * len(state.tokens))()
        self._forced = (c_int32 * len(state.tokens))()
        self._out = (c_int32 * (1 + 4 * target.rows.max_rows))()
        self._stages = (c_double * 5)()
        self.num_draft_rows = 0
        arrays = {
            name: address(f"slots.{name}", getattr(state, name), dtype)
            for dtype, names in ((np.int32, _INTEGERS), (np.float32, _FLOATS), (SAMPLING, ("settings",)))
            for name in names
        }
        num_slots, max_carry, width = state.carried.shape
        struct = AqCycle(
            target=pointer_to(target.model.struct),
            target_kv=pointer_to(describe_kv(target.kv)),
            rows=pointer_to(describe_rows(target.rows)),
            hidden=address("hidden", target.hidden, np.float32),
            slots=AqSlots(**arrays, num_slots=num_slots, max_carry=max_carry, width=width),
            max_rows=target.rows.max_rows,
        )
        if draft is not None:
            struct.features = address("features", features, np.float32)
            struct.draft = pointer_to(draft.model.struct)
            struct.draft_kv = pointer_to(describe_kv(draft.kv))
            struct.draft_rows = pointer_to(describe_rows(draft.rows))
            struct.draft_hidden = address("hidden", draft.hidden, np.float32)
            struct.d2t = address("d2t", draft.d2t, np.int32)
            struct.fusion, struct.norm_feedback = draft.fusion.struct, draft.norm_feedback
        self._cycle_at = byref(struct)

    def __call__(self, slots: list[int], num_spec_tokens: int, forced: list[int] | None = None) -> list[Cycled]:
        """One cycle of the slots, each with its root; 0 drafts nothing. On failure the slots are as before.

        forced: how many drafts each slot accepts, whatever the target drew; for simulated acceptance alone."""
        B, stride = len(slots), num_spec_tokens + 4
        self._slots[:B] = slots  # type: ignore[assignment]
        if forced is not None:
            self._forced[:B] = forced  # type: ignore[assignment]
        at = self._forced if forced is not None else None
        self._library.cycle(self._cycle_at, self._slots, B, num_spec_tokens, at, self._out, self._stages)
        found = self._out[1 : 1 + B * stride]
        self.num_draft_rows = self._out[0]
        starts = range(0, B * stride, stride)
        return [Cycled(found[at], found[at + 1], found[at + 2], found[at + 3 : at + stride]) for at in starts]

    @property
    def stages(self) -> list[float]:
        """Seconds of the last cycle's stages, as metrics.STAGES names them."""
        return self._stages[:]
