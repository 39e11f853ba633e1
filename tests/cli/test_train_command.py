"""`aquiline train` as a user types it: recipes, overrides, estimates, resume."""

from __future__ import annotations

import dataclasses
import inspect
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.checkpoints import write_target
from typer.testing import CliRunner, Result

from aquiline.cli.main import app
from aquiline.cli.train import train
from aquiline.models.load import read_model_config
from aquiline.train.train_config import TrainConfig
from aquiline.train.trainer import Trainer


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe for a tiny target, beside some token ids."""
    root = tmp_path_factory.mktemp("command")
    write_target(root / "target", "llama")
    size = read_model_config(root / "target").vocab_size
    rows = [[1 + (7 * i + j * j) % (size - 1) for j in range(40)] for i in range(60)]
    (root / "ids.jsonl").write_text("\n".join(json.dumps({"input_ids": row}) for row in rows))
    path = root / "tiny.yaml"
    path.write_text(
        f"target: {root / 'target'}\ntrain: {{context: 40, batch_size: 4, ttt_steps: 2, steps: 4, eval_rows: 2, "
        "eval_tokens: 4, log_every: 1, capture: [0, 1, 2], draft_vocab_size: 120}\n"
    )
    return path


def typed(*args: object) -> Result:
    return CliRunner().invoke(app, ["train", *map(str, args)])


def test_a_recipe_trains_and_options_come_first(recipe: Path, tmp_path: Path) -> None:
    data, out = recipe.parent / "ids.jsonl", tmp_path / "draft"
    result = typed("--recipe", recipe, "--data", data, "--out", out, "--steps", 2)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["steps"] == 2 and told["draft_vocab_size"] == 120 and len(told["accuracy"]) == 2
    for start in ("memory: ", "arithmetic: ", "disk: "):
        assert any(line.startswith(start) for line in result.stderr.splitlines()), start
    again = typed("--recipe", recipe, "--data", data, "--out", out, "--resume", "--json")
    assert again.exit_code == 0 and json.loads(again.stdout)["steps"] == 4 and not again.stderr
    refused = typed("--recipe", recipe, "--data", data, "--out", out, "--resume", "--batch-size", 2)
    assert refused.exit_code == 2 and "batch_size: 4 before, 2 now" in refused.stderr
    other = typed("--recipe", recipe, "--data", data, "--out", out)
    assert other.exit_code == 2 and "continue it with --resume" in other.stderr


def test_a_dry_run_needs_no_data_and_writes_nothing(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = typed("--recipe", recipe, "--dry-run", "--tokens", 1000)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["tokens"] == 4 * 4 * 40 and not list(tmp_path.iterdir())
    assert len(result.stderr.splitlines()) == 4
    assert "no step was measured" in result.stderr
    quiet = typed("--recipe", recipe, "--dry-run", "--json")
    assert not quiet.stderr and set(json.loads(quiet.stdout)) == set(json.loads(result.stdout))


def test_a_dry_run_with_data_measures_two_steps_and_writes_nothing(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = recipe.parent / "ids.jsonl"
    result = typed("--recipe", recipe, "--data", data, "--features", tmp_path / "features", "--dry-run")
    assert result.exit_code == 0, result.output
    lines = result.stderr.splitlines()
    assert "measured over the first 2 steps here" in lines[3] and "plan: 4 steps to go" in lines[4]
    told = json.loads(result.stdout)
    assert told["tokens_per_s"] > 0 and told["steps"] == 4 and not list(tmp_path.iterdir())


def test_a_run_that_was_stopped_ends_with_the_code_of_a_signal(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer._step
    monkeypatch.setattr(Trainer, "_step", lambda self: (signal.raise_signal(signal.SIGINT), step(self)))
    result = typed("--recipe", recipe, "--data", recipe.parent / "ids.jsonl", "--out", tmp_path / "draft")
    assert result.exit_code == 130 and json.loads(result.stdout)["steps"] == 1
    assert "stopped after step 1: " in result.stderr and "go on with --resume" in result.stderr


def test_what_cannot_run_says_why() -> None:
    for args, message in (
        (("--out", "x"), "--target and --data: must be given; or name a --recipe"),
        (("--recipe", "nothing", "--dry-run"), "recipe='nothing': must be one of"),
        (("--recipe", "smollm2-135m", "--dry-run", "--parallel", "fsdp", "--loss", "no"), "loss='no': must be one of"),
    ):
        result = typed(*args)
        assert result.exit_code == 2 and message in result.stderr, result.output


def test_every_setting_is_an_option_with_its_default() -> None:
    options = inspect.signature(train).parameters
    assert set(options) - {"ctx", "recipe", "dry_run", "json_only"} == {f.name for f in dataclasses.fields(TrainConfig)}
    for field in dataclasses.fields(TrainConfig):
        default = None if field.default in (dataclasses.MISSING, ()) else field.default
        assert options[field.name].default == default, field.name


def test_help_loads_no_torch() -> None:
    code = "import sys; from aquiline.cli.train import train; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_torch_one_line_says_what_to_install() -> None:
    code = """
import sys
from importlib.abc import MetaPathFinder


class NoTorch(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, NoTorch())
from aquiline.cli.main import app

app(["train", "--target", "t", "--data", "d", "--out", "o"])
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stderr == "aquiline: train: torch is not installed; pip install 'aquiline[train]'\n"
    assert ended.returncode == 2 and not ended.stdout
