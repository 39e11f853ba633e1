"""The drafting of a step for all sequences together: the most tokens per millisecond. Numbers only.

A step of B sequences that drafts nothing commits B tokens. What a draft may add is not known before it drafts, but how
often its nodes have which chance is (outlook_of). Of all nodes that the drafts of some sequences should have, the
likeliest are verified, as many as pay together. best_drafting tries how many sequences draft and how many nodes are
verified, and takes the best quotient of tokens and time of all. The cost of rows has edges, so the search does not stop
at the first node that loses.

Rows of prompts have to be computed in one step or another, so they lend nodes the slope of their place and no time to
hide in: the time that they take by themselves is left out of the quotient.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from aquiline.engine.control.costs import StepCosts, at

STEPS = 4
"""Chances are told apart by quarters of a power of two: bin i holds chances of about 2 ** (-i / STEPS)."""

NUM_BINS = 32
CHANCES = tuple(2.0 ** (-i / STEPS) for i in range(NUM_BINS))


class Margins(NamedTuple):
    """How a draft's tokens come by the bucket of their margin. first, deeper: the shares of the buckets at the first
    level and below it; chances, seconds: of a token and of a runner-up, as in Cut."""

    first: Sequence[float]
    deeper: Sequence[float]
    chances: Sequence[float]
    seconds: Sequence[float]


class Outlook(NamedTuple):
    """What one sequence's draft should have in a step. nodes [NUM_BINS]: how many nodes of each chance; passes: how
    often each pass of the draft runs for it, the first one always."""

    nodes: list[float]
    passes: list[float]


class Price(NamedTuple):
    """What counts in a plan. rate: tokens per millisecond; threshold: the chance from which a node is verified;
    pass_ms: what a sequence's part of a further pass costs."""

    rate: float
    threshold: float
    pass_ms: float


@dataclass(frozen=True)
class Load:
    """What a step carries whatever is drafted: rows of its forward, of which chunk_rows are of prompts, the tokens it
    commits, and the keys of its sequences; keys[i]: of the i-th sequence that may draft."""

    rows: int
    chunk_rows: int
    tokens: int
    all_keys: float
    keys: tuple[float, ...]


@dataclass(frozen=True)
class Planned:
    """The best found. num_drafting: how many sequences draft, the first ones; num_nodes: that are verified; plain:
    tokens per millisecond of a step that drafts nothing; ms: the step's time; draft_ms: of it, drafting; row_ms: the
    time of a step with 0, 1, ... nodes, less its drafting and its prompts; price: its rate and what follows from it."""

    num_drafting: int
    num_nodes: int
    plain: float
    ms: float
    draft_ms: float
    row_ms: tuple[float, ...]
    price: Price


def least_pass_of(margins: Margins, price: Price) -> float:
    """From which chance of a token on it pays to draft the next level."""
    cost, threshold = price.rate * price.pass_ms, price.threshold
    kinds = [*zip(margins.deeper, margins.chances, strict=True), *zip(margins.deeper, margins.seconds, strict=True)]

    def lacks(chance: float) -> bool:
        return sum([share * max(0.0, chance * below - threshold) for share, below in kinds]) < cost

    first = bisect_left(CHANCES, True, key=lacks)  # what a level brings falls with the chance that it is reached
    return CHANCES[first - 1] if first else math.inf


def outlook_of(margins: Margins, least_pass: float, most: int) -> Outlook:
    """The nodes of a chain of up to `most` levels that goes on below tokens of at least the chance least_pass."""
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


def best_drafting(costs: StepCosts, load: Load, outlooks: Sequence[Outlook], most_nodes: int) -> Planned:
    """How many of the sequences, the first ones, draft, and how many nodes are verified then, up to most_nodes."""
    keys = load.all_keys / max(1, load.tokens)
    chunk_ms = costs.verify(load.rows) - costs.verify(load.rows - load.chunk_rows)
    row_ms = tuple(
        costs.verify(load.rows + n, load.all_keys, load.all_keys + n * keys) - chunk_ms + costs.host_ms
        for n in range(most_nodes + 1)
    )
    plain = load.tokens / row_ms[0]
    best, found = plain, Planned(0, 0, plain, row_ms[0], 0.0, row_ms, Price(plain, 1.0, costs.drafting((1,))))
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
        draft_ms = costs.draft_factor * (
            _between(costs.table.first, passes[0]) + sum(_between(costs.table.deeper, rows) for rows in passes[1:])
        ) + costs.draft_keys(draft_keys)
        further = passes[1] if len(passes) > 1 else 0.0
        pass_ms = costs.draft_factor * _between(costs.table.deeper, max(1.0, further)) / max(1.0, further)
        for num_nodes, tokens, chance in _filled(nodes, most_nodes):
            ms = row_ms[num_nodes] + draft_ms
            rate = (load.tokens + tokens) / ms
            if rate > best:
                price = Price(rate, chance, pass_ms + costs.draft_keys(keys))
                best, found = rate, Planned(count, num_nodes, plain, ms, draft_ms, row_ms, price)
    return found


def best_copies(costs: StepCosts, rate: float, rows: int, gains: Sequence[Sequence[float]]) -> list[int]:
    """Of each of several copies, how many of its first tokens are verified, where a millisecond must bring `rate`
    tokens and the step has so many rows without them. gains[i]: what each token of copy i should bring; they fall.

    The likeliest tokens of all copies are added one after the other, and the number that is worth most is taken. A
    straight price of rows would not do: a row costs nothing up to an edge, and a whole tile of rows behind it."""
    additions = [(gain, -place, i) for i, own in enumerate(gains) for place, gain in enumerate(own)]
    if len(gains) > 1:
        additions.sort(reverse=True)
    row_price, ms = rate * costs.rows_factor, costs.table.verify
    value, most, count = 0.0, 0.0, 0
    for number, (gain, _, _) in enumerate(additions, 1):
        value += gain
        worth = value - row_price * (at(ms, rows + number) - at(ms, rows))
        if worth > most:
            most, count = worth, number
    kept = [0] * len(gains)
    for _, _, i in additions[:count]:
        kept[i] += 1
    return kept


def _bin(chance: float) -> int:
    return NUM_BINS if chance < CHANCES[-1] else round(-STEPS * math.log2(chance))


def _sizes(count: int) -> set[int]:
    """Numbers of sequences that are tried: each up to four, then about every fourth part more."""
    sizes, size = {count}, 1
    while size < count:
        sizes.add(size)
        size += max(1, size // 4)
    return sizes


def _between(values: Sequence[float], rows: float) -> float:
    """The milliseconds of an expected number of rows."""
    low = int(rows)
    return at(values, low) + (rows - low) * (at(values, low + 1) - at(values, low))


def _filled(nodes: Sequence[float], most: int) -> list[tuple[int, float, float]]:
    """For 1, 2, ... rows of the likeliest nodes: the rows, the tokens that they should bring, and the chance of the
    last of them."""
    found, tokens, room = list[tuple[int, float, float]](), 0.0, 1.0
    for count, chance in zip(nodes, CHANCES, strict=True):
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
