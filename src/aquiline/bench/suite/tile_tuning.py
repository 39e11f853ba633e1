"""A device's tiles: the inventory of runs, and a table of the fastest tiles of the shapes in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import triton

from aquiline.backends.gpu.gpu_backend import GpuBackend
from aquiline.bench.data.prompts import text_prompts
from aquiline.bench.suite.suite_plan import TuningWork
from aquiline.config import EngineConfig, PairConfig, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.ops.triton.tile_table import TileKey, TileTable, file_of
from aquiline.ops.triton.tuning import TileUse, Timer, device_us, inventory, search
from aquiline.spec.drafting import Drafting

RECORDED_TOKENS = 4
"""Tokens that each sequence of a recorded run writes: the first step builds the programs of its bucket."""


def device_named(device: str) -> str:
    """The name of a CUDA device. Raises ValueError where there is none."""
    if not (device.partition(":")[0] == "cuda" and torch.cuda.is_available()):
        raise ValueError(f"device={device!r}: tiles are timed on a CUDA device, and torch has none of this name here")
    return torch.cuda.get_device_name(device)


def record(llm: LLM, drafting: Drafting, prompts: Sequence[Sequence[int]]) -> list[TileUse]:
    """The inventory of a run: the uses of tiles in the programs that decoding these prompts builds."""
    backend = llm.engine.backend
    assert isinstance(backend, GpuBackend), backend
    sampling = SamplingParams(max_tokens=RECORDED_TOKENS, temperature=0.0, seed=0, ignore_eos=True)
    llm.generate([list(prompt) for prompt in prompts], sampling, drafting=drafting)
    return inventory(launch for program in backend.programs.values() for launch in program.launches)


def record_runs(pair: PairConfig, drafting: Drafting, work: TuningWork) -> list[TileUse]:
    """The inventory of a pair's runs over every context and batch of `work`."""
    found = list[TileUse]()
    for context in work.contexts:
        for batch in work.batches:
            config = EngineConfig(max_batch=batch, max_context=context + 4 * RECORDED_TOKENS, prefix_cache=False)
            llm = LLM.open(pair, config)
            if llm.models.tokenizer is None:
                raise ValueError(f"target={pair.target!r}: has no tokenizer.json, and prompts are text")
            prompts = [p.token_ids for p in text_prompts(context, batch, llm.models.tokenizer)]
            found += record(llm, drafting, prompts)
            llm.close()
    return found


def by_key(uses: Sequence[TileUse], kinds: Sequence[str], top: int) -> dict[TileKey, list[TileUse]]:
    """The uses of each key of these kinds: at most `top` keys, those that read the most bytes first."""
    found = defaultdict[TileKey, list[TileUse]](list)
    for use in uses:
        if use.key.kind in kinds:
            found[use.key].append(use)
    ranked = sorted(found.items(), key=lambda item: sum(use.count * use.least_bytes for use in item[1]), reverse=True)
    return dict(ranked[:top])


def tune(
    table: TileTable,
    keys: dict[TileKey, list[TileUse]],
    timer: Timer,
    device: torch.device,
    say: Callable[[str], None],
) -> TileTable:
    """The table with the fastest tiles of these keys, beside its entries of other keys; `say` gets a line for each."""
    entries = dict(table.entries)
    for key, uses in keys.items():
        entries[key] = found = search(key, uses, timer, device)
        say(f"{key}: {found.us:.1f} us, {found.default_us:.1f} with the default tiles: {found.tiles}")
    return TileTable(table.device, entries, triton.__version__)


def tune_device(
    name: str, keys: dict[TileKey, list[TileUse]], device: str, out: Path | None, say: Callable[[str], None]
) -> TileTable:
    """Tune these keys on a CUDA device of this name, and write its table to `out`, by default to where runs look."""
    path = out or file_of(name)
    with torch.cuda.device(device):
        table = tune(TileTable.of(name, path), keys, device_us, torch.device(device), say)
    table.write(path)
    say(f"written to {path}")
    return table
