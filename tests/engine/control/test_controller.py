"""What the controller asks for step by step, and which steps it learns from."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace

import pytest

from aquiline.backends.base import Admit, Chunk, Decode, Decoded, StepInput, StepOutput
from aquiline.config import SamplingParams
from aquiline.engine.control.acceptance import Pool, Record, pool_number
from aquiline.engine.control.choices import UNVERIFIED, source_of
from aquiline.engine.control.controller import INITIAL_PROBES, PROBE_TIME_SHARE, Controller
from aquiline.engine.control.costs import CostTable, StepCosts, times_by_rows
from aquiline.engine.control.planner import DraftingPlan
from aquiline.engine.control.plans import (
    REPLAN_STEPS,
    RESTING_SHARE,
    TIMING_STEPS,
    TRIAL_PERIOD,
    TRIAL_STEPS,
    PlanKey,
    Plans,
)
from aquiline.engine.control.searches import PERIODS, UNCOPIED_LIMITS
from aquiline.engine.pipeline import Step, StepChoice
from aquiline.engine.scheduler import StepPlan
from aquiline.engine.sequence import Request, Sequence
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.confidence import Guess
from aquiline.spec.drafting import Chain, Drafting, NoDraft, Proposal
from aquiline.text.detokenizer import Detokenizer

PLAIN_MS, PASS_MS = 100.0, 120.0
"""A forward of any few rows, and a pass of the draft, which never pays."""


Points = list[tuple[int, float]]
FLAT: Points = [(1, PLAIN_MS), (32, 1.001 * PLAIN_MS)]


def controller_of(rows: Points = FLAT, pass_ms: float = PASS_MS) -> Controller:
    passes = times_by_rows([(1, pass_ms), (32, 2 * pass_ms)])
    return Controller(StepCosts(CostTable(times_by_rows(rows), passes, passes)))


class Copies:
    """Proposes tokens of these chances while `is_there` says so; looked: at which lengths of the text it was asked."""

    def __init__(self, is_there: Callable[[int], bool], *chances: float) -> None:
        self.is_there, self.chances, self.looked = is_there, chances or (1.0,), list[int]()

    def propose(self, tokens: list[int], max_tokens: int) -> Proposal:
        self.looked.append(len(tokens))
        if not self.is_there(len(tokens)):
            return Proposal(())
        return Proposal(tuple(range(1, len(self.chances) + 1)), (), self.chances)


def sequence_of(
    proposer: Copies | None = None, drafting: Drafting = Adaptive(), slot: int = 0, temperature: float = 0.0
) -> Sequence:
    request = Request(slot, (5,), SamplingParams(max_tokens=10**6, temperature=temperature, seed=0), drafting)
    return Sequence(request, Detokenizer(None, (5,), ()), frozenset(), [5], slot, proposer, slot=slot)


def chosen(controller: Controller, *sequences: Sequence) -> StepChoice:
    """The choice for a step in which these sequences decode."""
    choice = controller.choose(StepPlan(decoding=sequences))
    assert choice is not None
    return choice


def taken(controller: Controller, sequence: Sequence, num_steps: int, admits: bool = False) -> list[str]:
    """The sources of so many steps of one sequence; each step adds a token and takes as long as the table says."""
    found = list[str]()
    for _ in range(num_steps):
        decode = chosen(controller, sequence).decodes[sequence]
        found.append(source_of(decode))
        output = StepOutput([Decoded(0, [5], 0, 0)], [], 0, {"draft": 0.0, "verify": PLAIN_MS / 1e3}, lambda: None)  # type: ignore
        message = StepInput((decode,), admits=(Admit(1, (5,), 1, SamplingParams(seed=0)),) if admits else ())
        pending = SimpleNamespace(read=lambda output=output: output)
        controller.learn(Step(StepPlan(decoding=(sequence,)), message, pending))
        sequence.tokens.append(5)
    return found


def test_a_text_without_copies_is_searched_less_and_less() -> None:
    copies = Copies(lambda length: length == 100)
    taken(controller_of(), sequence_of(copies), 130)
    gaps = [b - a for a, b in pairwise(copies.looked)]
    assert set(gaps) <= set(PERIODS) and max(gaps) == PERIODS[-1]
    before = [length for length in copies.looked if length <= UNCOPIED_LIMITS[-1]]
    assert len(before) <= UNCOPIED_LIMITS[-1] / PERIODS[-2] + 4, "looks cost time, and copies are rare"


def test_a_copy_has_the_text_searched_at_every_step_again() -> None:
    copies = Copies(lambda length: length >= 100)
    taken(controller_of(), sequence_of(copies), 130)
    found = next(length for length in copies.looked if length >= 100)
    assert copies.looked[copies.looked.index(found) :] == list(range(found, 131))


def test_time_that_no_probe_took_is_saved_up_to_a_limit() -> None:
    """While all is copied nobody is asked; afterwards there are no more probes in a row than the limit allows."""
    num_copied, num_plain = 8_000, 64
    sequence = sequence_of(Copies(lambda length: length <= num_copied))
    controller = controller_of()
    assert set(taken(controller, sequence, num_copied)) == {"lookup"}
    assert PROBE_TIME_SHARE * PLAIN_MS * num_copied / PASS_MS > 4 * INITIAL_PROBES, "more was saved than may be kept"
    after = taken(controller, sequence, num_plain)
    assert INITIAL_PROBES <= after.count("probe") <= 2 * INITIAL_PROBES


def test_probes_go_round() -> None:
    """Nobody drafts, and each sequence is asked as often as the others."""
    controller, sequences = controller_of(), [sequence_of(slot=slot) for slot in range(3)]
    steps = [chosen(controller, *sequences).decodes for _ in range(INITIAL_PROBES)]
    probed = [sequence.slot for found in steps for sequence in found if source_of(found[sequence]) == "probe"]
    assert len(probed) == INITIAL_PROBES and set(probed) == {0, 1, 2}


def test_a_copy_is_cut_where_a_row_costs_as_much_as_four() -> None:
    """Four rows cost as one, and the fifth is bought for no token that is likely to be wrong."""
    rows = [(1, 1.0), (4, 1.0), (5, 2.0), (8, 2.0), (64, 20.0)]
    sequence = sequence_of(Copies(lambda length: True, 0.9, 0.8, 0.7, 0.4))
    decode = chosen(controller_of(rows, pass_ms=9.0), sequence).decodes[sequence]
    assert decode.proposal == Proposal((1, 2, 3), (), (0.9, 0.8, 0.7))


def test_rows_of_fixed_drafts_leave_fewer_cheap_ones() -> None:
    """Eight rows are cheap. A chain of seven beside it takes them all, and what is left is too dear to draft for."""
    rows, sequence = [(1, 2.0), (8, 2.05), (9, 6.0), (32, 52.0)], sequence_of()
    for beside, source in ((), "draft"), ((sequence_of(drafting=Chain(7), slot=1),), "none"):
        controller = controller_of(rows, pass_ms=0.05)
        steps = [chosen(controller, sequence, *beside).decodes[sequence] for _ in range(INITIAL_PROBES + 1)]
        assert source_of(steps[-1]) == source, "those before may be probes"


def test_a_choice_ends_for_a_search_only_where_one_should_pay() -> None:
    """At first a search may bring a token, and a choice stands until the next one. Later the text is searched when
    something else has ended the choice."""
    controller, sequence = controller_of(), sequence_of(Copies(lambda length: False))
    controller._probe_ms, most = 0.0, list[int]()  # a probe would hold for one step
    for _ in range(2 * UNCOPIED_LIMITS[-1]):
        most.append(chosen(controller, sequence).most_steps)
        sequence.tokens.append(5)
    _, soon, _ = UNCOPIED_LIMITS
    assert max(most[: soon - 1]) <= PERIODS[1] and max(most[soon:]) > PERIODS[-1]


@pytest.mark.parametrize(("call_ms", "is_copied"), [(0.0, True), (80.0, True), (95.0, False)])
def test_a_copy_pays_for_the_run_of_steps_that_it_ends(call_ms: float, is_copied: bool) -> None:
    """Where steps are repeated in one call, a copy of 0.9 tokens is worth 90 ms of a step of 100."""
    controller, sequence = controller_of(), sequence_of(Copies(lambda length: length > 90, 0.9))
    taken(controller, sequence, 88)
    controller.costs.call_ms = call_ms
    found = list[str]()
    for _ in range(PERIODS[-1]):
        found.append(source_of(chosen(controller, sequence).decodes[sequence]))
        controller.repeated(2)
        sequence.tokens.append(5)
    assert ("lookup" in found) == is_copied


def test_steps_that_admit_teach_no_times() -> None:
    """Admissions take time of their own; what a forward costs is learnt from steps without them."""
    controller = controller_of()
    learnt = list[float]()
    controller.costs.learn_verify = lambda *args: learnt.append(args[3])  # type: ignore[method-assign]
    sequence = sequence_of()
    taken(controller, sequence, 40, admits=True)
    assert learnt == []
    taken(controller, sequence, 40)
    assert learnt and all(abs(ms - PLAIN_MS) < 1e-6 for ms in learnt)


def test_the_first_step_that_drafts_or_does_not_teaches_no_times() -> None:
    """It pays for the change: the weights that it reads are no longer in the caches."""
    controller, sequence, learnt = controller_of(), sequence_of(), list[bool]()
    chosen(controller, sequence)
    controller.costs.learn_verify = lambda *args: learnt.append(args[4])  # type: ignore[method-assign]
    for drafts in (False, True, True, True, False, False):
        controller._steps_untimed = TIMING_STEPS
        decode = Decode(0, Chain(1), cut=UNVERIFIED) if drafts else Decode(0, NoDraft())
        seconds = {"draft": 0.1 * drafts, "verify": PLAIN_MS / 1e3}
        output = StepOutput([Decoded(0, [5], 0, 0, guesses=[Guess(5, -1, 0)] * drafts)], [], 0, seconds, lambda: None)  # type: ignore
        pending = SimpleNamespace(read=lambda output=output: output)
        controller.learn(Step(StepPlan(decoding=(sequence,)), StepInput((decode,)), pending))
    assert learnt == [False, True, True, False]


@pytest.mark.parametrize(("num_cached", "draft_end", "chunk_rows", "source"), [
    (20_000, 20_000, 0, "draft"), (20_000, 0, 0, "none"), (2_000, 0, 0, "draft"), (2_000, 0, 1, "none"),
    (2_000, 2_000, 1, "draft"),
])  # fmt: skip
def test_missing_draft_keys_are_paid_for_before_a_sequence_begins(
    num_cached: int, draft_end: int, chunk_rows: int, source: str
) -> None:
    """A draft that brings a little does not pay for 20,000 keys within 128 steps, nor for 2,000 beside a prompt."""
    controller, sequence = controller_of(pass_ms=PLAIN_MS / 4), sequence_of()
    sequence.num_cached, sequence.draft_end = num_cached, draft_end
    controller._expected_ms = PLAIN_MS
    chunks = (Chunk(1, 0, chunk_rows, is_last=False, draws=False),) * chunk_rows
    choice = controller.choose(StepPlan(decoding=(sequence,), chunks=chunks))
    assert choice is not None and source_of(choice.decodes[sequence]) == source


def test_searches_that_take_long_are_rarer() -> None:
    """A search of 3 ms in a step of 100 takes more than searches may take that have brought nothing for long."""
    looked = []
    for seconds in (0.0, 0.003):
        copies = Copies(lambda length, seconds=seconds: bool(seconds and time.sleep(seconds)))  # type: ignore[misc, func-returns-value]
        taken(controller_of(), sequence_of(copies), 512)
        looked.append(len([length for length in copies.looked if length > 256]))
    assert looked[0] == 256 // PERIODS[-1] and looked[1] < 0.6 * looked[0]
    sequence = sequence_of(Copies(lambda length: time.sleep(0.003) is None))
    assert set(taken(controller_of(), sequence, 40)) == {"lookup"}, "copying goes on as before"


def test_a_way_to_draft_that_seems_a_little_too_dear_is_tried() -> None:
    """What it really takes is then timed. One that seems far too dear is not tried. Each trial that teaches nothing
    new makes trials half as frequent."""
    dear, far_too_dear = (
        taken(controller_of(pass_ms=pass_ms), sequence_of(), 4 * TRIAL_PERIOD) for pass_ms in (85.0, 300.0)
    )
    tried = [number for number, source in enumerate(dear) if source == "draft"]
    assert tried[:TRIAL_STEPS] == list(range(REPLAN_STEPS, REPLAN_STEPS + TRIAL_STEPS))
    first, second = tried[0], tried[TRIAL_STEPS]
    assert len(tried) == 2 * TRIAL_STEPS and 2 * TRIAL_PERIOD <= second - first < 2 * TRIAL_PERIOD + REPLAN_STEPS
    assert "draft" not in far_too_dear


def test_trials_are_as_frequent_as_at_first_once_drafting_has_paid() -> None:
    pays, does_not = DraftingPlan(1.0, 1.0, 2, 1.0, 1.0), DraftingPlan(1.0, 1.0, 1)
    plans, key, tried = Plans(), PlanKey(1, 1, False, frozenset()), list[int]()
    for number in range(60 * TRIAL_PERIOD):
        of_phase = pays if number // TRIAL_PERIOD == 40 else does_not
        plans.take(key, number, 1, lambda: 0.0, lambda least, plan=of_phase: pays if least < 1.0 else plan)  # type: ignore[misc]
        plans.earn(1, 1e3)
        tried += [number] * (plans.current.is_trial and plans.current.plan is pays)
    gaps = [round((after - before) / TRIAL_PERIOD) for before, after in pairwise(tried[::TRIAL_STEPS])]
    assert gaps[:4] == [2, 4, 8, 16] and gaps[-3:-1] == [2, 4], gaps


@pytest.mark.parametrize(("speedup", "num_rests"), [(1.02, 12), (1.2, 9), (1.5, 4), (3.0, 2)])
def test_where_drafting_pays_some_steps_of_many_do_not_draft(speedup: float, num_rests: int) -> None:
    """What such steps take is then timed. The more they cost, the rarer they are."""
    drafts = DraftingPlan(1.0, 1.0, 2, speedup, 1.0)
    plans, key, found = Plans(), PlanKey(1, 1, False, frozenset()), list[int]()
    for number in range(12 * TRIAL_PERIOD):
        plans.take(key, number, 1, lambda: 0.0, lambda least: drafts)
        plans.earn(1, 1e3)
        assert plans.current.is_trial == (plans.current.plan is not drafts) == (not plans.current.plan.planned_rate)
        found += [number] * plans.current.is_trial
    starts = found[::TRIAL_STEPS]
    assert found == [start + i for start in starts for i in range(TRIAL_STEPS)] and len(starts) == num_rests
    assert all(b - a >= TRIAL_PERIOD for a, b in pairwise(starts))
    assert len(found) * (1 - 1 / speedup) <= RESTING_SHARE * number + TRIAL_STEPS, "what they cost is bounded"


def test_sequences_that_come_and_go_share_a_plan() -> None:
    """As many as two that stay: one for 16 steps of two sequences, one for a trial of 4, and one for 32."""
    for others in (1, 4):
        controller, plans = controller_of(), list[object]()
        plan = controller._planner.plan
        controller._planner.plan = lambda *args, plans=plans, plan=plan: plans.append(args) or plan(*args)  # type: ignore[method-assign,func-returns-value,misc]
        for number in range(REPLAN_STEPS):
            found = chosen(controller, sequence_of(slot=0), sequence_of(slot=number % others + 1))
            assert len(found.decodes) == 2
        assert len(plans) == 3, others


def test_temperatures_that_take_turns_are_planned_apart() -> None:
    """Greedily a draft is always right, else never. A plan of one would be followed by the other's next steps."""
    controller = controller_of(pass_ms=PLAIN_MS / 3)
    for temperature, token in ((0.0, 5), (1.0, 6)):
        record = Record(controller.pools[pool_number(temperature)])
        for _ in range(400):
            record.observe([Guess(5, -1, 5)], [token])
    turns = [sequence_of(temperature=temperature) for temperature in (0.0, 1.0)] * 8
    decodes = [chosen(controller, sequence).decodes[sequence] for sequence in turns]
    assert [decode.cut is not None for decode in decodes if source_of(decode) != "probe"][-8:] == [True, False] * 4


def test_chains_have_the_planned_levels() -> None:
    """Before the first event about half of all tokens are right: a pass that costs a third of a step pays twice."""
    controller = controller_of(pass_ms=PLAIN_MS / 3)
    decode = chosen(controller, sequence := sequence_of()).decodes[sequence]
    assert source_of(decode) == "draft" and decode.drafting == Chain(2)


def test_a_sequence_that_comes_back_to_another_slot_drafts_there() -> None:
    """The plan stands, but what was chosen for the old slot is another sequence's now."""
    controller, sequence = controller_of(pass_ms=PLAIN_MS / 3), sequence_of()
    before = chosen(controller, sequence).decodes[sequence]
    sequence.slot = 3
    assert chosen(controller, sequence).decodes[sequence] == before._replace(slot=3)


@pytest.mark.parametrize(("window", "root", "first_key", "teaches"), [
    (0, 100, 1, True), (0, 100, 51, True), (0, 100, 52, False), (24, 100, 89, True), (24, 100, 90, False),
    (24, 10, 6, True), (24, 10, 7, False),
], ids=str)  # fmt: skip
def test_only_a_draft_that_sees_half_of_its_keys_teaches(window: int, root: int, first_key: int, teaches: bool) -> None:
    controller, sequence = controller_of(), sequence_of()
    controller.draft_window = window
    decode = Decode(0, Chain(1), cut=UNVERIFIED)
    chosen(controller, sequence)
    decoded = Decoded(root, [5], 0, root + 1, None, [Guess(5, 6, 3)], first_key)
    output = StepOutput([decoded], [], 2, None)
    controller.learn(Step(StepPlan(decoding=(sequence,)), StepInput((decode,)), SimpleNamespace(read=lambda: output)))
    assert any(pool.levels.trials != Pool().levels.trials for pool in controller.pools) == teaches
