"""The ceilings of the device that a user names. Those of this machine are measured once and kept in a cache file."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import asdict
from pathlib import Path

import psutil

from aquiline.bench.theory.choice import LimitsChoice
from aquiline.bench.theory.device import (
    GIGA,
    TERA,
    Ceilings,
    Figure,
    check_arithmetic,
    datasheet_ceilings,
    given_figure,
)
from aquiline.bench.theory.measure import (
    Machine,
    Measurement,
    OnStage,
    Rate,
    last_level_cache,
    measure_ceilings,
    this_machine,
)
from aquiline.blocks import is_packed
from aquiline.config import cache_directory
from aquiline.writing import write_whole

logger = logging.getLogger(__name__)


def ceilings_of(choice: LimitsChoice, dtype: str, on_stage: OnStage) -> Ceilings:
    """The ceilings of the chosen device for weights stored as `dtype`. Measures only if a measured figure is needed.

    Raises ValueError for an unknown device, an arithmetic that it does not have, and figures that are not positive."""
    bandwidth = given_figure("bandwidth", choice.bandwidth, GIGA)
    flops = given_figure("flops", choice.flops, TERA)
    if choice.device is None and bandwidth and flops:
        return Ceilings("given figures", choice.arithmetic, bandwidth, flops, flops)
    if choice.device not in (None, "cpu"):
        arithmetic = choice.arithmetic or ("float32" if dtype == "float32" else "bfloat16")
        return datasheet_ceilings(str(choice.device), arithmetic, bandwidth, flops)
    machine = this_machine()
    arithmetic = choice.arithmetic or ("int8" if _runs_on_integers(dtype) and machine.isa != "torch" else "float32")
    check_arithmetic(arithmetic)
    known = (last_level_cache(), psutil.virtual_memory().total)
    if bandwidth and flops:
        return Ceilings(machine.key, arithmetic, bandwidth, flops, flops, None, *known)
    measured = measured_once(machine, on_stage, remeasure=choice.remeasure)
    rate = {"float32": measured.float32, "bfloat16": measured.bfloat16, "int8": measured.int8}[arithmetic]
    if rate is None:
        needs = "AVX512_BF16" if arithmetic == "bfloat16" else "the native library"
        raise ValueError(f"arithmetic={arithmetic!r}: this CPU or build lacks {needs}; use arithmetic='float32'")
    beside = measured.float32 if arithmetic == "int8" else rate  # attention does not run on integers
    read, copy, linears, attention = (
        Figure(r.per_s, "measured", f"{r.by}, {measured.date}") for r in (measured.read, measured.copy, rate, beside)
    )
    return Ceilings(
        machine.key, arithmetic, bandwidth or read, flops or linears, flops or attention, copy, *known,
        remark=_remark(machine, measured),
    )  # fmt: skip


def _runs_on_integers(dtype: str) -> bool:
    """Whether the engine by itself multiplies weights of this storage in int8."""
    return dtype in ("int8", "int4") or is_packed(dtype)


def measured_once(machine: Machine, on_stage: OnStage, *, remeasure: bool = False) -> Measurement:
    """This machine's figures, read from the cache file, or else measured and written there."""
    file = cache_directory() / "ceilings.json"
    entries = read_entries(file)
    measured = None if remeasure else _found(entries.get(machine.key), machine)
    if measured is None:
        measured = measure_ceilings(machine, on_stage)
        write_entries(file, entries | {machine.key: asdict(measured)})
    return measured


def read_entries(file: Path) -> dict[str, object]:
    """The entries of the cache file by machine; empty if there is no file, and with a warning if it is broken."""
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("%s: broken (%s); measuring again", file, error)
        return {}
    if not isinstance(entries, dict):
        logger.warning("%s: broken (a JSON %s); measuring again", file, type(entries).__name__)
        return {}
    return entries


def write_entries(file: Path, entries: dict[str, object]) -> None:
    """Write the cache file, whole or not at all; warns if it cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(entries, indent=1) + "\n", "It is as before")
    except OSError as error:
        logger.warning("%s: the measured ceilings cannot be kept (%s)", file, error)


def _found(entry: object, machine: Machine) -> Measurement | None:
    """An entry of the cache file as a Measurement; None if there is none, and with a warning if it is broken."""
    if entry is None:
        return None
    try:
        return _measurement(entry)
    except (KeyError, TypeError, ValueError) as error:
        logger.warning("the cached ceilings of %s are broken (%r); measuring again", machine.key, error)
        return None


def _measurement(entry: object) -> Measurement:
    if not isinstance(entry, dict):
        raise TypeError(f"a JSON {type(entry).__name__}")
    load = entry["load"]
    bfloat16, int8 = (None if entry[name] is None else _rate(entry[name]) for name in ("bfloat16", "int8"))
    return Measurement(
        date=str(entry["date"]), load=None if load is None else float(load),
        **{name: _rate(entry[name]) for name in ("read", "copy", "float32")},
        bfloat16=bfloat16, int8=int8,
    )  # fmt: skip


def _rate(entry: dict[str, object]) -> Rate:
    per_s = float(str(entry["per_s"]))
    if not 0 < per_s < math.inf:
        raise ValueError(f"per_s={per_s}")
    return Rate(per_s, str(entry["by"]))


def _remark(machine: Machine, measured: Measurement) -> str:
    if measured.load is None or measured.load < machine.threads / 2:
        return ""
    return (
        f"the ceilings were measured on {measured.date} beside a load of {measured.load:.1f} on {machine.threads} "
        "threads and may be too low; --remeasure when the machine is idle"
    )
