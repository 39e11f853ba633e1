"""Our results beside other engines': passed, failed, and all that does not decide."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.results import BASELINE, CHAIN, at_speed, changed, measured, write_all
from typer.testing import CliRunner, Result

from aquiline.bench.gates.beside import FAIL, PASS, UNDECIDED, beside_peers
from aquiline.bench.results import result as results
from aquiline.cli.main import app

ROOT = Path(__file__).parents[2]
STEADY = (100.0, 101.0, 102.0, 103.0, 104.0, 105.0)


def run_of(theirs: tuple[float, ...], ours: tuple[float, ...] = STEADY, **fields: Any) -> dict[str, results.Result]:
    """Six rounds of our chain, and of a server that drafts as much."""
    own = at_speed(measured(num_runs=len(ours))[CHAIN], *ours)
    peer = at_speed(own, *theirs)
    server = {
        "engine": "openai", "setting__name": "openai eagle=3 http://h/v1#m", "setting__drafter": "other",
        "model__dtype": "server", "system": {"server": "uvicorn"},
    }  # fmt: skip
    return {"ours.json": own, "theirs.json": changed(peer, **server | fields)}


def verdicts(run: dict[str, results.Result], least: float = 1.0, gap: float = 0.1) -> list[tuple[str, str]]:
    return [(check.verdict, check.why) for check in beside_peers(run, least, gap)]


@pytest.mark.parametrize(
    ("factors", "verdict", "why"),
    [
        ((1.2, 1.3, 1.2, 1.3, 1.2, 1.3), PASS, ""),
        ((1.0, 1.3, 1.2, 1.3, 1.2, 1.3), PASS, ""),
        ((0.9, 0.8, 0.9, 0.99, 0.9, 0.8), FAIL, ""),
        ((0.9, 1.3, 1.2, 1.3, 1.2, 1.3), UNDECIDED, "the interval holds the limit"),
        ((0.9, 1.0, 0.9, 0.9, 0.9, 0.8), UNDECIDED, "the interval holds the limit"),
    ],
)  # fmt: skip
def test_the_whole_interval_decides(factors: tuple[float, ...], verdict: str, why: str) -> None:
    run = run_of(tuple(own / factor for own, factor in zip(STEADY, factors, strict=True)))
    speed, tau = beside_peers(run, 1.0, 0.1)
    assert (speed.verdict, speed.why, speed.limit) == (verdict, why, "speed >= 1x")
    assert (tau.verdict, tau.ours) == (PASS, "chain-3") and " against " in tau.measured


def test_five_rounds_decide_nothing_however_clear() -> None:
    assert verdicts(run_of((10.0,) * 5, STEADY[:5]))[0] == (UNDECIDED, "too few rounds for an interval")


@pytest.mark.parametrize(
    ("fields", "speed", "tau"),
    [
        ({"void": "its text is not ours"}, (UNDECIDED, "its text is not ours"), UNDECIDED),
        ({"eagle_speculation__mean_acceptance_length": 0.0}, (PASS, ""), (UNDECIDED, "the engine states no tau")),
        ({"eagle_speculation__mean_acceptance_length": 9.0}, (PASS, ""), (FAIL, "")),
        ({"setting__num_spec_tokens": 4}, (PASS, ""), (UNDECIDED, "no chain of 4 of ours that may be compared")),
        ({"scenario__prompts_sha256": "0"}, UNDECIDED, UNDECIDED),
        ({"model__dtype": "float16"}, (UNDECIDED, "no result of ours on float16 weights"), UNDECIDED),
        ({"model__dtype": "bfloat16"}, UNDECIDED, UNDECIDED),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_compare_does_not_decide(fields: dict[str, Any], speed: Any, tau: Any) -> None:
    found = verdicts(run_of((50.0,) * 6, **fields))
    for (verdict, why), expected in zip(found, (speed, tau), strict=True):
        assert (verdict, why) == expected if isinstance(expected, tuple) else (verdict == expected and why)


def test_our_fastest_is_asked_and_a_plain_server_has_no_tau() -> None:
    slow = at_speed(measured(num_runs=6)[BASELINE], *[value / 4 for value in STEADY])
    run = run_of((50.0,) * 6, setting__name="openai http://h/v1#m", setting__num_spec_tokens=None)
    (check,) = beside_peers({"slow.json": slow} | run, 2.0, 0.1)
    assert (check.verdict, check.ours) == (PASS, "chain-3, the fastest of 2")
    with pytest.raises(ValueError, match="over_peers: needs results of ours and of another engine"):
        beside_peers({"slow.json": slow}, 1.0, 0.1)


def gate(directory: Path, *args: object) -> Result:
    return CliRunner().invoke(app, ["gate", str(directory), "--over-peers", *map(str, args)])


def test_the_command_ends_with_the_worst_verdict(tmp_path: Path) -> None:
    run = run_of((50.0,) * 6)
    directory = write_all(run, tmp_path / "run")
    done = gate(directory, 1.5, "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == found["exit_code"] == 0 and {check["verdict"] for check in found["checks"]} == {PASS}
    assert gate(directory, 2.05).exit_code == 2 and "the interval holds the" in gate(directory, 2.05).output
    done = gate(directory, 3)
    assert done.exit_code == 1 and "fail" in done.output and "speed >= 3x" in done.output
    assert gate(directory, 1.5, "--peer-tau-gap", -1).exit_code == 1, "a tau that fails is worse than one not decided"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((1.0, "--set", "a.min_speedup=1.5", "--only", "a"), "over_peers=1.0: asks no gates; leave out only, set"),
        ((0.0,), "over_peers=0.0: must be a ratio above 0"),
    ],
)
def test_what_would_have_no_effect_is_refused(options: tuple[object, ...], told: str, tmp_path: Path) -> None:
    done = gate(write_all(run_of((50.0,) * 6), tmp_path / "run"), *options)
    assert done.exit_code == 2 and told in done.output
    done = CliRunner().invoke(app, ["gate", str(tmp_path / "run"), "--peer-tau-gap", "0.2"])
    assert done.exit_code == 2 and "peer_tau_gap=0.2: goes with over_peers" in done.output


def test_a_recorded_run_is_read_as_it_is() -> None:
    done = gate(ROOT / "results" / "peers" / "bundled-batch8", 1.0, "--json")
    found = json.loads(done.stdout)
    by_limit = {(check["theirs"], check["limit"]): check for check in found["checks"]}
    assert by_limit["llamacpp", "speed >= 1x"]["verdict"] == PASS
    assert by_limit["openvino eagle=2", "tau within 0.1"]["measured"] == "2.68 against 2.65"
    assert done.exit_code == 0 and len(found["checks"]) == 10
    assert json.loads(gate(ROOT / "results" / "peers" / "bundled-batch8", 2.5, "--json").stdout)["exit_code"] == 1


def test_the_recipe_is_shell_that_can_be_read() -> None:
    script = ROOT / "examples" / "other_engines" / "compare.sh"
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True).stderr == ""
    done = subprocess.run(["bash", str(script), "no-engine", "a", "b", "c"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "serve_no-engine: command not found" in done.stderr
