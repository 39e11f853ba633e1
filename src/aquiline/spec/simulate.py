"""A fixed acceptance length, for models whose weights are random: how fast a step is depends on tau, not on the text.

What runs is all that runs otherwise, drafts, verify and draws included; only which drafts are kept is decided here. The
text is nobody's, so every result that used it must say so (MISSION F5).
"""

from __future__ import annotations

import numpy as np

from aquiline.spec.tree import DraftTree
from aquiline.types import AcceptResult, Int32


class SimulatedAcceptance:
    """Accepts drafts so that tau, over all active slots and steps, is as near the given one as whole tokens allow."""

    def __init__(self, tau: float) -> None:
        if not tau >= 1:
            raise ValueError(f"simulate_tau={tau}: must be at least 1, the token a step commits anyway")
        self.start(tau)

    def start(self, tau: float) -> None:
        """Begin a run with this tau."""
        self.tau = tau
        self.owed = 0.0  # accepted tokens that rounding still owes

    def accepted(self, num_slots: int, depth: int) -> list[int]:
        """How many drafts each slot accepts in the next step, of chains of `depth`."""
        found = []
        for _ in range(num_slots if depth else 0):
            self.owed += min(self.tau - 1, depth)
            found.append(min(int(self.owed + 1e-9), depth))
            self.owed -= found[-1]
        return found or [0] * num_slots

    def __call__(self, tree: DraftTree, drawn: Int32) -> AcceptResult:
        """AcceptResult of chains; a one-node tree accepts nothing. Raises ValueError for wider trees."""
        shape = tree.topology
        if not shape.is_chain:
            raise ValueError("simulate_tau: acceptance is simulated for chains; use drafter='chain'")
        B, depth = len(shape.offsets) - 1, shape.max_depth
        accepted = np.array(self.accepted(B, depth), np.int32)
        levels = np.arange(depth + 1, dtype=np.int32)
        path = np.where(levels <= accepted[:, None], levels, 0).astype(np.int32)
        firsts = shape.offsets[:-1]
        tokens = np.full((B, depth + 1), -1, np.int32)
        if depth:
            drafts = tree.tokens.reshape(B, depth + 1)[:, 1:]
            tokens[:, :-1] = np.where(levels[:-1] < accepted[:, None], drafts, -1)
        tokens[np.arange(B), accepted] = drawn[firsts + accepted]
        return AcceptResult(path=path, tokens=tokens, num_accepted=accepted)
