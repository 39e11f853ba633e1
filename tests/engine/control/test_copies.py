"""Fixed settings copy too, where a copy brings more than their chains, and what that brings is no rival's own."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from tests.engine.control.test_controller import Copies, sequence_of

from aquiline.backends.base import Decode, Decoded, StepInput, StepOutput
from aquiline.engine.control.choices import PLAIN
from aquiline.engine.control.controller import Controller
from aquiline.engine.control.copies import beside_fixed
from aquiline.engine.control.costs import CostTable, StepCosts, times_by_rows
from aquiline.engine.control.planner import DraftingPlan
from aquiline.engine.control.rivals import Rivals
from aquiline.engine.control.searches import FIXED_PERIOD, FIXED_STEPS, SequenceSearches
from aquiline.engine.control.yields import CHAIN_LEVELS, NONE
from aquiline.engine.pipeline import Step, StepChoice
from aquiline.engine.scheduler import StepPlan
from aquiline.engine.sequence import Sequence
from aquiline.spec.drafting import Chain

CHAIN_3 = CHAIN_LEVELS.index(3)
COSTS = StepCosts(CostTable(*(times_by_rows([(1, 1.0), (64, 1.1)]) for _ in range(3))))
DRAFTS = DraftingPlan(1.0, 1.0, 8, speedup=1.1, planned_rate=1.0)


def fixed_of(*sequences: Sequence) -> StepChoice:
    return StepChoice({s: Decode(s.slot, Chain(3)) for s in sequences}, (), 32)


def beside(
    searching: list[tuple[Sequence, SequenceSearches]], number: int, costs: StepCosts = COSTS, least: float = 1.1
) -> StepChoice:
    return beside_fixed(fixed_of(*[s for s, _ in searching]), searching, number, costs, 2.0, least)


def test_a_copy_takes_the_place_of_a_chain_that_should_bring_less() -> None:
    sequence = sequence_of(Copies(lambda _: True, 0.9, 0.8, 0.7))
    for least, copies in ((2.3, True), (2.5, False)):
        choice = beside([(sequence, SequenceSearches(False))], 1, least=least)
        assert (choice.decodes[sequence].proposal is not None) == copies
        assert choice.most_steps == (1 if copies else 32)


def test_tokens_that_do_not_pay_are_not_copied_and_what_is_left_must_bring_more_than_the_chain() -> None:
    """Rows beyond the sixth cost more than any token."""
    dear = StepCosts(CostTable(*(times_by_rows([(1, 1.0), (6, 1.1), (7, 9.0), (64, 99.0)]) for _ in range(3))))
    sequence = sequence_of(Copies(lambda _: True, 0.9, 0.8, 0.7))
    for least, tokens in ((1.1, (1, 2)), (1.8, None)):
        choice = beside([(sequence, SequenceSearches(False))], 1, dear, least)
        found = choice.decodes[sequence].proposal
        assert (found and found.tokens) == tokens
        assert choice.most_steps == (1 if tokens else 32), "a copy that does not pay is not searched for at once again"


def test_a_sequence_that_copies_is_searched_at_every_step_and_another_seldom() -> None:
    """The more sequences there are, the rarer each is searched: one of them in FIXED_PERIOD steps."""
    copying, other = sequence_of(Copies(lambda _: True, 1.0, 1.0)), sequence_of(Copies(lambda _: False), slot=1)
    searching = [(copying, SequenceSearches(False)), (other, SequenceSearches(False))]
    for number in range(1, 40):
        choice = beside(searching, number)
        assert choice.decodes[copying].proposal is not None and choice.most_steps == 1
        assert choice.decodes[other] == Decode(1, Chain(3))
    assert len(copying.proposer.looked) == 39  # type: ignore[union-attr]
    assert len(other.proposer.looked) == math.ceil(39 / (2 * FIXED_PERIOD))  # type: ignore[union-attr]


def test_a_search_is_awaited_for_some_steps_behind_a_copy() -> None:
    """Then the fixed setting's steps run together again."""
    places = iter([True])
    sequence = sequence_of(Copies(lambda _: next(places, False), 1.0, 1.0))
    searching = [(sequence, SequenceSearches(False))]
    most = [beside(searching, number).most_steps for number in range(1, 12)]
    assert most == [1] * FIXED_STEPS + [32] * (11 - FIXED_STEPS)
    assert len(sequence.proposer.looked) == 1 + FIXED_STEPS  # type: ignore[union-attr]


def in_turn_of(number: int, *sequences: Sequence) -> tuple[Rivals, StepPlan]:
    """Rivals in which that one goes on."""
    ours, plan = Rivals(), StepPlan(decoding=sequences)
    ours.begin_call(plan, sequences, COSTS, DRAFTS)
    ours._rivalry.fastest = ours._rivalry.current = number
    ours._due_ms = 0.0
    ours.begin_call(plan, sequences, COSTS, DRAFTS)
    assert ours.number == number and ours.is_fixed
    return ours, plan


def test_the_controller_copies_in_a_fixed_turn_and_enters_it_as_a_copy() -> None:
    controller, sequence = Controller(COSTS), sequence_of(Copies(lambda _: True, 0.9, 0.9, 0.9))
    controller.rivals, plan = in_turn_of(CHAIN_3, sequence)
    choice = controller.choose(plan)
    assert choice is not None and choice.most_steps == 1
    decode = choice.decodes[sequence]
    assert decode.proposal is not None and decode.drafting == PLAIN
    output = StepOutput([Decoded(0, [1, 2, 3, 4], 3, 0)], [], 4, None)
    before = controller.rivals._rivalry.yields.num_steps(CHAIN_3)
    controller.learn(Step(plan, StepInput((decode,)), SimpleNamespace(read=lambda: output)))
    controller.end_step(0.001)
    assert controller.ledger.steps["lookup"] == 1 and controller.ledger.steps["draft"] == 0
    assert controller.ledger.accepted["lookup"] == 3
    assert controller.rivals._rivalry.yields.num_steps(CHAIN_3) == before, "it tells nothing of chains"
    assert controller.rivals._num_steps == 0, "nor of the time of steps that draft"


def test_a_step_in_which_all_copy_is_not_compared_and_one_in_which_some_do_counts_what_copies_bring() -> None:
    ours, plan = in_turn_of(NONE, sequence_of(slot=0), sequence_of(slot=1))
    ours.add_copies(20, 2, is_all=True)
    ours.add_step(0, 5.0)
    assert (ours._num_steps, ours._ms) == (0, 0.0)
    for _ in range(100):
        ours.add_copies(4, 1, is_all=False)
    counted: list[float] = []
    ours._rivalry.count = lambda steps, worth, ms, is_first: counted.append(worth)  # type: ignore[method-assign]
    ours.add_fixed([1])
    ours.add_step(0, 5.0)
    ours._due_ms = 0.0
    ours.begin_call(plan, plan.decoding, COSTS, DRAFTS)
    assert counted == pytest.approx([(1 + 100 + 100 * ours._rivalry.yields.of_copies) * ours._token_ms])
    assert ours._rivalry.yields.of_copies == pytest.approx(3.0, rel=0.1)


def test_a_change_is_still_paid_for_where_the_first_step_of_a_turn_copied() -> None:
    sequence = sequence_of(slot=0)
    ours, plan = in_turn_of(CHAIN_3, sequence)
    assert ours._is_first
    ours.add_copies(5, 1, is_all=True)
    ours.add_step(0, 1.0)
    ours.begin_call(plan, (sequence,), COSTS, DRAFTS)
    assert ours._is_first
    ours.add_fixed([1])
    ours.add_step(0, 1.0)
    ours.begin_call(plan, (sequence,), COSTS, DRAFTS)
    assert not ours._is_first
