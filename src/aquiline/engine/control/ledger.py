"""What was chosen, how often, and whether it came as foretold: the figures of adaptive drafting."""

from __future__ import annotations

from dataclasses import dataclass, field

SOURCES = ("none", "draft", "lookup", "probe")
"""Where a sequence's tokens of a step were drafted from. probe: the draft guessed and nothing was verified."""

BINS = 10
"""Parts of [0, 1] by which foretold chances are compared with what came."""


@dataclass(eq=False)
class Ledger:
    """Sums from the engine's start on. steps: choices by source, one for each sequence and step. foretold and right,
    by tenths of the foretold chance: tokens that were verified, and those of them that were accepted. expected_ms,
    measured_ms, error_ms and num_steps: of the steps whose time was looked at; choosing_ms: what choosing took in
    num_chosen steps."""

    steps: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    nodes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    foretold: list[float] = field(default_factory=lambda: [0.0] * BINS)
    verified: list[int] = field(default_factory=lambda: [0] * BINS)
    right: list[int] = field(default_factory=lambda: [0] * BINS)
    num_chosen: int = 0
    num_steps: int = 0
    expected_ms: float = 0.0
    measured_ms: float = 0.0
    choosing_ms: float = 0.0
    error_ms: float = 0.0  # sum of |expected - measured|

    def add_token(self, chance: float, is_right: bool) -> None:
        """A token with that foretold chance was verified."""
        place = min(BINS - 1, int(chance * BINS))
        self.foretold[place] += chance
        self.verified[place] += 1
        self.right[place] += is_right

    def add_time(self, expected_ms: float, measured_ms: float) -> None:
        """A step was to take so long, and took so long."""
        self.num_steps += 1
        self.expected_ms += expected_ms
        self.measured_ms += measured_ms
        self.error_ms += abs(expected_ms - measured_ms)
