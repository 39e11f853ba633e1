"""The plan of adaptive drafting for the next steps: which sequences draft, and how many tokens a node and a pass must
bring. Numbers only.

A step of B sequences that drafts nothing commits B tokens. Before the draft model runs, its tokens are not known, but
the expected number of its nodes of each chance is (outlook_of). Of all nodes that the drafts of some sequences should
have, the likeliest are verified. best_drafting tries numbers of drafting sequences and of verified nodes, and takes the
pair with the most tokens per millisecond. The cost of rows has edges, so the search does not stop at the first node
that loses.

Prompt rows run anyway: nodes pay their marginal cost, and the prompt's own time is left out.

The best plan depends on the nodes that drafts should have, these depend on where chains end, and that depends on the
price of time. So each plan uses the price of the plan before. The tokens that drafting steps really bring per
millisecond correct the planned rate.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from aquiline.engine.control.acceptance import Margins, Pool, Record, chances_of, margins_of, seconds_of
from aquiline.engine.control.costs import StepCosts
from aquiline.spec.confidence import Cut

BINS_PER_HALVING, NUM_BINS = 4, 32
"""Chances are told apart by quarters of a power of two: bin i holds chances of about 2 ** (-i / BINS_PER_HALVING)."""

BIN_CHANCES = tuple(2.0 ** (-i / BINS_PER_HALVING) for i in range(NUM_BINS))
"""The chance that a bin stands for."""

MIN_NODE_TOKENS = 0.01
"""Tokens that a verified token must be expected to bring, even where a row costs nothing."""

MAX_STEP_NODES, BASE_NODES, NODES_PER_SEQUENCE = 48, 10, 4
"""A plan considers up to BASE_NODES nodes of a step and NODES_PER_SEQUENCE more for each sequence that may draft, but
no more than MAX_STEP_NODES."""

SHARE_LEVELS = 10
"""Sequences whose first-token acceptance rounds to the same tenth share an outlook."""

OUTLOOK_PLANS = 4
"""Number of plans that use an outlook before it is computed again. Chances and the price change slowly."""

MIN_SPEEDUP = 1.01
"""A plan that drafts must be this many times as fast as one that does not."""

RATE_SMOOTHING = 1 / 8
"""Weight of a timed step in the correction of the planned rate."""


class Outlook(NamedTuple):
    """What one sequence's draft is expected to have in a step. nodes [NUM_BINS]: the number of nodes in each bin of
    chances; passes: how often each pass of the draft runs for the sequence. The first one always does."""

    nodes: list[float]
    passes: list[float]


class Price(NamedTuple):
    """The prices that a plan sets. rate: tokens per millisecond; threshold: the chance from which a node is verified;
    pass_ms: a sequence's share of the cost of a further pass."""

    rate: float
    threshold: float
    pass_ms: float


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
    number of verified nodes; plain: tokens per millisecond of a step that drafts nothing; ms: the step's time;
    draft_ms: the part of it that drafting takes; row_ms: the time of a step with 0, 1, ... nodes, without its drafting
    and its prompts; price: its rate, and the prices that follow."""

    num_drafting: int
    num_nodes: int
    plain: float
    ms: float
    draft_ms: float
    row_ms: tuple[float, ...]
    price: Price


class Terms(NamedTuple):
    """The terms on which one sequence drafts. length: levels of its chain, on average; worth: the expected tokens of
    the chain, less those that its time could bring otherwise."""

    cut: Cut
    length: int
    worth: float


class DraftingPlan(NamedTuple):
    """A plan for some steps. rate: the price of time, in tokens per millisecond; row_ms: what a copied token costs;
    num_rows: rows of a step, copies apart. If any sequence drafts: planned_rate: the rate of the steps; row_costs: the
    cost of their nodes, see StepInput; least_share: the first-token acceptance from which a sequence drafts; part_ms:
    its part of the passes; node: what a node costs on average, in tokens; least: the cost of the cheapest one."""

    rate: float
    row_ms: float
    num_rows: int
    planned_rate: float = 0.0
    row_costs: tuple[float, ...] = ()
    least_share: float = 0.0
    part_ms: float = 0.0
    node: float = 0.0
    least: float = 0.0


class Planner:
    """Plans from the current costs."""

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self._price: Price | None = None  # of the last plan
        self._outlook_cache: dict[tuple[Pool, float, int], tuple[float, Outlook]] = {}
        self._num_plans = 0
        self._correction = 1.0  # tokens per millisecond that drafting steps brought, as a share of the planned ones

    def plan(
        self, load: StepLoad, records: Sequence[Record], most_levels: int, least_speedup: float = MIN_SPEEDUP
    ) -> DraftingPlan:
        """The best plan. records: of the sequences that may draft, in descending order of first-token acceptance;
        least_speedup: a plan that drafts must be expected to be so many times as fast as one that does not."""
        most_nodes = min(MAX_STEP_NODES, BASE_NODES + NODES_PER_SEQUENCE * len(records)) if records else 0
        for _ in range(2 if self._price is None else 1):
            if self._num_plans % OUTLOOK_PLANS == 0:
                self._outlook_cache.clear()
            outlooks = [self._outlook(record, most_levels)[1] for record in records]
            best = best_drafting(self.costs, load, outlooks, most_nodes, min(1.0, least_speedup))
            self._price = best.price
        self._num_plans += 1
        rate = best.price.rate * self._correction
        if not best.num_drafting or rate <= best.plain * least_speedup:
            self._correction += (1 - self._correction) * RATE_SMOOTHING
            return DraftingPlan(best.plain, self.costs.row(load.rows, max(2, load.tokens)), load.rows)
        row_costs = tuple([rate * (ms - best.row_ms[0]) for ms in best.row_ms])
        num_rows = load.rows + best.num_nodes
        return DraftingPlan(
            rate, self.costs.row(num_rows, max(2, load.tokens)), num_rows, best.price.rate, row_costs,
            least_share=records[best.num_drafting - 1].share(0) if best.num_drafting < len(records) else 0.0,
            part_ms=best.draft_ms / best.num_drafting, node=row_costs[best.num_nodes] / best.num_nodes,
            least=max(MIN_NODE_TOKENS, min(more - less for less, more in pairwise(row_costs))),
        )  # fmt: skip

    def terms(self, plan: DraftingPlan, record: Record, most_levels: int) -> Terms | None:
        """The terms on which a sequence drafts, None if it does not."""
        if not plan.planned_rate or record.share(0) < plan.least_share:
            return None
        limit, outlook = self._outlook(record, most_levels)
        worth = sum([n * (chance - plan.node) for n, chance in zip(outlook.nodes, BIN_CHANCES, strict=True)
                     if chance > plan.node])  # fmt: skip
        cut = Cut(chances_of(record), seconds_of(record), plan.least, max(plan.least, limit))
        return Terms(cut, max(1, round(sum(outlook.passes))), worth - plan.rate * plan.part_ms)

    def learn_rate(self, rate: float, planned_rate: float) -> None:
        """Learn from a step that was planned at planned_rate and brought `rate` tokens per millisecond."""
        self._correction += (min(2.0, max(0.5, rate / planned_rate)) - self._correction) * RATE_SMOOTHING

    def _outlook(self, record: Record, most: int) -> tuple[float, Outlook]:
        """The chance from which on a sequence drafts the next level, and its outlook."""
        key = record.pool, round(record.share(0) * SHARE_LEVELS) / SHARE_LEVELS, most
        found = self._outlook_cache.get(key)
        if found is None:
            margins = margins_of(*key[:2])
            least = math.inf if self._price is None else least_pass_of(margins, self._price)
            found = self._outlook_cache[key] = least, outlook_of(margins, least, most)
        return found


def least_pass_of(margins: Margins, price: Price) -> float:
    """The chance of a token from which it pays to draft the next level."""
    cost, threshold = price.rate * price.pass_ms, price.threshold
    kinds = [*zip(margins.deeper, margins.chances, strict=True), *zip(margins.deeper, margins.seconds, strict=True)]

    def lacks(chance: float) -> bool:
        return sum([share * max(0.0, chance * below - threshold) for share, below in kinds]) < cost

    first = bisect_left(BIN_CHANCES, True, key=lacks)  # a level brings less, the smaller the chance to reach it
    return BIN_CHANCES[first - 1] if first else math.inf


def outlook_of(margins: Margins, least_pass: float, most: int) -> Outlook:
    """The outlook of a chain of up to `most` levels that continues below tokens with a chance of at least
    least_pass."""
    token_bins, leaf_bins = ([_bin(chance) for chance in own] for own in (margins.chances, margins.seconds))
    nodes, passes, last = [0.0] * NUM_BINS, list[float](), _bin(least_pass) if least_pass <= 1 else -1
    parents, shares = {0: 1.0}, margins.first
    for _ in range(most):
        passes.append(sum(parents.values()))
        below: dict[int, float] = {}
        for above, count in parents.items():
            for share, token, leaf in zip(shares, token_bins, leaf_bins, strict=True):
                token += above
                leaf += above
                if leaf < NUM_BINS:
                    nodes[leaf] += count * share
                if token < NUM_BINS:
                    nodes[token] += count * share
                    if token <= last:
                        below[token] = below.get(token, 0.0) + count * share
        if not below:
            break
        parents, shares = below, margins.deeper
    return Outlook(nodes, passes)


def best_drafting(
    costs: StepCosts, load: StepLoad, outlooks: Sequence[Outlook], most_nodes: int, least_speedup: float = 1.0
) -> BestDrafting:
    """The best number of drafting sequences, counted from the first, and of nodes verified, up to most_nodes; nobody
    drafts if that is not more than least_speedup times as fast as a step without."""
    keys = load.all_keys / max(1, load.tokens)
    chunk_ms = costs.verify(load.rows) - costs.verify(load.rows - load.chunk_rows)
    row_ms = tuple([
        ms - chunk_ms + costs.host_ms for ms in costs.verify_each(load.rows, most_nodes, load.all_keys, keys)
    ])  # fmt: skip
    plain = load.tokens / row_ms[0]
    best, price = plain * least_speedup, Price(plain, 1.0, costs.draft_ms((1,)))
    found = BestDrafting(0, 0, plain, row_ms[0], 0.0, row_ms, price)
    nodes, passes, draft_keys = [0.0] * NUM_BINS, list[float](), 0.0
    tried = _sizes(len(outlooks))
    for count, outlook in enumerate(outlooks, 1):
        nodes = [a + b for a, b in zip(nodes, outlook.nodes, strict=True)]
        passes += [0.0] * (len(outlook.passes) - len(passes))
        for level, often in enumerate(outlook.passes):
            passes[level] += often
            draft_keys += often * load.keys[count - 1]
        if count not in tried:
            continue
        draft_ms = costs.draft_ms(passes, draft_keys)
        further = max(1.0, passes[1]) if len(passes) > 1 else 1.0
        pass_ms = costs.deeper_pass(further) / further + costs.draft_keys(keys)
        for num_nodes, tokens, chance in _filled(nodes, most_nodes):
            ms = row_ms[num_nodes] + draft_ms
            rate = (load.tokens + tokens) / ms
            if rate > best:
                best = rate
                found = BestDrafting(count, num_nodes, plain, ms, draft_ms, row_ms, Price(rate, chance, pass_ms))
    return found


def best_copies(costs: StepCosts, rate: float, rows: int, gains: Sequence[Sequence[float]]) -> list[int]:
    """Choose for each of several copies how many of its first tokens are verified, if a millisecond must bring `rate`
    tokens and the step has `rows` rows without them. gains[i]: the expected tokens of each token of copy i, descending.

    The likeliest tokens of all copies are added one after the other, and the most valuable number of them is taken. A
    constant price of a row would not do: a row costs nothing up to an edge, and a whole tile of rows beyond it."""
    additions = [(gain, -place, i) for i, own in enumerate(gains) for place, gain in enumerate(own)]
    if len(gains) > 1:
        additions.sort(reverse=True)
    row_ms = costs.further_rows(rows, len(additions))
    value, most, count = 0.0, 0.0, 0
    for number, (gain, _, _) in enumerate(additions, 1):
        value += gain
        worth = value - rate * row_ms[number]
        if worth > most:
            most, count = worth, number
    kept = [0] * len(gains)
    for _, _, i in additions[:count]:
        kept[i] += 1
    return kept


def _bin(chance: float) -> int:
    return NUM_BINS if chance < BIN_CHANCES[-1] else round(-BINS_PER_HALVING * math.log2(chance))


def _sizes(count: int) -> set[int]:
    """The numbers of sequences that are tried: each up to four, and then in steps of about a quarter."""
    sizes, size = {count}, 1
    while size < count:
        sizes.add(size)
        size += max(1, size // 4)
    return sizes


def _filled(nodes: Sequence[float], most: int) -> list[tuple[int, float, float]]:
    """For 1, 2, ... rows of the likeliest nodes: the number of rows, the tokens that they should bring, and the chance
    of the last node."""
    found, tokens, room = list[tuple[int, float, float]](), 0.0, 1.0
    for count, chance in zip(nodes, BIN_CHANCES, strict=True):
        while count >= room and len(found) < most:
            tokens += room * chance
            count -= room
            room = 1.0
            found.append((len(found) + 1, tokens, chance))
        if len(found) >= most:
            break
        if count > 0.0:
            tokens += count * chance
            room -= count
            last = chance
    if room < 1.0 and len(found) < most:
        found.append((len(found) + 1, tokens, last))
    return found
