"""Acceptance from match events: what levels count, how fast counts follow a text, and that chances meet what comes."""

from __future__ import annotations

import numpy as np
import pytest

from aquiline.engine.control.acceptance import (
    KEPT_EVENTS,
    Pool,
    Record,
    chances_of,
    margins_of,
    new_pools,
    pool_number,
    seconds_of,
)
from aquiline.spec.confidence import NUM_MARGINS, Guess


def guess(token: int, margin: int = 3, runner_up: int = -1) -> Guess:
    return Guess(token, runner_up, margin)


def test_levels_count_up_to_the_first_wrong_guess() -> None:
    pool = Pool()
    record = Record(pool)
    record.observe([guess(1), guess(2, 5, 9), guess(3)], [1, 9, 4])
    assert (record.levels.hits[0], record.levels.trials[0]) == (1, 1)
    assert (record.levels.hits[1], record.levels.trials[1]) == (0, 1), "the third level was never reached"
    assert pool.seconds.hits[5] == pytest.approx(Pool().seconds.hits[5] + 1), "the runner-up was right"
    assert pool.seconds.hits[3] == Pool().seconds.hits[3]
    record.observe([guess(1)], [])
    assert record.levels.trials[0] == 1, "nothing was drawn"


def test_a_half_blind_draft_says_nothing_of_other_texts() -> None:
    pool = Pool()
    blind = Record(pool)
    for _ in range(100):
        blind.observe([guess(1, 3), guess(2, 3)], [2, 5], is_half_blind=True)
    assert blind.share(0) < 0.2, "what its own drafting brings is known"
    young, fresh = Record(pool), Record(Pool())
    assert (young.share(0), chances_of(young)) == (fresh.share(0), chances_of(fresh))
    assert margins_of(pool, 0.5) == margins_of(Pool(), 0.5)


def test_temperatures_have_pools_of_their_own() -> None:
    numbers = [pool_number(t) for t in (0.0, 0.3, 0.5, 0.8, 1.0, 2.0)]
    assert numbers == sorted(numbers) and numbers[0] == 0 and numbers[-1] == len(new_pools()) - 1
    assert len(set(numbers)) == len(new_pools())


def test_what_a_run_learnt_another_begins_with() -> None:
    pool, record = Pool(), Record(learnt := Pool())
    for _ in range(300):
        record.observe([guess(1, 3), guess(2, 5, 9)], [1, 9])
    pool.begin_with(learnt.counts())
    assert [pool.chances.share(m) for m in (3, 5)] == pytest.approx([learnt.chances.share(m) for m in (3, 5)])
    assert [own.shares() for own in pool.margins] == [pytest.approx(own.shares()) for own in learnt.margins]
    assert pool.seconds.share(5) == pytest.approx(learnt.seconds.share(5)) and pool.seconds.share(5) > 0.9
    assert pool.levels.trials == [KEPT_EVENTS] * 2 and pool.chances.trials[0] == learnt.chances.trials[0], (
        "few stay few"
    )
    for _ in range(100):
        Record(pool).observe([guess(2, 3)], [1])
    assert pool.chances.share(3) < 0.5, "it gives way to what comes"


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize("broken", [[], [1.0], ["1"] * 8, [float("nan")] * 8, [-1.0] * 8, [1e9] * 8, None, 7])
def test_counts_that_none_can_be_are_refused(place: int, broken: object) -> None:
    counts: list[object] = [*Pool().counts()]
    assert len(counts) == 8
    counts[place] = broken
    with pytest.raises((ValueError, TypeError)):
        Pool().begin_with(counts)  # type: ignore[arg-type]


def test_a_young_request_follows_the_pool_and_then_its_own_text() -> None:
    pool = Pool()
    for _ in range(200):
        Record(pool).observe([guess(1)], [1])
    young = Record(pool)
    assert young.share(0) > 0.95
    for _ in range(40):
        young.observe([guess(1)], [2])
    assert young.share(0) < 0.25, "its text changed within tens of tokens"
    for _ in range(40):
        young.observe([guess(1)], [1])
    assert young.share(0) > 0.6, "and back"


def test_chances_are_those_that_come() -> None:
    """Tokens are right with a chance that depends on the margin, less at every level of this text."""
    rng = np.random.default_rng(0)
    truth, seconds = np.linspace(0.2, 0.95, NUM_MARGINS), np.linspace(0.3, 0.01, NUM_MARGINS)
    pool = Pool()
    for _ in range(40):
        record = Record(pool)
        for _ in range(200):
            margins = rng.integers(NUM_MARGINS, size=4)
            drawn = rng.random(4)
            tokens = [1 if d < truth[m] else 2 if d < truth[m] + seconds[m] * (1 - truth[m]) else 3
                      for d, m in zip(drawn, margins, strict=True)]  # fmt: skip
            record.observe([guess(1, int(m), 2) for m in margins], tokens)
    assert np.abs(np.array(chances_of(record)) - truth).max() < 0.09
    assert np.abs(np.array(seconds_of(record)) - seconds * (1 - truth)).max() < 0.06
    assert record.calibration == pytest.approx(1.0, abs=0.2)


def test_a_text_that_leans_the_other_way_changes_its_chances() -> None:
    pool = Pool()
    rng = np.random.default_rng(1)
    for _ in range(2000):
        Record(pool).observe([guess(1)], [1 if rng.random() < 0.6 else 2])
    hard = Record(pool)
    for _ in range(60):
        hard.observe([guess(1)], [1 if rng.random() < 0.2 else 2])
    assert chances_of(hard)[3] < 0.45 < chances_of(Record(pool))[3]


def test_a_pool_follows_texts_that_have_changed() -> None:
    """Thousands of old events do not outweigh the last thousand: in rates, in margins, and in what a text leans to."""
    pool = Pool()
    for _ in range(5000):
        Record(pool).observe([guess(1, 6), guess(2, 6)], [1, 2])
    assert Record(pool).share(0) > 0.99 and margins_of(pool, 0.99).first[6] > 0.9
    for _ in range(3000):
        Record(pool).observe([guess(1, 2), guess(2, 2)], [1, 3])
    assert Record(pool).share(0) > 0.99 and Record(pool).share(1) < 0.2
    margins = margins_of(pool, 0.99)
    assert margins.first[2] > 0.8 and margins.deeper[2] > 0.8


def test_how_a_text_leans_is_told_by_its_last_tokens() -> None:
    record = Record(Pool())
    for _ in range(600):
        record.observe([guess(1)], [1])
    assert record.calibration > 1.0
    for _ in range(100):
        record.observe([guess(1)], [2])
    assert record.calibration < 0.5
