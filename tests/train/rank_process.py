"""One rank of a run under torchrun: `rank_process.py CONFIG.json GRADIENTS.pt`.

Keeps the gradients of the first step, stops after two steps, resumes from the checkpoint and runs to the end. Fails if
a thread of the process group outlives the group: it would abort the process now and then, as Python ends."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from tiny import in_float32
from train_process import read

from aquiline.train import distributed
from aquiline.train.checkpoint import Checkpoints
from aquiline.train.distributed import World, gathered, join, local
from aquiline.train.run_report import Silent
from aquiline.train.schedule import Clock
from aquiline.train.train_config import TrainConfig
from aquiline.train.trainer import Trainer


def first_gradients(config: TrainConfig, world: World) -> dict[str, torch.Tensor]:
    """Clipped gradients of the first step, by name. All ranks have every weight as often as there are copies."""
    trainer = Trainer(config, world, None, Silent(), Clock())
    own, whole = (
        sum(each.numel() for each in of) for of in (map(local, trainer.weights.trained), trainer.weights.trained)
    )
    assert world.sum([own]) == [whole * world.size / world.num_parts]
    trainer._gradients()
    grads = {name: p.grad for name, p in trainer.weights.named.items()}
    return {name: gathered(g) for name, g in grads.items() if g is not None}


def broken_run(config: TrainConfig, world: World) -> None:
    """Two steps, then the rest from the checkpoint."""
    trainer = Trainer(config, world, None, Silent(), Clock())
    for _ in range(2):
        trainer._step()
    trainer._look()
    world.sum([0.0])  # the first rank has written its checkpoint when it comes here
    start = Checkpoints(config.out, 2).newest()
    assert start.state["progress"]["step"] == 2
    Trainer(replace(config, resume=True), world, start, Silent(), Clock()).train()


def group_threads() -> list[str]:
    """Names of this process's threads that belong to a process group; none where the system does not tell."""
    names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


if __name__ == "__main__":
    torch.set_num_threads(1)
    distributed.BUCKET_BYTES = 4096  # several buckets in a draft of this size
    config = read(json.loads(Path(sys.argv[1]).read_text()))
    world = join(config.parallel)
    with in_float32():
        gradients = first_gradients(config, world)
        if world.is_first:
            torch.save(gradients, sys.argv[2])
        broken_run(config, world)
    assert group_threads() or sys.platform != "linux"
    world.leave()
    deadline = time.monotonic() + 10  # a thread that was joined is listed until the system has removed it
    while group_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not group_threads(), group_threads()
