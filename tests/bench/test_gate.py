"""Gates: limits held, or missed and by how much; everything that must not be judged; parity with another engine."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tests.gates import ELSEWHERE, GATES, MICRO, refusals, steady
from tests.results import BASELINE, CHAIN, NOTHING, at_speed, changed, measured, write_all
from typer.testing import CliRunner

from aquiline.bench.gates.rules import Gate, override
from aquiline.bench.gates.verdicts import Check, Judgement, Report, Streaks, ask, judge
from aquiline.bench.results.result import Result
from aquiline.bench.results.speedups import FIGURES
from aquiline.cli.main import app


@pytest.fixture
def state(tmp_path: Path) -> Streaks:
    return Streaks(tmp_path / "deep" / "gates.json")


def tau_of(file: str) -> float:
    tau: float = measured()[file]["eagle_speculation"]["mean_acceptance_length"]
    return tau


def with_chain(**fields: Any) -> dict[str, Result]:
    found = steady()
    return found | {CHAIN: changed(found[CHAIN], **fields)}


def only(report: Report) -> Judgement:
    """The one gate that was asked."""
    ((judgement,),) = [outcome.gates for outcome in report.outcomes]
    return judgement


def test_a_gate_that_holds_says_by_how_much(state: Streaks) -> None:
    report = ask(GATES, steady(), state)
    judgement = only(report)
    assert (report.exit_code, judgement.verdict, judgement.file) == (0, "green", CHAIN)
    checks = {check.limit: (check.threshold, check.measured, check.margin) for check in judgement.checks}
    assert checks["min_speedup"] == (1.5, pytest.approx(2.0), pytest.approx(0.5))
    assert checks["min_tau"] == (1.2, tau_of(CHAIN), pytest.approx(tau_of(CHAIN) - 1.2))
    assert checks["min_steps"] == (23, 23, 0)
    assert report.not_asked == ("large",), "no result of its model: not asked, and named"
    assert judgement.ideal_speedup is None


@pytest.mark.parametrize(
    ("limits", "missed"),
    [
        ({"min_speedup": 2.1}, {"min_speedup"}),
        ({"min_tau": 3.9}, {"min_tau"}),
        ({"min_steps": 24}, {"min_steps"}),
        ({"max_tau": 1.1, "max_steps": 23, "min_speedup": 9}, {"max_tau", "min_speedup"}),
    ],
    ids=lambda value: ",".join(sorted(value)),
)
def test_a_missed_limit_is_red_by_its_margin(limits: dict[str, float], missed: set[str], state: Streaks) -> None:
    report = ask(override(GATES, [f"micro.{name}={value}" for name, value in limits.items()]), steady(), state)
    assert report.exit_code == 1 and only(report).changed_limits == tuple(limits)
    figures = {"speedup": 2.0, "tau": tau_of(CHAIN), "steps": 23}
    red = {check.limit: check.margin for check in only(report).checks if not check.is_held}
    below = {limit: figures[limit[4:]] - limits[limit] for limit in missed}
    assert red == pytest.approx({limit: -abs(margin) for limit, margin in below.items()})


@pytest.mark.parametrize("figure", FIGURES)
def test_every_figure_can_be_held_from_either_side(figure: str) -> None:
    results = with_chain(roofline={"ideal_speedup": 4.0, "percent_of_ideal": 50.0})

    def check(limit: str, threshold: float) -> Check:
        checks = judge(override([MICRO], [f"micro.{limit}={threshold}"])[0], results).checks
        return next(check for check in checks if check.limit == limit)

    value = check(f"min_{figure}", 1.0).measured
    assert value is not None and value > 0
    for factor in (0.9, 1.1):
        assert check(f"min_{figure}", factor * value).is_held == (factor < 1)
        assert check(f"max_{figure}", factor * value).is_held == (factor > 1)


def test_what_was_not_measured_holds_no_limit(state: Streaks) -> None:
    gates = override(GATES, ["micro.min_percent_of_ideal=10"])
    (check,) = [c for c in only(ask(gates, steady(), state)).checks if c.limit == "min_percent_of_ideal"]
    assert check.measured is None and check.margin is None and not check.is_held


def test_the_ideal_is_the_rooflines(state: Streaks) -> None:
    report = ask(GATES, with_chain(roofline={"ideal_speedup": 2.6}), state)
    assert only(report).ideal_speedup == 2.6 and asdict(report)["outcomes"][0]["gates"][0]["ideal_speedup"] == 2.6


def test_without_a_setting_the_fastest_is_judged_alone() -> None:
    gate = Gate("any", "micro", "bundled", {"profile": "cpu"}, MICRO.limits | {"min_tau": 1.0})
    assert judge(gate, steady()).file == CHAIN
    found = steady()
    found["chain-2.json"] = at_speed(found["chain-2.json"], *[500.0] * 3)
    judgement = judge(gate, found)
    assert judgement.file == "chain-2.json"
    assert tau_of(CHAIN) > tau_of("chain-2.json")
    strict = override([gate], [f"any.min_tau={tau_of(CHAIN)}"])[0]
    assert judge(strict, found).verdict == "red", "chain-3's tau does not help chain-2's speed"


def test_a_gate_without_results_of_its_own_fails(state: Streaks) -> None:
    deeper = Gate("deeper", "micro", "bundled", {"profile": "cpu", "scenario": "single"}, MICRO.limits)
    report = ask([MICRO, deeper], steady(), state)
    assert report.exit_code == 1
    assert [(j.name, j.verdict, j.file) for j in report.outcomes[0].gates] == [
        ("micro", "green", CHAIN), ("deeper", "red", None)
    ]  # fmt: skip
    assert "--scenario single" in deeper.command and "--micro-steps 23" in deeper.command


def test_a_gate_that_is_named_is_asked_whatever_there_is(state: Streaks) -> None:
    report = ask(GATES, steady(), state, only=("large",))
    assert report.exit_code == 1 and only(report).file is None and report.not_asked == ()
    assert ask([ELSEWHERE], steady(), state).exit_code == 2, "nothing was asked, so nothing is shown"
    for level, names, words in (
        ("micro", ("huge",), "only='huge'"), ("micro", ("full",), "--level full"), ("big", (), "level='big'"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            ask(GATES, steady(), state, level, names)


UNFIT: dict[str, tuple[str, dict[str, Any], str]] = {
    "different prompts": (BASELINE, {"scenario__prompts_sha256": "f" * 64}, "scenario.prompts_sha256: "),
    "another context": (BASELINE, {"scenario__context_tokens": 8}, "scenario.context_tokens: 4 against 8"),
    "another seed": (BASELINE, {"scenario__seed": 9}, "scenario.seed: 3 against 9"),
    "another sampled text": (CHAIN, {"output__sha256": "f" * 64}, "output.sha256: the texts differ"),
    "another target": (BASELINE, {"model__target": "other"}, "model.target: 'bundled' against 'other'"),
    "a simulated tau": (CHAIN, {"model__simulated_tau": 3.0}, "model.simulated_tau: 3 was chosen, not measured"),
    "a slot that stopped": (CHAIN, {"slots__disabled_other": 2}, "PERF violation of chain-3: slots.disabled_other: 2"),
    "a slot of the baseline": (BASELINE, {"slots__disabled_other": 1}, "PERF violation of baseline: slots.disabled"),
    "slots that nobody counted": (CHAIN, {"slots": {}}, "slots.disabled_other: is missing"),
    "a violation that was recorded": (CHAIN, {"perf_violations": ["sync in step 3"]}, "chain-3: sync in step 3"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_must_not_be_judged_is_refused(name: str, state: Streaks) -> None:
    file, fields, reason = UNFIT[name]
    found = steady()
    report = ask(GATES, found | {file: changed(found[file], **fields)}, state)
    assert reason in refusals(report)
    assert "0 of 3 green" in report.outcomes[0].streak


def test_the_fallback_path_is_a_violation(state: Streaks) -> None:
    found = {name: changed(result, system__path="torch") for name, result in steady().items()}
    assert "system.path: torch, the fallback" in refusals(ask(GATES, found, state))


def test_random_weights_are_no_model(state: Streaks) -> None:
    found = {name: changed(result, model__random_weights=True) for name, result in steady().items()}
    assert "model.random_weights" in refusals(ask(GATES, found, state))


def test_unequal_outputs_are_refused(state: Streaks) -> None:
    found = steady()
    drafting = found[CHAIN]["eagle_speculation"]
    found[CHAIN] = changed(
        found[CHAIN], output__num_tokens=[23, *found[CHAIN]["output"]["num_tokens"][1:]],
        eagle_speculation__num_committed=drafting["num_committed"] - 1,
        eagle_speculation__tokens_cut=drafting["tokens_cut"] + 1,
        eagle_speculation__mean_acceptance_length=(drafting["num_committed"] - 1) / drafting["num_steps"],
    )  # fmt: skip
    assert "output.num_tokens: 143 against 144" in refusals(ask(GATES, found, state))


def test_a_missing_or_double_result_is_refused(state: Streaks) -> None:
    found = steady()
    alone = {CHAIN: found[CHAIN]}
    assert "there is no baseline" in refusals(ask(GATES, alone, state))
    twice = found | {"again.json": found[CHAIN]}
    assert "2 results of chain-3 (chain-3.json, again.json); keep one" in refusals(ask(GATES, twice, state))
    peer = {BASELINE: changed(found[BASELINE], engine="llama.cpp"), CHAIN: found[CHAIN]}
    assert "there is no baseline" in refusals(ask(GATES, peer, state)), "a slow peer is no baseline of ours"


def test_results_of_two_commits_or_devices_are_refused(state: Streaks) -> None:
    found = steady()
    commits = found | {"chain-2.json": changed(found["chain-2.json"], commit="ba9876543210")}
    assert "commit: the results are of 0123456789ab and of ba9876543210" in refusals(ask(GATES, commits, state))
    devices = found | {"chain-2.json": changed(found["chain-2.json"], system__cpu="Other CPU")}
    assert "device: the results are of Other CPU, " in refusals(ask(GATES, devices, state))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"throughput_tokens_per_sec": NOTHING}, "is 0; nothing was measured"), ({"ttft_ms": {}}, "'median' is a requ")],
)
def test_a_broken_result_is_refused_even_if_no_gate_needs_it(
    fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    for file in (BASELINE, CHAIN, "chain-2.json"):
        found = steady()
        directory = write_all(found | {file: changed(found[file], **fields)}, tmp_path / "run")
        done = CliRunner().invoke(app, ["gate", str(directory)])
        assert done.exit_code == 2 and re.search(f"(?s){file}: .*{reason}", done.stderr)


def peers(**fields: Any) -> dict[str, Result]:
    """The chain as another engine on another machine would have measured it."""
    own = {"engine": "llama.cpp", "system": {"cpu": "Other CPU"}, "setting__name": "draft-3", "commit": "b1"}
    return {"peer.json": changed(measured()[CHAIN], **(own | fields))}


def parity(results: dict[str, Result], state: Streaks, gap: float = 0.1) -> Report:
    gates = override(GATES, [f"{gate.name}.max_tau_gap={gap}" for gate in GATES])
    return ask(gates, steady(), state, parity=results)


@pytest.mark.parametrize(("tau", "code"), [(0.0, 0), (0.09, 0), (-0.09, 0), (0.2, 1), (-0.2, 1)])
def test_tau_must_be_near_another_engines_on_either_side(tau: float, code: int, state: Streaks) -> None:
    report = parity(peers(eagle_speculation__mean_acceptance_length=tau_of(CHAIN) + tau), state)
    assert report.exit_code == code
    (check,) = [check for check in only(report).checks if check.limit == "max_tau_gap"]
    assert check.measured == pytest.approx(abs(tau)) and check.is_held == (code == 0)


def test_tau_must_be_near_every_other_engines(state: Streaks) -> None:
    near, far = (peers(eagle_speculation__mean_acceptance_length=tau_of(CHAIN) + gap) for gap in (0.01, 0.2))
    report = parity({"near.json": near["peer.json"], "far.json": far["peer.json"]}, state)
    (check,) = [check for check in only(report).checks if check.limit == "max_tau_gap"]
    assert check.measured == pytest.approx(0.2) and report.exit_code == 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"scenario__prompts_sha256": "f" * 64}, "parity against peer.json: scenario.prompts_sha256"),
        ({"output__num_tokens": [24] * 5 + [23]}, "parity against peer.json: output.num_tokens: 144 against 143"),
        ({"scenario__seed": 8}, "parity against peer.json: scenario.seed"),
        ({"eagle_speculation__mean_acceptance_length": 0}, "mean_acceptance_length: is 0; the engine states no tau"),
        ({"model__simulated_tau": 2.0}, "model.simulated_tau: was chosen"),
    ],
)
def test_parity_with_other_work_is_refused(fields: dict[str, Any], reason: str, state: Streaks) -> None:
    assert reason in refusals(parity(peers(**fields), state))


@pytest.mark.parametrize(
    "fields", [{"setting__num_spec_tokens": 5}, {"model__target": "other"}, {"scenario__temperature": 0.0}], ids=str
)
def test_parity_without_the_same_work_is_not_shown(fields: dict[str, Any], state: Streaks) -> None:
    report = parity(peers(**fields), state)
    (check,) = [check for check in only(report).checks if check.limit == "max_tau_gap"]
    assert check.measured is None and report.exit_code == 1


def test_parity_needs_another_engine_and_a_limit(state: Streaks) -> None:
    with pytest.raises(ValueError, match="parity: the directory holds results of aquiline"):
        parity(measured(), state)
    with pytest.raises(
        ValueError, match=r"parity: micro has no max_tau_gap; give it one, as --set micro\.max_tau_gap=0\.1"
    ):
        ask(GATES, steady(), state, parity=peers())


def test_a_report_is_json(state: Streaks) -> None:
    report = ask(GATES, steady(), state, "all")
    parsed = json.loads(json.dumps(asdict(report), allow_nan=False))
    assert parsed["exit_code"] == 2 and parsed["not_asked"] == ["large"]
    micro, full = parsed["outcomes"]
    assert micro["gates"][0]["checks"][0].keys() == {"limit", "threshold", "measured", "margin", "is_held"}
    assert full["verdict"] == "refused" and full["gates"] == []
