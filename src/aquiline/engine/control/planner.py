"""The plan of adaptive drafting for the next steps: which sequences draft, and how many tokens a node and a pass must
bring. Numbers only.

A step of B sequences that drafts nothing commits B tokens. Before the draft model runs, its tokens are not known, but
the expected number of its nodes of each chance is, wherever its chains end (outlooks_of). Of all nodes that the drafts
of some sequences should have, the likeliest are verified. best_drafting tries numbers of drafting sequences and of
verified nodes, every number of levels, and several chances from which a chain goes on, and takes those with the most
tokens per millisecond. Neither the cost of rows, which has edges, nor that of passes, which sequences share, lets a
search stop at the first node or level that loses.

Prompt rows run anyway: nodes pay their marginal cost, and the prompt's own time is left out. The tokens that drafting
steps really bring per millisecond correct the planned rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aquiline.engine.control.acceptance import Margins, Pool, Record, chances_of, margins_of, seconds_of
from aquiline.engine.control.costs import StepCosts
from aquiline.spec.confidence import Cut

BINS_PER_HALVING, NUM_BINS = 4, 32
"""Chances are told apart by quarters of a power of two: bin i holds chances of about 2 ** (-i / BINS_PER_HALVING)."""

BIN_CHANCES = 2.0 ** (-np.arange(NUM_BINS) / BINS_PER_HALVING)
"""The chance that a bin stands for."""

LEAST_PASSES = BIN_CHANCES[[3, 5, 8, 12]]
"""The chances of a token from which a plan may let the draft go on below it: about 0.6, 0.4, 0.25 and 0.125."""

_WIDTH = NUM_BINS + BINS_PER_HALVING + 2
"""Numbers of bins by which a chance may be below another, and at last one that never occurs."""

_BELOW = np.arange(NUM_BINS) - np.arange(NUM_BINS)[:, None]
_BELOW[_BELOW < 0] = _WIDTH - 1
"""[i, j]: by how many bins a chance of bin j is below one of bin i."""

MIN_NODE_TOKENS = 0.01
"""Tokens that a verified token must be expected to bring, even where a row costs nothing."""

MAX_STEP_NODES, BASE_NODES, NODES_PER_SEQUENCE = 128, 10, 4
"""A plan considers up to BASE_NODES nodes of a step and NODES_PER_SEQUENCE more for each sequence that may draft, but
no more than MAX_STEP_NODES."""

EACH_NODE, NODE_STRIDE = 24, 4
"""Numbers of nodes up to the first are all considered, then every fourth."""

SHARE_LEVELS = 10
"""Sequences whose first-token acceptance rounds to the same tenth share an outlook."""

OUTLOOK_PLANS = 4
"""Number of plans that use an outlook before it is computed again. Chances and the price change slowly."""

MIN_SPEEDUP = 1.01
"""A plan that drafts must be this many times as fast as one that does not."""

FADING = 1 / 8
"""Share of the correction that a plan forgets if nothing is drafted."""

RATE_MEMORY = 24
"""Tokens of timed steps after which half of the correction of the planned rate is theirs."""


class Outlook(NamedTuple):
    """What one sequence's draft is expected to have in a step, if its chain has up to 1, 2, ... levels, and goes on
    below tokens of the chances LEAST_PASSES. nodes [levels, LEAST_PASSES, NUM_BINS]: the number of nodes in each bin of
    chances; passes [levels, LEAST_PASSES]: how often the last of the levels is drafted. The first one always is."""

    nodes: NDArray[np.float64]
    passes: NDArray[np.float64]


@dataclass(frozen=True)
class StepLoad:
    """The part of a step that does not depend on drafting. rows: rows of its forward, of which chunk_rows belong to
    prompts; tokens: the number that it commits; all_keys: the keys of its sequences; keys[i]: those of the i-th
    sequence that may draft."""

    rows: int
    chunk_rows: int
    tokens: int
    all_keys: float
    keys: tuple[float, ...]


@dataclass(frozen=True)
class BestDrafting:
    """The fastest drafting of a step. num_drafting: how many sequences draft, counted from the first; num_nodes: the
    number of verified nodes; plain: tokens per millisecond of a step that drafts nothing; rate: those of this step;
    row_ms: the time of a step with 0, 1, ... nodes, without its drafting and its prompts; draft_ms: the time that
    drafting takes; levels: of chains at most; least_pass: index in LEAST_PASSES."""

    num_drafting: int
    num_nodes: int
    plain: float
    rate: float
    row_ms: tuple[float, ...]
    draft_ms: float = 0.0
    levels: int = 0
    least_pass: int = 0


class ChainWorth(NamedTuple):
    """What one sequence's chain should bring. length: its levels on average; worth: its expected tokens, less those
    that its time could bring otherwise."""

    length: int
    worth: float


class DraftingPlan(NamedTuple):
    """A plan for some steps. rate: the price of time, in tokens per millisecond; row_ms: what a copied token costs;
    num_rows: rows of a step, copies apart; speedup: the rate over that of steps that draft nothing. If any sequence
    drafts: planned_rate: the rate of the steps; row_costs: the cost of their nodes, see StepInput; least_share: the
    first-token acceptance from which a sequence drafts; part_ms: its part of the passes; node: what a node costs on
    average, in tokens; least: the cost of the cheapest one; levels, least_pass: where chains end, see BestDrafting."""

    rate: float
    row_ms: float
    num_rows: int
    speedup: float = 1.0
    planned_rate: float = 0.0
    row_costs: tuple[float, ...] = ()
    least_share: float = 0.0
    part_ms: float = 0.0
    node: float = 0.0
    least: float = 0.0
    levels: int = 0
    least_pass: int = 0


class Planner:
    """Plans from the current costs."""

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self._outlook_cache: dict[tuple[Pool, float, int], Outlook] = {}
        self._num_plans = 0
        self._correction = 1.0  # tokens per millisecond that drafting steps brought, as a share of the planned ones

    def plan(
        self, load: StepLoad, records: Sequence[Record], most_levels: int, least_speedup: float = MIN_SPEEDUP
    ) -> DraftingPlan:
        """The best plan. records: of the sequences that may draft, in descending order of first-token acceptance;
        least_speedup: a plan that drafts must be expected to be so many times as fast as one that does not."""
        most_nodes = min(MAX_STEP_NODES, BASE_NODES + NODES_PER_SEQUENCE * len(records)) if records else 0
        if self._num_plans % OUTLOOK_PLANS == 0:
            self._outlook_cache.clear()
        outlooks = self._outlooks(records, most_levels)
        best = best_drafting(self.costs, load, outlooks, most_nodes, min(1.0, least_speedup))
        self._num_plans += 1
        rate = best.rate * self._correction
        if not best.num_drafting or rate <= best.plain * least_speedup:
            self._correction += (1 - self._correction) * FADING
            return DraftingPlan(best.plain, self.costs.row(load.rows, max(2, load.tokens)), load.rows)
        row_costs = tuple([rate * (ms - best.row_ms[0]) for ms in best.row_ms])
        num_rows = load.rows + best.num_nodes
        return DraftingPlan(
            rate, self.costs.row(num_rows, max(2, load.tokens)), num_rows, rate / best.plain, best.rate, row_costs,
            least_share=records[best.num_drafting - 1].share(0) if best.num_drafting < len(records) else 0.0,
            part_ms=best.draft_ms / best.num_drafting, node=row_costs[best.num_nodes] / best.num_nodes,
            least=max(MIN_NODE_TOKENS, min(more - less for less, more in pairwise(row_costs))),
            levels=best.levels, least_pass=best.least_pass,
        )  # fmt: skip

    def cut(self, plan: DraftingPlan, record: Record) -> Cut | None:
        """Where the chain of a sequence ends, None if it does not draft."""
        if not plan.planned_rate or record.share(0) < plan.least_share:
            return None
        least_pass = max(plan.least, float(LEAST_PASSES[plan.least_pass]))
        return Cut(chances_of(record), seconds_of(record), plan.least, least_pass)

    def chain_worth(self, plan: DraftingPlan, record: Record, most_levels: int) -> ChainWorth:
        """What the chain of a sequence that drafts should bring; most_levels: that it may have."""
        (outlook,) = self._outlooks([record], most_levels)
        levels, place = min(most_levels, plan.levels), plan.least_pass
        worth = float(outlook.nodes[levels - 1, place] @ np.maximum(0.0, BIN_CHANCES - plan.node))
        length = max(1, round(float(outlook.passes[:levels, place].sum())))
        return ChainWorth(length, worth - plan.rate * plan.part_ms)

    def learn_rate(self, tokens: int, ms: float, planned_rate: float) -> None:
        """Learn from a step that was planned at planned_rate and brought `tokens` in `ms`."""
        ratio = min(2.0, max(0.5, tokens / ms / planned_rate))
        self._correction += (ratio - self._correction) * tokens / (tokens + RATE_MEMORY)

    def _outlooks(self, records: Sequence[Record], most: int) -> list[Outlook]:
        keys = [(record.pool, round(record.share(0) * SHARE_LEVELS) / SHARE_LEVELS, most) for record in records]
        missing = [key for key in dict.fromkeys(keys) if key not in self._outlook_cache]
        if missing:
            found = outlooks_of([margins_of(pool, share) for pool, share, _ in missing], most)
            self._outlook_cache.update(zip(missing, found, strict=True))
        return [self._outlook_cache[key] for key in keys]


def outlooks_of(margins: Sequence[Margins], most: int) -> list[Outlook]:
    """The outlooks of chains of up to `most` levels, by the margins of their tokens."""
    tokens, each = _below(margins)
    goes_on = LEAST_PASSES[:, None] <= BIN_CHANCES
    parents = np.zeros((most, len(margins), *goes_on.shape))
    parents[0, :, :, 0] = 1.0
    for level in range(1, most):
        np.multiply(parents[level - 1] @ tokens[int(level > 1)], goes_on, out=parents[level])
    nodes = parents @ each[1]
    nodes[0] = parents[0] @ each[0]
    nodes, passes = nodes.cumsum(axis=0), parents.sum(axis=3)
    return [Outlook(nodes[:, i], passes[:, i]) for i in range(len(margins))]


def best_drafting(
    costs: StepCosts, load: StepLoad, outlooks: Sequence[Outlook], most_nodes: int, least_speedup: float = 1.0
) -> BestDrafting:
    """The best number of drafting sequences, counted from the first, of levels, and of nodes verified, up to
    most_nodes, and the best place for chains to end. Nobody drafts if that is not more than least_speedup times as fast
    as a step without."""
    keys = load.all_keys / max(1, load.tokens)
    chunk_ms = costs.verify(load.rows) - costs.verify(load.rows - load.chunk_rows)
    numbers = [*range(min(EACH_NODE, most_nodes)), *range(EACH_NODE, most_nodes, NODE_STRIDE), most_nodes]
    forwards = costs.verify_each(load.rows, numbers, load.all_keys, keys)
    found_ms = [costs.step_ms(ms - chunk_ms) for ms in forwards]
    row_ms = tuple(np.interp(range(most_nodes + 1), numbers, found_ms).tolist())
    plain = load.tokens / row_ms[0]
    found = BestDrafting(0, 0, plain, plain, row_ms)
    if not outlooks:
        return found
    counts = _sizes(len(outlooks))
    kinds = [*{id(outlook): outlook for outlook in outlooks}.values()]  # sequences share outlooks
    members = np.array([[outlook is kind for kind in kinds] for outlook in outlooks], float)
    number, read = (np.cumsum(each, axis=0)[counts - 1] for each in (members, members * np.array(load.keys)[:, None]))
    of_nodes, of_passes = (np.array(parts) for parts in zip(*kinds, strict=True))
    nodes, passes, reads = _sums(number, of_nodes), _sums(number, of_passes), _sums(read, of_passes)
    draft_ms = costs.draft_each(counts, passes, reads) * (1.0 + costs.host_share)
    rates = (load.tokens + _filled(nodes, np.array(numbers[1:]))) / (draft_ms[..., None] + np.array(found_ms[1:]))
    place = int(rates.argmax())
    if rates.flat[place] > plain * least_speedup:
        size, level, least_pass, node = (int(i) for i in np.unravel_index(place, rates.shape))
        drafting, rate = float(draft_ms[size, level, least_pass]), float(rates.flat[place])
        num_nodes = numbers[node + 1]
        return BestDrafting(int(counts[size]), num_nodes, plain, rate, row_ms, drafting, level + 1, least_pass)
    return found


def best_copies(
    costs: StepCosts, rate: float, rows: int, gains: Sequence[Sequence[float]], alone_ms: float = 0.0
) -> list[int]:
    """Choose for each of several copies how many of its first tokens are verified, if a millisecond must bring `rate`
    tokens and the step has `rows` rows without them. gains[i]: the expected tokens of each token of copy i, descending;
    alone_ms: what it costs that a step with copies is not repeated.

    The likeliest tokens of all copies are added one after the other, and the most valuable number of them is taken. A
    constant price of a row would not do: a row costs nothing up to an edge, and a whole tile of rows beyond it."""
    additions = [(gain, -place, i) for i, own in enumerate(gains) for place, gain in enumerate(own)]
    if len(gains) > 1:
        additions.sort(reverse=True)
    row_ms = costs.further_rows(rows, len(additions))
    value, most, count = 0.0, rate * alone_ms, 0
    for number, (gain, _, _) in enumerate(additions, 1):
        value += gain
        worth = value - rate * row_ms[number]
        if worth > most:
            most, count = worth, number
    kept = [0] * len(gains)
    for _, _, i in additions[:count]:
        kept[i] += 1
    return kept


def _below(margins: Sequence[Margins]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """[2, margins, NUM_BINS, NUM_BINS], at the first level and at a deeper one: the number of tokens in each bin below
    a token of one bin, and the number of tokens and runners-up."""
    shares = np.array([[own.first for own in margins], [own.deeper for own in margins]])
    chances = np.array([[own.chances for own in margins], [own.seconds for own in margins]])
    lower = np.rint(-BINS_PER_HALVING * np.log2(np.maximum(chances, 0.5 * BIN_CHANCES[-1]))).astype(int)
    size = 2 * len(margins) * _WIDTH
    places = lower + _WIDTH * np.arange(len(margins))[:, None]
    places = places + np.array([0, size // 2])[:, None, None, None]  # [level, token or runner-up, margins, NUM_MARGINS]
    tokens, seconds = (
        np.bincount(own.ravel(), shares.ravel(), size).reshape(2, -1, _WIDTH) for own in places.swapaxes(0, 1)
    )
    return np.take(tokens, _BELOW, axis=-1), np.take(tokens + seconds, _BELOW, axis=-1)


def _sizes(count: int) -> NDArray[np.int64]:
    """The numbers of sequences that are tried: each up to four, and then twice as many each."""
    sizes = [1]
    while sizes[-1] < count:
        sizes.append(min(count, sizes[-1] + (sizes[-1] if sizes[-1] >= 4 else 1)))
    return np.array(sizes)


def _sums(weights: NDArray[np.float64], parts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums of the parts, by rows of their weights. [rows, ...]"""
    return (weights @ parts.reshape(len(parts), -1)).reshape(-1, *parts.shape[1:])


def _filled(nodes: NDArray[np.float64], numbers: NDArray[np.int64]) -> NDArray[np.float64]:
    """[..., numbers]: the tokens that so many rows of the likeliest nodes should bring, in ascending order. nodes
    [..., NUM_BINS].

    Tokens by rows are a line through the bins. The lines of all cases are joined into one, far from each other."""
    flat = nodes.reshape(-1, NUM_BINS)
    rows, tokens = np.zeros((2, len(flat), NUM_BINS + 2))
    rows[:, 1:-1], tokens[:, 1:-1] = np.cumsum(flat, axis=1), np.cumsum(flat * BIN_CHANCES, axis=1)
    tokens[:, -1] = tokens[:, -2]
    far = rows[:, -2].max(initial=0.0) + numbers[-1] + 1.0
    rows[:, -1] = far
    starts = 2.0 * far * np.arange(len(flat))[:, None]
    found: NDArray[np.float64] = np.interp(starts + numbers, (starts + rows).ravel(), tokens.ravel())
    return found.reshape(*nodes.shape[:-1], len(numbers))
