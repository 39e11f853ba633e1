"""Plans follow what was learnt: what drafts should have, and what drafting steps brought."""

from __future__ import annotations

from aquiline.engine.control.acceptance import Pool, Record
from aquiline.engine.control.costs import CostTable, StepCosts, times_by_rows
from aquiline.engine.control.planner import OUTLOOK_PLANS, DraftingPlan, Planner, StepLoad
from aquiline.spec.confidence import Guess

LOAD = StepLoad(rows=1, chunk_rows=0, tokens=1, all_keys=10.0, keys=(10.0,))


def planner_of(deeper_ms: float) -> Planner:
    passes = times_by_rows([(1, 0.2), (32, 0.4)]), times_by_rows([(1, deeper_ms), (32, 2 * deeper_ms)])
    return Planner(StepCosts(CostTable(times_by_rows([(1, 2.0), (32, 2.1)]), *passes)))


def plan_of(planner: Planner, record: Record) -> DraftingPlan:
    return planner.plan(LOAD, [record], 8)


def length_of(planner: Planner, record: Record, plan: DraftingPlan) -> int:
    assert planner.cut(plan, record) is not None
    return planner.chain_worth(plan, record, 8).length


def test_chains_grow_within_some_plans_once_deeper_tokens_are_right() -> None:
    """The first tokens are right as often as before, so nothing but the age of what is known tells the two apart."""
    planner, pool = planner_of(deeper_ms=0.3), Pool()
    for _ in range(400):
        Record(pool).observe([Guess(1, -1, 5), Guess(1, -1, 2), Guess(1, -1, 2)], [1, 2, 2])
    before = [length_of(planner, Record(pool), plan_of(planner, Record(pool))) for _ in range(OUTLOOK_PLANS)]
    for _ in range(2000):
        Record(pool).observe([Guess(1, -1, 7)] * 4, [1, 1, 1, 1])
    after = [length_of(planner, Record(pool), plan_of(planner, Record(pool))) for _ in range(OUTLOOK_PLANS + 1)]
    assert before[-1] == 1 and after[-1] > 3
    assert round(Record(pool).share(0), 1) == 1.0


def test_steps_that_bring_less_than_planned_end_drafting_and_it_comes_back() -> None:
    """What drafting steps bring, per what was planned, corrects the plan; while nothing is drafted that fades."""
    planner, record = planner_of(deeper_ms=0.2), Record(Pool())
    plan = plan_of(planner, record)
    plain = planner_of(deeper_ms=100.0).plan(LOAD, [], 8).rate
    assert planner.cut(plan, record) is not None and plain < plan.planned_rate < 1.9 * plain
    num_drafted = 0
    while plan.planned_rate:
        planner.learn_rate(2, 4 / plan.planned_rate, plan.planned_rate)
        plan = plan_of(planner, record)
        num_drafted += 1
        assert num_drafted < 40, "half of what was planned is less than plain steps bring"
    assert plan.rate == plain and planner.cut(plan, record) is None
    for _ in range(40):
        plan = plan_of(planner, record)
    assert plan.planned_rate
