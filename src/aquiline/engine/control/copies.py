"""Which copies of earlier text a step verifies: as many of their tokens as pay together, and beside a fixed setting in
place of its chains, so that rivals differ by what they draft and not by what they copy."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items

from aquiline.backends.base import Decode
from aquiline.engine.control.choices import PLAIN
from aquiline.engine.control.costs import StepCosts
from aquiline.engine.control.planner import best_copies
from aquiline.engine.control.searches import FIXED_PERIOD, SequenceSearches
from aquiline.engine.pipeline import StepChoice
from aquiline.engine.sequence import Sequence
from aquiline.spec.drafting import Proposal


def first_of(proposal: Proposal, count: int) -> Proposal:
    """The first tokens of a copy."""
    return Proposal(proposal.tokens[:count], (), proposal.confidences[:count])


def fitting(
    chosen: Mapping[Sequence, Decode], costs: StepCosts, rate: float, rows: int, alone_ms: float = 0.0
) -> dict[Sequence, Decode | None]:
    """The choices with copies, cut to the tokens that pay together, each of which was chosen by a constant price of a
    row; None for a copy of which none does. For the numbers see best_copies."""
    copies = [(s, decode.proposal) for s, decode in chosen.items() if decode.proposal is not None]
    if not copies:
        return {}
    key_price = rate * costs.row_keys(1.0)
    gains = [[chance - key_price * len(s.tokens) for chance in proposal.confidences] for s, proposal in copies]
    kept = best_copies(costs, rate, rows, gains, alone_ms)
    return {
        s: chosen[s]._replace(proposal=first_of(proposal, count)) if count else None
        for (s, proposal), count in zip(copies, kept, strict=True)
    }


def beside_fixed(
    fixed: StepChoice, searching: Items[tuple[Sequence, SequenceSearches]], number: int, costs: StepCosts, rate: float,
    least: float,
) -> StepChoice:  # fmt: skip
    """A fixed setting's choice for step `number`, in which those sequences copy for which a copy should bring more than
    `least` tokens beside one, as the setting does. rate: the tokens that a millisecond must bring."""
    due = [(sequence, searches) for sequence, searches in searching if number >= searches.next_step]
    copies = {sequence: _copy(sequence) for sequence, _ in due}
    worthy = {sequence: copy for sequence, copy in copies.items() if _further(copy) > least}
    rows = sum([decode.drafting.max_nodes for decode in fixed.decodes.values()]) if worthy else 0
    fits = fitting(worthy, costs, rate, rows).items()
    paying = {sequence: copy for sequence, copy in fits if copy is not None and _further(copy) > least}
    for sequence, searches in due:
        searches.wait(number, sequence in paying, FIXED_PERIOD * len(searching))
    if not any(searches.next_step == number + 1 for _, searches in searching):
        return fixed
    return fixed._replace(decodes={**fixed.decodes, **paying}, most_steps=1)


def _copy(sequence: Sequence) -> Decode:
    """What follows the sequence's latest tokens where they stood before."""
    assert sequence.proposer is not None
    proposal = sequence.proposer.propose(sequence.tokens, sequence.request.drafting.max_depth)
    return Decode(sequence.slot, PLAIN, proposal)


def _further(copy: Decode) -> float:
    """Tokens that a copy should bring beside one."""
    return sum(copy.proposal.confidences) if copy.proposal is not None else 0.0
