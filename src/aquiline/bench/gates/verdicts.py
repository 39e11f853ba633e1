"""Judges results by gates: green, red with its margin, or refused with the reason.

A gate is red if a measurement misses a limit or is absent. A gate is refused if its results must not be judged: they
cannot be believed or compared, outputs differ, a run broke the rules of PERF mode, or full gates are asked too early.
Gates of one model and profile are asked together. They share the streak of green micro runs that opens the full gates.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from aquiline.bench.gates.judge import Judgement, judge
from aquiline.bench.gates.rules import GAP, LEVELS, Gate
from aquiline.bench.gates.state import RUNS_IN_A_ROW, GateState, Key
from aquiline.bench.results import speedups
from aquiline.bench.results.result import Result, require

Results = Mapping[str, Result]


@dataclass(frozen=True)
class GateRequest:
    """What is asked. level: micro, full or "all"; only: names of gates, empty for all; parity: another engine's
    results, to whose tau ours is compared."""

    level: str = "micro"
    only: tuple[str, ...] = ()
    parity: Results | None = None


@dataclass(frozen=True)
class Outcome:
    """The outcome of the gates of one model, profile and level. refusals: reasons that hold for all of them; streak: of
    green micro runs, in words."""

    model: str
    profile: str
    level: str
    judgements: tuple[Judgement, ...] = ()
    refusals: tuple[str, ...] = ()
    streak: str = ""

    @property
    def verdict(self) -> str:
        """The worst of its gates: refused before red before green."""
        verdicts = ["refused"] * bool(self.refusals) + [judgement.verdict for judgement in self.judgements]
        return next((verdict for verdict in ("refused", "red") if verdict in verdicts), "green")


@dataclass(frozen=True)
class Report:
    """The outcome of a request. idle: gates that were not asked, because their model and profile have no results."""

    outcomes: tuple[Outcome, ...]
    idle: tuple[Gate, ...]

    @property
    def exit_code(self) -> int:
        """0 all green, 1 something is red, 2 nothing is red but something was refused, or nothing was asked."""
        verdicts = {outcome.verdict for outcome in self.outcomes}
        if "red" in verdicts:
            return 1
        return 0 if verdicts == {"green"} else 2

    def as_dict(self) -> dict[str, object]:
        """The JSON of `aquiline gate --json`."""
        return {
            "exit_code": self.exit_code,
            "outcomes": [
                {
                    "model": outcome.model, "profile": outcome.profile, "level": outcome.level,
                    "verdict": outcome.verdict, "refusals": list(outcome.refusals), "streak": outcome.streak,
                    "gates": [judgement.as_dict() for judgement in outcome.judgements],
                }
                for outcome in self.outcomes
            ],
            "not_asked": [gate.name for gate in self.idle],
        }  # fmt: skip


def ask(gates: list[Gate], results: Results, request: GateRequest, state: GateState) -> Report:
    """Ask the gates named in the request, and otherwise the gates whose model and profile have results. Micro runs are
    recorded in the state.

    Raises ResultError naming every result that cannot be believed, ValueError for an invalid request."""
    _check(request, gates)
    require(results)
    require(request.parity or {})
    own = {name: result for name, result in results.items() if result["engine"] == "aquiline"}
    levels = LEVELS if request.level == "all" else (request.level,)
    wanted = [g for g in gates if g.level in levels and g.name in (request.only or (g.name,))]
    idle = [g for g in wanted if not request.only and not any(map(g.is_of, own.values()))]
    outcomes = []
    for group in dict.fromkeys(gate.group for gate in wanted if gate not in idle):
        micro = [gate for gate in gates if gate.group == group and gate.level == "micro"]
        for level in levels:
            asked = [gate for gate in wanted if gate.group == group and gate.level == level]
            if asked:
                outcomes.append(Group(own, micro, request.parity, state).outcome(asked))
    return Report(tuple(outcomes), tuple(idle))


class Group:
    """The results of one model and profile under their gates. micro: all of its micro gates, asked or not."""

    def __init__(self, results: Results, micro: list[Gate], parity: Results | None, state: GateState) -> None:
        self.results, self.micro, self.parity, self.state = results, micro, parity, state

    def outcome(self, asked: list[Gate]) -> Outcome:
        """Judge gates of one level, if that level is open, and record the verdict of micro gates."""
        first = asked[0]
        theirs = [result for result in self.results.values() if first.is_of(result)]
        found = Outcome(first.model, first.select.profile, first.level, refusals=tuple(_mixed(theirs)))
        if found.refusals:
            return found
        key = self._key(theirs) if theirs else None
        if first.level == "full":
            green = self.state.streak(key).green if key is not None and key.is_known else 0
            if green < RUNS_IN_A_ROW:
                return replace(found, refusals=(_closed(green),))
        found = replace(found, judgements=tuple(judge(gate, self.results, self.parity) for gate in asked))
        if first.level == "full":
            return found
        is_part = len(asked) < len(self.micro)
        return replace(found, streak=self._record(key, found.verdict == "green", theirs, is_part))

    def _key(self, theirs: list[Result]) -> Key:
        models = sorted({(speedups.model(r), str(r["model"]["draft"])) for r in theirs})
        asked = [(gate.name, str(gate.select), sorted(gate.limits.items())) for gate in self.micro]
        configuration = hashlib.sha256(json.dumps([models, asked]).encode()).hexdigest()[:16]
        return Key(theirs[0]["commit"], configuration, speedups.machine(theirs[0]))

    def _record(self, key: Key | None, is_green: bool, theirs: list[Result], is_part: bool) -> str:
        if key is None:
            return "not counted: no result of this model and profile"
        if is_part:
            return "not counted: only some of the micro gates were asked"
        recorded = self.state.record(key, is_green, theirs)
        why = f" (this run is not counted: {recorded.why_not})" if recorded.why_not else ""
        return f"{recorded.green} of {RUNS_IN_A_ROW} green micro runs in a row{why}"


def _check(request: GateRequest, gates: list[Gate]) -> None:
    if request.level not in (*LEVELS, "all"):
        raise ValueError(f"level={request.level!r}: must be one of {', '.join(LEVELS)}, all")
    names = {gate.name: gate for gate in gates}
    for name in request.only:
        if name not in names:
            raise ValueError(f"only={name!r}: is no gate; there are {', '.join(names)}")
        if request.level not in (names[name].level, "all"):
            raise ValueError(f"only={name!r}: is a {names[name].level} gate; ask with --level {names[name].level}")
    for result in (request.parity or {}).values():
        if result["engine"] == "aquiline":
            raise ValueError("parity: the directory holds results of aquiline; name one of another engine's alone")
    without = [gate.name for gate in gates if GAP not in gate.limits]
    if request.parity is not None and without:
        raise ValueError(f"parity: {without[0]} has no {GAP}; give it one, as --set {without[0]}.{GAP}=0.1 does")


def _closed(green: int) -> str:
    return (
        f"full gates open after {RUNS_IN_A_ROW} green micro runs in a row; this commit, configuration and device has "
        f"{green}. Run `aquiline gate DIR --level micro` on new directories"
    )


def _mixed(results: list[Result]) -> list[str]:
    """Reasons to refuse results of several commits or devices; empty if there is one of each."""
    found = []
    for what, values in (("commit", {r["commit"] for r in results}), ("device", set(map(speedups.machine, results)))):
        if len(values) > 1:
            found.append(f"{what}: the results are of {' and of '.join(sorted(values))}; one run is of one {what}")
    return found
