"""How fast a draft trains, where the time of a step goes, and how far that is from what this machine multiplies.

    python benchmarks/training.py --target DIR_OR_GGUF --data FILE [--vocab 8192] [--passes 4] [--late-share 0.25] ...

A step is matrix products: the limit is their FLOPs, counted as they run, over the rate at which this machine multiplies
the largest of them alone. The target's share is shown apart, since a feature cache pays it once. Ends with one JSON
line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode

from aquiline.engine.model import cpu_name
from aquiline.train.batches import Batch
from aquiline.train.distributed import join
from aquiline.train.run_report import Silent
from aquiline.train.schedule import Clock
from aquiline.train.teacher import autocast, has_bfloat16
from aquiline.train.train_config import TrainConfig
from aquiline.train.trainer import Trainer
from aquiline.train.ttt import PassRows, plan, ttt_loss

T = TypeVar("T")


def matmul_rate(trainer: Trainer, dtype: torch.dtype) -> float:
    """FLOPs per second of the best of three product shapes of a step, each alone."""
    rows = trainer.config.batch_size * trainer.config.context
    draft, best = trainer.run.head.config, 0.0
    hidden = draft.model.hidden_size
    for width in (hidden, 2 * draft.model.intermediate_size, draft.draft_vocab_size):
        x, w = torch.randn(rows, hidden).to(dtype), torch.randn(width, hidden).to(dtype)
        out = torch.empty(rows, width, dtype=dtype)
        for _ in range(8):
            start = time.perf_counter()
            torch.mm(x, w.T, out=out)
            best = max(best, 2 * rows * hidden * width / (time.perf_counter() - start))
    return best


class Stages:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str, run: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = run()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--features", type=Path, help="a feature cache, which takes the target out of the step")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--late-share", type=float, default=0.25)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--loss", default="ce")
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as out:
        config = TrainConfig(
            target=args.target, data=tuple(args.data), out=Path(out), features=args.features, context=args.context,
            batch_size=args.batch, ttt_steps=args.passes, late_share=args.late_share, draft_vocab_size=args.vocab,
            loss=args.loss, steps=args.steps,
        )  # fmt: skip
        start = time.perf_counter()
        trainer = Trainer(config, join(config.parallel), None, Silent(), Clock())
        prepared_s = time.perf_counter() - start
        result = run(trainer, args.steps)
    print(json.dumps({"prepared_s": prepared_s, **vars(args), **result}, default=str))


def forward(trainer: Trainer, batch: Batch, planned: list[PassRows]) -> torch.Tensor:
    """The loss of a batch, as the trainer computes it; the head's gradient is formed here too."""
    return ttt_loss(trainer.run.head, batch.tokens, batch.target, trainer.objective, planned, measure=False).total


def update(trainer: Trainer) -> None:
    """Clip, step, clear."""
    trainer.weights.clip(trainer.config.clip)
    trainer.weights.update()
    trainer.weights.clear()


def run(trainer: Trainer, num_steps: int) -> dict[str, object]:
    """Time steps, count their FLOPs, print the table."""
    stages, tokens, flops = Stages(), 0, 0
    config, prepared = trainer.config, trainer.run
    for step in range(num_steps + 1):
        if step == 1:  # the first one is a warm-up
            stages, tokens = Stages(), 0
        rows = prepared.batches.at(step)
        batch = stages("features", partial(prepared.assembler.packed, prepared.batches.corpus, rows, config.context))
        with autocast(trainer.world.device):
            planned = plan(batch.tokens, batch.target, trainer.objective, trainer._late_rows())
            counter = FlopCounterMode(display=False)
            with counter if step == 0 else contextlib.nullcontext():
                loss = stages("forward and head", partial(forward, trainer, batch, planned))
                stages("backward", loss.backward)
            flops = counter.get_total_flops() if step == 0 else flops
        stages("update", partial(update, trainer))
        tokens += batch.tokens.num_tokens
    dtype = torch.bfloat16 if has_bfloat16(trainer.world.device) else torch.float32
    rate = matmul_rate(trainer, dtype)
    seconds = sum(stages.seconds.values())
    draft_s = seconds - stages.seconds["features"]
    share = flops * num_steps / draft_s / rate
    for name, spent in stages.seconds.items():
        print(f"{name:16s} {1e3 * spent / num_steps:8.1f} ms  {100 * spent / seconds:5.1f} %")
    print(f"{tokens / seconds:.0f} tokens/s; without the target {tokens / draft_s:.0f}")
    print(f"{flops / 1e9:.1f} GFLOP a step, {100 * share:.0f} % of {rate / 1e9:.0f} GFLOP/s in {dtype}")
    return {
        "machine": cpu_name(), "torch": torch.__version__, "python": platform.python_version(),
        "threads": torch.get_num_threads(), "tokens_per_s": tokens / seconds,
        "tokens_per_s_without_target": tokens / draft_s, "flops_per_step": flops, "matmul_flops_per_s": rate,
        "share_of_matmul_rate": share, "stages_s": stages.seconds,
    }  # fmt: skip


if __name__ == "__main__":
    main()
