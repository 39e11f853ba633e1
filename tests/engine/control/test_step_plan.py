"""The plan of a step against a search over everything there is."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aquiline.engine.control.costs import CostTable, StepCosts, filled
from aquiline.engine.control.plan import Load, best_copies, best_lengths

MOST = 3
CHANCES = st.floats(0.02, 0.98)


def costs_of(verify: list[tuple[int, float]], first: float = 0.2, deeper: float = 0.1, host: float = 0.0) -> StepCosts:
    table = CostTable(
        filled(verify),
        filled([(1, first), (32, 2 * first)]),
        filled([(1, deeper), (32, 2 * deeper)]),
        ((1000.0, 0.1),),
        1e-5,
        1e-6,
    )
    costs = StepCosts(table)
    costs.host_ms = host
    return costs


FREE_ROWS = [(1, 2.0), (16, 2.1), (17, 4.0), (32, 4.2)]
DEAR_ROWS = [(1, 1.0), (32, 32.0)]


def rate(costs: StepCosts, load: Load, first: list[float], deeper: list[float], lengths: tuple[int, ...]) -> float:
    tokens = load.tokens + sum(
        first[i] * deeper[i] ** level for i, length in enumerate(lengths) for level in range(length)
    )
    passes = [sum(length > level for length in lengths) for level in range(max(lengths, default=0))]
    key_rows = load.all_keys + sum(load.keys[i] * length for i, length in enumerate(lengths))
    keys = [sum(load.keys[i] for i, length in enumerate(lengths) if length > level) for level in range(len(passes))]
    drafting = costs.drafting(passes) + sum(map(costs.draft_keys, keys))
    return tokens / (costs.verify(load.rows + sum(lengths), load.all_keys, key_rows) + drafting + costs.host_ms)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(CHANCES, CHANCES, st.floats(0, 3000)), min_size=1, max_size=3),
    st.sampled_from((FREE_ROWS, DEAR_ROWS)), st.integers(0, 40),
)  # fmt: skip
def test_its_rate_is_what_it_says_and_near_the_best_of_all(
    sequences: list[tuple[float, float, float]], verify: list[tuple[int, float]], more_rows: int
) -> None:
    first, deeper, keys = (list(values) for values in zip(*sequences, strict=True))
    costs = costs_of(verify, host=0.05)
    load = Load(len(first) + more_rows, len(first), sum(keys), tuple(keys))
    planned = best_lengths(costs, load, first, deeper, MOST)
    assert planned.rate == pytest.approx(rate(costs, load, first, deeper, planned.lengths))
    assert planned.plain == pytest.approx(rate(costs, load, first, deeper, (0,) * len(first)))
    assert planned.rate >= planned.plain
    everything = itertools.product(range(MOST + 1), repeat=len(first))
    best = max(rate(costs, load, first, deeper, lengths) for lengths in everything)
    assert planned.rate >= 0.93 * best, "likeliest first is not always the best order, and nearly always close"


@given(CHANCES, CHANCES)
def test_one_sequence_gets_the_best_length(first: float, deeper: float) -> None:
    for verify in (FREE_ROWS, DEAR_ROWS):
        costs = costs_of(verify)
        load = Load(1, 1, 100.0, (100.0,))
        planned = best_lengths(costs, load, [first], [deeper], 8)
        assert planned.rate == pytest.approx(max(rate(costs, load, [first], [deeper], (k,)) for k in range(9)))


def test_edges_are_seen_past_additions_that_lose() -> None:
    """Rows 2 to 8 cost the same: the first of them loses, all of them gain."""
    costs = costs_of([(1, 1.0), (2, 2.0), (8, 2.0), (9, 9.0)], first=0.01, deeper=0.01)
    planned = best_lengths(costs, Load(1, 1, 0.0, (0.0,)), [0.9], [0.95], 8)
    assert planned.lengths == (7,)


def test_dear_rows_are_for_likely_tokens_alone() -> None:
    costs = costs_of(DEAR_ROWS, first=0.05, deeper=0.02)
    planned = best_lengths(costs, Load(3, 3, 0.0, (0.0, 0.0, 0.0)), [0.2, 0.97, 0.5], [0.5, 0.97, 0.5], 4)
    assert planned.lengths[0] == planned.lengths[2] == 0
    planned = best_lengths(costs_of(FREE_ROWS), Load(3, 3, 0.0, (0.0, 0.0, 0.0)), [0.5, 0.97, 0.5], [0.5, 0.97, 0.5], 4)
    assert planned.lengths[1] == 4 and min(planned.lengths) >= 1


def test_without_a_draft_there_is_nothing_to_add() -> None:
    planned = best_lengths(costs_of(FREE_ROWS), Load(2, 2, 0.0, ()), [], [], 4)
    assert planned.lengths == () and planned.rate == planned.plain


@given(
    st.lists(st.lists(st.floats(0.01, 1), max_size=4), min_size=1, max_size=3),
    st.floats(0.01, 4),
    st.integers(1, 6),
    st.lists(st.floats(0, 2), min_size=20, max_size=20),
)
def test_copied_tokens_that_pay_together_are_found(
    parts: list[list[float]], rate: float, rows: int, steps: list[float]
) -> None:
    """Against all prefixes of all copies, where every row may cost what it will."""
    gains = [list(itertools.accumulate(own, lambda a, b: a * b)) for own in parts]
    verify = filled([(1 + i, 1.0 + sum(steps[:i])) for i in range(20)])
    costs = StepCosts(CostTable(verify, verify, verify))

    def worth(kept: Sequence[int]) -> float:
        brought = sum(sum(own[:count]) for own, count in zip(gains, kept, strict=True))
        return brought - rate * (verify[rows + sum(kept)] - verify[rows])

    found = best_copies(costs, rate, rows, gains)
    best = max(map(worth, itertools.product(*(range(len(own) + 1) for own in gains))))
    assert worth(found) == pytest.approx(best, abs=1e-9)


def test_a_row_beyond_an_edge_is_not_bought_for_one_token() -> None:
    """Four rows cost as one, the fifth costs as much as four more."""
    verify = filled([(1, 1.0), (4, 1.0), (5, 2.0), (8, 2.0), (64, 20.0)])
    costs = StepCosts(CostTable(verify, verify, verify))
    assert best_copies(costs, 3.0, 4, [[0.9], [0.8]]) == [0, 0]
    assert best_copies(costs, 3.0, 4, [[0.9, 0.8, 0.75], [0.85]]) == [3, 1]
    assert best_copies(costs, 3.0, 2, [[0.9, 0.8, 0.75], []]) == [2, 0]
