"""`aquiline regenerate` as a user types it: results, JSON, a kill in the middle, refusals, examples."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import write_draft, write_target
from tests.train.regenerating import TEMPLATE, target, write
from typer.testing import CliRunner, Result

from aquiline.cli.main import app, command_of
from aquiline.cli.regenerate import EXAMPLES
from aquiline.models.load import read_model_config


def rows(count: int) -> list[Any]:
    """Conversations of one and two turns, by turns, behind a short system message that all of them share."""
    system = {"role": "system", "content": "abcdefghijklmnopqrst"}
    users = [[{"role": "user", "content": f"{i}{t}"} for t in "ab"[: 1 + i % 2]] for i in range(count)]
    return [{"messages": [system, *turns]} for turns in users]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target with a chat template, a draft for it, and prompts, one of them broken."""
    root = tmp_path_factory.mktemp("pair")
    write_target(root / "target")
    target(root / "target", TEMPLATE)
    write_draft(root / "draft", read_model_config(root / "target"))
    write(root / "prompts.jsonl", [*rows(40), "{broken"])
    write(root / "many.jsonl", rows(150))
    return root


def arguments(pair: Path, out: Path, *more: object, data: str = "prompts.jsonl") -> list[str]:
    given = ("--target", pair / "target", "--data", pair / data, "--out", out, "--max-tokens", 9, *more)
    return ["regenerate", *(str(each) for each in given)]


def regenerate(pair: Path, out: Path, *more: object, data: str = "prompts.jsonl") -> Result:
    return CliRunner().invoke(app, arguments(pair, out, *more, data=data))


def read(out: Path) -> dict[int, dict[str, Any]]:
    return {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}


def test_figures_are_on_stderr_and_json_is_printed_where_it_is_asked_for(pair: Path, tmp_path: Path) -> None:
    shown = regenerate(pair, tmp_path / "a.jsonl")
    assert shown.exit_code == 1 and not shown.stdout, "a row failed"
    lines = shown.stderr.splitlines()[-5:]
    assert lines[0] == "41 rows = 40 done (0 by earlier runs) + 1 failed + 0 skipped" and "tok/s" in lines[1]
    assert [line.split(":")[0] for line in lines[2:]] == ["temperature 0", "temperature 0.8", "temperature 1"]
    assert "line 41: not JSON" in shown.stderr and "KV" in shown.stderr
    data, found = json.loads(regenerate(pair, tmp_path / "c.jsonl", "--json").stdout), read(tmp_path / "a.jsonl")
    assert (data["num_rows"], data["num_done"], data["num_failed"], data["num_skipped"]) == (41, 40, 1, 0)
    assert data["output"]["num_answers"] == 60 == sum(data["output"]["finish_reasons"].values())
    assert data["answer_tokens"] == sum(sum(row["loss_mask"]) for row in found.values()) and data["tokens_per_s"] > 0
    assert sum(each["num_conversations"] for each in data["by_temperature"].values()) == 40
    assert {row["temperature"] for row in found.values()} == {0.0, 0.8, 1.0}
    assert data["metrics"]["prefix_hit_rate"] > 0.5, "the system message is computed once"
    quiet = regenerate(pair, tmp_path / "b.jsonl", "--draft", pair / "draft", "--max-batch", 3, "--in-order", "--json")
    drafted = json.loads(quiet.stdout)
    assert drafted["metrics"]["num_draft_tokens"] > 0
    marked = read(tmp_path / "b.jsonl")
    assert all(len(row.pop("rejected")) == len(row["token_ids"]) for row in marked.values()) and marked == found


def test_killed_in_the_middle_it_goes_on(pair: Path, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert regenerate(pair, whole, data="many.jsonl").exit_code == 0
    code = "from aquiline.cli.main import app; app()"
    command = [sys.executable, "-c", code, *arguments(pair, out, "--max-batch", 1, data="many.jsonl")]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while (not out.exists() or out.stat().st_size < 1000) and time.monotonic() < deadline and running.poll() is None:
        time.sleep(0.001)
    os.kill(running.pid, signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL, "it was to be killed while it ran"
    before = out.read_bytes()
    kept = before[: before.rfind(b"\n") + 1]
    done = json.loads(regenerate(pair, out, "--json", data="many.jsonl").stdout)
    assert 0 < done["num_resumed"] == kept.count(b"\n") < 150 == done["num_done"]
    assert out.read_bytes().startswith(kept) and read(out) == read(whole)


def test_refusals_are_one_line(pair: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert regenerate(pair, out, "--limit", 2).exit_code == 0
    for more, named in (
        (["--seed", 1], "seed=1: "), (["--temperatures", 0.5, 0.7], "temperatures=[0.5, 0.7]: "),
        (["--max-context", 100], "max_context=100: "), (["--limit", 0], "limit=0: "),
        (["--template-options", '{"hint": 1}'], 'template_options={"hint": 1}: '),
        (["--temperature-weights", 1], "temperature_weights="), (["--data", tmp_path / "none.jsonl"], "none.jsonl"),
    ):  # fmt: skip
        refused = regenerate(pair, out, *more)
        assert refused.exit_code == 2 and refused.stderr.startswith("aquiline: ") and not refused.stdout
        assert named in refused.stderr and refused.stderr.count("\n") == 1, refused.stderr
    assert len(read(out)) == 2


def test_what_does_not_belong_to_the_output_is_refused_before_anything_is_loaded(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    assert regenerate(pair, out, "--limit", 2).exit_code == 0
    monkeypatch.setattr("aquiline.engine.model.ResolvedPair.load", None)
    assert "seed=1: " in regenerate(pair, out, "--seed", 1).stderr
    assert "none.jsonl" in regenerate(pair, tmp_path / "new.jsonl", "--data", tmp_path / "none.jsonl").stderr


def test_every_example_is_understood() -> None:
    command = command_of("regenerate")
    examples = [shlex.split(line)[2:] for line in EXAMPLES.splitlines() if line.startswith("  aquiline regenerate ")]
    assert len(examples) == 4
    for words in examples:
        given = command.make_context("regenerate", words).params
        assert given["target"] == "./target" and given["data"] and given["out"]
    assert command.make_context("regenerate", examples[1]).params["data"] == [
        Path("chats.jsonl"),
        Path("more.jsonl.gz"),
    ]
