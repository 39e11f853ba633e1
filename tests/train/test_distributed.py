from __future__ import annotations

import json
import os
import shutil
import socket
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
@pytest.mark.parametrize("parallel", ["ddp", "fsdp", "hsdp"])
def test_ranks_compute_what_one_does(
    config: TrainConfig, alone: dict[str, dict[str, torch.Tensor]], parallel: str
) -> None:
    """Gradients of a step, and weights, optimizer state and average after four with a resume in their middle: two ranks
    of one node, or with hsdp of each of two nodes."""
    run = replace(config, out=config.out / parallel, parallel=parallel, eval_every=100)
    file, gradients = config.out / f"{parallel}.json", config.out / f"{parallel}.pt"
    file.write_text(json.dumps(asdict(run), default=str))
    here = str(Path(__file__).parent)
    num_nodes = 2 if parallel == "hsdp" else 1
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = f"--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{free.getsockname()[1]} --local-addr=127.0.0.1"
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={num_nodes}", "--nproc-per-node=2"]
    nodes = [
        subprocess.Popen(
            [*command, *meeting.split(), f"{here}/rank_process.py", str(file), str(gradients)], stderr=subprocess.PIPE,
            text=True, env={**os.environ, "OMP_NUM_THREADS": "1", "AQUILINE_THREADS": "1"},
        ) for _ in range(num_nodes)
    ]  # fmt: skip
    said = [node.communicate(timeout=400)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0] * num_nodes, "".join(said)[-4000:]
    close(torch.load(gradients, weights_only=True), alone["gradients"], 1e-6)
    close(state_of(run.out), alone["weights"], 1e-6)
    if parallel != "ddp":  # what several ranks wrote, one goes on with
        single = replace(config, out=config.out / f"single of {parallel}", resume=True, eval_every=100)
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
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {"RANK": "0", "WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "2"}.items():
            patched.setenv(name, value)
        with pytest.raises(ValueError, match="parallel='hsdp': 5 ranks are no whole nodes of 2; use 'fsdp'"):
            join("hsdp")
    base = TrainConfig(Path("t"), (Path("d"),), Path("o"), batch_size=3)
    with pytest.raises(ValueError, match="batch_size=3: gives 4 ranks"):
        Trainer(base, World(0, 4), None, Silent(), Clock())
