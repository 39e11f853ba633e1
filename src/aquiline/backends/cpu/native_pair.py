"""A target and its draft in the native library's layout, and which settings they can be loaded with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from aquiline.backends.base import Sizes, check_replaces
from aquiline.backends.cpu import calls, native_weights
from aquiline.backends.cpu.buffers import address
from aquiline.backends.cpu.calls import NativeModel
from aquiline.backends.cpu.native import AqFusion
from aquiline.backends.cpu.native_backend import CpuBackend
from aquiline.backends.cpu.native_pages import KV_DTYPES
from aquiline.backends.cpu.native_text_index import NativeIndex
from aquiline.backends.cpu.native_weights import Arena, PackedLinear
from aquiline.blocks import PACKED, Array
from aquiline.config import Environment
from aquiline.models.model_config import DraftConfig, ModelConfig
from aquiline.models.model_weights import DraftWeights, ModelWeights
from aquiline.ops.control_groups import free_memory
from aquiline.ops.quantise import QUANTISED
from aquiline.ops.threads import usable_cores
from aquiline.spec.match_events import MatchEvents
from aquiline.types import Float32, Int32, storage_dtype


def missing_reason(environment: Environment) -> str | None:
    """Why pairs cannot run natively; None if they can."""
    return "AQUILINE_ISA=off" if environment.isa == "off" else calls.missing_reason()


def configure(environment: Environment) -> None:
    """Use the instruction set and number of threads that the environment names. By default, the best instruction set
    and one thread for each usable core."""
    calls.select_isa(environment.isa)
    calls.set_threads(environment.num_threads or usable_cores())


ARITHMETICS = ("float32", *native_weights.PAIRED, "int8")
ON_CODES = (PACKED, *QUANTISED)
"""Storages that arithmetic int8 multiplies."""


def resolve_arithmetic(arithmetic: str, dtype: str) -> str:
    """The arithmetic over weights stored as `dtype`. "auto" goes by a table, never by timing: int8 for weights of
    codes, on every CPU; for bfloat16 weights the one in which this CPU is fastest; float32 for all else.

    Raises ValueError, naming the fix, for an arithmetic that cannot run."""
    if arithmetic == "auto":
        if dtype in ON_CODES:
            return "int8"
        return native_weights.fastest_bf16() if dtype == "bfloat16" else "float32"
    if arithmetic not in ARITHMETICS:
        raise ValueError(f"arithmetic={arithmetic!r}: must be one of auto, {', '.join(ARITHMETICS)}")
    if arithmetic == "int8" and dtype not in ON_CODES:
        raise ValueError(f"arithmetic='int8': needs a dtype of {', '.join(ON_CODES)}, and dtype is {dtype!r}")
    if arithmetic in native_weights.PAIRED and dtype != "bfloat16":
        raise ValueError(f"arithmetic={arithmetic!r}: needs dtype='bfloat16', and dtype is {dtype!r}")
    if arithmetic == "bfloat16" and not native_weights.has_bf16_dot():
        raise ValueError(f"arithmetic={arithmetic!r}: this CPU or build lacks AVX512_BF16; use arithmetic='float32'")
    return arithmetic


def resolve_kv_dtype(kv_dtype: str, dtype: str) -> str:
    """How keys and values are stored beside weights stored as `dtype`: "auto" is float32 beside float32, else bfloat16.

    Keys are bfloat16 beside float16 weights too, because a key may exceed float16's largest number, 65504. Raises
    ValueError for a kv_dtype that the library does not store."""
    if kv_dtype == "auto":
        return "float32" if storage_dtype(dtype) == np.float32 else "bfloat16"
    if kv_dtype not in KV_DTYPES:
        raise ValueError(f"kv_dtype={kv_dtype!r}: must be one of auto, {', '.join(KV_DTYPES)}")
    return kv_dtype


@dataclass(frozen=True, eq=False)
class NativeDraft:
    """A draft head, packed. model: its layer and head; fusion: how features are fused; d2t [Vd]: what is added to a
    draft id to get the target id."""

    model: NativeModel
    fusion: AqFusion
    d2t: Int32
    config: DraftConfig
    kept: object  # the arrays behind fusion


class CpuPair:
    """A target and an optional draft, packed; the weights given may be dropped. See backends/base.py, Pair.

    dtype: how the target is stored, and the draft unless draft_dtype names another one. `arithmetic` is the target's; a
    draft that is stored otherwise has what "auto" gives it.

    Raises ValueError for an arithmetic or a kv_dtype that cannot run and for widths that the library
    does not have."""

    name = "native"
    is_exact = True

    def __init__(
        self,
        target: ModelWeights,
        draft: DraftWeights | None,
        dtype: str,
        arithmetic: str = "auto",
        kv_dtype: str = "auto",
        draft_dtype: str | None = None,
    ) -> None:
        draft_dtype = draft_dtype or dtype
        self.arithmetic = resolve_arithmetic(arithmetic, dtype)
        self.draft_arithmetic = self.arithmetic if draft_dtype == dtype else resolve_arithmetic("auto", draft_dtype)
        self.kv_dtype = resolve_kv_dtype(kv_dtype, dtype)
        self.target: ModelConfig = target.config
        self.draft: DraftConfig | None = None if draft is None else draft.config
        arena = Arena()
        self.draft_version = 0
        self.draft_model: NativeDraft | None = None  # packed first, while the blocks of a target are still in its file
        if draft is not None:
            self.draft_model = pack_draft(draft, self.draft_arithmetic, quantised(draft_dtype), arena)
        self.target_model = NativeModel(target, self.arithmetic, quantised(dtype), arena)
        self._arena, self._draft_dtype = arena, draft_dtype
        self._draft_embed = None if draft is None else draft.model.embed  # kept, so that the arena still knows it

    def open(self, sizes: Sizes) -> CpuBackend:
        """Storage and buffers for an engine of that size."""
        return CpuBackend(self, sizes)

    def replace_draft(self, draft: DraftWeights) -> None:
        """Draft with the layer, norm and head of these weights: see Pair."""
        old = self.draft_model
        check_replaces(self.draft, None if old is None else old.d2t, draft)
        assert old is not None and self._draft_embed is not None
        head, dtype = replace(draft.model, embed=self._draft_embed), quantised(self._draft_dtype)
        model = NativeModel(head, self.draft_arithmetic, dtype, self._arena.beside())
        self.draft_model = replace(old, model=model)
        self.draft_version += 1  # last: who reads it before the weights finds these or later ones

    def new_index(self, min_length: int, events: MatchEvents) -> NativeIndex:
        """The index of an empty text."""
        return NativeIndex(min_length, events)

    def kv_bytes_per_token(self) -> tuple[int, int]:
        """Bytes that one token takes in the pages: the target's; the draft's, its fused features included."""
        draft = 0
        if self.draft is not None:
            draft = self.draft.model.kv_bytes_per_token(self.kv_dtype) + 4 * self.draft.model.hidden_size
        return self.target.kv_bytes_per_token(self.kv_dtype), draft

    def free_bytes(self) -> int:
        """Free memory of this machine."""
        return free_memory()

    def system(self) -> dict[str, object]:
        """What runs: instruction set, threads, arithmetic."""
        own = {"arithmetic": self.arithmetic, "kv_dtype": self.kv_dtype}
        draft = {} if self.draft is None else {"draft_arithmetic": self.draft_arithmetic}
        return dict[str, object](calls.system()) | own | draft

    def close(self) -> None:
        """One process has nothing to end."""


def quantised(dtype: str) -> str | None:
    """The codes that linears are rounded to when they are packed; None: they are stored as they are given."""
    return dtype if dtype in QUANTISED else None


def pack_draft(head: DraftWeights, arithmetic: str, dtype: str | None, arena: Arena) -> NativeDraft:
    """A draft head in the library's layout."""
    model = NativeModel(head.model, arithmetic, dtype, arena)
    [weight] = head.fc
    fc = PackedLinear("fc", weight, None, arithmetic, arena, dtype)
    norms = [floats(head.input_norm), floats(head.fc_norm)]
    at = [None if norm is None else address("norm", norm, np.float32) for norm in norms]
    num_parts = 0 if head.fc_norm is None else len(head.fc_norm)
    return NativeDraft(
        model=model,
        fusion=AqFusion(fc.struct, *at, num_parts, head.config.model.rms_norm_eps),
        d2t=head.d2t.astype(np.int32),
        config=head.config,
        kept=(fc, norms),
    )


def floats(weight: Array | None) -> Float32 | None:
    """A weight as a float32 array of its own."""
    return None if weight is None else np.array(weight, np.float32, order="C")
