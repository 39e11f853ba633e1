"""What a comparison found: a row per setting, why a row says nothing, and who is faster, in sentences."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from aquiline.bench.peers.base import QUANTISED
from aquiline.bench.result import Result


@dataclass(frozen=True)
class Row:
    """One line of the table. agreed: leading tokens that are the float32 baseline's, mean over prompts; None if nobody
    can tell. void: why the line says nothing; empty if it says something."""

    label: str
    engine: str
    weights: str
    arithmetic: str
    is_speculative: bool
    tokens_per_s: list[float]
    ttft_ms: float
    tau: float
    agreed: float | None
    void: str

    @property
    def median(self) -> float:
        """Decode tokens per second, median over the measured runs."""
        return statistics.median(self.tokens_per_s)

    @property
    def is_own(self) -> bool:
        """Whether it is aquiline's."""
        return self.engine == "aquiline"

    @property
    def counts(self) -> bool:
        """Whether a verdict may rest on it: valid, and on weights that nobody rounded."""
        return not self.void and self.weights not in QUANTISED


@dataclass(frozen=True)
class Comparison:
    """All rows, aquiline's first; kinds of peers with the tokens they agreed on in float32; absent peers and why.

    moved: of our plain settings, the GB/s of weights, keys and values that their rate stands for, and those of plain
    reads."""

    rows: list[Row]
    results: list[Result]
    checks: dict[str, int]
    absent: dict[str, str]
    system: dict[str, object] = field(default_factory=dict)
    moved: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def last_own(self) -> Row:
        """Where aquiline's rows end."""
        return [row for row in self.rows if row.is_own][-1]

    @property
    def verdict(self) -> list[str]:
        """Who is faster, in sentences."""
        own = [row for row in self.rows if row.is_own and row.counts]
        plain = max((row for row in own if not row.is_speculative), key=lambda row: row.median)
        drafted = max((row for row in own if row.is_speculative), key=lambda row: row.median, default=None)
        peers = [row for row in self.rows if not row.is_own]
        lines = []
        for ours, theirs, what in (
            (plain, [r for r in peers if r.counts and not r.is_speculative], "peer without speculation"),
            (drafted, [r for r in peers if r.counts], "peer setting"),
        ):
            best = max(theirs, key=lambda row: row.median, default=None)
            if ours is not None and best is not None:
                ratio = ours.median / best.median
                lines.append(f"{ours.label} is {ratio:.2f}x the fastest {what}, {best.label} ({best.median:.0f} tok/s)")
        for weights in QUANTISED:
            rounded = [r for r in self.rows if r.weights == weights and not r.void]
            ours = max((r for r in rounded if r.is_own), key=lambda r: r.median, default=None)
            best = max((r for r in rounded if not r.is_own), key=lambda r: r.median, default=None)
            if ours is not None and best is not None:
                lines.append(
                    f"{ours.label} is {ours.median / best.median:.2f}x the fastest peer on {weights} weights, "
                    f"{best.label} ({best.median:.0f} tok/s)"
                )
        return lines or ["no peer to compare with"]

    def as_dict(self) -> dict[str, object]:
        """The JSON of `aquiline compare --json`."""
        baseline = self.rows[0].median
        return {
            "verdict": self.verdict,
            "rows": [
                row.__dict__ | {"median": row.median, "over_baseline": row.median / baseline} for row in self.rows
            ],
            "moved_gb_per_s": {
                label: {"moved": moved, "plain_reads": reads} for label, (moved, reads) in self.moved.items()
            },
            "agreed_in_float32": self.checks,
            "absent": self.absent,
            "system": self.system,
        }
