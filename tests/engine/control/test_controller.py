"""What the controller asks for step by step, and which steps it learns from."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace

from aquiline.backends.base import Admit, Decoded, StepInput, StepOutput
from aquiline.config import SamplingParams
from aquiline.engine.control.chosen import source_of
from aquiline.engine.control.controller import FIRST_PROBES, PATIENCE, PROBING, RARELY, Controller
from aquiline.engine.control.costs import CostTable, StepCosts, filled
from aquiline.engine.scheduler import StepPlan
from aquiline.engine.sequence import Request, Sequence
from aquiline.engine.step import Step
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.drafting import Proposal
from aquiline.text.detokenizer import Detokenizer

PLAIN_MS, PASS_MS = 100.0, 120.0
"""A forward of any few rows, and a pass of the draft, which never pays."""


def controller_of() -> Controller:
    passes = filled([(1, PASS_MS), (32, 2 * PASS_MS)])
    return Controller(StepCosts(CostTable(filled([(1, PLAIN_MS), (32, 1.001 * PLAIN_MS)]), passes, passes)))


class Copies:
    """Proposes a token while `is_there` says so; looked: at which lengths of the text it was asked."""

    def __init__(self, is_there: Callable[[int], bool]) -> None:
        self.is_there, self.looked = is_there, list[int]()

    def propose(self, tokens: list[int], max_tokens: int) -> Proposal:
        self.looked.append(len(tokens))
        return Proposal((1,), (), (1.0,)) if self.is_there(len(tokens)) else Proposal(())


def sequence_of(proposer: Copies | None) -> Sequence:
    request = Request(0, (5,), SamplingParams(max_tokens=10**6, seed=0), Adaptive())
    return Sequence(request, Detokenizer(None, (5,), ()), frozenset(), [5], 0, proposer, slot=0)


def taken(controller: Controller, sequence: Sequence, num_steps: int, admits: bool = False) -> list[str]:
    """The sources of so many steps of one sequence; each step adds a token and takes as long as the table says."""
    plan, found = StepPlan((), (sequence,), (), 0, 0), list[str]()
    for _ in range(num_steps):
        decode = controller.decodes(plan)[sequence]
        found.append(source_of(decode))
        output = StepOutput([Decoded(0, [5], 0, 0)], [], 0, {"verify": PLAIN_MS / 1e3}, lambda: None)  # type: ignore
        message = StepInput((decode,), admits=(Admit(1, (5,), 1, SamplingParams(seed=0)),) if admits else ())
        controller.learn(Step(plan, message, SimpleNamespace(read=lambda output=output: output)), output)
        sequence.tokens.append(5)
    return found


def test_a_text_without_copies_is_searched_less_and_less() -> None:
    copies = Copies(lambda length: length == 100)
    taken(controller_of(), sequence_of(copies), 130)
    gaps = [b - a for a, b in pairwise(copies.looked)]
    assert set(gaps) <= set(RARELY) and max(gaps) == RARELY[-1]
    before = [length for length in copies.looked if length <= PATIENCE[-1]]
    assert len(before) <= PATIENCE[-1] / RARELY[-2] + 4, "looks cost time, and copies are rare"


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
    assert PROBING * PLAIN_MS * num_copied / PASS_MS > 4 * FIRST_PROBES, "more was saved than may be kept"
    after = taken(controller, sequence, num_plain)
    assert FIRST_PROBES <= after.count("probe") <= 2 * FIRST_PROBES


def test_steps_that_admit_teach_no_times() -> None:
    """Admissions take time of their own; what a forward costs is learnt from steps without them."""
    controller = controller_of()
    learnt = list[float]()
    controller.costs.learn_verify = lambda *args: learnt.append(args[-1])  # type: ignore[method-assign]
    sequence = sequence_of(None)
    taken(controller, sequence, 40, admits=True)
    assert learnt == []
    taken(controller, sequence, 40)
    assert learnt and all(abs(ms - PLAIN_MS) < 1e-6 for ms in learnt)
