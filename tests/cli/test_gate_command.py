"""`aquiline gate` as a user types it: the report, the exit codes, and refusals in one line per reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.gates import steady
from tests.results import BASELINE, CHAIN, NOTHING, changed, write_all
from typer.testing import CliRunner, Result

from aquiline.cli.main import app

GATES = """gates:
  - name: mine
    level: micro
    model: bundled
    select: {profile: cpu, scenario: baseline, context_tokens: 4, batch: 2, temperature: 0.8, setting: chain-3}
    limits: {min_speedup: 1.5, min_tau: 1.2, min_steps: 23, max_tau_gap: 0.1}
  - name: mine-full
    level: full
    model: bundled
    select: {profile: cpu}
    limits: {min_speedup: 1.9, min_tau: 1.2, min_steps: 23, max_tau_gap: 0.1}
  - name: large
    level: micro
    model: Llama-3.1-8B-Instruct
    select: {profile: full, scenario: single, temperature: 0}
    limits: {min_speedup: 2, min_tau: 3, min_steps: 512, max_tau_gap: 0.1}
"""


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home of its own, so that streaks are this test's, and a terminal of 100 columns."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "mine.yaml").write_text(GATES)
    return tmp_path


def gate(home: Path, directory: Path, *args: object) -> Result:
    words = ["gate", directory, "--gates", home / "mine.yaml", *args]
    return CliRunner().invoke(app, [str(word) for word in words])


def test_a_green_run(home: Path) -> None:
    done = gate(home, write_all(steady(), home / "run"))
    assert done.exit_code == 0, done.output
    assert "bundled, cpu profile, micro gates: GREEN" in done.output
    assert "ideal not measured" in done.output and "of the text repeats itself" in done.output
    assert "1 of 3 green micro runs in a row" in done.output
    assert "not asked, no result of the model in the profile: large (Llama-3.1-8B-Instruct)" in done.output
    assert len(done.output.splitlines()) < 24, "one screen"
    assert (home / ".cache" / "aquiline" / "gates.json").exists()


def test_a_red_run_says_which_limit_and_by_how_much(home: Path) -> None:
    directory = write_all(
        {n: changed(r, roofline={"ideal_speedup": 2.6}) for n, r in steady(1.2).items()}, home / "run"
    )
    done = gate(home, directory)
    assert done.exit_code == 1
    row = next(line for line in done.output.splitlines() if "min_speedup 1.5" in line)
    assert "1.2 " in row and "-0.3 (-20.0%)" in row and "red" in row
    assert next(line for line in done.output.splitlines() if "min_tau" in line).rstrip(" │").endswith("green")
    assert "ideal 2.60x at this tau" in done.output and "0 of 3 green" in done.output


def test_a_limit_from_the_command_line_is_marked(home: Path) -> None:
    done = gate(
        home, write_all(steady(1.2), home / "run"), "--set", "mine.min_speedup=1.1", "--set", "mine.min_tau=1.1"
    )
    assert done.exit_code == 0 and "mine: not the file's own limit: min_speedup, min_tau" in done.output


def test_full_gates_open_after_three_runs(home: Path) -> None:
    for number in range(3):
        directory = write_all(steady(), home / str(number))
        closed = gate(home, directory, "--level", "full")
        assert closed.exit_code == 2 and f"device has {number}" in closed.output
        assert gate(home, directory).exit_code == 0
        assert "counted before" in gate(home, directory).output
    full = gate(home, write_all(steady(), home / "full"), "--level", "full")
    assert full.exit_code == 0 and "full gates: GREEN" in full.output
    elsewhere = gate(home, directory, "--level", "full", "--state", home / "other.json")
    assert elsewhere.exit_code == 2, "another file has other streaks"


def test_a_gate_without_results_names_the_command_that_makes_them(home: Path) -> None:
    done = gate(home, write_all(steady(), home / "run"), "--only", "large")
    assert done.exit_code == 1
    assert (
        "run `aquiline bench --out DIR --profile full --scenario single --temperature 0 --target Llama-3.1-8B-Instruct "
        "--draft DRAFT --micro-steps 512`"
    ) in done.output


def test_nothing_asked_is_not_green(home: Path) -> None:
    other = {name: changed(result, model__target="other") for name, result in steady().items()}
    done = gate(home, write_all(other, home / "run"))
    assert done.exit_code == 2 and "no gate was asked: nothing is shown to hold" in done.output


@pytest.mark.parametrize(
    ("file", "fields", "reason"),
    [
        (BASELINE, {"throughput_tokens_per_sec": NOTHING}, "baseline.json: throughput_tokens_per_sec: is 0"),
        (CHAIN, {"eagle_speculation": {}}, "chain-3.json: eagle_speculation: 'num_steps' is a required property"),
        (CHAIN, {"output__num_tokens": [24] * 5}, "chain-3.json: output.num_tokens: 120 tokens, but"),
        (BASELINE, {"scenario__prompts_sha256": "f" * 64}, "against baseline.json: scenario.prompts_sha256: "),
        (CHAIN, {"output__sha256": "f" * 64}, "against baseline.json: output.sha256: the texts differ"),
    ],
)  # fmt: skip
def test_refused_results_exit_with_2_and_the_reason(
    file: str, fields: dict[str, object], reason: str, home: Path
) -> None:
    found = steady()
    directory = write_all(found | {file: changed(found[file], **fields)}, home / "run")
    done = gate(home, directory)
    assert done.exit_code == 2 and reason in done.output + done.stderr


def test_parity_with_another_engine(home: Path) -> None:
    ours = steady()
    directory = write_all(ours, home / "run")
    near = {"peer.json": changed(ours[CHAIN], engine="llama.cpp", setting__name="draft-3")}
    tau = ours[CHAIN]["eagle_speculation"]["mean_acceptance_length"]
    far = {"peer.json": changed(near["peer.json"], eagle_speculation__mean_acceptance_length=tau + 0.5)}
    done = gate(home, directory, "--parity", write_all(near, home / "near"))
    assert done.exit_code == 0 and "max_tau_gap 0.1" in done.output
    done = gate(home, directory, "--parity", write_all(far, home / "far"))
    assert done.exit_code == 1 and "-0.4 (-400.0%)" in done.output


def test_json_is_one_object(home: Path) -> None:
    done = gate(home, write_all(steady(1.2), home / "run"), "--level", "all", "--json")
    parsed = json.loads(done.stdout)
    assert done.exit_code == parsed["exit_code"] == 1
    assert [outcome["verdict"] for outcome in parsed["outcomes"]] == ["red", "refused"]
    checks = {check["limit"]: check for check in parsed["outcomes"][0]["gates"][0]["checks"]}
    assert checks["min_speedup"]["margin"] == pytest.approx(-0.3) and not checks["min_speedup"]["is_held"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--level", "big"], "level='big'"),
        (["--set", "mine.min_tau=x"], "set='mine.min_tau=x'"),
        (["--set", "yours.min_tau=2"], "set='yours.min_tau=2': no gate 'yours'"),
        (["--only", "yours"], "only='yours'"),
        (["--parity", "absent"], "absent: is no directory"),
        (["--gates", "absent.yaml"], "absent.yaml"),
    ],
    ids=str,
)
def test_bad_options_are_named(words: list[str], named: str, home: Path) -> None:
    done = gate(home, write_all(steady(), home / "run"), *words)
    assert done.exit_code == 2 and named in done.stderr and done.stderr.count("\n") == 1


def test_the_gates_of_the_package_are_asked_by_default(home: Path) -> None:
    done = CliRunner().invoke(app, ["gate", str(write_all(steady(), home / "run"))])
    assert done.exit_code == 1, "the run has no result of their contexts"
    assert "cpu-micro-greedy" in done.output and "cpu-micro-sampled" in done.output
    assert (
        "run `aquiline bench --out DIR --profile cpu --scenario baseline --temperature 0 --num-spec-tokens 3 "
        "--target bundled " in done.output
    )
