"""The ideal table of `aquiline limits`: a roofline over contexts, batches, draft lengths and acceptance."""

from __future__ import annotations

from dataclasses import dataclass

from aquiline.bench.theory.choice import Grid
from aquiline.bench.theory.roofline import Ideal, Roofline
from aquiline.spec.drafting import Chain

EXAMPLE_TAU = 2.5
EXPECTED_CHAIN = 3
"""The chain of which `expectation` says from when on it pays."""


@dataclass(frozen=True)
class SpeculationBound:
    """One chain at one tau; is_upper_bound: tau is the most the chain can commit."""

    num_spec_tokens: int
    tau: float
    is_upper_bound: bool
    tokens_per_s: float
    speedup: float
    draft_ms: float
    verify_ms: float


@dataclass(frozen=True)
class Cell:
    """One context and batch. memory_bytes: weights, and keys and values of whole contexts; fits: whether the device has
    that memory, None if its size is not known."""

    context: int
    batch: int
    step: Ideal
    tokens_per_s: float
    memory_bytes: float
    fits: bool | None
    speculative: tuple[SpeculationBound, ...]

    def as_dict(self) -> dict[str, object]:
        """The cell as JSON."""
        cost = self.step.cost
        return {
            "context": self.context,
            "batch": self.batch,
            "weight_bytes": cost.weight_bytes,
            "kv_bytes": cost.kv_bytes,
            "linear_flops": cost.linear_flops,
            "attention_flops": cost.attention_flops,
            "bound": self.step.bound,
            "step_ms": self.step.seconds * 1e3,
            "baseline_tokens_per_s": self.tokens_per_s,
            "memory_bytes": self.memory_bytes,
            "fits": self.fits,
            "speculative": [vars(s) for s in self.speculative],
        }


def tabulate(roofline: Roofline, grid: Grid) -> list[Cell]:
    """A cell for each context and batch; with speculation if the roofline has a draft."""
    return [_cell(roofline, grid, context, batch) for context in grid.contexts for batch in grid.batches]


def notes(roofline: Roofline, cells: list[Cell]) -> list[str]:
    """Notes below the table: what limits the meaning of its figures."""
    found, ceilings, longest = roofline.notes(), roofline.ceilings, roofline.target.max_positions
    if ceilings.bandwidth.source != ceilings.linear_flops.source:
        found.append(
            f"the bandwidth is {ceilings.bandwidth.source}, the FLOPs are {ceilings.linear_flops.source}: no device as "
            "a whole"
        )
    too_long = sorted({cell.context for cell in cells if longest and cell.context > longest})
    if too_long:
        found.append(f"context {', '.join(map(str, too_long))}: the model was built for {longest} positions")
    too_big = [f"{cell.context} x {cell.batch}" for cell in cells if cell.fits is False]
    if too_big and ceilings.memory_bytes:
        found.append(
            f"context x batch {', '.join(too_big)}: more than the {ceilings.memory_bytes / 1e9:.0f} GB of the device"
        )
    return found


@dataclass(frozen=True)
class Costs:
    """What decides whether speculation pays.

    weight_bytes: that a step reads. cache_bytes: of the last-level cache, None if it is not known. rows: a forward of
    EXPECTED_CHAIN + 1 rows, in forwards of one. chain: the same with the drafting of such a chain; None without a
    draft. is_ideal: computed at the device's best, not measured."""

    weight_bytes: float
    cache_bytes: int | None
    rows: float
    chain: float | None
    is_ideal: bool = False


def expectation(costs: Costs) -> str:
    """What to expect of speculation, in one line: where the weights come from, what verified rows cost, and from which
    tau on a chain pays."""
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


def costs_of(roofline: Roofline, context: int) -> Costs:
    """The least that a chain costs one sequence of so many cached tokens."""
    one, drafting = roofline.step(1, context), Chain(EXPECTED_CHAIN)
    return Costs(
        one.cost.weight_bytes, roofline.ceilings.cache_bytes,
        roofline.step(1, context, drafting.max_nodes).seconds / one.seconds,
        None if roofline.draft is None else roofline.cycle(drafting, 1.0, 1, context).seconds / one.seconds,
        is_ideal=True,
    )  # fmt: skip


def describe(roofline: Roofline) -> dict[str, object]:
    """Target, draft and device as JSON."""
    target, draft, precision = roofline.target, roofline.draft, roofline.draft_precision
    return {
        "target": {
            "family": target.family,
            "num_parameters": target.num_parameters,
            "num_active": target.num_active,
            "dtype": target.precision.name,
            "kv_dtype": target.precision.kv.name,
            "weight_bytes": target.stored_bytes(target.precision),
            "kv_bytes_per_token": target.body.kv_bytes_per_token(target.precision),
            "max_positions": target.max_positions,
        },
        "draft": draft
        and {
            "is_assumed": bool(draft.assumptions),
            "num_parameters": draft.num_parameters,
            "draft_vocab_size": draft.body.head.n,
            "dtype": precision.name,
            "weight_bytes": draft.stored_bytes(precision),
            "kv_bytes_per_token": draft.body.kv_bytes_per_token(precision),
        },
        "ceilings": roofline.ceilings.as_dict(),
    }


def _cell(roofline: Roofline, grid: Grid, context: int, batch: int) -> Cell:
    step, memory = roofline.step(batch, context), roofline.memory_bytes(batch, context)
    has = roofline.ceilings.memory_bytes
    speculative = [
        _speculation(roofline, chain, tau, context, batch)
        for chain in (grid.chains if roofline.draft else ())
        for tau in (grid.taus or dict.fromkeys((chain + 1, EXAMPLE_TAU)))
        if tau <= chain + 1
    ]
    return Cell(
        context=context, batch=batch, step=step, tokens_per_s=batch / step.seconds, memory_bytes=memory,
        fits=None if has is None else memory <= has, speculative=tuple(speculative),
    )  # fmt: skip


def _speculation(roofline: Roofline, chain: int, tau: float, context: int, batch: int) -> SpeculationBound:
    drafting = Chain(chain)
    cycle = roofline.cycle(drafting, tau, batch, context)
    return SpeculationBound(
        num_spec_tokens=chain, tau=tau, is_upper_bound=tau == chain + 1, tokens_per_s=batch * tau / cycle.seconds,
        speedup=roofline.speedup(drafting, tau, batch, context), draft_ms=cycle.draft.seconds * 1e3,
        verify_ms=cycle.verify.seconds * 1e3,
    )  # fmt: skip
