"""Which of the rivals goes on: the fastest one by what its steps took, at a bounded cost, whatever a plan promises."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from tests.engine.control.test_controller import sequence_of

from aquiline.backends.base import Chunk, Decode, Decoded, StepInput, StepOutput
from aquiline.config import EngineConfig, SamplingParams
from aquiline.engine.control import rivalry
from aquiline.engine.control.choices import PLAIN
from aquiline.engine.control.controller import Controller
from aquiline.engine.control.costs import CostTable, StepCosts, times_by_rows
from aquiline.engine.control.planner import DraftingPlan
from aquiline.engine.control.rivalry import (
    COST_SHARE,
    COUNTED_STEPS,
    FIRST_COST,
    MOST_COST,
    MOST_LOST,
    PIECE_STEPS,
    TURN_STEPS,
    Found,
    Rivalry,
)
from aquiline.engine.control.rivals import Rivals
from aquiline.engine.control.yields import CHAIN_LEVELS, NONE, PLANNED
from aquiline.engine.llm import LLM
from aquiline.engine.pipeline import Step
from aquiline.engine.scheduler import StepPlan
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.drafting import Chain, NoDraft

CHAIN, CHAIN_2, CHAIN_3, CHAIN_5 = (CHAIN_LEVELS.index(levels) for levels in (1, 2, 3, 5))
PLAN = DraftingPlan(1.0, 1.0, 1)
"""A plan that drafts nothing."""

DRAFTS = PLAN._replace(speedup=1.1, planned_rate=1.0, num_rows=8)
"""One that drafts, and promises little."""

Rates = tuple[float, ...]
"""Of planned drafting, none, and chains of one token and more; each further one that is not named has the last."""


class Played(NamedTuple):
    """turns: whose turn each step was, by time: one with a prompt is eight; lost: the steps that turns cost, beside the
    fastest alone."""

    turns: list[int]
    lost: float


def know(rivalry: Rivalry, num_steps: int) -> None:
    """Steps of the turn bring a token each. What more they bring is part of what they are worth here."""
    for _ in range(num_steps):
        if rivalry.current == PLANNED:
            rivalry.yields.add_planned(1, 1, 0, 0, 0.0)
        elif rivalry.current != NONE:
            rivalry.yields.add_chain(rivalry.current, [1])


def played(
    rivalry: Rivalry, rates: Callable[[int], Rates], num_steps: int, *, noise: float = 0.1, mood: float = 0.0,
    change: float = 0.25, prompt_pace: float = 1.0, speedup: float | None = None, num_nodes: float = 1.0,
) -> Played:  # fmt: skip
    """Calls of at most eight steps of a millisecond. Of a rival's rate come the tokens, of eight steps more or less by
    `noise`. The machine is slower or faster by `mood` for some hundreds of steps. Each tenth call has a prompt; it
    takes prompt_pace times what it is worth, eight steps. A call of another rival than the last one has one step, and
    takes `change` ms longer. speedup: what the plan promises, by default 1.2 if it drafts."""
    rng, turns, lost, moods = random.Random(1), list[int](), 0.0, random.Random(2)
    promised, slower, number = speedup or (1.2 if num_nodes >= 0.5 else 1.0), 0.0, 0
    while len(turns) < num_steps:
        turn = rivalry.begin_call(promised, num_nodes)
        own = [*rates(len(turns)), *[rates(len(turns))[-1]] * len(CHAIN_LEVELS)]
        is_first, has_prompts = turns[-1:] not in ([], [turn]), number % 10 == 9
        steps = 8 if has_prompts else 1 if is_first else min(8, rivalry.num_left)
        slower = 0.96 * slower + 0.28 * mood * moods.gauss(0, 1)  # of size `mood`, kept for 25 calls
        worth_ms = steps * own[turn] * math.exp(rng.gauss(0, noise * math.sqrt(8 / steps)))
        ms = steps * (prompt_pace if has_prompts else math.exp(slower)) + is_first * change
        know(rivalry, steps)
        rivalry.count(0 if has_prompts else steps, worth_ms, ms, is_first)
        turns += [turn] * steps
        lost += steps * (1 - own[turn] / max(own)) + is_first * change
        number += 1
    return Played(turns[:num_steps], lost)


@pytest.mark.parametrize("fastest", range(len(CHAIN_LEVELS)))
@pytest.mark.parametrize("num_sequences", [1, 8])
def test_the_fastest_goes_on(fastest: int, num_sequences: int) -> None:
    """It is 20 % faster than its neighbours, and what is measured of one call differs by 10 % without a reason. Chains
    bring the less the further they are from the best one, as they do."""
    rates = [1.0 - 0.03 * max(0, abs(number - fastest) - 1) for number in range(len(CHAIN_LEVELS))]
    rates[fastest] = 1.2
    found = played(Rivalry(1.0, num_sequences, can_draft=True), lambda _: tuple(rates), 32_000)
    assert found.turns[16_000:].count(fastest) > 0.9 * 16_000
    assert set(found.turns) >= {PLANNED, NONE, CHAIN}, "each was tried"


def test_the_first_chain_is_about_as_long_as_planned_drafts_and_its_neighbours_follow_where_it_leads() -> None:
    """Chains that are neighbours of no fast one get no turn."""
    order = dict[float, list[int]]()
    for num_nodes, rates in (
        (0.0, (1.0, 1.0, 0.9, 0.8, 0.7)),
        (1.2, (1.0, 0.8, 1.0, 0.9, 0.8)),
        (2.2, (1.0, 0.6, 0.9, 1.2, 1.3, 1.4)),
    ):
        found = played(Rivalry(1.0, 8, can_draft=True), lambda _, own=rates: own, 48_000, num_nodes=num_nodes)
        order[num_nodes] = [*dict.fromkeys(found.turns)]
    assert order[0.0] == [PLANNED, NONE, CHAIN, CHAIN_2]
    assert order[1.2][:2] == [PLANNED, CHAIN] and set(order[1.2]) == {PLANNED, NONE, CHAIN, CHAIN_2}
    assert order[2.2][:2] == [PLANNED, CHAIN_2] and set(order[2.2]) >= {CHAIN, CHAIN_3, CHAIN_5}


@pytest.mark.parametrize("rates", [(2.0, 1.0, 1.5), (1.0, 1.0, 0.5)])
def test_what_turns_cost_is_bounded(rates: Rates) -> None:
    """A planner that is as fast as anything goes on. The turns of the others cost a share of the time, and a little at
    first; the last one may cost more than was earned. Steps that begin a piece take as long as two do."""
    found = played(Rivalry(1.0, 8, can_draft=True), lambda _: rates, 64_000, change=1.0, speedup=rates[0])
    assert found.lost < 1.5 * (COST_SHARE * 64_000 + FIRST_COST + MOST_COST)
    assert set(found.turns) >= {PLANNED, NONE, CHAIN}


@pytest.mark.parametrize("speedup, last", [(1.2, 0.0), (1.1, MOST_LOST + 8)])
def test_a_short_run_pays_for_few_turns(speedup: float, last: float) -> None:
    """At a load that it has not met. The last turn may cost more than was left: its change and, if none had the first
    turn for next to nothing, the steps after whose loss it ends."""
    rivalry, change = Rivalry(1.0, 8, can_draft=True), 1.0
    found = played(rivalry, lambda _: (1.0, 1.0, 0.7), 2_400, noise=0.0, change=change, speedup=speedup)
    assert 0.0 < found.lost < COST_SHARE * 2_400 + FIRST_COST + 16 * change + last


@pytest.mark.parametrize(("before", "after"), [((0.9, 1.0, 0.9), (1.4, 1.0, 1.1)), ((0.7, 1.0, 0.9), (1.4, 1.0, 0.9))])
def test_another_rival_becomes_the_fastest_when_it_is(before: Rates, after: Rates) -> None:
    """Even one that was the slowest, so that others always seem likelier to be faster."""
    found = played(Rivalry(1.0, 8, can_draft=True), lambda number: before if number < 24_000 else after, 72_000)
    assert found.turns[16_000:24_000].count(NONE) > 0.85 * 8_000
    assert found.turns[48_000:].count(PLANNED) > 0.85 * 24_000


@pytest.mark.parametrize("num_nodes, num_more, goes_on", [(0.0, 0, NONE), (0.0, 1, PLANNED), (1.0, 0, PLANNED)])
def test_none_goes_on_at_once_where_a_plan_does_nothing(num_nodes: float, num_more: int, goes_on: int) -> None:
    """It does the same for less, however slow it has seemed, and whatever turns have cost. Where copies bring a tenth
    of a token, or drafts are planned, it must seem faster first."""
    rivalry, count, turns = Rivalry(1.0, 32, can_draft=True), len(CHAIN_LEVELS), list[int]()
    rivalry.begin_with(Found(PLANNED, [0.0, -0.12, *[-0.05] * (count - 2)], [1.0] * count))
    rivalry._earned = -20.0
    for _ in range(200):
        turns.append(rivalry.begin_call(1.0, num_nodes))
        for _ in range(8 * (turns[-1] == PLANNED)):
            rivalry.yields.add_planned(10, 10 + num_more, 0, 0, 0.0)
        rivalry.count(8, 8.0, 8.0, False)
    assert turns[:8] == [PLANNED] * 8, "it is not known yet"
    assert {*turns[8:]} == {goes_on}


@pytest.mark.parametrize("speedup, first", [(1.1, NONE), (1.2, CHAIN)])
def test_none_has_its_turn_first_where_a_plan_promises_little(speedup: float, first: int) -> None:
    """As soon as there is a pace to compare it with; a plan that promises more is first compared with a chain."""
    rates = (0.9, 1.0, 0.95)
    found = played(Rivalry(1.0, 16, can_draft=True), lambda _: rates, 1_600, noise=0.0, change=0.0, speedup=speedup)
    begin = next(number for number, turn in enumerate(found.turns) if turn != PLANNED)
    assert found.turns[begin] == first
    if first == NONE:
        assert begin <= 1.3 * TURN_STEPS and found.turns[4 * TURN_STEPS :].count(NONE) > 0.7 * (1_600 - 4 * TURN_STEPS)


@pytest.mark.parametrize(
    ("step_ms", "num_sequences", "expected"),
    [(1.0, 32, 64), (5.0, 32, 50), (40.0, 32, 16), (40.0, 3, 21), (40.0, 1, 64)],
)
def test_turns_of_long_steps_have_fewer(step_ms: float, num_sequences: int, expected: int) -> None:
    """A chain that is 30 % faster goes on after its first turn, whose pieces have a step each that is not compared."""
    rivalry, turns, num_compared = Rivalry(step_ms, num_sequences, can_draft=True), list[int](), 0
    while rivalry.fastest != CHAIN:
        turns.append(rivalry.begin_call(1.2, 1.0))
        know(rivalry, 1)
        is_first = turns[-1:] != turns[-2:-1]
        num_compared += turns[-1] == CHAIN and not is_first and rivalry.fastest != CHAIN
        rivalry.count(1, step_ms * (1.3 if turns[-1] == CHAIN else 1.0), step_ms, is_first)
    assert expected <= num_compared < expected + PIECE_STEPS
    assert turns.index(CHAIN) >= expected


@pytest.mark.parametrize(
    "rate, slower, stall",
    [(1.05, 0.0, 3.5), (0.97, 0.0, 1.5), (1.0, 0.001, 0.0), (1.0, -0.001, 0.0)],
    ids=["faster", "slower", "slowing down", "speeding up"],
)
def test_neither_a_moment_in_which_the_machine_stands_still_nor_its_drift_misleads_a_turn(
    rate: float, slower: float, stall: float
) -> None:
    """It stands still in the second piece of none's turn, or each step takes 0.1 % longer, or less, than the last."""
    rivalry, number, num_pieces, last = Rivalry(1.0, 8, can_draft=False), 0, 0, PLANNED
    while not rivalry.found().turns[NONE]:
        turn = rivalry.begin_call(1.2, 1.0)
        is_first, steps = turn != last, 1 if turn != last else min(8, rivalry.num_left)
        num_pieces += is_first and turn == NONE
        stands_still = not is_first and turn == NONE and num_pieces == 2
        ms = sum(math.exp(slower * step) for step in range(number, number + steps)) + stall * stands_still
        rivalry.count(steps, steps * (rate if turn == NONE else 1.0), ms, is_first)
        number, last = number + steps, turn
    assert rivalry.found().gains[NONE] == pytest.approx(math.log(rate), abs=0.005)


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.4])
def test_how_much_a_turn_may_mislead_is_learnt_from_its_pieces(noise: float) -> None:
    """Pieces, eight for a turn, differ by so much from two of the fastest, each of which differs as well."""
    rivalry, found = Rivalry(1.0, 8, can_draft=False), list[float]()
    for _ in range(400):
        played(rivalry, lambda _: (1.0, 0.97), 400, noise=noise, change=0.0)
        found.append(rivalry._turn_noise)
    assert sum(found[200:]) / 200 == pytest.approx(noise * math.sqrt(1.5 / 8), rel=0.35)


@pytest.mark.parametrize("fastest", [PLANNED, NONE, CHAIN])
def test_the_moods_of_a_machine_do_not_hide_a_lead_of_8_percent(fastest: int) -> None:
    """It is slower or faster by 12 % for some hundreds of steps."""
    rates = [1.0, 1.0, 1.0, 0.8]
    rates[fastest] = 1.08
    found = played(Rivalry(1.0, 8, can_draft=True), lambda _: tuple(rates), 16_000, noise=0.03, mood=0.12)
    assert found.turns[4_000:].count(fastest) > 0.9 * 12_000


def test_a_rival_that_seems_faster_soon_has_its_next_turn() -> None:
    """By chance one may be 9 % faster in a turn. None that is 4 % faster has no such lead yet, but a second look."""
    rates = (1.0, 1.04, 0.7)
    turns = played(Rivalry(1.0, 1, can_draft=False), lambda _: rates, 1_600, noise=0.0, change=0.0, num_nodes=0.0).turns
    first = turns.index(NONE)
    assert turns[first : first + 2 * TURN_STEPS].count(NONE) == pytest.approx(TURN_STEPS, abs=2 * PIECE_STEPS)
    ended = first + 2 * (TURN_STEPS + 2 * PIECE_STEPS)
    assert turns[ended : ended + TURN_STEPS // 2].count(NONE) == 0
    assert NONE in turns[ended : ended + TURN_STEPS]


def test_a_turn_that_ends_early_counts_for_as_much_less() -> None:
    """A chain brings 3 % more in one text and a fifth less in the next. Turns in the second end after the loss
    that a turn may have, so the chain is hardly behind by all steps of its turns together, and much by their mean."""
    rivalry, turns, texts = Rivalry(1.0, 1, can_draft=True), list[int](), 0
    for _ in range(4_000):
        before = rivalry._other
        turns.append(rivalry.begin_call(1.2, 1.0))
        is_first = turns[-1:] != turns[-2:-1]
        texts += before is None and rivalry._other == CHAIN
        rate = (0.8, 1.03)[texts % 2] if turns[-1] == CHAIN else 1.0
        know(rivalry, 4)
        rivalry.count(4, 4 * rate, 4.0, is_first)
        if texts == 3:  # the third one begins
            break
    assert texts == 3 and -0.04 < rivalry._gains[CHAIN] < 0.0


def test_a_new_fastest_rival_is_compared_by_what_its_own_steps_bring() -> None:
    """The first turn behind its own is compared with the pace that the last one had."""
    ours, mine = Rivals(), (sequence_of(slot=0), sequence_of(slot=1))
    plan = StepPlan(decoding=mine)
    for _ in range(1_000):
        ours.begin_call(plan, mine, COSTS, PLAN._replace(speedup=1.2, planned_rate=1.0, num_rows=4))
        if ours.number >= CHAIN:
            ours.add_fixed([2, 2])
            ours.add_step(0, 1.6)
        else:
            took(ours, 2, 1.0)
        if ours._rivalry.fastest == CHAIN and ours._rivalry._turns[NONE] > 0.1 and ours.number == CHAIN:
            break
    gains = ours._rivalry._gains
    assert gains[NONE] - gains[CHAIN] == pytest.approx(-math.log(2 / 1.6), abs=0.03)


def test_what_a_change_costs_is_not_held_against_a_rival() -> None:
    """Missing draft keys take as long as 30 steps here, but a rival that goes on has them."""
    found = played(Rivalry(1.0, 8, can_draft=True), lambda _: (0.9, 1.0, 1.2), 8_000, noise=0.0, change=30.0)
    assert found.turns[6_000:].count(CHAIN) > 0.9 * 2_000


@pytest.mark.parametrize("pace", [0.5, 2.0])
def test_steps_with_prompts_are_compared_with_such_steps(pace: float) -> None:
    """How long prompts really take is not known well, and a turn may meet any number of them."""
    rivalry = Rivalry(1.0, 8, can_draft=True)
    played(rivalry, lambda _: (1.0, 1.0, 1.0), 4_000, noise=0.0, change=0.0, prompt_pace=pace)
    assert rivalry._gains == pytest.approx([0.0] * len(CHAIN_LEVELS), abs=1e-6) and sum(rivalry._turns) >= 4


@pytest.mark.parametrize("lag, cost", [(0.02, 0.02 * TURN_STEPS), (1.4, MOST_LOST + 0.75 * PIECE_STEPS)])
def test_a_turn_waits_until_what_it_should_cost_was_earned(lag: float, cost: float) -> None:
    """At a load that is known nothing may be lost at first. A turn that is slow ends behind the piece in which it has
    lost four steps."""
    rivalry, count = Rivalry(1.0, 8, can_draft=True), len(CHAIN_LEVELS)
    rivalry.begin_with(Found(PLANNED, [0.0, *[-lag] * (count - 1)], [1.0] * count))
    rates = (1.0, *[math.exp(-lag)] * 2)
    turns = played(rivalry, lambda _: rates, 4_000, noise=0.0, change=0.0).turns
    assert next(i for i, turn in enumerate(turns) if turn != PLANNED) == pytest.approx(cost / COST_SHARE, abs=80)


def test_the_first_turn_comes_as_soon_as_there_is_a_pace() -> None:
    turns = played(Rivalry(1.0, 8, can_draft=True), lambda _: (1.0, 1.0, 1.0), 500, speedup=1.2).turns
    assert turns.index(CHAIN) == pytest.approx(rivalry.FIRST_WAIT * TURN_STEPS, abs=8)


COSTS = StepCosts(CostTable(*(times_by_rows([(1, 1.0), (64, 1.1)]) for _ in range(3))))


def took(ours: Rivals, num_sequences: int, ms: float) -> None:
    """A step of the turn took so long, and brought each sequence one token."""
    if ours.number == PLANNED:
        ours.add_planned(num_sequences, num_sequences, 0, 0, 0.0)
    else:
        ours.add_fixed([1] * num_sequences)
    ours.add_step(0, ms)


def calls_until(ours: Rivals, plan: StepPlan, number: int) -> int:
    """Calls of one step until that rival has its turn."""
    mine = plan.decoding
    for calls in range(3_000):
        ours.begin_call(plan, mine, COSTS, DRAFTS)
        if ours.number == number:
            return calls
        took(ours, len(mine), 1.0)
    raise AssertionError(f"rival {number} had no turn")


def test_longer_texts_do_not_make_a_rival_seem_slower() -> None:
    """A turn meets other contexts than the steps that it is compared with."""
    costs = StepCosts(CostTable(*(times_by_rows([(1, 1.0), (64, 1.1)]) for _ in range(3)), keys=((10_000.0, 0.5),)))
    ours, mine = Rivals(), tuple(sequence_of(slot=slot) for slot in range(8))
    plan = StepPlan(decoding=mine)
    for _ in range(1_000):
        ours.begin_call(plan, mine, costs, PLAN)
        took(ours, 8, costs.plain_ms(8, float(sum(len(s.tokens) for s in mine))))
        for sequence in mine:
            sequence.tokens.append(1)
    assert ours._rivalry._gains == pytest.approx([0.0] * len(CHAIN_LEVELS), abs=0.02)
    assert sum(number > 0.9 for number in ours._rivalry._turns) >= 3


def test_a_fixed_setting_is_chosen_for_all_until_its_turn_ends() -> None:
    ours, plan = Rivals(), StepPlan(decoding=(sequence_of(slot=0), sequence_of(slot=3)))
    for number, drafting in ((NONE, PLAIN), (CHAIN, Chain(1))):
        calls_until(ours, plan, number)
        choice = ours._choice
        assert choice is not None and ours.is_trying
        assert [(d.slot, d.drafting, d.cut) for d in choice.decodes.values()] == [
            (0, drafting, None),
            (3, drafting, None),
        ]
        assert choice.most_steps == 1, "the first step of a piece pays for the change"
        took(ours, 2, 1.0)
        choice = ours.begin_call(plan, plan.decoding, COSTS, PLAN)
        assert choice is not None and ours.number == number and choice.most_steps == PIECE_STEPS
        for _ in range(PIECE_STEPS):
            took(ours, 2, 1.0)
        ours.begin_call(plan, plan.decoding, COSTS, PLAN)
        assert ours.number == ours._rivalry.fastest != number, "which goes on between two pieces"


@pytest.mark.parametrize("number", [PLANNED, NONE])
def test_calls_of_the_fastest_are_counted_together(number: int) -> None:
    """All their steps and tokens are, at the pace that they had."""
    ours, plan = Rivals(), StepPlan(decoding=(sequence_of(slot=0), sequence_of(slot=1)))
    ours.begin_call(plan, plan.decoding, COSTS, PLAN)
    rivalry, counted = ours._rivalry, list[tuple[int, float]]()
    rivalry.fastest = number
    rivalry._wait_for(math.inf)
    ours._due_ms = 0.0
    rivalry.count = lambda num_steps, worth_ms, ms, is_first: counted.append((num_steps, ms))  # type: ignore[method-assign]
    for _ in range(4 * COUNTED_STEPS):
        choice = ours.begin_call(plan, plan.decoding, COSTS, PLAN)
        assert (choice is None) == (number == PLANNED)
        took(ours, 2, 0.5 * rivalry.step_ms)
    steps = [steps for steps, _ in counted]
    assert len(steps) <= 4 and sum(steps) + ours._num_steps == 4 * COUNTED_STEPS
    assert [ms for _, ms in counted] == pytest.approx([0.5 * rivalry.step_ms * number for number in steps])


@pytest.mark.parametrize("fastest", [PLANNED, NONE, CHAIN])
def test_a_lead_of_8_percent_is_found_whatever_the_texts(fastest: int) -> None:
    """One sequence; a text of a hundred steps brings from 0.1 to 0.8 first tokens of a chain."""
    rng, ours, mine = random.Random(3), Rivals(), (sequence_of(slot=0),)
    plan, took_ms = StepPlan(decoding=mine), [1.55, 1.0, 1.45]
    took_ms[fastest] /= 1.08
    planned, turns, right = DraftingPlan(1.0, 1.0, 2, 1.2, 1.0), list[int](), 0.0
    for number in range(12_000):
        if number % 100 == 0:
            right = rng.uniform(0.1, 0.8)
        ours.begin_call(plan, mine, COSTS, planned)
        is_right, further = rng.random() < right, rng.random() < 0.1
        if ours.number == PLANNED:
            ours.add_planned(1, 1 + is_right + further, 1, is_right + further, is_right)
        else:
            ours.add_fixed([1 + is_right * (ours.number >= CHAIN)])
        ours.add_step(0, [*took_ms, 2.0, 2.5, 3.0][ours.number] * math.exp(rng.gauss(0, 0.05)))
        turns.append(ours.number)
    assert turns[6_000:].count(fastest) > 0.8 * 6_000


def test_a_plan_is_compared_by_the_drafts_of_the_steps_that_were_timed() -> None:
    """It drafts for 150 of 400 steps, which then bring and take half as much again. Nothing is faster than anything."""
    ours, mine = Rivals(), tuple(sequence_of(slot=slot) for slot in range(8))
    plan, planned = StepPlan(decoding=mine), PLAN._replace(speedup=1.2, planned_rate=1.0, num_rows=16)
    for number in range(20_000):
        ours.begin_call(plan, mine, COSTS, planned)
        drafts = number % 400 < 150
        if ours.number == PLANNED:
            ours.add_planned(8, 12 if drafts else 8, 8 if drafts else 0, 4 if drafts else 0, 4.0)
            ours.add_step(0, 1.5 if drafts else 1.0)
        else:
            ours.add_fixed([1, 1 + (ours.number != NONE)] * 4)
            ours.add_step(0, 1.0 if ours.number == NONE else 1.5)
    assert ours._rivalry._gains == pytest.approx([0.0] * len(CHAIN_LEVELS), abs=0.03)
    assert max(ours._rivalry._last_turns) > 8


def test_sequences_that_come_take_part_in_a_turn() -> None:
    ours, one = Rivals(), sequence_of(slot=0)
    calls_until(ours, StepPlan(decoding=(one, sequence_of(slot=1), sequence_of(slot=2))), NONE)
    came = StepPlan(
        decoding=(one, sequence_of(slot=1), sequence_of(slot=2), sequence_of(slot=3)), admitted=(sequence_of(slot=3),)
    )
    choice = ours.begin_call(came, came.decoding, COSTS, PLAN)
    assert choice is not None and [*choice.decodes] == [*came.decoding]
    one.slot = 7
    moved = ours.begin_call(came, came.decoding, COSTS, PLAN)
    assert moved is not None and moved.decodes[one].slot == 7, "a slot that it was given anew"


def test_prompts_count_to_the_load_whose_rival_goes_on() -> None:
    """While eight prompts are computed ever more sequences decode; all of this is the load of eight."""
    ours, decoding = Rivals(), tuple(sequence_of(slot=slot) for slot in range(8))
    calls_until(ours, StepPlan(decoding=decoding), NONE)
    for number in range(1, 8):
        chunks = (Chunk(number, 0, 16, is_last=False, draws=False),)
        beside = StepPlan(decoding=decoding[:number], chunks=chunks, num_chunk_rows=16, num_prefilling=8 - number)
        assert ours.begin_call(beside, beside.decoding, COSTS, PLAN) is not None and ours.number == NONE


def test_steps_of_others_do_not_count() -> None:
    ours, plan = Rivals(), StepPlan(decoding=(sequence_of(slot=0), sequence_of(slot=1)))
    before = calls_until(ours, plan, NONE)
    ours = Rivals()
    for _ in range(before - 1):
        ours.begin_call(plan, plan.decoding, COSTS, PLAN)
        took(ours, 2, 1.0)
        ours.pause()
        took(ours, 2, 50.0)
    ours.begin_call(plan, plan.decoding, COSTS, PLAN)
    assert ours.number == PLANNED and ours._rivalry.step_ms == pytest.approx(1.0)


def test_a_run_begins_with_what_the_last_one_found() -> None:
    first, plan = Rivals(), StepPlan(decoding=tuple(sequence_of(slot=slot) for slot in range(8)))
    for _ in range(2_000):
        first.begin_call(plan, plan.decoding, COSTS, PLAN)
        took(first, 8, 2.0 if first.number == PLANNED else 1.0)
    later = Rivals()
    later.begin_with(json.loads(json.dumps(first.kept())))
    assert later.kept() == first.kept() != [], "loads that it does not meet are kept too"
    assert later.begin_call(plan, plan.decoding, COSTS, PLAN) is not None and later.number != PLANNED
    other = StepPlan(decoding=plan.decoding[:1])
    assert later.begin_call(other, other.decoding, COSTS, PLAN) is None, "nothing is known of another load"
    gains, turns = [0.0] * len(CHAIN_LEVELS), [1] * len(CHAIN_LEVELS)
    for broken in (
        [[1]],
        [[math.inf, 3, [0], 0, gains, turns]],
        [[3, 3, [0], len(gains), gains, turns]],
        [[3, 3, [0], 0, gains[1:], turns]],
        [[3, 3, [0], 0, [1e300, *gains[1:]], turns]],
        [[3, 3, 0, 0, [], []]],
    ):
        with pytest.raises((ValueError, TypeError, OverflowError)):
            Rivals().begin_with(broken)


def test_a_rival_without_a_turn_is_no_fastest_one_of_an_earlier_run() -> None:
    """Its gain of 0 is none that was found. And turns at a load that is known must be earned."""
    rivalry = Rivalry(1.0, 8, can_draft=True)
    gains, turns = [0.0] * len(CHAIN_LEVELS), [0] * len(CHAIN_LEVELS)
    gains[PLANNED], gains[CHAIN_2], turns[CHAIN_2] = -0.02, -0.08, 1
    rivalry.begin_with(Found(PLANNED, gains, turns))
    found = played(rivalry, lambda _: (1.0,), 60, noise=0.0, change=0.0, speedup=1.2)
    assert set(found.turns) == {PLANNED}


def test_a_step_in_a_fixed_turn_counts_for_the_adaptive_sequences_alone() -> None:
    controller, adaptive = Controller(COSTS), sequence_of(slot=0)
    plan = StepPlan(decoding=(adaptive, sequence_of(drafting=Chain(1), slot=1)))
    decodes, output = (Decode(0, PLAIN), Decode(1, Chain(1))), [Decoded(1, [5, 6], 1, 1, None, [], 1)] * 2
    step = Step(plan, StepInput(decodes), SimpleNamespace(read=lambda: StepOutput(output, [], 2, None)))
    controller.rivals.number, controller.rivals._is_paused = NONE, False
    controller.learn(step)
    assert sum(controller.ledger.steps.values()) == 1
    controller.rivals.pause()
    controller.learn(step)
    assert sum(controller.ledger.steps.values()) == 1, "nobody drafted adaptively"


def test_a_late_outcome_without_adaptive_sequences_teaches_a_turn_nothing() -> None:
    """It is read when a chain's turn has begun, and its step was planned before."""
    controller, other = Controller(COSTS), sequence_of(drafting=Chain(1), slot=0)
    output = StepOutput([Decoded(1, [5, 6], 1, 1, None, [], 1)], [], 2, None)
    controller.rivals.number, controller.rivals._is_paused = CHAIN, False
    before = controller.rivals._rivalry.yields.further(CHAIN)
    controller.learn(
        Step(StepPlan(decoding=(other,)), StepInput((Decode(0, Chain(1)),)), SimpleNamespace(read=lambda: output))
    )
    assert controller.rivals._rivalry.yields.further(CHAIN) == before


def test_the_first_step_of_a_piece_teaches_no_tokens() -> None:
    """Where outcomes are read late it is that of another rival's step."""
    ours, plan = Rivals(), StepPlan(decoding=(sequence_of(slot=0), sequence_of(slot=1)))
    calls_until(ours, plan, CHAIN)
    for known in (0, 1):
        before = ours._rivalry.yields.num_steps(CHAIN)
        took(ours, 2, 1.0)
        assert ours._rivalry.yields.num_steps(CHAIN) - before == known
        ours.begin_call(plan, plan.decoding, COSTS, PLAN)


def test_texts_are_the_same_while_rivals_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of three steps, so that every sequence meets all rivals, and prompts come meanwhile."""
    waits = dict.fromkeys(("FIRST_WAIT", "HOPELESS_WAIT"), 1)
    always = waits | {
        "TURN_STEPS": 3,
        "PIECE_STEPS": 1,
        "LEAST_TURN": 1,
        "COUNTED_STEPS": 1,
        "FIRST_COST": 1e9,
        "MOST_COST": 1e9,
    }
    for name, value in always.items():
        monkeypatch.setattr(rivalry, name, value)
    engine = EngineConfig(max_batch=4, max_context=256, check=True, num_continuous_decode_steps=1)
    llm = LLM("bundled", drafting=Adaptive(), engine=engine)
    sampling = [SamplingParams(max_tokens=80, temperature=0.8 * (i % 2), seed=i, ignore_eos=True) for i in range(9)]
    prompts = [f"def f{i}(x):\n    return" for i in range(9)]
    turned = [output.token_ids for output in llm.run(prompts, sampling, drafting=Adaptive()).outputs]
    assert llm.engine.controller is not None
    of_loads = llm.engine.controller.rivals._of_loads.values()
    assert all(any(rivalry._last_turns[rival] for rivalry in of_loads) for rival in (NONE, CHAIN))
    assert turned == [output.token_ids for output in llm.run(prompts, sampling, drafting=NoDraft()).outputs]
    llm.close()
