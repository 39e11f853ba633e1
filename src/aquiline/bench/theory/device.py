"""What a device can do at most, and the source of each figure: measured here, a datasheet, or given by the user.

A figure always carries its source, so that measured and published figures are not mixed unnoticed. `ceilings.py`
measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Source = Literal["measured", "datasheet", "given"]

GIGA, TERA = 1e9, 1e12


@dataclass(frozen=True)
class Figure:
    """A rate in bytes or FLOPs per second, its source, and details of the source."""

    value: float
    source: Source
    detail: str = ""

    def as_dict(self) -> dict[str, object]:
        """The figure as JSON."""
        return {"per_s": self.value, "source": self.source, "detail": self.detail}


@dataclass(frozen=True)
class Ceilings:
    """The ceilings of one device. bandwidth: bytes per second of pure reading; copy: bytes read and written per second.

    arithmetic: what linears multiply in; cache_bytes: size of the last-level cache; memory_bytes: memory for weights
    and caches together. None: not known."""

    device: str
    arithmetic: str | None
    bandwidth: Figure
    linear_flops: Figure
    attention_flops: Figure
    copy: Figure | None = None
    cache_bytes: int | None = None
    memory_bytes: int | None = None
    remark: str = ""

    def as_dict(self) -> dict[str, object]:
        """The ceilings as JSON."""
        figures = {name: getattr(self, name) for name in ("bandwidth", "linear_flops", "attention_flops", "copy")}
        return {
            "device": self.device,
            "arithmetic": self.arithmetic,
            "cache_bytes": self.cache_bytes,
            "memory_bytes": self.memory_bytes,
        } | {name: figure.as_dict() if figure else None for name, figure in figures.items()}


@dataclass(frozen=True)
class Datasheet:
    """Published figures of one card: GB/s; dense TFLOP/s, bfloat16 with float32 sums and float32 without tensor cores;
    GB of memory; MB of last-level cache, None if the source does not name it."""

    name: str
    gb_per_s: float
    bfloat16_tflops: float
    float32_tflops: float | None
    memory_gb: float
    cache_mb: float | None
    source: str


DATASHEETS = {
    "a100": Datasheet("NVIDIA A100 SXM 80 GB", 2039, 312, 19.5, 80, 40, "NVIDIA A100 80GB datasheet, A100 white paper"),
    "h100": Datasheet("NVIDIA H100 SXM 80 GB", 3350, 989.4, 66.9, 80, 50, "NVIDIA H100 datasheet, H100 white paper"),
    "h200": Datasheet("NVIDIA H200 SXM 141 GB", 4800, 989.4, 66.9, 141, 50, "NVIDIA H200 datasheet; cache as H100"),
    "b200": Datasheet("NVIDIA B200 SXM 180 GB", 8000, 2250, None, 180, None, "NVIDIA DGX B200 datasheet, one of 8"),
    "l4": Datasheet("NVIDIA L4 24 GB", 300, 121, 30.3, 24, None, "NVIDIA L4 datasheet"),
    "l40s": Datasheet("NVIDIA L40S 48 GB", 864, 362, 91.6, 48, None, "NVIDIA L40S datasheet"),
    "rtx3090": Datasheet("GeForce RTX 3090 24 GB", 936, 71, 35.6, 24, 6, "NVIDIA GA102 white paper"),
    "rtx4090": Datasheet(
        "GeForce RTX 4090 24 GB", 1008, 165.2, 82.6, 24, 72, "NVIDIA Ada GPU architecture white paper"
    ),
    "rtx5090": Datasheet("GeForce RTX 5090 32 GB", 1792, 209.5, 104.8, 32, 96, "NVIDIA RTX Blackwell white paper"),
    "mi300x": Datasheet("AMD Instinct MI300X 192 GB", 5300, 1307.4, 163.4, 192, 256, "AMD Instinct MI300X datasheet"),
}
"""Peaks that no kernel reaches: on an H100 and an H200, copies reach 90 % of the bandwidth, GEMMs 80 % of the FLOPs."""


def datasheet_ceilings(
    device: str, arithmetic: str, bandwidth: Figure | None = None, flops: Figure | None = None
) -> Ceilings:
    """A card's published figures; given figures replace them.

    Raises ValueError for a device or an arithmetic that no datasheet here has."""
    sheet = DATASHEETS.get(device)
    if sheet is None:
        raise ValueError(
            f"device={device!r}: must be cpu or one of {', '.join(DATASHEETS)}; for any other, give --bandwidth and "
            "--flops"
        )
    check_arithmetic(arithmetic)
    if flops is None:
        tflops = {"bfloat16": sheet.bfloat16_tflops, "float32": sheet.float32_tflops}.get(arithmetic)
        if tflops is None:
            raise ValueError(f"arithmetic={arithmetic!r}: no published figure for {device} is known here; give --flops")
        flops = Figure(tflops * TERA, "datasheet", sheet.source)
    return Ceilings(
        device=sheet.name, arithmetic=arithmetic, linear_flops=flops, attention_flops=flops,
        bandwidth=bandwidth or Figure(sheet.gb_per_s * GIGA, "datasheet", sheet.source),
        memory_bytes=int(sheet.memory_gb * GIGA), cache_bytes=int(sheet.cache_mb * 2**20) if sheet.cache_mb else None,
    )  # fmt: skip


def given_figure(name: str, value: float | None, unit: float) -> Figure | None:
    """The user's own figure, in units of `unit` per second; None for None. Raises ValueError unless it is positive."""
    if value is None:
        return None
    if not 0 < value < float("inf"):
        raise ValueError(f"{name}={value:g}: must be a positive number")
    return Figure(value * unit, "given")


ARITHMETICS = ("float32", "bfloat16", "int8")
"""What linears may be multiplied in."""


def check_arithmetic(arithmetic: str) -> None:
    """Raises ValueError for an arithmetic that has no ceiling."""
    if arithmetic not in ARITHMETICS:
        raise ValueError(f"arithmetic={arithmetic!r}: must be one of {', '.join(ARITHMETICS)}")
