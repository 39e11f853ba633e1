"""Three green micro runs in a row: what counts, what ends them, and whose they are."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from tests.gates import GATES, MICRO, SELECT, refusals, steady
from tests.results import BASELINE, CHAIN, changed, measured

from aquiline.bench.gates.rules import Gate, override
from aquiline.bench.gates.verdicts import Streaks, ask, content_hash
from aquiline.bench.results.result import Result


@pytest.fixture
def state(tmp_path: Path) -> Streaks:
    return Streaks(tmp_path / "deep" / "gates.json")


def streak(gates: list[Gate], results: dict[str, Result], state: Streaks) -> str:
    (outcome,) = ask(gates, results, state).outcomes
    return outcome.streak


def test_three_green_micro_runs_in_a_row_open_the_full_gates(state: Streaks) -> None:
    for green in (1, 2):
        assert streak(GATES, steady(), state) == f"{green} of 3 green micro runs in a row"
        assert f"device has {green}" in refusals(ask(GATES, steady(), state, "full"))
    assert streak(GATES, steady(1.2), state) == "0 of 3 green micro runs in a row", "red ends the streak"
    for green in (1, 2, 3):
        assert streak(GATES, steady(), state).startswith(f"{green} of 3")
    report = ask(GATES, steady(), Streaks(state.file), "full")
    assert (report.exit_code, report.outcomes[0].level, report.outcomes[0].verdict) == (0, "full", "green")
    assert ask(GATES, steady(1.7), state, "full").exit_code == 1, "open, and red by its own limit"
    assert ask(GATES, steady(), state, "full").exit_code == 0, "a full run does not end a streak of micro runs"
    assert streak(GATES, steady(1.0), state).startswith("0 of 3")
    assert refusals(ask(GATES, steady(), state, "full"))


def test_all_levels_at_once(state: Streaks) -> None:
    codes = [ask(GATES, steady(), state, "all") for _ in range(3)]
    assert [report.exit_code for report in codes] == [2, 2, 0], "the third run is counted before the full gates open"
    red = ask(GATES, steady(1.2), state, "all")
    assert [outcome.verdict for outcome in red.outcomes] == ["red", "refused"] and red.exit_code == 1


def test_the_same_results_count_once(state: Streaks) -> None:
    found = steady()
    assert streak(GATES, found, state) == "1 of 3 green micro runs in a row"
    for again in (
        found,
        {f"copy-of-{name}": result for name, result in found.items()},
        {name: changed(result, date="2030-01-01") for name, result in found.items()},
        steady() | {BASELINE: found[BASELINE], "chain-2.json": steady()["chain-2.json"], CHAIN: found[CHAIN]},
    ):
        said = streak(GATES, again, state)
        assert said.startswith("1 of 3") and "results were counted before" in said
    red = steady(1.2)
    assert streak(GATES, red, state).startswith("0 of 3")
    assert streak(GATES, steady(), state).startswith("1 of 3")
    assert streak(GATES, red, state).startswith("1 of 3"), "an old red run is no new one"


@pytest.mark.parametrize(
    "fields",
    [{"commit": "ba9"}, {"system__cpu": "Other CPU"}, {"system__threads": 7}, {"model__arithmetic": "bfloat16"}],
    ids=str,
)
def test_another_commit_device_or_configuration_begins_anew(fields: dict[str, Any], state: Streaks) -> None:
    for _ in range(3):
        streak(GATES, steady(), state)
    other = {name: changed(result, **fields) for name, result in steady().items()}
    assert "has 0" in refusals(ask(GATES, other, state, "full"))
    assert streak(GATES, other, state).startswith("1 of 3")
    assert ask(GATES, steady(), state, "full").exit_code == 0, "the first streak stands"


def test_lowered_limits_do_not_open_the_full_gates(state: Streaks) -> None:
    lowered = override(GATES, ["micro.min_speedup=0.1"])
    for _ in range(3):
        assert ask(lowered, steady(1.2), state).exit_code == 0
    assert "has 0" in refusals(ask(GATES, steady(), state, "full"))
    assert ask(lowered, steady(), state, "full").exit_code == 0


def test_part_of_the_micro_gates_does_not_count(state: Streaks) -> None:
    gates = [*GATES, Gate("second", "micro", "bundled", SELECT, MICRO.limits)]
    report = ask(gates, steady(), state, only=("micro",))
    assert report.outcomes[0].streak == "not counted: only some of the micro gates were asked"
    assert not state.file.exists()


@pytest.mark.parametrize("commit", ["0123456789ab-dirty", "unknown"])
def test_a_commit_that_does_not_say_what_ran_does_not_count(commit: str, state: Streaks) -> None:
    for _ in range(4):
        found = {name: changed(result, commit=commit) for name, result in steady().items()}
        report = ask(GATES, found, state)
        assert report.exit_code == 0 and f"commit {commit} does not say what ran" in report.outcomes[0].streak
    assert refusals(ask(GATES, found, state, "full")) and not state.file.exists()


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"streaks": {}}', '{"schema": "aquiline.gates/1", "streaks": {"a": {"green": "3", "seen": []}}}'],
)
def test_a_broken_state_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "gates.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"gates\.json'?: is no file of streaks; delete it"):
        Streaks(file)
    assert file.read_text() == content


def record(file: Path, process: int) -> None:
    for number in range(25):
        Streaks(file).record("0123456789ab | c | d", True, [{"commit": "c", "number": number, "process": process}])


def test_processes_that_record_at_once_lose_nothing(tmp_path: Path) -> None:
    file = tmp_path / "gates.json"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=record, args=(file, number)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert Streaks(file).green("0123456789ab | c | d") == 100
    assert sorted(f.name for f in tmp_path.iterdir()) == ["gates.json", "gates.lock"]


def test_the_state_is_kept_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert Streaks().file == tmp_path / ".cache" / "aquiline" / "gates.json"
    found = measured()
    assert len({content_hash(result) for result in found.values()}) == 3
