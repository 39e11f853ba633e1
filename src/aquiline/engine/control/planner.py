"""What drafting pays in the steps to come, and on what terms: which sequences draft, what a node and a pass must bring.

The best plan (plan.py) follows from what drafts should have, and that from where they stop, and that from the price of
time. So each plan stands on the price of the one before. What drafting steps really brought corrects the rate that they
were planned at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from aquiline.engine.control.acceptance import Pool, Record, chances_of, margins_of, seconds_of
from aquiline.engine.control.costs import StepCosts
from aquiline.engine.control.plan import (
    CHANCES,
    Load,
    Outlook,
    Price,
    best_drafting,
    least_pass_of,
    outlook_of,
)
from aquiline.spec.confidence import Cut

LEAST_NODE = 0.01
"""Tokens that a verified token should bring at least, where a row seems to cost nothing."""

MOST_NODES, NODES_BESIDE, NODES_EACH = 48, 10, 4
"""Nodes of a step that are looked at: up to MOST_NODES, or so many, and so many more for each sequence that drafts."""

FINE = 10
"""Sequences whose first tokens are right about as often, to a part of so many, have the same outlook."""

KNOWN = 4
"""Plans for which an outlook holds: chances and the price change slowly."""

MIN_GAIN = 1.01
"""By how much a plan that drafts must be faster than one that does not."""

SETTLING = 1 / 8
"""Share of a step that was looked at in the correction of the planned rate."""


class Terms(NamedTuple):
    """On what terms one sequence drafts. length: levels of its chain, on average; worth: tokens that they should bring
    beyond what their time could bring otherwise."""

    cut: Cut
    length: int
    worth: float


class Plan(NamedTuple):
    """What holds for some steps. rate: the price of time, tokens per millisecond; planned_rate: of the steps, if they
    draft; num_rows: of a step, copies apart; row_costs: of their nodes, see StepInput; terms: of the first sequences,
    the others do not draft."""

    rate: float
    planned_rate: float
    num_rows: int
    row_costs: tuple[float, ...]
    terms: list[Terms]


class Planner:
    """Plans from the costs as they are known."""

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self._price: Price | None = None  # of the last plan
        self._known: dict[tuple[Pool, float, int], tuple[float, Outlook]] = {}  # by what _outlooks knows a draft by
        self._num_plans = 0
        self._correction = 1.0  # what drafting steps brought per millisecond, per planned

    def plan(self, load: Load, records: Sequence[Record], most_levels: int) -> Plan:
        """The best for these sequences, those first that are most often right. load: what their steps carry beside."""
        most_nodes = min(MOST_NODES, NODES_BESIDE + NODES_EACH * len(records)) if records else 0
        for _ in range(2 if self._price is None else 1):
            if self._num_plans % KNOWN == 0:
                self._known.clear()
            limits, outlooks = self._outlooks(records, most_levels)
            planned = best_drafting(self.costs, load, outlooks, most_nodes)
            self._price = planned.price
        self._num_plans += 1
        rate = planned.price.rate * self._correction
        if not planned.num_drafting or rate <= planned.plain * MIN_GAIN:
            self._correction += (1 - self._correction) * SETTLING
            return Plan(planned.plain, 0.0, load.rows, (), [])
        row_costs = tuple([rate * (ms - planned.row_ms[0]) for ms in planned.row_ms])
        least = max(LEAST_NODE, min(more - less for less, more in pairwise(row_costs)))
        node, part_ms = row_costs[planned.num_nodes] / planned.num_nodes, planned.draft_ms / planned.num_drafting
        terms = []
        for record, limit, each in zip(records[: planned.num_drafting], limits, outlooks, strict=False):
            worth = sum(count * max(0.0, chance - node) for count, chance in zip(each.nodes, CHANCES, strict=True))
            cut = Cut(chances_of(record), seconds_of(record), least, max(least, limit))
            terms.append(Terms(cut, max(1, round(sum(each.passes))), worth - rate * part_ms))
        return Plan(rate, planned.price.rate, load.rows + planned.num_nodes, row_costs, terms)

    def came(self, rate: float, planned_rate: float) -> None:
        """A step that was planned at one rate came at another."""
        self._correction += (min(2.0, max(0.5, rate / planned_rate)) - self._correction) * SETTLING

    def _outlooks(self, records: Sequence[Record], most: int) -> tuple[list[float], list[Outlook]]:
        """Of each sequence: from which chance on it drafts the next level, and what its draft should have."""
        known, found = self._known, []
        for record in records:
            kind = record.pool, round(record.share(0) * FINE) / FINE, most
            if kind not in known:
                margins = margins_of(*kind[:2])
                least = math.inf if self._price is None else least_pass_of(margins, self._price)
                known[kind] = least, outlook_of(margins, least, most)
            found.append(known[kind])
        return [least for least, _ in found], [outlook for _, outlook in found]
