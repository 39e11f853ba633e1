"""What was chosen for a sequence, by name, and how it came out."""

from __future__ import annotations

import math

from aquiline.backends.base import Decode, Decoded
from aquiline.config import MAX_CHAIN
from aquiline.engine.sequence import Sequence
from aquiline.ledger import Ledger
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.confidence import NUM_MARGINS, Cut
from aquiline.spec.drafting import Chain, NoDraft

PLAIN = NoDraft()

UNVERIFIED = Cut((0.0,) * NUM_MARGINS, (0.0,) * NUM_MARGINS, math.inf, math.inf)
"""The Cut of a probe: one pass of the draft, and nothing is verified."""


def chain_of(sequence: Sequence, most: int = MAX_CHAIN) -> Chain:
    """The longest chain that a sequence may draft, of `most` levels at most."""
    drafting = sequence.request.drafting
    assert isinstance(drafting, Adaptive)
    return drafting.chains[min(most, drafting.max_spec_tokens) - 1]


def source_of(decode: Decode) -> str:
    """The source of a decode's drafted tokens, by the names of ledger.SOURCES."""
    if decode.proposal is not None:
        return "lookup" if decode.cut is None else "both"
    if decode.cut is None:
        return "none"
    return "probe" if decode.cut is UNVERIFIED else "draft"


def add_choice(ledger: Ledger, decode: Decode, decoded: Decoded, with_chances: bool) -> str:
    """Enter a choice and its outcome in the ledger; with_chances: and the chances of its tokens. Returns its source."""
    source = source_of(decode)
    ledger.steps[source] += 1
    ledger.nodes[source] += decoded.num_drafted
    ledger.accepted[source] += len(decoded.kept) - 1
    if not with_chances:
        return source
    if decode.proposal is not None:
        copied = [*decode.proposal.tokens]
        for end, chance in enumerate(decode.proposal.confidences, 1):
            ledger.add_token(chance, copied[:end] == decoded.kept[:end])
    if decode.cut is not None:
        for guess, token in zip(decoded.guesses, decoded.kept, strict=False):
            ledger.add_token(decode.cut.chances[guess.margin], guess.token == token)
            if guess.token != token:
                break
    return source
