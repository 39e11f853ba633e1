"""`aquiline learn`: generations as a table and as JSON, a draft taken out, the one of before, and nothing left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.checkpoints import write_draft, write_target
from tests.cli.learnt import write_learnt
from typer.testing import CliRunner, Result

from aquiline.cli.main import app
from aquiline.engine.learning.store import LearningStore, ServingState
from aquiline.models.draft_config import read_draft_config
from aquiline.models.load import read_model_config


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["learn", *map(str, args)])


def refused(*args: object) -> str:
    done = run(*args)
    assert done.exit_code == 2, done.output
    return done.stderr


@pytest.fixture
def store(tmp_path: Path) -> LearningStore:
    write_target(tmp_path / "target")
    write_draft(tmp_path / "draft", read_model_config(tmp_path / "target"))
    return write_learnt(tmp_path / "learnt", tmp_path / "draft")


def test_generations_and_what_became_of_them(store: LearningStore) -> None:
    shown = run(store.folder).output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]
    assert "smollm2: generation 3 serves" in shown and [row[0] for row in rows] == ["1", "2", "3"]
    assert rows[0][2:] == ["5,000", "1.50", "1.80", "1.200 [1.100, 1.300]", "2.00", "1.99", "served"]
    assert [row[-1] for row in rows] == ["served", "refused", "serves"]
    told = json.loads(run(store.folder, "--json").output)
    assert told["serving"] == 3 and [each["has_weights"] for each in told["generations"]] == [True, False, True]
    assert told["generations"][2]["tau_after"] == 2.0 and told["pair"]["target"] == "smollm2"


def test_the_draft_of_before_serves_and_that_of_now_never_again(store: LearningStore) -> None:
    done = run(store.folder, "--roll-back")
    assert "generation 1 serves from now on" in done.stderr and "rolled back" in done.stdout
    assert store.state() == ServingState(1, (3,))
    assert run(store.folder, "--roll-back").exit_code == 0 and store.state() == ServingState(0, (3, 1))
    assert "the shipped draft serves; there is none before it" in refused(store.folder, "--roll-back")
    store.write_state(ServingState(3))
    (store.checkpoint(1) / "model.safetensors").unlink()
    assert "the weights of generation 1 are gone" in refused(store.folder, "--roll-back")
    assert store.state() == ServingState(3)


def test_a_draft_that_is_taken_out_is_a_checkpoint(store: LearningStore, tmp_path: Path) -> None:
    out = tmp_path / "better"
    assert "holds the draft of generation 3" in run(store.folder, "--export", out).stderr
    assert {file.name for file in out.iterdir()} == {"model.safetensors", "config.json"}
    read_draft_config(out, tmp_path / "target")
    assert "exists and is left alone" in refused(store.folder, "--export", out)
    told = refused(store.folder, "--export", tmp_path / "no", "--generation", 2)
    assert "generation=2: has no weights" in told and "those with weights: 1, 3" in told
    assert "add --export" in refused(store.folder, "--generation", 1)
    store.write_state(ServingState())
    assert "the shipped draft, smollm2; copy that" in refused(store.folder, "--export", tmp_path / "no")


def test_nothing_is_left_of_what_is_forgotten(store: LearningStore, tmp_path: Path) -> None:
    assert run(store.folder, "--forget", "served").exit_code == 0
    left = {path.name for path in store.folder.iterdir() if path.is_file() or any(path.iterdir())}
    assert left == {"pair.json", "state.json", "generations"} and store.state().serving == 3
    assert run(store.folder, "--forget", "everything").exit_code == 0
    assert store.generations() == [] and store.state() == ServingState()
    assert "holds nothing that a draft has learnt" in refused(tmp_path)
