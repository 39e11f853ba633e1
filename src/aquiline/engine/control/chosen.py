"""What was chosen for a sequence in a step: by what name it is counted, and what it runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from aquiline.backends.base import Decode, Decoded
from aquiline.ledger import Ledger
from aquiline.spec.confidence import NUM_MARGINS, Cut
from aquiline.spec.drafting import NoDraft

PLAIN = NoDraft()
UNVERIFIED = Cut((0.0,) * NUM_MARGINS, (0.0,) * NUM_MARGINS, math.inf, math.inf)
"""Of a probe: one pass of the draft, nothing verified."""


def source_of(decode: Decode) -> str:
    """Where the tokens of a decode are drafted from, by the names of ledger.SOURCES."""
    if decode.proposal is not None:
        return "lookup" if decode.cut is None else "both"
    if decode.cut is None:
        return "none"
    return "probe" if decode.cut is UNVERIFIED else "draft"


def add_choice(ledger: Ledger, decode: Decode, decoded: Decoded, with_chances: bool) -> None:
    """Enter a choice and its outcome in the ledger; with_chances: the chances of its tokens too."""
    source = source_of(decode)
    ledger.steps[source] += 1
    ledger.nodes[source] += decoded.num_drafted
    ledger.accepted[source] += len(decoded.kept) - 1
    if not with_chances:
        return
    if decode.proposal is not None:
        copied = [*decode.proposal.tokens]
        for end, chance in enumerate(decode.proposal.confidences, 1):
            ledger.add_token(chance, copied[:end] == decoded.kept[:end])
    if decode.cut is not None:
        for guess, token in zip(decoded.guesses, decoded.kept, strict=False):
            ledger.add_token(decode.cut.chances[guess.margin], guess.token == token)
            if guess.token != token:
                return


def passes_of(decodes: Sequence[Decode], outcomes: Sequence[Decoded], keys: Sequence[int]) -> tuple[list[int], float]:
    """Rows of each pass of the draft in a step, and the keys that all passes together read. keys: of each sequence."""
    passes: list[int] = []
    num_keys = 0
    for decode, decoded, each in zip(decodes, outcomes, keys, strict=True):
        if decode.cut is not None:
            levels = [1] * len(decoded.guesses)
        elif decode.proposal is None and decode.drafting.needs_draft_model:
            levels = [1, *decode.drafting.draft_passes]
        else:
            continue
        num_keys += len(levels) * each
        passes += [0] * (len(levels) - len(passes))
        for level, rows in enumerate(levels):
            passes[level] += rows
    return passes, float(num_keys)
