"""Trains as told by a JSON file, in a process of its own: `python train_process.py CONFIG.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from aquiline.train.train_config import TrainConfig
from aquiline.train.trainer import train


def read(fields: dict[str, Any]) -> TrainConfig:
    """A TrainConfig from JSON, in which paths are strings and tuples lists."""
    paths = {name: Path(fields[name]) for name in ("target", "out", "init", "features") if fields[name] is not None}
    lists = {name: tuple(map(Path, fields[name])) for name in ("data", "held_out")}
    tuples = {name: tuple(fields[name]) for name in ("capture", "log", "may_differ") if fields[name] is not None}
    return TrainConfig(**{**fields, **paths, **lists, **tuples})


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(train(read(json.loads(Path(sys.argv[1]).read_text())), quiet=True)))
