"""What a step costs in milliseconds, by its rows, its draft passes and the keys it reads.

A CostTable is measured once for a pair on a machine (calibrate.py) or estimated. StepCosts corrects it by what real
steps take: a forward of one row, the further rows, the keys, and drafting have a factor each, which follows the machine
within some tens of steps. Each number of rows has its own place beside the factors: steps have edges that no formula
knows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

MOST_ROWS = 256
"""Rows up to which a table holds each number; beyond, the last slope goes on."""

LEAST_MS, MOST_MS = 1e-9, 1e9
"""No forward takes less, and no part of a step more."""

PACE, PLACE_PACE = 1 / 8, 1 / 32
"""Share of a new measurement in the correction of a stage, and in that of one number of rows: what all numbers of rows
share goes to the stage."""

DRIFT, DOUBT, NOISE, MOST_ERROR = (0.05, 0.02, 0.02), (0.3, 0.12, 0.3), 0.1, 0.15
"""Of the factors of the base, the rows and the keys: by how much each is expected to change between two measurements,
and how little may be known of it at most. Of a measured step: its relative noise, and the error that is believed."""


@dataclass(frozen=True)
class CostTable:
    """Milliseconds of the parts of a step, at contexts of few keys; lists [MOST_ROWS + 1] by rows, 0 at no rows.

    verify: the target's forward over so many rows, their draw, and all that a step does beside it. first: the draft's
    first pass for so many sequences, which also brings its keys up to date. deeper: each further pass of so many rows.
    keys: points (keys, milliseconds): what the keys of all sequences together add to a forward, however many rows read
    them. A key costs more where all of them are more than the caches hold. key_row_ms: what each key of a sequence adds
    for each of the sequence's rows; draft_key_ms: to a pass of the draft.

    Raises ValueError for what no machine takes: lists of another length, times that fall with rows or keys, are not
    numbers or out of bounds, and forwards that take none."""

    verify: tuple[float, ...]
    first: tuple[float, ...]
    deeper: tuple[float, ...]
    keys: tuple[tuple[float, float], ...] = ()
    key_row_ms: float = 0.0
    draft_key_ms: float = 0.0

    def __post_init__(self) -> None:
        for name in ("verify", "first", "deeper"):
            values = getattr(self, name)
            if len(values) != MOST_ROWS + 1 or not _ascends((0.0, *values)) or values[0] != 0.0:
                raise ValueError(f"{name}: must be {MOST_ROWS + 1} times from 0 on, none below the one before")
        if self.verify[1] < LEAST_MS:
            raise ValueError(f"verify[1]={self.verify[1]} ms: a forward takes time")
        numbers = [number for number, _ in self.keys]
        is_line = all(low < high for low, high in pairwise((0.0, *numbers))) and all(map(math.isfinite, numbers))
        if not is_line or not _ascends((0.0, *(ms for _, ms in self.keys))):
            raise ValueError(f"keys={self.keys}: must be points of ascending numbers and times")
        for name in ("key_row_ms", "draft_key_ms"):
            if not 0.0 <= getattr(self, name) <= MOST_MS:
                raise ValueError(f"{name}={getattr(self, name)}: must be a time")


def filled(points: Sequence[tuple[int, float]]) -> tuple[float, ...]:
    """A list by rows through measured points (rows, milliseconds) in ascending order: straight between them, and on
    from the last two. A point that lies above one behind it is lowered to it: more rows never cost less, and what
    disturbs a measurement only makes it longer."""
    lowered: list[tuple[int, float]] = []
    for rows, ms in reversed(points):
        lowered.insert(0, (rows, min(ms, lowered[0][1] if lowered else ms)))
    values = [0.0] * (MOST_ROWS + 1)
    for rows in range(1, lowered[0][0] + 1):
        values[rows] = lowered[0][1]
    for (low, low_ms), (high, high_ms) in pairwise(lowered):
        for rows in range(low, min(high, MOST_ROWS) + 1):
            values[rows] = low_ms + (high_ms - low_ms) * (rows - low) / (high - low)
    last, last_ms = lowered[-1]
    slope = (last_ms - lowered[-2][1]) / (last - lowered[-2][0]) if len(lowered) > 1 else last_ms / last
    for rows in range(last + 1, MOST_ROWS + 1):
        values[rows] = last_ms + slope * (rows - last)
    return tuple(accumulate(values, max))


def at(values: Sequence[float], rows: int) -> float:
    """The milliseconds of so many rows."""
    if rows <= MOST_ROWS:
        return values[rows]
    return values[MOST_ROWS] + (rows - MOST_ROWS) * (values[MOST_ROWS] - values[MOST_ROWS // 2]) / (MOST_ROWS // 2)


def through(points: Sequence[tuple[float, float]], x: float) -> float:
    """The value at x of the line through no point at all, which is 0, or through the origin and points in ascending
    order; beyond the last, its last piece goes on."""
    low = low_y = slope = 0.0
    for high, y in points:
        slope = (y - low_y) / (high - low)
        if x <= high:
            break
        low, low_y = high, y
    return low_y + slope * (x - low)


class StepCosts:
    """A CostTable with corrections. Milliseconds throughout."""

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self.base_factor = self.rows_factor = self.keys_factor = self.draft_factor = 1.0
        self.host_ms = 0.0
        self._doubts = [[DOUBT[i] ** 2 * (i == j) for j in range(3)] for i in range(3)]
        self._places = [1.0] * (MOST_ROWS + 1)  # of each number of rows, beside the factors

    def verify(self, rows: int, keys: float = 0.0, key_rows: float = 0.0) -> float:
        """A forward of so many rows. keys: keys of all its sequences; key_rows: the same, each sequence's times its
        rows."""
        base, further, of_keys = self._parts(rows, keys, key_rows)
        return base + further + of_keys

    def drafting(self, rows_of_passes: Sequence[int], keys: float = 0.0) -> float:
        """Passes of the draft of so many rows each, the first pass first; keys: that all passes together read."""
        if not rows_of_passes:
            return 0.0
        table = self.table
        base = at(table.first, rows_of_passes[0]) + sum(at(table.deeper, rows) for rows in rows_of_passes[1:])
        return self.draft_factor * base + self.draft_keys(keys)

    def first_more(self, rows: int) -> float:
        """One more sequence in a first pass of so many."""
        return self.draft_factor * (at(self.table.first, rows + 1) - at(self.table.first, rows))

    def deeper_more(self, rows: int) -> float:
        """One more row in a deeper pass of so many."""
        return self.draft_factor * (at(self.table.deeper, rows + 1) - at(self.table.deeper, rows))

    def draft_keys(self, keys: float) -> float:
        """What so many keys add to the passes of the draft that read them."""
        return self.draft_factor * self.table.draft_key_ms * keys

    def row(self, rows: int, more: int, keys: float = 0.0) -> float:
        """A verified row more where there are about `rows`: the mean over the next `more`; keys: its sequence's."""
        return (self.verify(rows + more) - self.verify(rows)) / more + self.row_keys(keys)

    def row_keys(self, keys: float) -> float:
        """What a sequence of so many keys adds to each of its rows."""
        return self.keys_factor * self.table.key_row_ms * keys

    def learn_verify(self, rows: int, keys: float, key_rows: float, measured_ms: float) -> None:
        """A forward of so many rows and keys took so long, with all that a step does beside it but drafting.

        The three factors are followed by a Kalman filter. Steps of different rows tell the base and the rows apart:
        where the memory is slow, the base is dear and rows hide behind it."""
        base, further, of_keys = self._parts(rows, keys, key_rows)
        expected = base + further + of_keys
        error = min(MOST_ERROR, max(-MOST_ERROR, measured_ms / expected - 1)) * expected
        factors, doubts = [self.base_factor, self.rows_factor, self.keys_factor], self._doubts
        parts = [part / factor for part, factor in zip((base, further, of_keys), factors, strict=True)]
        for i in range(3):
            doubts[i][i] = min(DOUBT[i] ** 2, doubts[i][i] + DRIFT[i] ** 2)
        spread = [sum(doubt * part for doubt, part in zip(row, parts, strict=True)) for row in doubts]
        total = sum(part * each for part, each in zip(parts, spread, strict=True)) + (NOISE * expected) ** 2
        for i in range(3):
            factors[i] = _within(factors[i] + spread[i] / total * error, 0.05, 20.0)
            for j in range(3):
                doubts[i][j] -= spread[i] * spread[j] / total
        self.base_factor, self.rows_factor, self.keys_factor = factors
        if rows <= MOST_ROWS:
            step = PLACE_PACE * error / expected
            self._places[rows] = _within(self._places[rows] * (1 + step), 0.5, 2.0)

    def learn_draft(self, expected_ms: float, measured_ms: float) -> None:
        """Drafting took so long."""
        ratio = min(2.0, max(0.5, measured_ms / expected_ms))
        self.draft_factor = _within(self.draft_factor * (1 + PACE * (ratio - 1)), 0.05, 20.0)

    def learn_host(self, measured_ms: float) -> None:
        """What a step took beside the backend's stages."""
        self.host_ms += PACE * (min(measured_ms, 4 * self.host_ms + 0.1) - self.host_ms)

    def _parts(self, rows: int, keys: float, key_rows: float) -> tuple[float, float, float]:
        """Milliseconds of a forward of one row, of the further rows, and of the keys."""
        table = self.table
        one = table.verify[1]
        further = at(table.verify, rows) - one
        of_keys = through(table.keys, keys) + table.key_row_ms * key_rows
        place = self._places[rows] if rows <= MOST_ROWS else 1.0
        return self.base_factor * one * place, self.rows_factor * further * place, self.keys_factor * of_keys


def _ascends(times: Sequence[float]) -> bool:
    """Whether they are numbers within the bounds, none below the one before."""
    return all(low <= high <= MOST_MS for low, high in pairwise(times))


def _within(value: float, least: float, most: float) -> float:
    return min(most, max(least, value))
