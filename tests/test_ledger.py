"""The figures of adaptive drafting: differences between two moments, and calibration."""

from __future__ import annotations

import pytest

from aquiline.ledger import SOURCES, Ledger


def filled() -> Ledger:
    ledger = Ledger()
    for i, source in enumerate(SOURCES):
        ledger.steps[source] += 10 + i
        ledger.nodes[source] += 4 * i
        ledger.accepted[source] += i
    for chance, is_right in ((0.31, True), (0.39, False), (0.92, True), (1.0, True)):
        ledger.add_token(chance, is_right)
    ledger.add_time(2.0, 3.0)
    ledger.add_time(3.0, 2.5)
    ledger.num_chosen, ledger.choosing_ms = 20, 0.5
    return ledger


def test_the_json_object_is_of_what_was_added() -> None:
    found = filled().as_dict()
    assert found is not None
    assert found["steps"] == {"none": 10, "draft": 11, "lookup": 12, "both": 13, "probe": 14}
    assert found["choosing_us"] == pytest.approx(25.0)
    assert (found["predicted_ms"], found["measured_ms"], found["error_ms"]) == pytest.approx((2.5, 2.75, 0.75))
    calibration = found["calibration"]
    assert isinstance(calibration, list)
    assert [part["tokens"] for part in calibration] == [2, 2]
    assert calibration[0] == {"foretold": pytest.approx(0.35), "right": 0.5, "tokens": 2}
    assert calibration[1] == {"foretold": pytest.approx(0.96), "right": 1.0, "tokens": 2}


def test_a_run_is_the_difference_between_two_moments() -> None:
    ledger = filled()
    began = ledger.plus(Ledger())
    assert ledger.minus(began).as_dict() is None, "nothing was chosen since"
    ledger.steps["draft"] += 5
    ledger.num_chosen += 5
    ledger.add_token(0.7, True)
    since = ledger.minus(began)
    assert since.steps == {"none": 0, "draft": 5, "lookup": 0, "both": 0, "probe": 0}
    found = since.as_dict()
    assert found is not None
    assert found["calibration"] == [{"foretold": pytest.approx(0.7), "right": 1.0, "tokens": 1}]
    both = began.plus(since)
    assert (both.steps, both.right, both.num_chosen) == (ledger.steps, ledger.right, ledger.num_chosen)
