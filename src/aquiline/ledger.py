"""What adaptive drafting chose, how often, and whether it came as foretold: figures alone; engine/control chooses."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

SOURCES = ("none", "draft", "lookup", "both", "probe")
"""Where a sequence's tokens of a step were drafted from. both: the draft's chain and a copy in one tree; probe: the
draft guessed and nothing was verified."""

BINS = 10
"""Parts of [0, 1] by which foretold chances are compared with what came."""


def _by_source() -> dict[str, int]:
    return dict.fromkeys(SOURCES, 0)


@dataclass(eq=False)
class Ledger:
    """Sums that only grow. steps, nodes, accepted: by source, choices (one for each sequence and step), tokens that
    were verified, and those of them that were accepted. choosing_ms: what choosing took in num_chosen steps.

    Of the steps that were looked at, one in several. foretold, verified, right: by tenths of the foretold chance, the
    sum of these chances, tokens that the target judged (all of a copy, the draft's as far as those before were right),
    and those that were right. expected_ms, measured_ms, error_ms: the foretold and the true time of num_timed steps,
    and the sum of the differences, each taken positive."""

    steps: dict[str, int] = field(default_factory=_by_source)
    nodes: dict[str, int] = field(default_factory=_by_source)
    accepted: dict[str, int] = field(default_factory=_by_source)
    num_chosen: int = 0
    choosing_ms: float = 0.0
    foretold: list[float] = field(default_factory=lambda: [0.0] * BINS)
    verified: list[int] = field(default_factory=lambda: [0] * BINS)
    right: list[int] = field(default_factory=lambda: [0] * BINS)
    num_timed: int = 0
    expected_ms: float = 0.0
    measured_ms: float = 0.0
    error_ms: float = 0.0

    def add_token(self, chance: float, is_right: bool) -> None:
        """The target judged a token with that foretold chance."""
        place = min(BINS - 1, int(chance * BINS))
        self.foretold[place] += chance
        self.verified[place] += 1
        self.right[place] += is_right

    def add_time(self, expected_ms: float, measured_ms: float) -> None:
        """A step was to take so long, and took so long."""
        self.num_timed += 1
        self.expected_ms += expected_ms
        self.measured_ms += measured_ms
        self.error_ms += abs(expected_ms - measured_ms)

    def plus(self, other: Ledger, sign: int = 1) -> Ledger:
        """The sums of both."""
        found = Ledger()
        for name in (each.name for each in fields(self)):
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, dict):
                setattr(found, name, {key: mine[key] + sign * theirs[key] for key in mine})
            elif isinstance(mine, list):
                setattr(found, name, [a + sign * b for a, b in zip(mine, theirs, strict=True)])
            else:
                setattr(found, name, mine + sign * theirs)
        return found

    def minus(self, earlier: Ledger) -> Ledger:
        """What was counted since `earlier`, a copy of the same sums."""
        return self.plus(earlier, -1)

    def as_dict(self) -> dict[str, object] | None:
        """The `adaptive` object of a JSON result; None where nothing was chosen.

        Times are means over the timed steps; calibration: a row for each tenth of the foretold chance with tokens."""
        if not self.num_chosen:
            return None
        timed = max(1, self.num_timed)
        rows = zip(self.foretold, self.verified, self.right, strict=True)
        return {
            "steps": dict(self.steps), "nodes": dict(self.nodes), "accepted": dict(self.accepted),
            "num_steps": self.num_chosen, "choosing_us": self.choosing_ms / self.num_chosen * 1e3,
            "num_timed": self.num_timed, "predicted_ms": self.expected_ms / timed,
            "measured_ms": self.measured_ms / timed, "error_ms": self.error_ms / timed,
            "calibration": [
                {"foretold": foretold / verified, "right": right / verified, "tokens": verified}
                for foretold, verified, right in rows if verified
            ],
        }  # fmt: skip
