"""A fixed acceptance length for models with random weights: how fast decoding is depends on tau, not on the text.

Drafting, verification and draws all run as usual; only the number of drafts that are kept is decided here. The text is
then not the target's, so every result that used a simulated acceptance must say so.
"""

from __future__ import annotations

from aquiline.spec.drafting import Chain, Drafting


class SimulatedAcceptance:
    """Accepts drafts so that tau over all active slots and steps is as near the wanted tau as whole tokens allow."""

    def __init__(self, tau: float) -> None:
        if not tau >= 1:
            raise ValueError(f"simulate_tau={tau}: must be at least 1, the token a step commits anyway")
        self.start(tau)

    def start(self, tau: float) -> None:
        """Begin a run with this tau."""
        self.tau = tau
        self.owed = 0.0  # accepted tokens that rounding still owes

    def next(self, drafting: Drafting) -> int | None:
        """How many drafts one slot accepts in its next step. Raises ValueError for trees."""
        if not drafting.is_speculative:
            return None
        if not isinstance(drafting, Chain):
            raise ValueError("simulate_tau: acceptance is simulated for chains; use drafter='chain'")
        self.owed += min(self.tau - 1, drafting.num_spec_tokens)
        accepted = min(int(self.owed + 1e-9), drafting.num_spec_tokens)
        self.owed -= accepted
        return accepted
