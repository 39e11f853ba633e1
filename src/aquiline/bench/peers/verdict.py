"""The outcome of a comparison: the standing of every setting, why one is void, and who is faster, in sentences.

All settings run the same prompts in each round, so every ratio is the median of the rounds' ratios, with its interval.
On either side the best of several settings is chosen on the same runs that it is judged by; the sentences say from how
many settings.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from aquiline.bench.peers.names import QUANTISED, is_rounded
from aquiline.bench.peers.peer import PeerOutput
from aquiline.bench.results.integrity import differences
from aquiline.bench.results.intervals import Estimate, estimate, paired
from aquiline.bench.results.result import Result, is_speculative, write_result
from aquiline.bench.tables import Table
from aquiline.blocks import is_packed
from aquiline.engine.llm import Output

CHECK_TOKENS, CHECK_NEEDED = 16, 8
"""Every prompt of a check is continued by CHECK_TOKENS tokens. A kind of peer is void unless at least the first
CHECK_NEEDED of them are ours on every prompt."""
PACKED_NEEDED = 12
"""On packed blocks, at least PACKED_NEEDED of the CHECK_TOKENS tokens must be ours, at any place."""


@dataclass(frozen=True)
class Checked:
    """How many greedy tokens of a kind of peer are ours on each prompt. In float32 two engines write the same text of
    one model for long, and leading tokens are counted. On packed blocks every engine rounds the inputs of its linears
    in its own way, so near ties fall either way and the texts soon differ. There the peer continues each beginning of
    our text by one token."""

    counts: tuple[int, ...]
    is_packed: bool = False

    def __str__(self) -> str:
        which = "tokens after our text" if self.is_packed else "first tokens in float32"
        return f"{', '.join(map(str, self.counts))} of {CHECK_TOKENS} {which}"

    @property
    def problems(self) -> list[str]:
        """Why a kind of peer is void; empty if it is not. One prompt with another text is enough, since it shows that
        the peer computes another model."""
        needed = PACKED_NEEDED if self.is_packed else CHECK_NEEDED
        return [] if min(self.counts) >= needed else [f"it computes another model: only {self} are ours"]


def num_agreed(output: Output | PeerOutput, expected: list[int], tokenizer: Tokenizer | None) -> int | None:
    """How many leading tokens are the expected ones. If a server returns no ids, its text is compared with the decoded
    tokens; None if there is no text or no tokenizer."""
    if output.token_ids:
        pairs = zip(output.token_ids, expected, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(output.token_ids), len(expected)))
    if output.text is None or tokenizer is None:
        return None
    count = 0
    while count < len(expected) and output.text.startswith(tokenizer.decode(expected[: count + 1])):
        count += 1
    return count


def void(result: Result, baseline: Result, checked: Checked | None, agreed: list[float]) -> str:
    """Why a result may not be compared; empty if it may. checked: of its kind of peer; None for our own engine, and for
    servers. agreed: how many of its leading tokens are the baseline's, for each prompt of which that is known."""
    is_own = result["engine"] == "aquiline"
    reasons = differences(result, baseline, is_one_machine=is_own or checked is not None)  # a server may be anywhere
    if is_own:
        alike = all(result["model"][name] == baseline["model"][name] for name in ("dtype", "arithmetic"))
        return "; ".join(reasons) if alike else ""
    if checked is not None:
        return "; ".join(reasons + checked.problems)
    if agreed and min(agreed) < min(CHECK_NEEDED, result["scenario"]["new_tokens"]):
        reasons.append(f"its text is not ours: on one prompt {min(agreed):.0f} tokens agree")
    return "; ".join(reasons)


@dataclass(frozen=True)
class Standing:
    """How one setting did. tokens_per_s: of each round. agreed: how many leading tokens are the first baseline's, mean
    over prompts; None if that is not known. void: why the setting may not be compared; empty if it may."""

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

    def over(self, other: Standing) -> Estimate:
        """This setting's rate divided by the other's, paired round by round."""
        return paired(self.tokens_per_s, other.tokens_per_s)

    @property
    def is_own(self) -> bool:
        """Whether the setting is aquiline's."""
        return self.engine == "aquiline"

    def cells(self, baseline: Standing, new_tokens: int) -> dict[str, str]:
        """The setting's row of the table."""
        agreed = "?" if self.agreed is None else f"{self.agreed:.0f} of {new_tokens}"
        return {
            "setting": self.label, "weights": self.weights, "arithmetic": self.arithmetic, "tok/s": self.rate.whole(),
            "over baseline": self.over(baseline).times(), "first token": f"{self.ttft_ms:.0f} ms",
            "tau": f"{self.tau:.2f}" if self.tau else "?", "same tokens": "VOID" if self.void else agreed,
        }  # fmt: skip


def standing_of(result: Result, agreed: float | None = None) -> Standing:
    """The standing of a result, without its engine's name before a peer's label."""
    name = result["setting"]["name"]
    return Standing(
        label=f"aquiline {name}" if result["engine"] == "aquiline" else name, engine=result["engine"],
        weights=result["model"]["dtype"], arithmetic=result["model"]["arithmetic"],
        is_speculative=is_speculative(result), tokens_per_s=result["throughput_tokens_per_sec"]["values"],
        ttft_ms=result["ttft_ms"]["median"], tau=result["eagle_speculation"]["mean_acceptance_length"], agreed=agreed,
        void=result.get("void", ""),
    )  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """The outcome of a comparison. rows: aquiline's first. checks: for each kind of peer, how many of its tokens were
    ours, prompt by prompt. absent: peers that did not run, with the reason.

    moved: for each of our plain settings, the GB/s of weights, keys and values that it reads at its rate, and the GB/s
    of plain reads."""

    rows: list[Standing]
    results: list[Result]
    checks: dict[str, Checked]
    absent: dict[str, str]
    system: dict[str, object] = field(default_factory=dict)
    moved: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def verdict(self) -> list[str]:
        """Who is faster, in sentences. Settings are compared where their weights are stored alike. If none of ours has
        unrounded weights, the fastest of all settings are compared too."""
        fair = [row for row in self.rows if not row.void]
        floats = [row for row in fair if not is_rounded(row.weights)]
        contests = _contests(floats, "")
        for weights in QUANTISED:
            contests.append(([row for row in fair if row.weights == weights], f"on {weights} weights"))
        for weights in dict.fromkeys(row.weights for row in fair if is_packed(row.weights)):
            contests += _contests([row for row in fair if row.weights == weights], f"on {weights} weights, ")
        if not any(row.is_own for row in floats) and len({row.weights for row in fair}) > 1:
            contests.append((fair, "of all, whatever the weights"))
        said = [_sentence(*contest) for contest in contests]
        return [line for line in said if line] or ["no peer to compare with"]

    def as_dict(self) -> dict[str, object]:
        """The JSON of `aquiline compare --json`."""
        baseline = self.rows[0]
        return {
            "verdict": self.verdict,
            "rows": [
                vars(row)
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

    def table(self, title: str, new_tokens: int) -> Table:
        """Every setting beside the first baseline."""
        return Table.of_cells([row.cells(self.rows[0], new_tokens) for row in self.rows], title=title)

    def notes(self) -> list[str]:
        """The facts below the table: bandwidth, agreement, void settings and peers that did not run."""
        return [
            f"{self.system['cpu']}, {self.system['threads']} threads for every engine; decoding by the wall clock, "
            "prompts apart",
            "tok/s: median of the rounds; over baseline: median of the rounds' ratios; [95 % intervals] from 6 on",
            *(
                f"{label} moves {rate:.1f} GB/s of weights, keys and values, {rate / reads:.0%} of the {reads:.1f} "
                "that plain reads reach; caches can hold a part"
                for label, (rate, reads) in self.moved.items()
            ),
            *(f"{kind}: {checked} are ours, prompt by prompt" for kind, checked in self.checks.items()),
            *(f"void: {row.label}: {row.void}" for row in self.rows if row.void),
            *(f"not run: {label}: {reason}" for label, reason in self.absent.items()),
        ]

    def write(self, out: Path) -> None:
        """Write one result file per setting."""
        out.mkdir(parents=True, exist_ok=True)
        for row, result in zip(self.rows, self.results, strict=True):
            write_result(result, out / f"{re.sub('[^a-z0-9=.-]+', '-', row.label.lower())}.json")


def fastest(rows: list[Standing]) -> Standing:
    """The setting with the highest median."""
    return max(rows, key=lambda row: row.rate.value)


def _contests(rows: list[Standing], where: str) -> list[tuple[list[Standing], str]]:
    """Two contests among settings of one storage: without drafting, and our drafting beside all that peers have."""
    drafted = [row for row in rows if row.is_speculative or not row.is_own]
    return [([row for row in rows if not row.is_speculative], f"{where}without drafting"), (drafted, f"{where}of all")]


def _sentence(rows: list[Standing], what: str) -> str:
    """Who is faster among some settings; empty if either side has none."""
    own, peers = ([row for row in rows if row.is_own == is_own] for is_own in (True, False))
    if not own or not peers:
        return ""
    ours, best = fastest(own), fastest(peers)
    choice = f"the fastest of {len(own)} settings, " if len(own) > 1 else ""
    mine, theirs = ("", "") if ours.weights == best.weights else (f"{ours.weights}, ", f"{best.weights}, ")
    return (
        f"{what}: {ours.label} ({choice}{mine}{ours.rate.whole()} tok/s) is {ours.over(best).times()} the fastest of "
        f"{len(peers)} peer settings, {best.label} ({theirs}{best.rate.whole()} tok/s)"
    )
