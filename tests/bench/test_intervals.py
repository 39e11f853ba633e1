"""Medians, their intervals, ratios of rounds, the order of settings: the rules of every published figure."""

from __future__ import annotations

import itertools
import statistics

import numpy as np
import pytest

from aquiline.bench.results.intervals import (
    COVERAGE,
    LEAST_RUNS,
    Estimate,
    Span,
    decode_s,
    decode_tokens_per_s,
    estimate,
    paired,
    rotated,
    spread,
)


def test_one_slow_run_moves_no_headline() -> None:
    """The case that failed: baselines of 1297 on average, 1405 in the middle, and a speedup of 2.02x that was 1.86x."""
    baseline, chain = [1405.0, 1410.0, 1076.0], [2613.0, 2620.0, 2605.0]
    assert statistics.mean(chain) / statistics.mean(baseline) > 2.0
    assert estimate(baseline).value == 1405.0
    assert paired(chain, baseline).value == pytest.approx(2613 / 1405) and paired(chain, baseline).low is None


@pytest.mark.parametrize(("n", "cut"), [(1, None), (5, None), (6, 0), (8, 0), (9, 1), (11, 1), (12, 2), (20, 5)])
def test_intervals_are_the_order_statistics_of_the_sign_test(n: int, cut: int | None) -> None:
    values = [float(v) for v in range(n)][::-1]
    found = estimate(values)
    assert found.value == (n - 1) / 2
    assert (found.low, found.high) == ((None, None) if cut is None else (float(cut), float(n - 1 - cut)))
    assert found.is_sure == (n >= LEAST_RUNS)


@pytest.mark.parametrize("n", [6, 9, 12])
def test_the_coverage_is_what_it_says_by_enumeration(n: int) -> None:
    """Runs lie above or below the median like coins: of all 2^n ways the interval holds it in 95 % or more, and one run
    narrower it would not."""
    cut = int(estimate([float(v) for v in range(n)]).low or 0)
    below = [sum(way) for way in itertools.product((0, 1), repeat=n)]

    def held(k: int) -> float:
        return sum(k < count < n - k for count in below) / 2**n

    assert held(cut) >= COVERAGE > held(cut + 1)


def test_the_coverage_holds_for_times_with_outliers() -> None:
    rng = np.random.default_rng(0)
    draws = 1 + rng.exponential(size=(2000, 6)) ** 3
    median = 1 + np.log(2) ** 3
    held = [(found.low or 0) <= median <= (found.high or 0) for found in (estimate(list(row)) for row in draws)]
    assert 0.95 <= np.mean(held) <= 0.985


def test_ratios_are_of_rounds_not_of_medians() -> None:
    """Rounds that are slow as a whole leave the ratio alone."""
    machine = [1.0, 0.5, 0.9, 0.3, 1.0, 0.8]
    found = paired([200 * m for m in machine], [100 * m for m in machine])
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))
    with pytest.raises(ValueError, match="6 rounds against 5"):
        paired([1.0] * 6, [1.0] * 5)
    with pytest.raises(ValueError, match="are none"):
        estimate([])


def test_a_figure_says_its_interval_or_has_none() -> None:
    assert Estimate(1.861, 1.7049, 1.93).times() == "1.86x [1.70, 1.93]" and Estimate(2.0).times() == "2.00x"
    assert Estimate(1296.7, 1204, 1330).whole() == "1297 [1204, 1330]" and Estimate(0.0).whole() == "0"
    assert spread([3.0, 1.0]) == {
        "median": 2.0, "low": None, "high": None, "min": 1.0, "max": 3.0, "values": [3.0, 1.0]
    }  # fmt: skip


def test_every_setting_begins_a_round_and_none_is_left_out() -> None:
    settings = ["baseline", "chain-2", "chain-3"]
    rounds = [rotated(settings, number) for number in range(6)]
    assert [order[0] for order in rounds] == settings * 2
    assert all(sorted(order) == sorted(settings) for order in rounds)
    assert rotated([], 3) == []


def test_decoding_is_timed_from_the_first_token_of_all_to_the_last() -> None:
    spans = [Span(11, 100.0, 300.0), Span(11, 120.0, 600.0)]
    assert decode_s(spans) == pytest.approx(0.5) and decode_tokens_per_s(spans) == pytest.approx(40.0)
    assert decode_tokens_per_s([Span(1, 5.0, 5.0)]) == 0.0
