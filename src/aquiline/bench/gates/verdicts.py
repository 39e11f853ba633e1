"""Judges results by gates: green, red with its margin, or refused with the reason.

A gate is red if a measurement misses a limit or is absent. A gate is refused if its results must not be judged: they
cannot be compared, outputs differ, a run broke the rules of PERF mode, or full gates are asked too early. Gates of one
model and profile are asked together. They share the streak of green micro runs that opens the full gates.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aquiline.bench.gates.rules import GAP, LEVELS, SCHEMA, Gate
from aquiline.bench.results.integrity import schema_problems, unfit
from aquiline.bench.results.result import Result, is_dirty, is_speculative
from aquiline.bench.results.speedups import FIGURES, Results, machine, model, speedup, tau_gaps
from aquiline.config import cache_directory, check
from aquiline.writing import write_whole

RUNS_IN_A_ROW = 3
NO_STREAK: dict[str, Any] = {"green": 0, "seen": []}
VERDICTS = ("green", "red", "refused")
"""Of several gates, the last of these verdicts counts."""


@dataclass(frozen=True)
class Check:
    """One limit of a gate and its measurement, None if there is none. margin: negative if the limit was missed."""

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
    verdict: str
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


class Streaks:
    """Streaks of green micro runs in one file, which several processes may share; RUNS_IN_A_ROW of them open the full
    gates. A streak belongs to the commit, the configuration (the models and the micro gates with their limits) and the
    device. A result counts once, even if it comes in several files. Raises ValueError for a file of another kind."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file or cache_directory() / "gates.json"
        self._read()

    def green(self, key: str) -> int:
        """The number of green micro runs in a row."""
        return int(self._read().get(key, NO_STREAK)["green"])

    def record(self, key: str, is_green: bool, results: list[Result]) -> str:
        """Count a micro run, and say the streak; a red run ends it. A run is not counted if any of its results was
        counted before, or if its commit does not identify the code that ran."""
        hashes, commit = list(map(content_hash, results)), results[0]["commit"]
        if commit == "unknown" or is_dirty(results[0]):
            return _said(0, f"commit {commit} does not say what ran; commit first, and measure from a checkout")
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            streaks = self._read()
            before = streaks.get(key, NO_STREAK)
            if repeated := sum(found in before["seen"] for found in hashes):
                why = f"{repeated} of its {len(hashes)} results were counted before; measure into a new directory"
                return _said(before["green"], why)
            streaks[key] = {"green": before["green"] + 1 if is_green else 0, "seen": [*before["seen"], *hashes]}
            text = json.dumps({"schema": "aquiline.gates/1", "streaks": streaks}, indent=1) + "\n"
            write_whole(self.file, text, "The streaks are as before")
        return _said(streaks[key]["green"])

    def _read(self) -> dict[str, Any]:
        if not self.file.exists():
            return {}
        try:
            parsed = json.loads(self.file.read_text(encoding="utf-8"))
        except ValueError:
            parsed = None
        found = schema_problems(parsed, SCHEMA["$defs"]["streaks"], "streaks")
        check(not found, "state", str(self.file), "is no file of streaks; delete it to begin anew")
        return dict(parsed["streaks"])


def _said(green: int, why: str = "") -> str:
    """A streak in words. why: the reason why the run at hand was not counted."""
    return f"{green} of {RUNS_IN_A_ROW} green micro runs in a row{f' (this run is not counted: {why})' if why else ''}"


def content_hash(result: Result) -> str:
    """A hash that identifies a measurement, since two runs never have the same times. The date does not enter it."""
    text = json.dumps({name: value for name, value in result.items() if name != "date"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


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
    wanted = [gate for gate in gates if level in (gate.level, "all") and (not only or gate.name in only)]
    idle = [gate for gate in wanted if not only and not any(gate.selects(r, "profile") for r in own.values())]
    outcomes = []
    for group in dict.fromkeys(gate.group for gate in wanted if gate not in idle):
        micro = [gate for gate in gates if gate.group == group and gate.level == "micro"]
        for one in LEVELS:
            if asked := [gate for gate in wanted if gate.group == group and gate.level == one]:
                outcomes.append(_outcome(asked, micro, own, streaks, parity))
    verdicts = {outcome.verdict for outcome in outcomes}
    code = 1 if "red" in verdicts else 0 if verdicts == {"green"} else 2
    return Report(code, tuple(outcomes), tuple(gate.name for gate in idle))


def judge(gate: Gate, results: Results, parity: Results | None = None) -> Judgement:
    """Judge one gate over the results that it selects: check the limits of the fastest, and refuse if any of them must
    not be judged."""
    ratios = {name: speedup(r, results) for name, r in results.items() if gate.selects(r) and is_speculative(r)}

    def judged(verdict: str, **found: Any) -> Judgement:
        return Judgement(gate.name, gate.model, gate.work, verdict, changed_limits=gate.changed, **found)

    if not ratios:
        return judged("red")
    refusals = [f"{name}: {why}" for name, ratio in ratios.items() for why in unfit(name, ratio, results)]
    for setting, times in sorted(Counter(results[name]["setting"]["name"] for name in ratios).items()):
        refusals += [f"{times} results of {setting} ({', '.join(ratios)}); keep one"] if times > 1 else []
    file = max(ratios, key=lambda name: ratios[name].value or 0.0)
    best, gaps = results[file], list[float]()
    if parity is not None and not refusals:
        gaps, reasons = tau_gaps(best, parity)
        refusals = [f"{file}: {reason}" for reason in reasons]
    if refusals:
        return judged("refused", refusals=tuple(refusals))
    measured = {name: figure(best, ratios[file]) for name, figure in FIGURES.items()}
    measured["tau_gap"] = max(gaps, default=None)
    checks = tuple(
        _check(limit, threshold, measured[limit.partition("_")[2]])
        for limit, threshold in gate.limits.items()
        if limit != GAP or parity is not None
    )
    verdict, ideal = VERDICTS[not all(check.is_held for check in checks)], best.get("roofline", {}).get("ideal_speedup")
    return judged(verdict, checks=checks, file=file, setting=best["setting"]["name"], ideal_speedup=ideal)


def _check(limit: str, threshold: float, measured: float | None) -> Check:
    if measured is None:
        return Check(limit, threshold, None, None, False)
    margin = threshold - measured if limit.startswith("max_") else measured - threshold
    return Check(limit, threshold, measured, margin, margin >= 0)


def _outcome(
    asked: list[Gate], micro: list[Gate], results: Results, streaks: Streaks, parity: Results | None
) -> Outcome:
    """Judge gates of one model, profile and level, if that level is open, and count the run of micro gates. micro: all
    micro gates of the model and profile, asked or not."""
    level, theirs = asked[0].level, [r for r in results.values() if asked[0].selects(r, "profile")]
    key, refusals = _key(theirs, micro) if theirs else "", []
    for what, values in (("commit", {r["commit"] for r in theirs}), ("device", set(map(machine, theirs)))):
        if len(values) > 1:
            refusals.append(f"{what}: the results are of {' and of '.join(sorted(values))}; one run is of one {what}")
    if level == "full" and not refusals and (green := streaks.green(key)) < RUNS_IN_A_ROW:
        refusals.append(
            f"full gates open after {RUNS_IN_A_ROW} green micro runs in a row; this commit, configuration and device "
            f"has {green}. Run `aquiline gate DIR --level micro` on new directories"
        )
    if refusals:
        return Outcome(*asked[0].group, level, "refused", tuple(refusals))
    gates = tuple(judge(gate, results, parity) for gate in asked)
    worst = max((gate.verdict for gate in gates), key=VERDICTS.index)
    streak = ""
    if level == "micro":
        why = "only some of the micro gates were asked" if len(asked) < len(micro) else ""
        why = why if theirs else "no result of this model and profile"
        streak = f"not counted: {why}" if why else streaks.record(key, worst == "green", theirs)
    return Outcome(*asked[0].group, level, worst, (), streak, gates)


def _key(results: list[Result], micro: list[Gate]) -> str:
    """The commit, the configuration and the device that a streak belongs to."""
    models = sorted({(model(r), str(r["model"]["draft"])) for r in results})
    asked = [(gate.name, gate.work, sorted(gate.limits.items())) for gate in micro]
    configuration = hashlib.sha256(json.dumps([models, asked]).encode()).hexdigest()[:16]
    return f"{results[0]['commit']} | {configuration} | {machine(results[0])}"


def _check_request(gates: list[Gate], level: str, only: tuple[str, ...], parity: Results | None) -> None:
    check(level in (*LEVELS, "all"), "level", level, f"must be one of {', '.join(LEVELS)}, all")
    levels = {gate.name: gate.level for gate in gates}
    for name in only:
        check(name in levels, "only", name, f"is no gate; there are {', '.join(levels)}")
        own = levels[name]
        check(level in (own, "all"), "only", name, f"is a {own} gate; ask with --level {own}")
    if parity is not None and any(result["engine"] == "aquiline" for result in parity.values()):
        raise ValueError("parity: the directory holds results of aquiline; name one of another engine's alone")
    for gate in gates if parity is not None else ():
        if GAP not in gate.limits:
            raise ValueError(f"parity: {gate.name} has no {GAP}; give it one, as --set {gate.name}.{GAP}=0.1 does")
