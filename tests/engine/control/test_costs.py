"""The cost of a step: lines through measured points, edges kept, corrections that follow the machine."""

from __future__ import annotations

import math
import os
import random
import statistics
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import needs_native, tiny_models

import aquiline.engine.control.calibrate as calibrate
from aquiline.backends.base import Decode, Decoded, StepInput, StepOutput
from aquiline.engine.control.costs import MAX_TABLE_ROWS, CostTable, StepCosts, ms_at, times_by_rows
from aquiline.engine.model import LoadedModels
from aquiline.spec.drafting import Chain

EDGED = times_by_rows([(1, 2.0), (4, 2.0), (5, 3.0), (8, 3.0), (64, 17.0)])
TABLE = CostTable(
    EDGED,
    times_by_rows([(1, 0.2), (8, 0.3)]),
    times_by_rows([(1, 0.1), (8, 0.2)]),
    ((1000.0, 0.1), (4000.0, 0.7)),
    2e-4,
    1e-5,
)


def test_points_are_kept_and_joined_by_lines() -> None:
    assert EDGED[0] == 0.0 and EDGED[1] == EDGED[4] == 2.0 and EDGED[5] == EDGED[8] == 3.0
    assert EDGED[36] == pytest.approx(10.0), "half way from 8 to 64"
    assert EDGED[128] == pytest.approx(17.0 + 64 * 14.0 / 56), "the last slope goes on"
    assert ms_at(EDGED, 2 * MAX_TABLE_ROWS) == pytest.approx(17.0 + (512 - 64) * 0.25)


@given(
    st.lists(
        st.tuples(st.integers(1, MAX_TABLE_ROWS), st.floats(0.01, 50)),
        min_size=1,
        max_size=12,
        unique_by=lambda p: p[0],
    )
)
def test_more_rows_never_cost_less(points: list[tuple[int, float]]) -> None:
    values = times_by_rows(sorted(points))
    assert len(values) == MAX_TABLE_ROWS + 1
    assert all(low <= high + 1e-9 for low, high in pairwise(values))


def test_a_disturbed_point_does_not_raise_those_behind_it() -> None:
    values = times_by_rows([(1, 2.0), (4, 9.0), (8, 3.0), (16, 5.0)])
    assert values[1] == 2.0 and values[4] == values[8] == 3.0 and values[16] == 5.0


def test_keys_of_further_rows_have_their_own_factor() -> None:
    """Keys come slowly. That is the time of the first row of a sequence, until steps with further rows tell theirs:
    these are computed while the first one waits, or take twice what the table says."""
    costs = StepCosts(TABLE)
    plain = costs.verify(8, 4000, 4000)
    assert costs.verify(8, 4000, 8000) - plain == pytest.approx(0.8)
    for _ in range(100):
        costs.learn_verify(8, 4000, 4000, plain + 1.5)
    slow = costs.verify(8, 4000, 4000)
    assert slow == pytest.approx(plain + 1.5, rel=0.02)
    assert costs.verify(8, 4000, 8000) - slow == pytest.approx(0.8) and costs.row_keys(4000.0) == pytest.approx(0.8)
    for further_ms in (0.0, 1.6):
        for number in range(360):
            further = number % 6 == 0
            costs.learn_verify(8, 4000, 4000 + further * 4000, plain + 1.5 + further * further_ms)
        assert costs.row_keys(4000.0) == pytest.approx(further_ms, abs=0.2)
        assert costs.verify(8, 4000, 4000) == pytest.approx(slow, rel=0.03)


def test_keys_cost_once_for_a_sequence_and_again_for_each_row() -> None:
    costs = StepCosts(TABLE)
    assert costs.verify(3, keys=1000, key_rows=3000) == pytest.approx(2.0 + 0.1 + 0.6)
    assert costs.verify(3, keys=500) == pytest.approx(2.0 + 0.05)
    assert costs.verify(3, keys=2000) == pytest.approx(2.0 + 0.1 + 0.2), "dearer beyond the caches"
    assert costs.verify(3, keys=5000) == pytest.approx(2.0 + 0.7 + 0.2)
    assert costs.draft_ms((8, 1), keys=2000) == pytest.approx(0.3 + 0.1 + 0.02)
    assert costs.draft_ms(()) == 0.0
    assert costs.row(4, 1) == pytest.approx(1.0), "an edge"
    assert costs.row(1, 3) == 0.0, "no edge"


def test_a_slower_machine_is_followed_within_some_tens_of_steps() -> None:
    costs = StepCosts(TABLE)
    for _ in range(60):
        costs.learn_verify(4, 0.0, 0.0, 1.5 * TABLE.verify[4])
        costs.learn_draft(costs.draft_ms((2,)), 3 * TABLE.first[2])
    assert costs.verify(4) == pytest.approx(3.0, rel=0.05)
    assert 2.3 < costs.verify(1) <= 3.0, "what all rows share goes to all rows"
    assert costs.draft_ms((2, 2)) == pytest.approx(3 * (TABLE.first[2] + TABLE.deeper[2]), rel=0.1)


def test_one_number_of_rows_has_its_own_place() -> None:
    costs = StepCosts(TABLE)
    for _ in range(400):
        for rows in (1, 2, 3, 4, 6, 8):
            costs.learn_verify(rows, 0.0, 0.0, TABLE.verify[rows] * (1.4 if rows == 6 else 1.0))
    assert costs.verify(6) == pytest.approx(1.4 * TABLE.verify[6], rel=0.08)
    assert costs.verify(2) == pytest.approx(TABLE.verify[2], rel=0.08)


def test_keys_that_cost_more_leave_rows_their_price() -> None:
    """Attention takes thrice what the table says. Both the step and a row more are foretold rightly afterwards."""
    costs, truth = StepCosts(TABLE), StepCosts(TABLE)
    truth.keys_factor = 3.0
    for _ in range(100):
        for rows, keys in ((4, 3000.0), (8, 3000.0), (4, 100.0)):
            costs.learn_verify(rows, keys, keys, truth.verify(rows, keys, keys))
    assert costs.verify(4, 3000.0, 3000.0) == pytest.approx(truth.verify(4, 3000.0, 3000.0), rel=0.03)
    assert costs.row(8, 8) == pytest.approx(truth.row(8, 8), rel=0.15)
    assert costs.keys_factor == pytest.approx(3.0, rel=0.15)


def test_noise_moves_little_and_rows_are_told_from_their_base() -> None:
    """The memory is slow, and rows hide behind it: the base is dear and rows are cheap. Steps take 5 % more or less."""
    for seed in range(4):
        draw, costs, truth = random.Random(seed), StepCosts(TABLE), StepCosts(TABLE)
        truth.base_factor, truth.rows_factor, ratios = 1.4, 0.6, []
        for _ in range(600):
            rows = draw.choice((4, 5, 6, 8))
            costs.learn_verify(rows, 0.0, 0.0, truth.verify(rows) * draw.gauss(1.0, 0.05))
            ratios.append(costs.verify(4) / truth.verify(4))
        assert statistics.mean(ratios[300:]) == pytest.approx(1.0, rel=0.03)
        assert statistics.pstdev(ratios[300:]) < 0.035, "less than the noise"
        assert costs.rows_factor < 0.78 and costs.base_factor > 1.3


def test_rows_that_slow_memory_hid_get_a_price() -> None:
    """By the table eight rows cost what one costs. Memory is twice as fast now, and eight rows take what they took."""
    points = [(1, 2.0), (8, 2.0), (64, 16.0)]
    draw, costs = random.Random(0), StepCosts(CostTable(times_by_rows(points), EDGED, EDGED))
    truth = times_by_rows([(1, 1.0), *points[1:]])
    for _ in range(150):
        rows = draw.choice((3, 4, 5, 6, 8))
        costs.learn_verify(rows, 0.0, 0.0, truth[rows] * draw.gauss(1.0, 0.03))
    for rows in (1, 2, 4, 8):
        assert costs.verify(rows) == pytest.approx(truth[rows], rel=0.12), rows
    assert costs.verify(32) == pytest.approx(truth[32], rel=0.15), "not early rows"
    more = costs.further_rows(2, 10)
    assert more[4] == pytest.approx(truth[6] - truth[2], rel=0.25), "copies pay it too"
    assert more[6] - more[4] == pytest.approx(0.5 * more[4], rel=0.01) and more[7] - more[6] > 0.2


def test_what_a_forward_takes_behind_a_draft_is_not_what_its_rows_take() -> None:
    """All steps draft but four of 160. Behind the draft a forward takes a tenth of one row's time longer."""
    draw, costs, found = random.Random(0), StepCosts(TABLE), list[float]()
    for number in range(1600):
        drafts = number % 160 >= 4
        rows = draw.choice((3, 4, 5, 6, 8)) if drafts else 2
        truth = TABLE.verify[rows] + drafts * 0.1 * TABLE.verify[1]
        costs.learn_verify(rows, 0.0, 0.0, truth * draw.gauss(1.0, 0.03), drafts)
        found.append(costs.verify(2) / TABLE.verify[2])
    assert statistics.mean(found[800:]) == pytest.approx(1.0, abs=0.025)
    assert costs.after_ms == pytest.approx(0.1 * TABLE.verify[1], rel=0.35)
    each = costs.draft_each(np.array([1]), np.ones((1, 2)), np.zeros((1, 2)))
    assert each[0].tolist() == pytest.approx([costs.after_ms + costs.draft_ms(passes) for passes in ((1,), (1, 1))])


def test_what_a_call_costs_the_host_is_learnt_without_its_choice() -> None:
    costs = StepCosts(TABLE)
    for _ in range(100):
        costs.learn_host(1.0, 0.4)
        costs.learn_host(0.2)
    assert abs(costs.call_ms - 0.6) < 0.01 and 0.2 < costs.host_ms < 1.0


def test_a_call_of_several_steps_takes_the_host_a_share_of_their_time() -> None:
    """Each call lasts 16 ms. Its first step takes the host 1 ms more than the 0.2 ms that a further one takes."""
    costs = StepCosts(TABLE)
    for _ in range(100):
        costs.learn_host(1.2, 0.3, calls_ms=16.0)
        costs.learn_host(0.2)
    assert costs.host_ms == pytest.approx(0.2, rel=1e-4) and costs.call_ms == pytest.approx(0.9, rel=1e-4)
    for inside_ms, num_steps in ((2.0, 8), (4.0, 4)):
        assert costs.step_ms(inside_ms) == pytest.approx(inside_ms + 0.2 + 1.0 / num_steps, rel=1e-4)


def test_one_long_pause_moves_little() -> None:
    costs = StepCosts(TABLE)
    costs.learn_verify(4, 0.0, 0.0, 1e6)
    assert costs.verify(4) < 1.2 * TABLE.verify[4]
    costs.learn_host(0.05, 0.01)
    costs.learn_host(1e6, 0.01)
    costs.learn_host(1e6, 0.01, calls_ms=1.0)
    assert costs.host_ms < 0.1 and costs.call_ms < 0.1 and costs.host_share < 0.1
    assert math.isfinite(costs.verify(MAX_TABLE_ROWS + 5))


@needs_native
def test_a_table_is_measured_anew_for_another_number_of_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where siblings share a core, a process with fewer CPUs may have as many threads and still other costs."""
    measured = list[CostTable]()

    def measure(models: LoadedModels) -> CostTable:
        measured.append(calibrate.estimated_table(10**6 * (1 + len(measured)), True))
        return measured[-1]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "measured_table", measure)
    monkeypatch.setattr(calibrate._Watch, "others", lambda watch: 0.0)
    for cpus, number in (({0, 1}, 0), ({0, 1}, 0), ({0, 1, 2}, 1), ({0, 1}, 0)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cpus=cpus: cpus, raising=False)
        assert calibrate.cost_table(tiny_models(), is_measured=True) == measured[number]
    assert len(measured) == 2


def test_draft_keys_that_a_sequence_catches_up_say_nothing_of_passes() -> None:
    """A sequence that begins to draft writes the keys of its whole window in that step."""
    table = CostTable(times_by_rows([(1, 1.0)]), times_by_rows([(1, 0.1)]), times_by_rows([(1, 0.1)]))
    for num_draft_rows, is_learnt in ((3, True), (200, False)):
        costs = StepCosts(table)
        output = StepOutput([Decoded(9, [5], 1, 10)], [], num_draft_rows, {"draft": 1.0, "verify": 0.001})
        costs.learn_step(StepInput((Decode(0, Chain(1)),)), output, [10])
        assert (costs.draft_factor > 1.0) == is_learnt
