"""What a step costs in milliseconds, by its rows, its draft passes and the keys it reads.

A CostTable is measured once for a pair on a machine (calibrate.py), or estimated. StepCosts corrects the table by the
times of real steps. A forward of one row, the further rows, the keys, and drafting have a factor each, which follows
the machine within some tens of steps. Each number of rows also has a factor of its own, because the time by rows has
edges that no formula describes.

While the weights are read, a few further rows are computed. So a table that was measured while memory was slow says
that they take no time, which no factor would correct. What each of the first EARLY_ROWS takes beyond the table is
learnt as a share of a forward of one row.

Behind the draft's passes a forward finds less of its weights in the caches. That has a factor too: without it, steps
that draft make the rows look dear, and with them the step that does not.

Keys that come from slow memory take longer than the table says, and that time is shared by all rows of their sequence:
as long as one row waits for its keys, further rows are computed meanwhile. So the keys of one row for each sequence and
those of its further rows have a factor each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from aquiline.backends.base import Decode, Decoded, StepInput, StepOutput
from aquiline.config import MAX_DEPTH

MAX_TABLE_ROWS = 256
"""A table has an entry for every number of rows up to this one. Beyond, times continue with the last slope."""

EARLY_ROWS = 7
"""The first further rows, whose time slow memory hides."""

MIN_MS, MAX_MS = 1e-9, 1e9
"""Bounds of a table: the least time of a forward, and the greatest of any part of a step."""

STAGE_SMOOTHING, ROW_SMOOTHING = 1 / 8, 1 / 32
"""Weight of a new measurement in the factor of a stage, and in the factor of one number of rows. The second is smaller,
so that a change which all numbers of rows share goes to the stage."""

FACTOR_DRIFT, MAX_DOUBT = (0.03, 0.03, 0.03, 0.03, 0.03, 0.01), (0.26, 0.3, 1.0, 1.0, 0.3, 0.1)
"""Of the factors of the base, the rows, the keys, the keys of further rows, the early rows, and a forward behind a
draft: the standard deviation of the change between two measurements, and the greatest standard deviation of the
estimate."""

TIME_NOISE, MAX_ERROR = 0.1, 0.15
"""Relative noise of a measured step, and how much longer than expected it is believed to be: a pause is longer still.
Nothing makes a step shorter than it is."""


@dataclass(frozen=True)
class CostTable:
    """Milliseconds of the parts of a step, at contexts of few keys; lists [MAX_TABLE_ROWS + 1] by rows, 0 at no rows.

    verify: the target's forward over that number of rows, the draw, and everything else that a step does but drafting.
    first: the draft's first pass for that number of sequences, which also writes missing keys. deeper: each further
    pass of that number of rows. keys: points (keys, milliseconds): the time that the keys of all sequences together add
    to a forward, whatever the number of rows that read them. A key costs more where the keys do not fit into the
    caches. key_row_ms: the time that each key of a sequence adds for each of the sequence's rows; draft_key_ms: the
    time that it adds to a pass of the draft.

    Raises ValueError for times that no machine can have: lists of another length, times that fall with rows or keys,
    that are not numbers or out of bounds, and forwards that take no time."""

    verify: tuple[float, ...]
    first: tuple[float, ...]
    deeper: tuple[float, ...]
    keys: tuple[tuple[float, float], ...] = ()
    key_row_ms: float = 0.0
    draft_key_ms: float = 0.0

    def __post_init__(self) -> None:
        for name in ("verify", "first", "deeper"):
            values = getattr(self, name)
            if len(values) != MAX_TABLE_ROWS + 1 or not _ascends((0.0, *values)) or values[0] != 0.0:
                raise ValueError(f"{name}: must be {MAX_TABLE_ROWS + 1} times from 0 on, none below the one before")
        if self.verify[1] < MIN_MS:
            raise ValueError(f"verify[1]={self.verify[1]} ms: a forward takes time")
        numbers = [number for number, _ in self.keys]
        is_line = all(low < high for low, high in pairwise((0.0, *numbers))) and all(map(math.isfinite, numbers))
        if not is_line or not _ascends((0.0, *(ms for _, ms in self.keys))):
            raise ValueError(f"keys={self.keys}: must be points of ascending numbers and times")
        for name in ("key_row_ms", "draft_key_ms"):
            if not 0.0 <= getattr(self, name) <= MAX_MS:
                raise ValueError(f"{name}={getattr(self, name)}: must be a time")


def times_by_rows(points: Sequence[tuple[int, float]]) -> tuple[float, ...]:
    """The list by rows through measured points (rows, milliseconds) in ascending order: linear between the points, and
    beyond the last two. A point that lies above a later one is lowered to it: more rows never cost less, and a
    disturbance only makes a measurement longer."""
    lowered: list[tuple[int, float]] = []
    for rows, ms in reversed(points):
        lowered.insert(0, (rows, min(ms, lowered[0][1] if lowered else ms)))
    values = [0.0] * (MAX_TABLE_ROWS + 1)
    for rows in range(1, lowered[0][0] + 1):
        values[rows] = lowered[0][1]
    for (low, low_ms), (high, high_ms) in pairwise(lowered):
        for rows in range(low, min(high, MAX_TABLE_ROWS) + 1):
            values[rows] = low_ms + (high_ms - low_ms) * (rows - low) / (high - low)
    last, last_ms = lowered[-1]
    slope = (last_ms - lowered[-2][1]) / (last - lowered[-2][0]) if len(lowered) > 1 else last_ms / last
    for rows in range(last + 1, MAX_TABLE_ROWS + 1):
        values[rows] = last_ms + slope * (rows - last)
    return tuple(accumulate(values, max))


def ms_at(values: Sequence[float], rows: int) -> float:
    """The milliseconds of that number of rows."""
    if rows <= MAX_TABLE_ROWS:
        return values[rows]
    return values[MAX_TABLE_ROWS] + (rows - MAX_TABLE_ROWS) * (values[MAX_TABLE_ROWS] - values[MAX_TABLE_ROWS // 2]) / (
        MAX_TABLE_ROWS // 2
    )


def interpolated(points: Sequence[tuple[float, float]], x: float) -> float:
    """The value at x of the line through the origin and the points, which ascend. Beyond the last point its last piece
    continues; without points it is 0."""
    low = low_y = slope = 0.0
    for high, y in points:
        slope = (y - low_y) / (high - low)
        if x <= high:
            break
        low, low_y = high, y
    return low_y + slope * (x - low)


class StepCosts:
    """A CostTable with corrections. Milliseconds throughout. host_ms: the host's part of a step, on average; call_ms:
    of the first step of a call, without the choice of its drafting. Calls of several steps take about the same time
    however long a step is, so what the first one takes the host beyond host_ms counts as a share of the steps' own
    time: host_share."""

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self.base_factor = self.rows_factor = self.keys_factor = self.key_rows_factor = self.draft_factor = 1.0
        self.early_factor = self.after_factor = self.host_ms = self.host_share = self.call_ms = 0.0
        self._covariance = [[doubt**2 * (i == j) for j in range(len(MAX_DOUBT))] for i, doubt in enumerate(MAX_DOUBT)]
        self._row_factors = [1.0] * (MAX_TABLE_ROWS + 1)  # by the number of rows

    def verify(self, rows: int, keys: float = 0.0, key_rows: float = 0.0) -> float:
        """A forward of that number of rows. keys: keys of all its sequences; key_rows: the sum over the sequences of
        keys times rows."""
        base, further, of_keys, of_key_rows, early = self._parts(rows, keys, key_rows)
        return (
            self.base_factor * base
            + self.rows_factor * further
            + self.keys_factor * of_keys
            + self.key_rows_factor * of_key_rows
            + self.early_factor * early
        )

    def verify_each(self, rows: int, further: Sequence[int], keys: float, keys_each: float) -> list[float]:
        """The forwards of `rows` rows, each of which reads its own keys, and of so many further rows, each of which
        reads keys_each of all `keys`."""
        return [self.verify(rows + n, keys, keys + n * keys_each) for n in further]

    def plain_ms(self, rows: int, keys: float) -> float:
        """A forward of one row for each of that number of sequences, as the table has it: what is learnt moves. keys:
        of all of them."""
        return ms_at(self.table.verify, rows) + self._one_row_keys(keys)

    @property
    def after_ms(self) -> float:
        """How much longer a forward takes behind the draft's passes, whose weights are in the caches now."""
        return self.after_factor * self.table.verify[1]

    def draft_ms(self, rows_of_passes: Sequence[int], keys: float = 0.0) -> float:
        """The passes of the draft, by the rows of each. The first pass has a table of its own. keys: the number that
        all passes together read."""
        if not rows_of_passes:
            return 0.0
        table = self.table
        base = ms_at(table.first, rows_of_passes[0]) + sum(ms_at(table.deeper, n) for n in rows_of_passes[1:])
        return self.draft_factor * (base + table.draft_key_ms * keys)

    def draft_each(
        self, counts: NDArray[np.int64], rows: NDArray[np.float64], keys: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """The passes of drafts for counts [C] sequences that end after their 1st, 2nd, ... pass, and how much longer a
        forward takes behind them. rows, keys [C, passes, ...]: the expected rows of each pass, and the keys that it
        reads. A pass runs if any of the sequences needs it; their needs are taken as independent and alike."""
        number = counts.reshape(-1, *[1] * (rows.ndim - 1))
        runs = np.maximum(1.0 - (1.0 - np.minimum(1.0, rows / number)) ** number, 1e-9)
        each = runs * np.interp(rows / runs, np.arange(MAX_TABLE_ROWS + 1), self.table.deeper)
        each[:, :1] = np.reshape([ms_at(self.table.first, count) for count in counts], number.shape)
        return self.after_ms + self.draft_factor * np.cumsum(each + self.table.draft_key_ms * keys, axis=1)

    def step_ms(self, inside_ms: float) -> float:
        """A step that takes the backend so long, with the host's part."""
        return inside_ms * (1.0 + self.host_share) + self.host_ms

    def row(self, rows: int, more: int) -> float:
        """One more verified row beside about `rows`, as the mean over the next `more`, keys apart."""
        return (self.verify(rows + more) - self.verify(rows)) / more

    def further_rows(self, rows: int, most: int) -> list[float]:
        """What 0 to `most` verified rows cost beside `rows` others, keys apart."""
        each = [
            self.rows_factor * ms_at(self.table.verify, rows + n) + self.early_factor * self._early(rows + n)
            for n in range(most + 1)
        ]
        return [ms - each[0] for ms in each]

    def row_keys(self, keys: float) -> float:
        """The time that a sequence's keys add to each of its further rows."""
        return self.key_rows_factor * self.table.key_row_ms * keys

    def learn_step(self, message: StepInput, output: StepOutput, keys: Sequence[int]) -> tuple[float, float | None]:
        """Learn from a step without rows of prompts. keys: of each sequence.

        Returns the milliseconds that the step was expected to take, and those that it took if the backend reports them.
        Both contain the host's work as it was expected."""
        rows = [1 + decoded.num_drafted for decoded in output.decodes]
        num_rows, num_keys = sum(rows), float(sum(keys))
        key_rows = float(sum(k * r for k, r in zip(keys, rows, strict=True)))
        passes, num_read = passes_of(message.decodes, output.decodes, keys)
        draft_ms = self.draft_ms(passes, num_read)
        after_ms = self.after_ms if passes else 0.0
        expected = self.step_ms(self.verify(num_rows, num_keys, key_rows) + draft_ms + after_ms)
        if output.seconds is None:
            return expected, None
        drafting_ms = output.seconds["draft"] * 1e3
        verify_ms = sum(output.seconds.values()) * 1e3 - drafting_ms
        measured = self.step_ms(verify_ms + drafting_ms)
        if not message.admits:  # admissions take time of their own
            self.learn_verify(num_rows, num_keys, key_rows, verify_ms, bool(passes))
            num_caught_up = output.num_draft_rows - sum(passes)  # a sequence that begins to draft has much to catch up
            if draft_ms > 0.0 and not message.extends and num_caught_up <= MAX_DEPTH * len(output.decodes):
                self.learn_draft(draft_ms, drafting_ms)
        return expected, measured

    def learn_verify(
        self, rows: int, keys: float, key_rows: float, measured_ms: float, is_after_draft: bool = False
    ) -> None:
        """Learn the time of a forward, with everything else that its step did but drafting.

        A Kalman filter follows the factors. Steps with different numbers of rows tell the base and the rows apart:
        where memory is slow, the base is expensive and further rows cost little."""
        parts = (*self._parts(rows, keys, key_rows), is_after_draft * self.table.verify[1])
        doubts, number = self._covariance, range(len(parts))
        factors = [
            self.base_factor, self.rows_factor, self.keys_factor, self.key_rows_factor, self.early_factor,
            self.after_factor,
        ]  # fmt: skip
        expected = sum(factor * part for factor, part in zip(factors, parts, strict=True))
        error = min(MAX_ERROR * expected, measured_ms - expected)
        for i in number:
            doubts[i][i] = min(MAX_DOUBT[i] ** 2, doubts[i][i] + FACTOR_DRIFT[i] ** 2)
        spread = [sum(doubt * part for doubt, part in zip(row, parts, strict=True)) for row in doubts]
        total = sum(part * each for part, each in zip(parts, spread, strict=True)) + (TIME_NOISE * expected) ** 2
        for i in number:
            factors[i] = _within(factors[i] + spread[i] / total * error, 0.0 if i > 2 else 0.05, 20.0)
            for j in number:
                doubts[i][j] -= spread[i] * spread[j] / total
        self.base_factor, self.rows_factor, self.keys_factor, self.key_rows_factor, early, self.after_factor = factors
        self.early_factor = min(self.base_factor, early)
        if rows <= MAX_TABLE_ROWS:
            step = ROW_SMOOTHING * error / expected
            self._row_factors[rows] = _within(self._row_factors[rows] * (1 + step), 0.5, 2.0)

    def learn_draft(self, expected_ms: float, measured_ms: float) -> None:
        """Learn the time of a step's drafting."""
        ratio = min(2.0, max(0.5, measured_ms / expected_ms))
        self.draft_factor = _within(self.draft_factor * (1 + STAGE_SMOOTHING * (ratio - 1)), 0.05, 20.0)

    def learn_host(self, measured_ms: float, choosing_ms: float = 0.0, calls_ms: float = 0.0) -> None:
        """Learn the time of a step outside the backend's stages. choosing_ms: the part of it in which the drafting of a
        call was chosen; 0 for all of a call's steps but the first. calls_ms: what the stages of all steps of the call
        take, if there are several and this is the first; else 0."""

        def follow(average: float, value: float, spare: float) -> float:
            return average + STAGE_SMOOTHING * (min(value, 4 * average + spare) - average)

        if calls_ms:
            self.host_share = follow(self.host_share, max(0.0, measured_ms - self.host_ms) / calls_ms, 0.1)
        else:
            self.host_ms = follow(self.host_ms, measured_ms, 0.1)
        if choosing_ms:
            self.call_ms = follow(self.call_ms, measured_ms - choosing_ms, 0.1)

    def _parts(self, rows: int, keys: float, key_rows: float) -> tuple[float, float, float, float, float]:
        """Milliseconds by the table, without the factors: of a forward of one row, of the further rows, of the keys of
        one row for each sequence, of those of its further rows, and of a forward of one row again, as much more or less
        of it as there are more or fewer early rows than half of them."""
        one, of_keys = self.table.verify[1], self._one_row_keys(keys)
        own = self._row_factors[rows] if rows <= MAX_TABLE_ROWS else 1.0
        further = (ms_at(self.table.verify, rows) - one) * own
        return one * own, further, of_keys, self.table.key_row_ms * (key_rows - keys), self._early(rows)

    def _early(self, rows: int) -> float:
        """What early rows take for a factor of 1, less half of what all of them take."""
        return (min(1.0, (rows - 1) / EARLY_ROWS) - 0.5) * self.table.verify[1]

    def _one_row_keys(self, keys: float) -> float:
        """The time that keys add to a forward of one row for each sequence, by the table."""
        return interpolated(self.table.keys, keys) + self.table.key_row_ms * keys


def passes_of(decodes: Sequence[Decode], outcomes: Sequence[Decoded], keys: Sequence[int]) -> tuple[list[int], float]:
    """The rows of each pass of the draft in a step, and the number of keys that all passes together read. keys: of each
    sequence."""
    passes: list[int] = []
    num_keys = 0
    for decode, decoded, num_own in zip(decodes, outcomes, keys, strict=True):
        if decode.cut is not None:
            levels = [1] * len(decoded.guesses)
        elif decode.proposal is None and decode.drafting.needs_draft_model:
            levels = [1, *decode.drafting.draft_passes]
        else:
            continue
        num_keys += len(levels) * num_own
        passes += [0] * (len(levels) - len(passes))
        for level, rows in enumerate(levels):
            passes[level] += rows
    return passes, float(num_keys)


def _ascends(times: Sequence[float]) -> bool:
    """Whether the times are numbers within the bounds that never fall."""
    return all(low <= high <= MAX_MS for low, high in pairwise(times))


def _within(value: float, least: float, most: float) -> float:
    return min(most, max(least, value))
