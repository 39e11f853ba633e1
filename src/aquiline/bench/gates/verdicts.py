"""Judges results by gates: green, red with its margin, or refused with the reason.

A gate is red if a measurement misses a limit or is absent. A gate is refused if its results must not be judged: they
cannot be compared, outputs differ, a run broke the rules of PERF mode, or full gates are asked too early. Gates of one
model and profile are asked together. They share the streak of green micro runs that opens the full gates.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from aquiline.bench.gates.rules import FIGURES, GAP, LEVELS, Gate
from aquiline.bench.gates.streaks import Streaks
from aquiline.bench.results import speedups
from aquiline.bench.results.integrity import differences
from aquiline.bench.results.result import Result, is_dirty, is_speculative
from aquiline.bench.results.speedups import Ratio

Results = Mapping[str, Result]
RUNS_IN_A_ROW = 3
VERDICTS = ("green", "red", "refused")


@dataclass(frozen=True)
class Check:
    """One limit of a gate and the measurement, None if there is none. margin: the distance between the two, negative
    if the limit was missed."""

    limit: str
    threshold: float
    measured: float | None
    margin: float | None
    is_held: bool


@dataclass(frozen=True)
class Judgement:
    """One gate's verdict: green, red or refused. file: the result that was judged; None if the gate selects no result,
    which makes it red. ideal_speedup: what the roofline allows at this tau on this device."""

    name: str
    model: str
    select: str
    verdict: str = "red"
    file: str | None = None
    setting: str | None = None
    ideal_speedup: float | None = None
    checks: tuple[Check, ...] = ()
    changed_limits: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The gates of one model, profile and level, with the worst of their verdicts. refusals: reasons that hold for all
    of them; streak: of green micro runs, in words."""

    model: str
    profile: str
    level: str
    verdict: str
    refusals: tuple[str, ...] = ()
    streak: str = ""
    gates: tuple[Judgement, ...] = ()


@dataclass(frozen=True)
class Report:
    """The outcome of a request; as a dict it is the JSON of `aquiline gate --json`. exit_code: 0 all is green, 1
    something is red, 2 nothing is red but something was refused, or nothing was asked. not_asked: names of gates whose
    model and profile have no results."""

    exit_code: int
    outcomes: tuple[Outcome, ...]
    not_asked: tuple[str, ...]


def ask(
    gates: list[Gate], results: Results, streaks: Streaks, level: str = "micro", only: tuple[str, ...] = (),
    parity: Results | None = None,
) -> Report:  # fmt: skip
    """Ask gates of checked results: those named in `only`, and otherwise those whose model and profile have results.
    Micro runs are counted in `streaks`. level: micro, full or all; parity: another engine's results, to whose tau ours
    is compared.

    Raises ValueError for an invalid request."""
    _check_request(gates, level, only, parity)
    own = {name: result for name, result in results.items() if result["engine"] == "aquiline"}
    levels = LEVELS if level == "all" else [level]
    wanted = [gate for gate in gates if gate.level in levels and (not only or gate.name in only)]
    idle = [gate for gate in wanted if not only and not any(map(gate.is_of, own.values()))]
    outcomes = []
    for group in dict.fromkeys(gate.group for gate in wanted if gate not in idle):
        micro = [gate for gate in gates if gate.group == group and gate.level == "micro"]
        for one in levels:
            if asked := [gate for gate in wanted if gate.group == group and gate.level == one]:
                outcomes.append(_outcome(asked, micro, own, streaks, parity))
    verdicts = {outcome.verdict for outcome in outcomes}
    code = 1 if "red" in verdicts else 0 if verdicts == {"green"} else 2
    return Report(code, tuple(outcomes), tuple(gate.name for gate in idle))


def judge(gate: Gate, results: Results, parity: Results | None = None) -> Judgement:
    """Judge one gate over the results that it selects: check the limits of the fastest, and refuse if any of them must
    not be judged."""
    found = Judgement(gate.name, gate.model, gate.work, changed_limits=gate.changed)
    selected = {name: r for name, r in results.items() if gate.selects(r) and is_speculative(r)}
    if not selected:
        return found
    ratios = {name: speedups.speedup(result, results) for name, result in selected.items()}
    refusals = [f"{name}: {why}" for name in selected for why in _unfit(selected[name], ratios[name], results)]
    settings = Counter(result["setting"]["name"] for result in selected.values())
    for setting in sorted(setting for setting, times in settings.items() if times > 1):
        refusals.append(f"{settings[setting]} results of {setting} ({', '.join(selected)}); keep one")
    file = max(selected, key=lambda name: ratios[name].value or 0.0)
    best = selected[file]
    figures = {name: figure(best, ratios[file]) for name, figure in FIGURES.items()}
    checks = [_check(gate, limit, figures[limit.partition("_")[2]]) for limit in gate.limits if limit != GAP]
    if parity is not None and not refusals:
        gaps, why = _gaps(best, parity)
        refusals = [f"{file}: {reason}" for reason in why]
        checks.append(_check(gate, GAP, max(gaps, default=None)))
    if refusals:
        return replace(found, verdict="refused", refusals=tuple(refusals))
    return replace(
        found, verdict="green" if all(check.is_held for check in checks) else "red", checks=tuple(checks), file=file,
        setting=best["setting"]["name"], ideal_speedup=best.get("roofline", {}).get("ideal_speedup"),
    )  # fmt: skip


def _check(gate: Gate, limit: str, measured: float | None) -> Check:
    threshold = gate.limits[limit]
    if measured is None:
        return Check(limit, threshold, None, None, False)
    margin = threshold - measured if limit.startswith("max_") else measured - threshold
    return Check(limit, threshold, measured, margin, margin >= 0)


def _unfit(result: Result, ratio: Ratio, results: Results) -> list[str]:
    """Why a gate must not judge a result: it has no fair baseline, its figures are simulated, its weights are random,
    or it broke a rule of PERF mode."""
    against = f"against {ratio.other}: " if ratio.other is not None else ""
    found = [f"{against}{reason}" for reason in ratio.reasons]
    if result["model"]["simulated_tau"] is not None:
        found.append(f"model.simulated_tau: {result['model']['simulated_tau']:g} was chosen, not measured")
    if result["model"]["random_weights"]:
        found.append("model.random_weights: a gate asks about a real model")
    for run in [result] + ([results[ratio.other]] if ratio.other is not None else []):
        found += [f"PERF violation of {run['setting']['name']}: {violation}" for violation in _violations(run)]
    return found


def _violations(result: Result) -> list[str]:
    """The rules of PERF mode that a run broke."""
    found = list(result.get("perf_violations", []))
    disabled = result.get("slots", {}).get("disabled_other")
    if disabled is None:
        found.append("slots.disabled_other: is missing, so whether every slot decoded is not known")
    elif disabled:
        found.append(f"slots.disabled_other: {disabled} slots did not decode for another reason than their end")
    if result["system"]["path"] == "torch":
        found.append("system.path: torch, the fallback without the native library")
    return found


def _gaps(result: Result, parity: Results) -> tuple[list[float], list[str]]:
    """How far tau is from another engine's in each of its results of the same work with drafts of the same length, and
    the reasons why they cannot be compared. Tau is compared, not speed, so the device does not matter."""
    gaps, reasons = [], []
    for file, peer in parity.items():
        if _job(peer) != _job(result) or not is_speculative(peer):
            continue
        why = [reason for reason in differences(result, peer) if not reason.startswith("system.")]
        ours, theirs = (r["eagle_speculation"]["mean_acceptance_length"] for r in (result, peer))
        if not theirs:
            why.append("eagle_speculation.mean_acceptance_length: is 0; the engine states no tau")
        if peer["model"]["simulated_tau"] is not None:
            why.append("model.simulated_tau: was chosen, not measured")
        reasons += [f"parity against {file}: {reason}" for reason in why]
        gaps.append(abs(ours - theirs))
    return gaps, reasons


def _job(result: Result) -> list[object]:
    """The work, the model and the length of drafts. Owners of hub names do not count."""
    work = [result["scenario"][name] for name in ("name", "profile", "context_tokens", "batch", "temperature")]
    return [*work, result["model"]["target"].split("/")[-1], result["setting"].get("num_spec_tokens")]


def _outcome(
    asked: list[Gate], micro: list[Gate], results: Results, streaks: Streaks, parity: Results | None
) -> Outcome:
    """Judge gates of one model, profile and level, if that level is open, and count the run of micro gates. micro: all
    micro gates of the model and profile, asked or not."""
    level, theirs = asked[0].level, [result for result in results.values() if asked[0].is_of(result)]
    key = _streak_key(theirs, micro) if theirs else ""
    refusals = _mixed(theirs)
    if level == "full" and not refusals and (green := streaks.green(key)) < RUNS_IN_A_ROW:
        refusals.append(
            f"full gates open after {RUNS_IN_A_ROW} green micro runs in a row; this commit, configuration and device "
            f"has {green}. Run `aquiline gate DIR --level micro` on new directories"
        )
    if refusals:
        return Outcome(*asked[0].group, level, "refused", tuple(refusals))
    gates = tuple(judge(gate, results, parity) for gate in asked)
    worst = max((gate.verdict for gate in gates), key=VERDICTS.index)
    if level == "full":
        streak = ""
    elif not theirs:
        streak = "not counted: no result of this model and profile"
    elif len(asked) < len(micro):
        streak = "not counted: only some of the micro gates were asked"
    else:
        streak = _count(key, worst == "green", theirs, streaks)
    return Outcome(*asked[0].group, level, worst, (), streak, gates)


def _streak_key(results: list[Result], micro: list[Gate]) -> str:
    """The commit, the configuration and the device that a streak belongs to."""
    models = sorted({(speedups.model(r), str(r["model"]["draft"])) for r in results})
    asked = [(gate.name, gate.work, sorted(gate.limits.items())) for gate in micro]
    configuration = hashlib.sha256(json.dumps([models, asked]).encode()).hexdigest()[:16]
    return f"{results[0]['commit']} | {configuration} | {speedups.machine(results[0])}"


def _count(key: str, is_green: bool, results: list[Result], streaks: Streaks) -> str:
    """Record a micro run, and say the streak. A run counts only if its commit identifies the code that ran: an
    installed package has no commit, and uncommitted changes are in none."""
    commit = results[0]["commit"]
    if commit == "unknown" or is_dirty(results[0]):
        green, why = 0, f"commit {commit} does not say what ran; commit first, and measure from a checkout"
    else:
        green, why = streaks.record(key, is_green, results)
    said = f" (this run is not counted: {why})" if why else ""
    return f"{green} of {RUNS_IN_A_ROW} green micro runs in a row{said}"


def _check_request(gates: list[Gate], level: str, only: tuple[str, ...], parity: Results | None) -> None:
    if level not in (*LEVELS, "all"):
        raise ValueError(f"level={level!r}: must be one of {', '.join(LEVELS)}, all")
    levels = {gate.name: gate.level for gate in gates}
    for name in only:
        if name not in levels:
            raise ValueError(f"only={name!r}: is no gate; there are {', '.join(levels)}")
        if level not in (levels[name], "all"):
            raise ValueError(f"only={name!r}: is a {levels[name]} gate; ask with --level {levels[name]}")
    if parity is None:
        return
    if any(result["engine"] == "aquiline" for result in parity.values()):
        raise ValueError("parity: the directory holds results of aquiline; name one of another engine's alone")
    for gate in gates:
        if GAP not in gate.limits:
            raise ValueError(f"parity: {gate.name} has no {GAP}; give it one, as --set {gate.name}.{GAP}=0.1 does")


def _mixed(results: list[Result]) -> list[str]:
    """Reasons to refuse results of several commits or devices; empty if there is one of each."""
    found = []
    for what, values in (("commit", {r["commit"] for r in results}), ("device", set(map(speedups.machine, results)))):
        if len(values) > 1:
            found.append(f"{what}: the results are of {' and of '.join(sorted(values))}; one run is of one {what}")
    return found
