"""The outcome of a comparison: a row per setting, the reason why a row is void, and who is faster, in sentences.

All settings run the same prompts in each round, so every ratio is the median of the rounds' ratios, with its interval.
On either side the best of several settings is chosen on the same runs that it is judged by; the sentences say from how
many settings.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from aquiline.bench.peers.base import QUANTISED
from aquiline.bench.results.intervals import Estimate, estimate, paired
from aquiline.bench.results.result import Result, write_result


@dataclass(frozen=True)
class Row:
    """One line of the table. tokens_per_s: of each round. agreed: how many leading tokens are the float32 baseline's,
    mean over prompts; None if that is not known. void: why the line may not be compared; empty if it may."""

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
    def rate(self) -> Estimate:
        """Decode tokens per second by the wall clock, median over the rounds."""
        return estimate(self.tokens_per_s)

    def over(self, other: Row) -> Estimate:
        """This row's rate divided by the other's, paired round by round."""
        return paired(self.tokens_per_s, other.tokens_per_s)

    @property
    def is_own(self) -> bool:
        """Whether the row is aquiline's."""
        return self.engine == "aquiline"

    @property
    def counts(self) -> bool:
        """Whether the row counts for the main verdict: it is not void, and its weights are not rounded."""
        return not self.void and self.weights not in QUANTISED


@dataclass(frozen=True)
class Comparison:
    """The outcome of a comparison. rows: aquiline's first. checks: for each kind of peer, how many leading tokens were
    ours in float32, prompt by prompt. absent: peers that did not run, with the reason.

    moved: for each of our plain settings, the GB/s of weights, keys and values that it reads at its rate, and the GB/s
    of plain reads."""

    rows: list[Row]
    results: list[Result]
    checks: dict[str, list[int]]
    absent: dict[str, str]
    system: dict[str, object] = field(default_factory=dict)
    moved: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def last_own(self) -> Row:
        """The last of aquiline's rows."""
        return [row for row in self.rows if row.is_own][-1]

    @property
    def verdict(self) -> list[str]:
        """Who is faster, in sentences."""
        own = [row for row in self.rows if row.is_own and row.counts]
        peers = [row for row in self.rows if not row.is_own and row.counts]
        pairs = [
            ([r for r in own if not r.is_speculative], [r for r in peers if not r.is_speculative], "without drafting"),
            ([r for r in own if r.is_speculative], peers, "of all"),
        ]  # fmt: skip
        for weights in QUANTISED:
            rounded = [r for r in self.rows if r.weights == weights and not r.void]
            sides = [r for r in rounded if r.is_own], [r for r in rounded if not r.is_own]
            pairs.append((*sides, f"on {weights} weights"))
        return [_sentence(*pair) for pair in pairs if pair[0] and pair[1]] or ["no peer to compare with"]

    def as_dict(self) -> dict[str, object]:
        """The JSON of `aquiline compare --json`."""
        baseline = self.rows[0]
        return {
            "verdict": self.verdict,
            "rows": [
                row.__dict__
                | {"median": row.rate.value, "low": row.rate.low, "high": row.rate.high}
                | {"over_baseline": asdict(row.over(baseline))}
                for row in self.rows
            ],
            "moved_gb_per_s": {
                label: {"moved": moved, "plain_reads": reads} for label, (moved, reads) in self.moved.items()
            },
            "agreed_in_float32": self.checks,
            "absent": self.absent,
            "system": self.system,
        }


def fastest(rows: list[Row]) -> Row:
    """The row with the highest median."""
    return max(rows, key=lambda row: row.rate.value)


def _sentence(own: list[Row], peers: list[Row], what: str) -> str:
    ours, best = fastest(own), fastest(peers)
    choice = f"the fastest of {len(own)} settings, " if len(own) > 1 else ""
    return (
        f"{what}: {ours.label} ({choice}{ours.rate.whole()} tok/s) is {ours.over(best).times()} the fastest of "
        f"{len(peers)} peer settings, {best.label} ({best.rate.whole()} tok/s)"
    )


def write_comparison(found: Comparison, out: Path) -> None:
    """Write one result file per setting."""
    out.mkdir(parents=True, exist_ok=True)
    for row, result in zip(found.rows, found.results, strict=True):
        write_result(result, out / f"{re.sub('[^a-z0-9=.-]+', '-', row.label.lower())}.json")
