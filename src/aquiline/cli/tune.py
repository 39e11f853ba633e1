"""`aquiline tune`: the fastest tiles of a GPU's kernels, measured."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from aquiline.bench.suite.suite_plan import KINDS_OF, Tuned, TuningWork
from aquiline.cli.fields import Fields, with_options
from aquiline.cli.options import named
from aquiline.config import PairConfig
from aquiline.spec.registry import DraftingChoice
from aquiline.writing import check_place, write_whole

EXAMPLES = """
Examples:

  aquiline tune all --target ./target --draft ./draft --num-spec-tokens 3

  aquiline tune gemm --target ./target --drafter none --batch 1 8 --top 8

  aquiline tune attention --target ./target --context 8192 32768 --inventory inventory.json --out tiles.json
"""


@with_options
def tune(
    what: Annotated[Tuned, typer.Argument(help="What is tuned: matrix products (gemm), attention, or all.")] = "all",
    *,
    pair: Annotated[PairConfig, Fields(only=("target", "draft", "dtype", "draft_dtype"))],
    choice: DraftingChoice,
    work: TuningWork,
    device: Annotated[str, typer.Option(help="CUDA device: cuda or cuda:N.")] = "cuda",
    out: Annotated[
        Path | None, typer.Option(help="File of the table. Default: where runs on this device look for it.")
    ] = None,
    inventory: Annotated[
        Path | None, typer.Option(help="Write every shape of the recorded runs, with its count, to this file.")
    ] = None,
) -> None:
    """Time a pair's kernels with different tiles on a CUDA device, and write the fastest to a table.

    Short runs are recorded first, each context beside each batch. Tiles decide in which order sums are added up, so a
    shape has one entry for every number of rows, and texts of runs with another table may differ. Without an entry a
    shape runs with default tiles, which were not measured.
    """
    from aquiline.models.known_pairs import checkpoints

    suite = _suite(device)
    name = suite.device_named(device)
    for place in (out, inventory):
        check_place(place)
    pair = named(replace(pair, device=device))
    drafter = "none" if checkpoints(pair.target, pair.draft).draft is None else "chain"
    uses = suite.record_runs(pair, choice.value(drafter), work)
    if inventory is not None:
        write_whole(
            inventory, json.dumps([use.as_dict() for use in uses], indent=1) + "\n", "Nothing was tuned yet"
        )  # fmt: skip
    table = suite.tune_device(name, suite.by_key(uses, KINDS_OF[what], work.top), device, out, print)
    print(f"{len(table.entries)} shapes of {name} are tuned")


def _suite(device: str) -> ModuleType:
    """What tunes; it needs torch and Triton. Raises ValueError where one of them is missing."""
    try:
        return import_module("aquiline.bench.suite.tile_tuning")
    except ImportError as error:
        raise ValueError(f"device={device!r}: {error.name} is not installed; pip install torch triton") from None


tune.__doc__ = f"{inspect.getdoc(tune)}\n{EXAMPLES}"
