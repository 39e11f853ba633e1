"""Judges our results beside other engines' of the same run: a limit is passed, failed, or not decided.

Not decided is what the runs do not tell: the interval of a ratio holds the limit, there are too few rounds for one, a
figure is missing, or the results may not be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aquiline.bench.results.integrity import differences
from aquiline.bench.results.intervals import Estimate, paired
from aquiline.bench.results.result import Result
from aquiline.config import check

PASS, FAIL, UNDECIDED = "pass", "fail", "not decided"


@dataclass(frozen=True)
class PeerCheck:
    """One limit on our setting `ours` beside another engine's setting `theirs`; why: the reason not to decide."""

    theirs: str
    ours: str
    limit: str
    measured: str
    verdict: str
    why: str = ""


def beside_peers(results: Mapping[str, Result], least: float, most_gap: float) -> list[PeerCheck]:
    """Whether, beside each setting of every other engine, our fastest is `least` times as fast; and whether our tau is
    within most_gap of each that drafts as many tokens with an EAGLE-3 head.

    Raises ValueError for a ratio that is none, and where there are no results of ours, or none of another engine."""
    check(least > 0, "over_peers", least, "must be a ratio above 0, as 1.0")
    own = [result for result in results.values() if result["engine"] == "aquiline"]
    theirs = [result for result in results.values() if result["engine"] != "aquiline"]
    if not theirs or not own:
        raise ValueError("over_peers: needs results of ours and of another engine, as `aquiline compare --out` writes")
    drafting = [peer for peer in theirs if "eagle=" in peer["setting"]["name"]]
    return [_speed(own, peer, least) for peer in theirs] + [_tau(own, peer, most_gap) for peer in drafting]


def exit_code_of(checks: Sequence[PeerCheck]) -> int:
    """1 if a limit is failed, 2 if none is but one is not decided, 0 if all are passed."""
    found = {check.verdict for check in checks}
    return 1 if FAIL in found else 2 if UNDECIDED in found else 0


def _speed(own: list[Result], peer: Result, least: float) -> PeerCheck:
    name, limit, reasons = peer["setting"]["name"], f"speed >= {least:g}x", [_unfit(result, peer) for result in own]
    fit = [result for result, why in zip(own, reasons, strict=True) if not why]
    if not fit:
        return PeerCheck(name, "", limit, "", UNDECIDED, min(reasons, key=len))
    ours = max(fit, key=lambda result: float(result["throughput_tokens_per_sec"]["median"]))
    found = paired(*(result["throughput_tokens_per_sec"]["values"] for result in (ours, peer)))
    label = f"{ours['setting']['name']}, the fastest of {len(fit)}" if len(fit) > 1 else ours["setting"]["name"]
    return PeerCheck(name, label, limit, found.times(), *_decided(found, least))


def _decided(found: Estimate, least: float) -> tuple[str, str]:
    """The verdict on a ratio, and why there is none."""
    if found.low is None or found.high is None:
        return UNDECIDED, "too few rounds for an interval"
    if found.low < least <= found.high:
        return UNDECIDED, "the interval holds the limit"
    return PASS if found.low >= least else FAIL, ""


def _tau(own: list[Result], peer: Result, most_gap: float) -> PeerCheck:
    name, limit, length = peer["setting"]["name"], f"tau within {most_gap:g}", peer["setting"]["num_spec_tokens"]
    chains = [r for r in own if r["setting"]["drafter"] == "chain" and r["setting"]["num_spec_tokens"] == length]
    ours = next((result for result in chains if not _unfit(result, peer)), None)
    if ours is None:
        return PeerCheck(name, "", limit, "", UNDECIDED, f"no chain of {length} of ours that may be compared")
    label, taus = ours["setting"]["name"], [r["eagle_speculation"]["mean_acceptance_length"] for r in (ours, peer)]
    if not taus[1]:
        return PeerCheck(name, label, limit, "", UNDECIDED, "the engine states no tau")
    verdict = PASS if abs(taus[0] - taus[1]) <= most_gap else FAIL
    return PeerCheck(name, label, limit, f"{taus[0]:.2f} against {taus[1]:.2f}", verdict)


def _unfit(result: Result, peer: Result) -> str:
    """Why two results may not be compared; empty if they may. A server's weights and machine are not known."""
    void, dtype = peer.get("void") or result.get("void"), peer["model"]["dtype"]
    if void:
        return str(void)
    if dtype not in ("server", result["model"]["dtype"]):
        return f"no result of ours on {dtype} weights"
    return "; ".join(differences(result, peer, is_one_machine=dtype != "server"))
