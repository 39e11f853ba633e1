"""A target and its draft in the native library's layout, and which settings they can be loaded with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aquiline.backends.base import Sizes
from aquiline.backends.cpu import calls, packed
from aquiline.backends.cpu.backend import CpuBackend
from aquiline.backends.cpu.buffers import address
from aquiline.backends.cpu.calls import NativeModel
from aquiline.backends.cpu.native import AqFusion
from aquiline.backends.cpu.packed import Arena, PackedLinear
from aquiline.config import Environment
from aquiline.models.config import DraftConfig, ModelConfig
from aquiline.models.decoder import Decoder
from aquiline.models.eagle import DraftHead
from aquiline.ops.quantise import QUANTISED
from aquiline.ops.threads import usable_cores
from aquiline.types import Float32, Int32, storage_dtype

KV_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def missing_reason(environment: Environment) -> str | None:
    """Why pairs cannot run natively; None if they can."""
    return "AQUILINE_ISA=off" if environment.isa == "off" else calls.missing_reason()


def configure(environment: Environment) -> None:
    """Use the instruction set and number of threads that the environment names. By default, the best instruction set
    and one thread for each usable core."""
    calls.select_isa(environment.isa)
    calls.set_threads(environment.num_threads or usable_cores())


def resolve_arithmetic(arithmetic: str, dtype: str) -> str:
    """The arithmetic over weights stored as `dtype`; "auto" is the fastest one that this CPU can run.

    Raises ValueError, naming the fix, for an arithmetic that cannot run."""
    if arithmetic == "auto":
        return "bfloat16" if dtype == "bfloat16" and packed.has_bf16_dot() else "float32"
    if arithmetic not in ("float32", "bfloat16"):
        raise ValueError(f"arithmetic={arithmetic!r}: must be one of auto, float32, bfloat16")
    if arithmetic == "float32":
        return arithmetic
    if dtype != "bfloat16":
        raise ValueError(f"arithmetic={arithmetic!r}: needs dtype='bfloat16', and dtype is {dtype!r}")
    if not packed.has_bf16_dot():
        raise ValueError(f"arithmetic={arithmetic!r}: this CPU or build lacks AVX512_BF16; use arithmetic='float32'")
    return arithmetic


def resolve_kv_dtype(kv_dtype: str, dtype: str) -> str:
    """How keys and values are stored beside weights stored as `dtype`: "auto" is float32 beside float32, else bfloat16.

    Keys are bfloat16 beside float16 weights too, because a key may exceed float16's largest number, 65504. Raises
    ValueError for a kv_dtype that the library does not store."""
    if kv_dtype == "auto":
        return "float32" if storage_dtype(dtype) == torch.float32 else "bfloat16"
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
    """A target and an optional draft, packed; the modules' own tensors may be dropped. See backends/base.py, Pair.

    dtype: how the weights are stored, float32, bfloat16, float16, int8 or int4. Raises ValueError for an arithmetic or
    a kv_dtype that cannot run and for widths that the library does not have."""

    name = "native"
    is_exact = True

    def __init__(
        self, decoder: Decoder, head: DraftHead | None, dtype: str, arithmetic: str = "auto", kv_dtype: str = "auto"
    ) -> None:
        self.arithmetic = resolve_arithmetic(arithmetic, dtype)
        self.kv_dtype = resolve_kv_dtype(kv_dtype, dtype)
        self.storage = dtype
        self.target: ModelConfig = decoder.config
        self.draft: DraftConfig | None = None if head is None else head.config
        quantised = dtype if dtype in QUANTISED else None
        self.target_model = NativeModel(decoder.weights(), self.arithmetic, quantised)
        self.draft_model = None if head is None else pack_draft(head, self.arithmetic, quantised)

    def open(self, sizes: Sizes) -> CpuBackend:
        """Storage and buffers for an engine of that size."""
        return CpuBackend(self, sizes)

    def kv_bytes_per_token(self) -> tuple[int, int]:
        """Bytes that one token takes in the pages: the target's; the draft's, its fused features included."""
        dtype = KV_DTYPES[self.kv_dtype]
        draft = 0
        if self.draft is not None:
            draft = self.draft.model.kv_values_per_token * dtype.itemsize + 4 * self.draft.model.hidden_size
        return self.target.kv_values_per_token * dtype.itemsize, draft

    def system(self) -> dict[str, object]:
        """What runs: instruction set, threads, arithmetic."""
        return dict[str, object](calls.system()) | {"arithmetic": self.arithmetic, "kv_dtype": self.kv_dtype}


def pack_draft(head: DraftHead, arithmetic: str, dtype: str | None) -> NativeDraft:
    """A draft head in the library's layout."""
    fc = PackedLinear("fc", head.fc.data, None, arithmetic, Arena(), dtype)
    norms = [floats(head.input_norm), floats(head.fc_norm)]
    at = [None if norm is None else address("norm", norm, np.float32) for norm in norms]
    num_parts = 0 if head.fc_norm is None else len(head.fc_norm)
    return NativeDraft(
        model=NativeModel(head.weights(), arithmetic, dtype),
        fusion=AqFusion(fc.struct, *at, num_parts, head.config.model.rms_norm_eps),
        d2t=head.d2t.numpy().astype(np.int32),
        config=head.config,
        kept=(fc, norms),
    )


def floats(weight: Tensor | None) -> Float32 | None:
    """A weight as a float32 array of its own."""
    return None if weight is None else weight.detach().float().contiguous().clone().numpy()
