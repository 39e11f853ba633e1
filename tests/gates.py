"""Gates for the results of `tests/results.py`, and runs that hold them or not."""

from __future__ import annotations

from itertools import count

from tests.results import BASELINE, CHAIN, at_speed, measured

from aquiline.bench.gates.rules import Gate
from aquiline.bench.gates.verdicts import Report
from aquiline.bench.results.result import Result

SELECT = {
    "profile": "cpu", "scenario": "baseline", "context_tokens": 4, "batch": 2, "temperature": 0.8, "setting": "chain-3",
}  # fmt: skip
MICRO = Gate("micro", "micro", "bundled", SELECT, {"min_speedup": 1.5, "min_tau": 1.2, "min_steps": 23.0})
FULL = Gate("full", "full", "bundled", SELECT, MICRO.limits | {"min_speedup": 1.8})
ELSEWHERE = Gate("large", "micro", "Llama-3.1-8B-Instruct", {"profile": "full"}, MICRO.limits)
GATES = [MICRO, FULL, ELSEWHERE]
SPEEDS = count(1)


def steady(speedup: float = 2.0) -> dict[str, Result]:
    """A run that was not there before: the chain at so many times its baseline."""
    base = 100 + next(SPEEDS) / 64
    speeds = {BASELINE: base, "chain-2.json": base, CHAIN: base * speedup}
    return {name: at_speed(result, *[speeds[name]] * 3) for name, result in measured().items()}


def refusals(report: Report) -> str:
    (outcome,) = report.outcomes
    assert outcome.verdict == "refused" and report.exit_code == 2
    return "\n".join([*outcome.refusals, *(r for judgement in outcome.gates for r in judgement.refusals)])
