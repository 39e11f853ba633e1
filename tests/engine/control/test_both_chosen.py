"""When a copy and the draft's chain are verified in one tree, and what is learnt of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aquiline.backends.base import Decode, Decoded
from aquiline.engine.control.acceptance import Pool, Record
from aquiline.engine.control.calibrate import estimated_table
from aquiline.engine.control.choices import PLAIN, add_choice, source_of
from aquiline.engine.control.controller import Controller, _SequenceState
from aquiline.engine.control.costs import StepCosts
from aquiline.engine.control.planner import ChainWorth, DraftingPlan
from aquiline.engine.control.searches import SequenceSearches
from aquiline.ledger import Ledger
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.confidence import NUM_MARGINS, Cut, Guess, most_nodes
from aquiline.spec.drafting import Chain, Proposal

CUT = Cut((0.5,) * NUM_MARGINS, (0.2,) * NUM_MARGINS, 0.1, 0.2)


class Copies:
    """Proposes tokens 1, 2, 3 with these chances."""

    def __init__(self, chances: list[float]) -> None:
        self.chances = chances

    def propose(self, tokens: list[int], max_tokens: int) -> Proposal:
        return Proposal(tuple(range(1, len(self.chances) + 1)), (), tuple(self.chances))


def chosen(
    chances: list[float], length: int, chain_worth: float, alike: float = 0.8, least: float = 0.1, share: float = 0.5
) -> Decode:
    """What is chosen of a copy with these chances, and a chain that was planned so long and is worth so much. share: of
    right tokens at deeper levels."""
    controller = Controller(StepCosts(estimated_table(10**6, True)))
    controller._overlap.hits[0] = alike * controller._overlap.trials[0]
    record = Record(Pool())
    record.pool.levels.hits[1] = share * record.pool.levels.trials[1]
    plan = DraftingPlan(rate=1.0, row_ms=least, num_rows=1, levels=8)
    controller._plans.current = controller._plans.current._replace(plan=plan)
    uncopied = Decode(0, Chain(8), cut=CUT) if length else Decode(0, PLAIN)
    worth = ChainWorth(length, chain_worth if length else 0.0)
    choice = _SequenceState(record, SequenceSearches(False), uncopied, plan, worth)
    sequence: Any = SimpleNamespace(
        proposer=Copies(chances), slot=0, tokens=[0], max_step=17, request=SimpleNamespace(drafting=Adaptive())
    )
    return controller._choose(sequence, choice)


def test_two_unsure_drafts_that_are_unlike_are_both_verified() -> None:
    found = chosen([0.5, 0.4, 0.3], 2, 0.8, alike=0.5)
    assert source_of(found) == "both"
    assert found.proposal == Proposal((1, 2, 3), (), (0.5, 0.4, 0.3)) and found.cut is CUT
    assert found.drafting == Chain(6), "as long as there is room for beside the copy"


@pytest.mark.parametrize(
    ("chances", "chain_worth", "alike", "source"),
    [
        ([0.9] * 8, 0.1, 0.9, "lookup"), ([0.3, 0.2], 0.8, 0.95, "draft"), ([0.05], 0.8, 0.0, "draft"),
        ([0.05], -0.1, 0.0, "draft"), ([], 0.3, 0.0, "draft"), ([0.3, 0.2], -0.5, 0.5, "lookup"),
    ],
)  # fmt: skip
def test_one_alone_is_verified_where_the_other_adds_nothing(
    chances: list[float], chain_worth: float, alike: float, source: str
) -> None:
    found = chosen(chances, 2, chain_worth, alike, share=0.9)
    assert source_of(found) == source
    assert found.drafting == {"lookup": PLAIN, "draft": Chain(8)}[source]


def test_a_token_that_both_have_costs_one_node() -> None:
    """Of a copied token of chance 0.7 the chain has half: 0.35 comes with it, and its node is paid for already."""
    found = chosen([0.7], 2, chain_worth=0.8, alike=0.5, least=0.4)
    assert source_of(found) == "both", "0.8 + 0.7 - 0.4 - 0.35 * (1 - 0.4) = 0.89 tokens, the chain alone brings 0.8"


def test_without_a_chain_there_is_the_copy() -> None:
    assert source_of(chosen([0.5, 0.4], 0, 0.0)) == "lookup"


@given(
    st.lists(st.floats(0.01, 1), max_size=16), st.integers(0, 8), st.floats(-1, 6), st.floats(0, 1), st.floats(0.01, 1)
)
@example([0.9, 0.9, 0.9], 7, 2.0, 0.0, 0.5)  # a copy of which two tokens fit beside the chain
def test_it_is_worth_the_most_of_the_three_and_fits(
    parts: list[float], length: int, chain_worth: float, alike: float, share: float
) -> None:
    """The worth of both: every copied token brings what the chain does not bring too, and costs a node where it is
    none of the chain's."""
    chances, chance, least = [], 1.0, 0.1
    for part in parts:
        chance *= part
        chances.append(chance)
    found = chosen(chances, length, chain_worth if length else 0.0, alike, least, share)
    kept = [chance for chance in chances if chance >= least]
    fit = kept[: max(0, 16 - 2 * length)]
    extra = sum(
        chance * (1 - alike * share**level) - least * (1 - chance * alike * share**level)
        for level, chance in enumerate(fit)
    )
    worths = {"none": 0.0, "lookup": sum(kept) - least * len(kept)}
    if length:
        del worths["none"]
        worths["draft"] = chain_worth
        worths["both"] = chain_worth + extra if fit else -10.0
    best = max(worths.values())
    assert worths[source_of(found)] == pytest.approx(best) or (source_of(found) == "draft" and not kept)
    if source_of(found) == "both":
        assert found.proposal is not None and isinstance(found.drafting, Chain)
        nodes = most_nodes(found.drafting.num_spec_tokens) + len(found.proposal.tokens)
        assert nodes <= Adaptive().max_nodes and found.drafting.num_spec_tokens >= length


def test_tokens_of_both_are_counted_by_their_own_chances() -> None:
    ledger = Ledger()
    decode = Decode(0, Chain(3), Proposal((5, 6, 7), (), (0.9, 0.7, 0.45)), cut=CUT)
    guesses = [Guess(5, -1, 0), Guess(8, 6, 0), Guess(9, -1, 0)]
    add_choice(ledger, decode, Decoded(10, [5, 6, 1], 6, 11, None, guesses), True)
    assert (ledger.steps["both"], ledger.nodes["both"], ledger.accepted["both"]) == (1, 6, 2)
    assert ledger.foretold == pytest.approx([0, 0, 0, 0, 0.45, 1.0, 0, 0.7, 0, 0.9])
    assert ledger.verified == [0, 0, 0, 0, 1, 2, 0, 1, 0, 1], "the third guess was never judged"
    assert ledger.right == [0, 0, 0, 0, 0, 1, 0, 1, 0, 1]
