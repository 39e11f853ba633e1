"""`aquiline doctor` as a user types it: here, on one core, and where nothing can run a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import needs_native
from typer.testing import CliRunner, Result

import aquiline
from aquiline.bench.theory.measure import Measurement, Rate
from aquiline.cli.main import app
from aquiline.doctor import examination
from aquiline.doctor.findings import SEVERITIES
from aquiline.models.known_pairs import PAIRS, KnownPair, Packaged
from aquiline.ops.threads import usable_cores

RUN = "from aquiline.cli.main import app; app()"
ONE_CORE = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); " + RUN


RATES = Measurement("2026-01-31", 0.0, *[Rate(1e10, "some way")] * 2, *[Rate(1e12, "some way")] * 4)


@pytest.fixture
def known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """No measuring, for tests of what is made of the rates."""
    monkeypatch.setattr(examination, "measure_ceilings", lambda machine, on_stage, seconds: RATES)


def run(*args: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *args])


def apart(code: str, place: Path, **settings: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON, from another folder and without a terminal."""
    paths = os.pathsep.join([*settings.pop("PYTHONPATH", "").split(), str(Path(aquiline.__file__).parents[1])])
    plain = {"AQUILINE_THREADS": "", "AQUILINE_ISA": "", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", "--json"], capture_output=True, text=True, cwd=place, timeout=120,
        stdin=subprocess.DEVNULL, env=os.environ | plain | settings,
    )  # fmt: skip
    assert not done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)


@needs_native
def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AQUILINE_API_KEY", "a-secret")
    monkeypatch.delenv("AQUILINE_THREADS", raising=False)
    done = run("--json")
    found = json.loads(done.stdout)
    worst = max((SEVERITIES.index(finding["severity"]) for finding in found["findings"]), default=0)
    assert done.exit_code == found["exit_code"] == worst and "a-secret" not in done.output
    assert all(finding["what"] and finding["fix"] for finding in found["findings"])
    assert found["course"]["backend"] == "native" and found["course"]["threads"] == usable_cores()
    assert {"portable", "amx_twin"} <= set(found["facts"]["library"]["isas"]) and found["rates"]["int8"]["per_s"] > 1e9
    bundled = found["pairs"]["bundled"]
    assert 30e6 < bundled["weight_bytes"] < 60e6 and "a chain of 3" in bundled["expectation"]
    first, second = (fit["num_sequences"] for fit in bundled["contexts"])
    assert first // 4 >= second > 0 and [fit["context"] for fit in bundled["contexts"]] == [512, 2048]


@pytest.mark.usefixtures("known_rates")
def test_a_small_memory_holds_no_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """In words, for a user: what is wrong stands at the end, and the last line says how bad it is."""
    monkeypatch.setattr("aquiline.doctor.facts.free_memory", lambda root: 20 << 20)
    done = run()
    assert done.exit_code == 2 and "it does not run (exit code 2" in done.stdout.splitlines()[-1]
    assert "error: bundled: 0.04 GB of weights and pages do not fit what is free" in done.stdout
    for name in ("CPU", "cores", "memory", "library", "torch", "[serve]", "runs", "reads", "multiplies", "bundled"):
        assert any(line.startswith(name) for line in done.stdout.splitlines()), name


@pytest.mark.usefixtures("known_rates")
def test_a_pair_that_cannot_be_read_is_told_and_the_others_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Packaged("numpy==0.1", "numpy", "no.gguf", num_bytes=1, fingerprint="")
    monkeypatch.setitem(PAIRS, "smollm2", KnownPair(other, Path("a"), Path("b"), Path("c")))
    done = run("--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 2 and list(found["pairs"]) == ["bundled"]
    assert "is installed, and numpy==0.1 is needed: no.gguf is missing" in found["findings"][0]["what"]


@pytest.mark.usefixtures("known_rates")
def test_rates_count_for_the_share_of_time_that_a_quota_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = []
    for quota in (float("inf"), 0.5):
        monkeypatch.setattr("aquiline.doctor.facts.cpu_quota", lambda root, quota=quota: quota)
        monkeypatch.setattr("aquiline.doctor.facts.usable_cores", lambda root: 1)
        done = run("--json")
        speeds.append(json.loads(done.stdout)["pairs"]["bundled"]["contexts"][0]["tokens_per_s"][0])
    assert speeds[1] == pytest.approx(speeds[0] / 2)


@pytest.mark.rare
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
@needs_native
def test_one_core(tmp_path: Path) -> None:
    _, found = apart(ONE_CORE, tmp_path)
    assert found["facts"]["allowed_cpus"] == found["facts"]["usable_cores"] == found["course"]["threads"] == 1
    told = [finding["what"] for finding in found["findings"]]
    assert os.cpu_count() == 1 or any("may run on 1 of" in what for what in told)


@pytest.mark.rare
def test_nothing_can_run_a_model(tmp_path: Path) -> None:
    blocked = str(Path(__file__).parents[1] / "light" / "blocked")
    code, found = apart(RUN, tmp_path, AQUILINE_ISA="off", PYTHONPATH=blocked)
    assert code == 2 and found["course"]["backend"] == "nothing" and found["rates"]["int8"] is None
    assert "AQUILINE_ISA=off" in found["findings"][0]["what"] and "torch is kept" in found["findings"][0]["what"]
