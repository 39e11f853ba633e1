"""A model's storage, a device and a grid as a user names them. Knows neither models nor devices."""

from __future__ import annotations

import math
from dataclasses import dataclass

from aquiline.config import check
from aquiline.settings import setting
from aquiline.spec.drafting import Chain

DEVICE, STORAGE = "Device", "Storage"
"""Headings under which settings are listed."""

ARITHMETICS = ("float32", "bfloat16", "bfloat16_tiles", "int8")
"""The arithmetics that linears may be multiplied in."""

DEFAULT_CONTEXTS = (512, 2048, 8192)
EXAMPLE_TAU = 2.5


@dataclass(frozen=True)
class StorageChoice:
    """How target and draft are stored, each None as its config says."""

    dtype: str | None = setting(
        None, "Weights: float32, bfloat16, float16, fp8, int8, int4 or mxfp4. Default: as the config says.", STORAGE
    )
    draft_dtype: str | None = setting(
        None,
        "The draft's. Default: int4 beside packed weights, else bfloat16 or as a target that is not quantised.",
        STORAGE,
    )
    kv_dtype: str | None = setting(None, "Keys and values: float32, bfloat16, float16 or fp8.", STORAGE)


@dataclass(frozen=True)
class LimitsChoice:
    """A device as the user names it; figures replace its own.

    device None: cpu, or nothing but the figures if both are given. arithmetic None: on a CPU int8 for int8, int4 and
    packed weights, else float32; on other devices float32 for float32 weights, else bfloat16."""

    device: str | None = setting(
        None, "cpu, measured once and cached; or by datasheet a100, h100, h200, b200, l4, l40s, rtx3090, rtx4090, "
        "rtx5090, mi300x. Default: cpu.", DEVICE,
    )  # fmt: skip
    arithmetic: str | None = setting(
        None,
        "float32, bfloat16, bfloat16_tiles or int8. Default: on a CPU int8 for int8, int4 and packed weights, else "
        "float32; on other devices bfloat16.",
        DEVICE,
    )
    bandwidth: float | None = setting(None, "GB/s, in the place of the device's.", DEVICE)
    flops: float | None = setting(None, "TFLOP/s, in the place of the device's.", DEVICE)
    remeasure: bool = setting(False, "Measure the CPU again.", DEVICE)

    def __post_init__(self) -> None:
        if self.arithmetic not in (None, *ARITHMETICS):
            raise ValueError(f"arithmetic={self.arithmetic!r}: must be one of {', '.join(ARITHMETICS)}")
        for name, value in (("bandwidth", self.bandwidth), ("flops", self.flops)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value:g}: must be a positive number")


@dataclass(frozen=True)
class Grid:
    """What to tabulate. contexts empty: those of DEFAULT_CONTEXTS that the model was built for. taus empty: for every
    chain its upper bound, at which all drafts are accepted, and EXAMPLE_TAU."""

    contexts: tuple[int, ...] = setting((), "Cached tokens per sequence. Default: 512 2048 8192.", name="context")
    batches: tuple[int, ...] = setting((1, 4, 8), "Sequences.", name="batch")
    chains: tuple[int, ...] = setting((2, 3, 4, 5), "Chain lengths K.", name="num_spec_tokens")
    taus: tuple[float, ...] = setting(
        (), "Tokens committed a step. Default: the most a chain can, and 2.5.", name="tau"
    )
    overlap: float = setting(0.0, "Share of experts that a row has in common with its neighbours, 0 to 1.")

    ranks: int = setting(1, "Processes that share the target: what they send each other in a step is printed.")

    def __post_init__(self) -> None:
        for name, values in (("ranks", (self.ranks,)), ("context", self.contexts), ("batch", self.batches)):
            for value in values:
                check(value >= 1, name, value, "must be at least 1")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"overlap={self.overlap:g}: must be between 0 (independent rows) and 1 (the same experts)")
        Chain(max(self.chains))
        Chain(min(self.chains))
        for tau in self.taus:
            if not 1 <= tau <= max(self.chains) + 1:
                raise ValueError(
                    f"tau={tau:g}: must be between 1 and {max(self.chains) + 1}, the most the longest chain and its "
                    "bonus can commit; raise --num-spec-tokens or lower it"
                )
