"""What `aquiline tune` records and tunes. Apart from tile_tuning.py, so that help texts load no engine, no kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from aquiline.config import check
from aquiline.settings import setting

Tuned = Literal["gemm", "attention", "all"]
KINDS_OF: dict[Tuned, tuple[str, ...]] = {
    "gemm": ("linear", "head"), "attention": ("attention",), "all": ("linear", "head", "attention"),
}  # fmt: skip
"""Kinds of keys (ops/triton/tile_table.py) by what is tuned."""

TUNING = "Tuning"


@dataclass(frozen=True)
class TuningWork:
    """Which runs are recorded, each context beside each batch, and how much of their inventory is tuned."""

    contexts: tuple[int, ...] = setting((8192,), "Prompt tokens of the recorded runs.", TUNING, name="context")
    batches: tuple[int, ...] = setting((1, 4), "Sequences that decode together in them.", TUNING, name="batch")
    top: int = setting(32, "Shapes that are tuned: those that read the most bytes.", TUNING)

    def __post_init__(self) -> None:
        for name, values in (("context", self.contexts), ("batch", self.batches), ("top", (self.top,))):
            check(bool(values) and min(values) >= 1, name, values, "must be at least 1 each")
