"""The ideal tables of `aquiline limits`: a roofline over contexts, batches, draft lengths and acceptance; and one line
on whether speculation pays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from aquiline.bench.theory.choice import DEFAULT_CONTEXTS, EXAMPLE_TAU, Grid
from aquiline.bench.theory.links import links_of
from aquiline.bench.theory.roofline import Roofline, Routing
from aquiline.models.shape import DraftShape, ModelShape
from aquiline.spec.drafting import Chain

EXPECTED_CHAIN = 3
"""The chain for which `expectation` says from which tau on it pays."""

Cell = dict[str, Any]
"""The JSON of one context and batch; `memory_bytes` holds whole contexts."""


def limits_of(roofline: Roofline, grid: Grid) -> dict[str, Any]:
    """The JSON of `aquiline limits`: target, draft and device, and a cell for each context and batch; with speculation
    if the roofline has a draft. A cell fits if the device has its memory_bytes, and None says that this is unknown.
    break_even: the tau from which on a chain pays, None for a chain that never does."""
    roofline = replace(roofline, routing=Routing(grid.overlap))
    longest = roofline.target.max_positions
    fitting = tuple(c for c in DEFAULT_CONTEXTS if longest is None or c <= longest)
    contexts = grid.contexts or fitting or (longest or 1,)
    models = _models(roofline)
    cells = [_cell(roofline, grid, models, context, batch) for context in contexts for batch in grid.batches]
    return models | {
        "ceilings": roofline.ceilings.as_dict(),
        "cells": cells,
        "links": links_of(roofline.target.body, grid.ranks, _rows_of(grid)) if grid.ranks > 1 else [],
        "notes": [*roofline.notes(), *_grid_notes(roofline, cells)],
        "expectation": expectation(costs_of(roofline, min(contexts))),
    }


def _models(roofline: Roofline) -> dict[str, Any]:
    target, draft = roofline.target, roofline.draft
    of_target = {"family": target.family, "num_active": target.num_active, "max_positions": target.max_positions}
    of_target |= {"kv_dtype": target.body.precision.kv.name} | _sizes(target)
    of_draft = draft and {
        "is_assumed": bool(draft.assumptions), "draft_vocab_size": draft.body.head.n, **_sizes(draft)
    }  # fmt: skip
    return {"target": of_target, "draft": of_draft}


def _rows_of(grid: Grid) -> list[int]:
    """Rows of plain decoding, and of the longest chain, for every batch."""
    return sorted({batch * rows for batch in grid.batches for rows in (1, max(grid.chains) + 1)})


def _sizes(model: ModelShape | DraftShape) -> dict[str, Any]:
    return {
        "num_parameters": model.num_parameters,
        "dtype": model.body.precision.name,
        "weight_bytes": model.stored_bytes,
        "kv_bytes_per_token": model.body.kv_bytes_per_token,
    }


def _cell(roofline: Roofline, grid: Grid, models: dict[str, Any], context: int, batch: int) -> Cell:
    step, has, chains = roofline.step(batch, context), roofline.ceilings.memory_bytes, grid.chains
    stored = [model for model in models.values() if model is not None]
    memory = sum(model["weight_bytes"] + batch * context * model["kv_bytes_per_token"] for model in stored)
    chains = chains if roofline.draft else ()
    return {
        "context": context,
        "batch": batch,
        **vars(step.cost),
        "bound": step.bound,
        "step_ms": step.seconds * 1e3,
        "baseline_tokens_per_s": batch / step.seconds,
        "memory_bytes": memory,
        "fits": None if has is None else memory <= has,
        "break_even": [
            {"num_spec_tokens": chain, "tau": roofline.break_even(Chain(chain), batch, context)} for chain in chains
        ],
        "speculative": [
            _speculation(roofline, chain, tau, context, batch)
            for chain in chains
            for tau in (grid.taus or dict.fromkeys((chain + 1, EXAMPLE_TAU)))
            if tau <= chain + 1
        ],
    }


def _speculation(roofline: Roofline, chain: int, tau: float, context: int, batch: int) -> dict[str, object]:
    """One chain at one tau; the tau of an upper bound is the most that the chain can commit. one_pass_saves: the share
    of its time that a parallel head (P-EAGLE, DFlash) would save at the same tau."""
    cycle = roofline.cycle(Chain(chain), tau, batch, context)
    return {
        "num_spec_tokens": chain,
        "tau": tau,
        "is_upper_bound": tau == chain + 1,
        "tokens_per_s": cycle.tokens_per_s,
        "speedup": cycle.speedup,
        "draft_ms": cycle.draft.seconds * 1e3,
        "verify_ms": cycle.verify.seconds * 1e3,
        "one_pass_saves": roofline.one_pass_saving(Chain(chain), tau, batch, context),
    }


def _grid_notes(roofline: Roofline, cells: list[Cell]) -> list[str]:
    """The doubts about the table's figures, beside the notes of the roofline."""
    found, ceilings, longest = list[str](), roofline.ceilings, roofline.target.max_positions
    if ceilings.bandwidth.source != ceilings.linear_flops.source:
        found.append(
            f"the bandwidth is {ceilings.bandwidth.source}, the FLOPs are {ceilings.linear_flops.source}: no device as "
            "a whole"
        )
    too_long = sorted({cell["context"] for cell in cells if longest and cell["context"] > longest})
    if too_long:
        found.append(f"context {', '.join(map(str, too_long))}: the model was built for {longest} positions")
    too_big = [f"{cell['context']} x {cell['batch']}" for cell in cells if cell["fits"] is False]
    if too_big and ceilings.memory_bytes:
        found.append(
            f"context x batch {', '.join(too_big)}: more than the {ceilings.memory_bytes / 1e9:.0f} GB of the device"
        )
    return found


@dataclass(frozen=True)
class Costs:
    """The costs that decide whether speculation pays.

    weight_bytes: that a step reads. cache_bytes: of the last-level cache, None if it is not known. rows: the time of a
    forward of EXPECTED_CHAIN + 1 rows, over that of a forward of one. chain: the same with the drafting of such a
    chain; None without a draft. is_ideal: computed at the device's best, not measured."""

    weight_bytes: float
    cache_bytes: int | None
    rows: float
    chain: float | None
    is_ideal: bool = False


def costs_of(roofline: Roofline, context: int) -> Costs:
    """The least that a chain costs one sequence of that many cached tokens."""
    one, drafting = roofline.step(1, context), Chain(EXPECTED_CHAIN)
    return Costs(
        one.cost.weight_bytes, roofline.ceilings.cache_bytes,
        roofline.step(1, context, drafting.max_nodes).seconds / one.seconds,
        None if roofline.draft is None else roofline.cycle(drafting, 1.0, 1, context).seconds / one.seconds,
        is_ideal=True,
    )  # fmt: skip


def expectation(costs: Costs) -> str:
    """One line on whether speculation pays: where the weights come from, the cost of verified rows, and the tau from
    which on a chain pays."""
    weights, cache = f"{costs.weight_bytes / 1e6:.0f} MB of weights", costs.cache_bytes
    if cache is None:
        source = f"a step reads {weights}"
    elif cache >= costs.weight_bytes:
        source = f"a last-level cache of {cache / 1e6:.0f} MB holds the {weights} of a step, so rows cost arithmetic"
    else:
        source = f"a step reads {weights} from memory, past a last-level cache of {cache / 1e6:.0f} MB"
    bound = "at least " if costs.is_ideal else ""
    told = f"{source}; {EXPECTED_CHAIN + 1} rows cost {bound}{costs.rows:.2f} steps"
    if costs.chain is None:
        return told
    if costs.chain >= EXPECTED_CHAIN + 1:
        return f"{told}, and with its drafting a chain of {EXPECTED_CHAIN} costs {costs.chain:.2f}: it cannot pay"
    return f"{told}, and with its drafting a chain of {EXPECTED_CHAIN} pays from a tau of {bound}{costs.chain:.2f} on"
