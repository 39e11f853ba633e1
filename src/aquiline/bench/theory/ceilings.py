"""The most that a device can do, and the source of each figure: measured here, a datasheet, or given by the user.

A figure always carries its source, so that measured and published figures are not mixed unnoticed. The figures of this
machine are measured once (`measure.py`) and kept in a cache file.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from typing import Any, Literal

import psutil

from aquiline.bench.theory import measure
from aquiline.bench.theory.choice import LimitsChoice
from aquiline.bench.theory.measure import Machine, Measurement, OnStage, Rate
from aquiline.blocks import is_packed
from aquiline.config import cache_directory
from aquiline.writing import write_whole

logger = logging.getLogger(__name__)

GIGA, TERA = 1e9, 1e12


@dataclass(frozen=True)
class Figure:
    """A rate in bytes or FLOPs per second, its source, and details of the source."""

    per_s: float
    source: Literal["measured", "datasheet", "given"]
    detail: str = ""


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
        """The ceilings as JSON; the remark stands among the notes."""
        return {name: value for name, value in asdict(self).items() if name != "remark"}


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


def ceilings_of(choice: LimitsChoice, dtype: str, on_stage: OnStage) -> Ceilings:
    """The ceilings of the chosen device for weights stored as `dtype`. Measures only if a measured figure is needed.

    Raises ValueError for an unknown device and for an arithmetic that the device does not have."""
    bandwidth = None if choice.bandwidth is None else Figure(choice.bandwidth * GIGA, "given")
    flops = None if choice.flops is None else Figure(choice.flops * TERA, "given")
    if choice.device is None and bandwidth and flops:
        return Ceilings("given figures", choice.arithmetic, bandwidth, flops, flops)
    if choice.device not in (None, "cpu"):
        arithmetic = choice.arithmetic or ("float32" if dtype == "float32" else "bfloat16")
        return _published(str(choice.device), arithmetic, bandwidth, flops)
    machine = measure.this_machine()
    runs_on_integers = machine.isa != "torch" and (dtype in ("int8", "int4") or is_packed(dtype))
    arithmetic = choice.arithmetic or ("int8" if runs_on_integers else "float32")
    sizes = (measure.last_level_cache(), psutil.virtual_memory().total)
    if bandwidth and flops:
        return Ceilings(machine.key, arithmetic, bandwidth, flops, flops, None, *sizes)
    measured = measured_once(machine, on_stage, remeasure=choice.remeasure)
    rate: Rate | None = getattr(measured, arithmetic)
    if rate is None:
        needs = {"bfloat16": "AVX512_BF16", "bfloat16_tiles": "AMX"}.get(arithmetic, "the native library")
        raise ValueError(f"arithmetic={arithmetic!r}: this CPU or build lacks {needs}; use arithmetic='float32'")
    beside = measured.float32 if arithmetic == "int8" else rate  # attention does not run on integers
    read, copy, linears, attention = (
        Figure(r.per_s, "measured", f"{r.by}, {measured.date}") for r in (measured.read, measured.copy, rate, beside)
    )
    return Ceilings(
        machine.key, arithmetic, bandwidth or read, flops or linears, flops or attention, copy, *sizes,
        remark=_remark(machine, measured),
    )  # fmt: skip


def _published(device: str, arithmetic: str, bandwidth: Figure | None, flops: Figure | None) -> Ceilings:
    """A card's published figures; given figures replace them."""
    sheet = DATASHEETS.get(device)
    if sheet is None:
        raise ValueError(
            f"device={device!r}: must be cpu or one of {', '.join(DATASHEETS)}; for any other, give --bandwidth and "
            "--flops"
        )
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


def measured_once(machine: Machine, on_stage: OnStage, *, remeasure: bool = False) -> Measurement:
    """This machine's figures, read from the cache file, or else measured and written there.

    Warns if the file is broken, and measures again; warns if the file cannot be written."""
    file = cache_directory() / "ceilings.json"
    entries: dict[str, Any] = {}
    try:
        entries = dict(json.loads(file.read_text(encoding="utf-8")))
        if machine.key in entries and not remeasure:
            return Measurement.of_entry(entries[machine.key])
    except FileNotFoundError:
        pass
    except (OSError, KeyError, TypeError, ValueError) as error:
        logger.warning("%s: the ceilings of %s are broken (%r); measuring again", file, machine.key, error)
    measured = measure.measure_ceilings(machine, on_stage)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(entries | {machine.key: asdict(measured)}, indent=1) + "\n", "It is as before")
    except OSError as error:
        logger.warning("%s: the measured ceilings cannot be kept (%s)", file, error)
    return measured


def _remark(machine: Machine, measured: Measurement) -> str:
    if measured.load is None or measured.load < machine.threads / 2:
        return ""
    return (
        f"the ceilings were measured on {measured.date} beside a load of {measured.load:.1f} on {machine.threads} "
        "threads and may be too low; --remeasure when the machine is idle"
    )
