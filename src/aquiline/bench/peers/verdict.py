"""The outcome of a comparison: a row per setting, the reason why a row is void, and who is faster, in sentences.

All settings run the same prompts in each round, so every ratio is the median of the rounds' ratios, with its interval.
On either side the best of several settings is chosen on the same runs that it is judged by; the sentences say from how
many settings.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from aquiline.bench.peers.base import QUANTISED, is_rounded
from aquiline.bench.peers.check import Checked
from aquiline.bench.results.intervals import Estimate, estimate, paired
from aquiline.bench.results.result import Result, write_result
from aquiline.blocks import is_packed


@dataclass(frozen=True)
class Row:
    """One line of the table. tokens_per_s: of each round. agreed: how many leading tokens are the first baseline's,
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
        return not self.void and not is_rounded(self.weights)


@dataclass(frozen=True)
class Comparison:
    """The outcome of a comparison. rows: aquiline's first. checks: for each kind of peer, how many of its tokens were
    ours, prompt by prompt. absent: peers that did not run, with the reason.

    moved: for each of our plain settings, the GB/s of weights, keys and values that it reads at its rate, and the GB/s
    of plain reads."""

    rows: list[Row]
    results: list[Result]
    checks: dict[str, Checked]
    absent: dict[str, str]
    system: dict[str, object] = field(default_factory=dict)
    moved: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def last_own(self) -> Row:
        """The last of aquiline's rows."""
        return [row for row in self.rows if row.is_own][-1]

    @property
    def verdict(self) -> list[str]:
        """Who is faster, in sentences. Weights are compared with weights that are stored alike; where ours are none but
        a GGUF file's blocks, the fastest of all is told too."""
        fair = [row for row in self.rows if not row.void]
        floats = [row for row in fair if row.counts]
        pairs = _plain_and_all(floats, "")
        for weights in QUANTISED:
            pairs.append((*_sides([r for r in fair if r.weights == weights]), f"on {weights} weights"))
        for weights in dict.fromkeys(row.weights for row in fair if is_packed(row.weights)):
            pairs += _plain_and_all([r for r in fair if r.weights == weights], f"on {weights} weights, ")
        if not _sides(floats)[0] and len({row.weights for row in fair}) > 1:
            pairs.append((*_sides(fair), "of all, whatever the weights"))
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
            "agreed_in_float32": {kind: found.counts for kind, found in self.checks.items() if not found.is_packed},
            "agreed_on_packed": {kind: found.counts for kind, found in self.checks.items() if found.is_packed},
            "absent": self.absent,
            "system": self.system,
        }


def fastest(rows: list[Row]) -> Row:
    """The row with the highest median."""
    return max(rows, key=lambda row: row.rate.value)


def _sides(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Our rows and the peers'."""
    return [row for row in rows if row.is_own], [row for row in rows if not row.is_own]


def _plain_and_all(rows: list[Row], where: str) -> list[tuple[list[Row], list[Row], str]]:
    """Two contests among rows of one storage: without drafting, and our drafting beside all that peers have."""
    own, peers = _sides(rows)
    plain = _sides([row for row in rows if not row.is_speculative])
    return [(*plain, f"{where}without drafting"), ([r for r in own if r.is_speculative], peers, f"{where}of all")]


def _sentence(own: list[Row], peers: list[Row], what: str) -> str:
    ours, best = fastest(own), fastest(peers)
    choice = f"the fastest of {len(own)} settings, " if len(own) > 1 else ""
    mine, theirs = ("", "") if ours.weights == best.weights else (f"{ours.weights}, ", f"{best.weights}, ")
    return (
        f"{what}: {ours.label} ({choice}{mine}{ours.rate.whole()} tok/s) is {ours.over(best).times()} the fastest of "
        f"{len(peers)} peer settings, {best.label} ({theirs}{best.rate.whole()} tok/s)"
    )


def write_comparison(found: Comparison, out: Path) -> None:
    """Write one result file per setting."""
    out.mkdir(parents=True, exist_ok=True)
    for row, result in zip(found.rows, found.results, strict=True):
        write_result(result, out / f"{re.sub('[^a-z0-9=.-]+', '-', row.label.lower())}.json")
