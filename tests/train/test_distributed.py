from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import rank_process
import tiny
import torch

from aquiline.train.distributed import World, join
from aquiline.train.run_report import Silent
from aquiline.train.schedule import Clock
from aquiline.train.train_config import TrainConfig
from aquiline.train.trainer import Trainer, train

STEPS = 4


@pytest.fixture(scope="module", autouse=True)
def float32() -> Iterator[None]:
    with tiny.in_float32():
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    folder = tmp_path_factory.mktemp("ranks")
    return replace(
        tiny.run_config(folder), batch_size=5, accumulate=2, steps=STEPS, late_share=0.5, eval_rows=2, ema=0.9
    )


@pytest.fixture(scope="module")
def alone(config: TrainConfig) -> dict[str, dict[str, torch.Tensor]]:
    """What one process computes: first gradients, last state."""
    run = replace(config, out=config.out / "alone", eval_every=100)
    gradients = rank_process.first_gradients(replace(run, out=config.out / "unused"), World())
    train(run, quiet=True)
    return {"gradients": gradients, "weights": state_of(run.out)}


def state_of(out: Path) -> dict[str, torch.Tensor]:
    state = torch.load(out / f"step-{STEPS:07d}" / "training.pt", weights_only=True)
    flat = {**state["head"], **{f"average {i}": w for i, w in enumerate(state["average"])}}
    for i, values in state["optimizers"][0]["state"].items():
        flat |= {f"{name} {i}": value for name, value in values.items()}
    return flat


def close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float) -> None:
    assert set(got) == set(want)
    for name, value in want.items():
        difference = float((got[name].float() - value.float()).norm() / value.float().norm().clamp_min(1e-30))
        assert difference <= tolerance, (name, difference)


@pytest.mark.rare
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_compute_what_one_does(
    config: TrainConfig, alone: dict[str, dict[str, torch.Tensor]], parallel: str
) -> None:
    """Gradients of a step, and weights, optimizer state and average after four with a resume in their middle."""
    run = replace(config, out=config.out / parallel, parallel=parallel, eval_every=100)
    file, gradients = config.out / f"{parallel}.json", config.out / f"{parallel}.pt"
    file.write_text(json.dumps(asdict(run), default=str))
    here = str(Path(__file__).parent)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, f"{here}/rank_process.py", str(file), str(gradients)], capture_output=True, text=True, timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1", "AQUILINE_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    close(torch.load(gradients, weights_only=True), alone["gradients"], 1e-6)
    close(state_of(run.out), alone["weights"], 1e-6)
    if parallel == "fsdp":  # what two ranks wrote, one goes on with
        single = replace(config, out=config.out / "single", resume=True, eval_every=100)
        shutil.copytree(run.out / "step-0000002", single.out / "step-0000002")
        train(single, quiet=True)
        close(state_of(single.out), alone["weights"], 1e-6)


def test_rows_are_shared_without_loss() -> None:
    rows = list(range(11))
    for size in (1, 2, 3, 4):
        shares = [World(rank, size).share(rows) for rank in range(size)]
        assert [r for share in shares for r in share] == rows and max(map(len, shares)) - min(map(len, shares)) <= 1


def test_parallel_needs_torchrun() -> None:
    with pytest.raises(ValueError, match=r"parallel=.fsdp.: needs several processes.*torchrun"):
        join("fsdp")
    base = TrainConfig(Path("t"), (Path("d"),), Path("o"), batch_size=3)
    with pytest.raises(ValueError, match="batch_size=3: gives 4 ranks"):
        Trainer(base, World(0, 4), None, Silent(), Clock())
