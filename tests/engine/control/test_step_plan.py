"""The plan of a step against a search over everything there is, and against drafts that are played."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aquiline.engine.control.costs import CostTable, StepCosts, times_by_rows
from aquiline.engine.control.planner import (
    BIN_CHANCES,
    LEAST_PASSES,
    NUM_BINS,
    Margins,
    Outlook,
    StepLoad,
    best_copies,
    best_drafting,
    outlooks_of,
)
from aquiline.spec.confidence import NUM_MARGINS

SURE = Margins((0, 0, 0, 0, 0, 0, 0, 1.0), (0, 0, 0, 0, 0, 0, 0, 1.0), (0.5,) * 7 + (1.0,), (0.0,) * NUM_MARGINS)
"""Every token has the widest margin, and is right."""


def costs_of(verify: list[tuple[int, float]], first: float = 0.2, deeper: float = 0.1, host: float = 0.0) -> StepCosts:
    table = CostTable(
        times_by_rows(verify),
        times_by_rows([(1, first), (32, 2 * first)]),
        times_by_rows([(1, deeper), (32, 2 * deeper)]),
        ((1000.0, 0.1),),
        1e-5,
        1e-6,
    )
    costs = StepCosts(table)
    costs.host_ms = host
    return costs


FREE_ROWS = [(1, 2.0), (16, 2.1), (17, 4.0), (32, 4.2)]
DEAR_ROWS = [(1, 1.0), (32, 32.0)]


def margins_from(rng: np.random.Generator) -> Margins:
    first, deeper = rng.dirichlet(np.ones(NUM_MARGINS), 2).tolist()
    chances = np.sort(rng.uniform(0.05, 0.99, NUM_MARGINS)).tolist()
    return Margins(first, deeper, chances, (0.5 * (1 - np.array(chances))).tolist())


def load_of(count: int, chunk_rows: int = 0, keys: float = 0.0) -> StepLoad:
    return StepLoad(count + chunk_rows, chunk_rows, count, count * keys, (keys,) * count)


def outlook(*nodes: float) -> Outlook:
    """Single nodes of these chances, from a single pass."""
    found = np.zeros((1, len(LEAST_PASSES), NUM_BINS))
    for chance in nodes:
        found[:, :, round(-4 * math.log2(chance))] += 1.0
    return Outlook(found, np.ones((1, len(LEAST_PASSES))))


@pytest.mark.parametrize("seed", range(6))
def test_an_outlook_is_what_drafts_have_on_average(seed: int) -> None:
    """Played: a margin is drawn at each level, and the chain goes on while its chance is no less than the limit."""
    rng = np.random.default_rng(seed)
    margins, most, place = margins_from(rng), 5, int(rng.integers(len(LEAST_PASSES)))
    found, _ = outlooks_of([margins, margins_from(rng)], most)
    plays, nodes, passes = 20_000, np.zeros((most, NUM_BINS)), np.zeros(most)
    bins = [[round(-4 * math.log2(chance)) for chance in own] for own in (margins.chances, margins.seconds)]
    last = round(-4 * math.log2(LEAST_PASSES[place]))
    first, deeper = (rng.choice(NUM_MARGINS, (plays, most), p=shares) for shares in (margins.first, margins.deeper))
    for play in range(plays):
        above = 0
        for level in range(most):
            passes[level] += 1
            margin = (deeper if level else first)[play, level]
            for own in bins:
                if above + own[margin] < NUM_BINS:
                    nodes[level:, above + own[margin]] += 1
            above += bins[0][margin]
            if above > last:
                break
    assert found.nodes[:, place] == pytest.approx(nodes / plays, abs=0.02)
    assert found.passes[:, place] == pytest.approx(passes / plays, abs=0.02)


@settings(max_examples=100)
@given(
    st.lists(st.lists(st.integers(0, 24), max_size=4), min_size=1, max_size=3),
    st.sampled_from((FREE_ROWS, DEAR_ROWS)),
    st.integers(0, 40),
    st.floats(0, 3000),
)
def test_it_is_the_best_of_all_ways(
    bins: list[list[int]], verify: list[tuple[int, float]], chunk_rows: int, keys: float
) -> None:
    """Against every number of sequences and every set of nodes, where each sequence has single nodes."""
    costs, load = costs_of(verify, host=0.05), load_of(len(bins), chunk_rows, keys)
    outlooks = [outlook(*(BIN_CHANCES[i] for i in own)) for own in bins]
    planned = best_drafting(costs, load, outlooks, 16)

    def rate(chosen: Sequence[float], num_drafting: int) -> float:
        rows = load.rows + len(chosen)
        ms = costs.verify(rows, load.all_keys, load.all_keys + len(chosen) * keys) + costs.host_ms
        ms -= costs.verify(load.rows) - costs.verify(load.rows - chunk_rows)
        ms += costs.draft_ms((num_drafting,), num_drafting * keys) if num_drafting else 0.0
        return (load.tokens + sum(chosen)) / ms

    best = rate((), 0)
    assert planned.plain == pytest.approx(best)
    for count in range(1, len(bins) + 1):
        nodes = [BIN_CHANCES[i] for own in bins[:count] for i in own]
        for size in range(1, len(nodes) + 1):
            best = max(best, *(rate(chosen, count) for chosen in itertools.combinations(nodes, size)))
    assert planned.rate == pytest.approx(best)
    drafted = costs.draft_ms((planned.num_drafting,), planned.num_drafting * keys) if planned.num_drafting else 0.0
    assert planned.draft_ms == pytest.approx(drafted)


@pytest.mark.parametrize("seed", range(4))
def test_sequences_that_share_an_outlook_count_each(seed: int) -> None:
    """With its own keys, as if each sequence had an outlook of its own."""
    rng = np.random.default_rng(seed)
    kinds = outlooks_of([margins_from(rng) for _ in range(2)], 4)
    shared = [kinds[i] for i in (0, 0, 1, 0, 1, 1)]
    keys = (0.0, 90_000.0, 10.0, 200_000.0, 5.0, 1_000.0)
    load = StepLoad(6, 0, 6, sum(keys), keys)
    costs = costs_of(FREE_ROWS)
    found = best_drafting(costs, load, shared, 16)
    alone = best_drafting(costs, load, [Outlook(own.nodes.copy(), own.passes.copy()) for own in shared], 16)
    assert found.num_drafting == alone.num_drafting and found.num_nodes == alone.num_nodes > 0
    assert (found.rate, found.draft_ms) == pytest.approx((alone.rate, alone.draft_ms))
    draft_ms = costs.draft_ms((found.num_drafting,), sum(keys[: found.num_drafting]))
    assert found.draft_ms >= draft_ms * (1 - 1e-9), "the first pass reads all keys of those that draft"


@settings(max_examples=40)
@given(
    st.integers(0, 10**6),
    st.integers(1, 3),
    st.sampled_from((FREE_ROWS, DEAR_ROWS)),
    st.floats(0.01, 3),
    st.floats(0.01, 1),
)
def test_the_best_number_of_levels_and_the_best_end_of_chains_are_found(
    seed: int, count: int, verify: list[tuple[int, float]], first: float, deeper: float
) -> None:
    """Where a first pass is dear and further ones are cheap, one level loses and four gain."""
    costs, rng = costs_of(verify, first, deeper), np.random.default_rng(seed)
    load, most = load_of(count), 4
    outlooks = outlooks_of([margins_from(rng) for _ in range(count)], most)

    def rate(drafting: int, levels: int, place: int, rows: int) -> float:
        nodes = sum(outlook.nodes[levels - 1, place] for outlook in outlooks[:drafting])
        ms, tokens, room = costs.verify(count + rows) + costs.draft_ms((drafting,)), float(count), float(rows)
        for chance, number in zip(BIN_CHANCES, nodes, strict=True):
            tokens += chance * min(room, number)
            room -= min(room, number)
        for level in range(1, levels):
            expected = sum(outlook.passes[level, place] for outlook in outlooks[:drafting])
            runs = 1 - (1 - expected / drafting) ** drafting
            ms += runs * np.interp(expected / runs, range(257), costs.table.deeper) if runs else 0.0
        return tokens / ms

    ways = itertools.product(range(1, count + 1), range(1, most + 1), range(len(LEAST_PASSES)), range(1, 13))
    planned = best_drafting(costs, load, outlooks, 12)
    assert planned.rate == pytest.approx(max(planned.plain, *(rate(*way) for way in ways)))


def test_edges_are_seen_past_nodes_that_lose() -> None:
    """Rows 2 to 8 cost the same: the first of them loses, all of them gain."""
    costs = costs_of([(1, 1.0), (2, 2.0), (8, 2.0), (9, 9.0)], first=0.01, deeper=0.01)
    planned = best_drafting(costs, load_of(1), outlooks_of([SURE], 7), 12)
    assert (planned.num_drafting, planned.num_nodes) == (1, 7)


def test_dear_rows_are_for_likely_tokens_alone() -> None:
    unsure, sure = outlook(0.25, 0.25), outlook(1.0, 1.0)
    assert best_drafting(costs_of(DEAR_ROWS), load_of(2), [unsure, unsure], 8).num_drafting == 0
    planned = best_drafting(costs_of(DEAR_ROWS, first=0.05), load_of(2), [sure, unsure], 8)
    assert (planned.num_drafting, planned.num_nodes) == (0, 0), "a row costs what a token of the plain step does"
    planned = best_drafting(costs_of(FREE_ROWS), load_of(2), [sure, unsure], 8)
    assert (planned.num_drafting, planned.num_nodes) == (2, 4)


def test_rows_of_prompts_lend_no_time() -> None:
    """Beside 200 prompt rows a node costs what it costs there, and is worth what it is worth without them."""
    linear = [(1, 2.0), (8, 2.2), (256, 70.0)]
    assert best_drafting(costs_of(linear), load_of(4), [outlook(0.5)] * 4, 8).num_nodes > 0
    planned = best_drafting(costs_of(linear), load_of(4, chunk_rows=200), [outlook(0.5)] * 4, 8)
    assert planned.num_drafting == 0 and planned.plain == pytest.approx(4 / costs_of(linear).verify(4))


def test_without_a_draft_there_is_nothing_to_add() -> None:
    planned = best_drafting(costs_of(FREE_ROWS), StepLoad(2, 0, 2, 0.0, ()), [], 0)
    assert planned.num_drafting == 0 and planned.rate == planned.plain


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
    verify = times_by_rows([(1 + i, 1.0 + sum(steps[:i])) for i in range(20)])
    costs = StepCosts(CostTable(verify, verify, verify))

    def worth(kept: Sequence[int]) -> float:
        brought = sum(sum(own[:count]) for own, count in zip(gains, kept, strict=True))
        return brought - rate * (verify[rows + sum(kept)] - verify[rows])

    found = best_copies(costs, rate, rows, gains)
    best = max(map(worth, itertools.product(*(range(len(own) + 1) for own in gains))))
    assert worth(found) == pytest.approx(best, abs=1e-9)


def test_a_row_beyond_an_edge_is_not_bought_for_one_token() -> None:
    """Four rows cost as one, the fifth costs as much as four more."""
    verify = times_by_rows([(1, 1.0), (4, 1.0), (5, 2.0), (8, 2.0), (64, 20.0)])
    costs = StepCosts(CostTable(verify, verify, verify))
    assert best_copies(costs, 3.0, 4, [[0.9], [0.8]]) == [0, 0]
    assert best_copies(costs, 3.0, 4, [[0.9, 0.8, 0.75], [0.85]]) == [3, 1]
    assert best_copies(costs, 3.0, 2, [[0.9, 0.8, 0.75], []]) == [2, 0]
    assert best_copies(costs, 3.0, 2, [[0.9, 0.8, 0.75], []], alone_ms=10.0) == [0, 0]
