"""The drafting of a step for all sequences together: the most tokens per millisecond. Numbers only.

A step of B sequences that drafts nothing commits B tokens. Each level of each sequence's chain may be added: the chance
that it is accepted against a row of the target's forward and a row of a pass of the draft. All additions, likeliest
first, are tried one after the other, and the best quotient of all is taken. The cost of rows has edges, so the search
does not stop at the first addition that loses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aquiline.engine.control.costs import StepCosts, at


@dataclass(frozen=True)
class Load:
    """What a step carries whatever is drafted: rows of its forward, the tokens it commits, and the keys of its
    sequences; keys[i]: of the i-th sequence that may draft."""

    rows: int
    tokens: int
    all_keys: float
    keys: tuple[float, ...]


@dataclass(frozen=True)
class Planned:
    """The best found. lengths: of each sequence's chain; rate: committed tokens per millisecond; plain: those of a step
    that drafts nothing; ms: the step's time."""

    lengths: tuple[int, ...]
    rate: float
    plain: float
    ms: float


def best_lengths(costs: StepCosts, load: Load, first: Sequence[float], deeper: Sequence[float], most: int) -> Planned:
    """The best lengths of chains, up to `most`, where sequence i's first token is accepted with chance first[i] and
    each further one, given the one before, with chance deeper[i]."""
    plain_ms = costs.verify(load.rows, load.all_keys, load.all_keys) + costs.host_ms
    plain = load.tokens / plain_ms
    additions = [
        (chance, -level, i)
        for i, start in enumerate(first)
        for level, chance in enumerate(_falling(start, deeper[i], most))
    ]
    additions.sort(reverse=True)
    num = len(first)
    lengths, passes = [0] * num, [0] * most
    best, best_ms, best_count = plain, plain_ms, 0
    tokens, drafting_ms, key_rows, drafting_keys = float(load.tokens), 0.0, load.all_keys, 0.0
    for count, (chance, negative, i) in enumerate(additions, 1):
        level = -negative
        was = passes[level]
        passes[level] = was + 1
        if level == 0:
            drafting_keys += load.keys[i]
            drafting_ms += costs.first_more(was)
        else:
            drafting_ms += costs.deeper_more(was)
        drafting_ms += costs.draft_keys(load.keys[i])
        tokens += chance
        key_rows += load.keys[i]
        ms = costs.verify(load.rows + count, load.all_keys, key_rows) + drafting_ms + costs.host_ms
        if tokens / ms > best:
            best, best_ms, best_count = tokens / ms, ms, count
    for _, _, i in additions[:best_count]:
        lengths[i] += 1
    return Planned(tuple(lengths), best, plain, best_ms)


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


def _falling(first: float, deeper: float, most: int) -> list[float]:
    chances, chance = [], first
    for _ in range(most):
        chances.append(chance)
        chance *= deeper
    return chances
