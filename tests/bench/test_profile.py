"""The profile: every named range is there, the shares are of the whole cycle, the trace is one Chrome can read."""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path

import pytest
from tests.conftest import engine_config, needs_native, tiny_llm, tiny_models
from tests.engine.test_exact import BASELINE, SPECS, prompts
from typer.testing import CliRunner

from aquiline.bench.suite.stages import PARTS, RANGES, profile
from aquiline.cli.main import app
from aquiline.config import EngineConfig, SamplingParams
from aquiline.engine.llm import LLM

pytestmark = needs_native
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.mark.parametrize("name", ["chain4", "dynamic", "none"])
def test_ranges_and_shares(name: str, tmp_path: Path) -> None:
    drafting = BASELINE if name == "none" else SPECS[name]
    found = profile(LLM.from_models(tiny_models(), engine_config(4)), drafting, prompts(4), PARAMS)
    stages = [row for row in found.rows if not row["is_part"]]
    assert {row["name"] for row in stages} == set(RANGES.values())
    assert sum(row["share"] for row in stages) == pytest.approx(1)
    total = found.summary.decode_ms / found.summary.num_decode_steps
    assert sum(row["ms_per_step"] for row in stages) == pytest.approx(total, rel=1e-6)
    assert found.summary.num_prefill_tokens == 0, "only decode steps count"
    parts = {row["name"]: row for row in found.rows if row["is_part"]}
    draft_parts = set(PARTS["EAGLE_DRAFT"])
    assert set(parts) == {part for own in PARTS.values() for part in own} - (draft_parts if name == "none" else set())
    for stage in stages:
        within = [parts[part]["ms_per_step"] for part in PARTS.get(stage["name"], {}) if part in parts]
        assert sum(within) <= stage["ms_per_step"] * 1.001, stage
    assert {row["calls"] for row in found.rows} == {found.summary.num_decode_steps}, "each once a step, the host too"

    found.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {e["name"] for e in events} == {row["name"] for row in found.rows}
    outer = sorted((e for e in events if e["tid"] == 1), key=lambda e: e["ts"])
    assert all(a["ts"] + a["dur"] <= b["ts"] + 1 for a, b in itertools.pairwise(outer)), "stages overlap"
    for event in (e for e in events if e["tid"] == 2):
        stage = next(stage for stage, own in PARTS.items() if event["name"] in own)
        inside = [e for e in outer if e["name"] == stage and e["ts"] - 1 <= event["ts"]]
        assert any(event["ts"] + event["dur"] <= e["ts"] + e["dur"] + 1 for e in inside), event


def test_parts_are_timed_only_while_wanted() -> None:
    llm = tiny_llm()
    profile(tiny_llm(), BASELINE, prompts(1), PARAMS)  # the same models in an engine of its own
    summary = llm.run(prompts(2), PARAMS, drafting=SPECS["chain4"]).summary
    assert summary.num_decode_steps and not any(summary.part_ms.values())


def test_the_command(tmp_path: Path) -> None:
    args = ["profile", "--target", "bundled", "--context", "64", "--new-tokens", "8", "--batch", "2"]
    shown = CliRunner().invoke(app, [*args, "--trace", str(tmp_path / "t.json")], env={"COLUMNS": "120"})
    assert "What adaptive drafting chose" in shown.output and "us a step" in shown.output, "adaptive is the default"
    assert shown.exit_code == 0 and "EAGLE_TREE_MASKS" in shown.output and (tmp_path / "t.json").exists()
    data = json.loads(CliRunner().invoke(app, [*args, "--json", "--drafter", "dynamic"]).stdout)
    assert data["num_steps"] > 0 and data["tau"] >= 1 and data["adaptive"] is None


@pytest.mark.rare
def test_a_backend_that_times_no_stages_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of its stages is shown as taking no time, and no step as having taken none."""
    monkeypatch.setenv("AQUILINE_ISA", "off")
    monkeypatch.setattr("aquiline.cli.profile.EngineConfig", partial(EngineConfig, calibration=False))
    args = ["profile", "--context", "32", "--new-tokens", "3"]
    shown = CliRunner().invoke(app, args, env={"COLUMNS": "120"})
    assert shown.exit_code == 0 and "the torch path does not time its stages: HOST is the whole step" in shown.output
    assert "EAGLE_DRAFT" not in shown.output and "step: not timed; verified tokens" in shown.output
