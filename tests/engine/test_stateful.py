"""Random traffic: arrivals, aborts, preemptions, shared prefixes and unlike requests in pools that are too small.

After every step pages, slots and sequences agree (Traffic.check, and the engine's own conservation check), and every
text, from its first token on, is that of the same request alone without speculation, bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from tests.conftest import needs_native
from tests.engine.traffic import Setup, Traffic
from tests.engine.wishes import CHAINS, COMB, MAX_BATCH, ROW_BUDGET, STEMS, TREES, Wish, draw_wishes

import aquiline.engine.engine as engine_module
from aquiline.spec.drafting import Drafting

pytestmark = needs_native


def walk(setup: Setup, seed: int | list[int], num_steps: int) -> Traffic:
    """One long run without hypothesis: the same for the same seed."""
    rng, traffic = np.random.default_rng(seed), Traffic(setup)

    def choose(choices: Sequence[Any]) -> Any:
        return choices[int(rng.integers(len(choices)))]

    for number in range(num_steps):
        if len(traffic.live) < 7 and rng.random() < 0.35:
            for wish in draw_wishes(choose, traffic.texts):
                traffic.add(wish)
        if traffic.live and rng.random() < 0.06:
            traffic.abort(choose(sorted(traffic.live)))
        if rng.random() < 0.002:
            traffic.abort_all()
        traffic.step()
        if number % 50 == 0:
            traffic.check_cached()
    traffic.drain()
    return traffic


ALWAYS = (
    "accepted", "cut", "preempted", "resumed", "aborted running", "aborted waiting", "mixed drafters",
    "mixed with prefill",
)  # fmt: skip
CACHED = (
    "prefix hits", "whole hits", "resumed on a hit", "drafted behind undrafted pages", "upgraded", "evicted",
    "draft pages checked",
)  # fmt: skip
LATE = ("preempted unread", "aborted unread")


@pytest.mark.parametrize("late_reads", [False, True])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_long_run_meets_everything_there_is(prefix_cache: bool, late_reads: bool) -> None:
    setup = Setup(prefix_cache=prefix_cache, late_reads=late_reads)
    seen = walk(setup, seed=7, num_steps=800).seen
    wanted = ALWAYS + CACHED * prefix_cache + LATE * late_reads
    assert not [what for what in wanted if seen[what] == 0], f"never happened: {dict(seen)}"


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_long_run_with_repeated_steps_meets_everything(prefix_cache: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take no time, as a slow machine would repeat few."""
    monkeypatch.setattr(engine_module, "MOST_AHEAD_S", 1e9)
    setup = Setup(prefix_cache=prefix_cache, is_taught=False, num_continuous=8)
    seen = walk(setup, seed=7, num_steps=6000).seen
    wanted = ALWAYS + CACHED * prefix_cache + ("aborted ahead",)
    assert not [what for what in wanted if seen[what] == 0], f"never happened: {dict(seen)}"


@pytest.mark.parametrize("late_reads", [False, True])
def test_a_long_run_with_a_draft_that_sees_a_window(late_reads: bool) -> None:
    setup = Setup(late_reads=late_reads, draft_window=20, num_continuous=8, is_taught=late_reads)
    seen = walk(setup, seed=7, num_steps=1000).seen
    wanted = ALWAYS + CACHED + ("computed again",)
    assert not [what for what in wanted if seen[what] == 0], f"never happened: {dict(seen)}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_engines_of_many_sizes_run_for_long(seed: int, run_seed: int) -> None:
    rng = np.random.default_rng([run_seed, seed])
    for number in range(20):
        setup = Setup(
            num_pages=int(rng.choice((7, 9, 11, 16, 24))),
            max_batch=int(rng.integers(1, MAX_BATCH + 1)),
            row_budget=int(rng.choice((1, 5, 16, ROW_BUDGET))),
            prefix_cache=bool(rng.random() < 0.8),
            late_reads=bool(rng.integers(2)),
            is_taught=bool(rng.random() < 0.6),
            num_continuous=int(rng.choice((1, 8))),
        )
        walk(setup, [run_seed, seed, number], num_steps=500)


@pytest.mark.parametrize("late_reads", [False, True])
@pytest.mark.parametrize("drafting", [CHAINS[4], COMB, TREES[-1]], ids=["chain", "static", "dynamic"])
def test_pages_of_texts_that_end_have_their_draft_keys(drafting: Drafting, late_reads: bool) -> None:
    """Texts end at every offset of a page, and whichever step completes a page: the next step would have written the
    draft's keys of the last tokens, and there is none."""
    traffic = Traffic(Setup(num_pages=200, row_budget=ROW_BUDGET, late_reads=late_reads))
    prompt = STEMS[0] + STEMS[1]
    for length, max_tokens in itertools.product(range(1, 34), (5, 12)):
        traffic.add(Wish(prompt[length:0:-1], "sampled", max_tokens, drafting, 0))
    traffic.drain()
    assert traffic.seen["accepted"] and traffic.seen["draft pages checked"] > 20
    assert not traffic.undrafted, "everyone drafts"
    if not late_reads:
        assert traffic.seen["drafts completed"]


@pytest.mark.parametrize("late_reads", [False, True])
def test_the_cache_may_be_cleared_while_its_pages_are_in_use(late_reads: bool) -> None:
    traffic = Traffic(Setup(num_pages=24, row_budget=ROW_BUDGET, late_reads=late_reads))
    for _ in range(2):
        traffic.add(Wish(STEMS[0][:40], "sampled", 40, CHAINS[2], 0))
    for _ in range(5):
        traffic.step()
    assert traffic.engine.prefix is not None
    traffic.engine.prefix.clear()
    traffic.drain()


SETUPS = st.builds(
    Setup,
    num_pages=st.sampled_from((9, 11, 16, 24)),
    max_batch=st.integers(3, MAX_BATCH),
    row_budget=st.sampled_from((1, 7, 16, ROW_BUDGET)),
    prefix_cache=st.booleans(),
    late_reads=st.booleans(),
    is_taught=st.booleans(),
    num_continuous=st.sampled_from((1, 8)),
)


class EngineMachine(RuleBasedStateMachine):
    """Hypothesis chooses what arrives, what is aborted and when the engine runs."""

    def __init__(self) -> None:
        super().__init__()
        self.traffic: Traffic | None = None
        self.is_sound = True  # no rule has failed: draining says nothing more otherwise

    @initialize(setup=SETUPS)
    def start(self, setup: Setup) -> None:
        self.traffic = Traffic(setup)

    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        for wish in draw_wishes(lambda choices: data.draw(st.sampled_from(choices)), self.traffic.texts):
            self._guarded(self.traffic.add, wish)

    @rule(count=st.sampled_from((1, 2, 5, 12)))
    def run(self, count: int) -> None:
        for _ in range(count):
            self._guarded(self.traffic.step)

    @precondition(lambda self: self.traffic is not None and self.traffic.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self._guarded(self.traffic.abort, data.draw(st.sampled_from(sorted(self.traffic.live))))

    @precondition(lambda self: self.traffic is not None and len(self.traffic.live) > 4)
    @rule()
    def abort_all(self) -> None:
        self._guarded(self.traffic.abort_all)

    def teardown(self) -> None:
        if self.traffic is not None and self.is_sound:
            self.traffic.drain()

    def _guarded(self, call: Callable[..., None], *args: Any) -> None:
        self.is_sound = False
        call(*args)
        self.is_sound = True


def explore(max_examples: int, num_rules: int) -> None:
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=max_examples, stateful_step_count=num_rules, suppress_health_check=list(HealthCheck)
        ),
    )


def test_nothing_that_hypothesis_thinks_of_breaks_the_engine() -> None:
    explore(max_examples=20, num_rules=30)


@pytest.mark.slow
def test_nothing_that_hypothesis_thinks_of_for_long_breaks_the_engine() -> None:
    explore(max_examples=400, num_rules=60)
