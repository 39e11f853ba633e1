"""Reports of a run: a progress bar or log lines, OUT/train.jsonl, OUT/train.png, figures for trackers.

Trackers are TensorBoard and Weights & Biases, both optional packages.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from aquiline.train.run_figures import StepFigures, draw_curves, read_log
from aquiline.train.schedule import RunProgress
from aquiline.train.simulated_tau import DraftJudgement
from aquiline.writing import writing

KEPT = "Checkpoints stay; with room on the disk go on with --resume"


@dataclass(frozen=True)
class Tracker:
    """Where figures are sent. log: takes a step and its figures; steps ascend. close: writes the rest of them."""

    log: Callable[[int, Mapping[str, float]], None]
    close: Callable[[], None]


def _tensorboard(out: Path, after_step: int | None) -> Tracker:
    """Event files under OUT/tensorboard; a resumed run drops what was logged beyond `after_step`."""
    from torch.utils.tensorboard import SummaryWriter

    purge = None if after_step is None else after_step + 1
    writer: Any = SummaryWriter(str(out / "tensorboard"), purge_step=purge)

    def log(step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)

    return Tracker(log, writer.close)


def _wandb(out: Path, after_step: int | None) -> Tracker:
    """A run in the project "aquiline", with files under OUT/wandb. All commands that train into one OUT form a group.

    WANDB_MODE=offline keeps the run on this machine."""
    import wandb

    group = out.resolve().name
    name = group if after_step is None else f"{group} after {after_step}"
    run: Any = wandb.init(project="aquiline", dir=str(out), group=group, name=name)
    return Tracker(lambda step, figures: run.log(dict(figures), step=step), run.finish)


TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb}


def flat_figures(prefix: str, record: Mapping[str, Any]) -> dict[str, float]:
    """The known numbers of a log record with names under `prefix/`. Entry k of a list, from 1, is named NAME/k."""
    flat: dict[str, float] = {}
    for name, value in record.items():
        figures = {f"{name}/{k}": v for k, v in enumerate(value, 1)} if isinstance(value, list) else {name: value}
        flat |= {f"{prefix}/{n}": float(v) for n, v in figures.items() if v is not None}
    return flat


class Silent:
    """The reporter of ranks that are not the first: says and writes nothing."""

    def _nothing(self, *_: object, **__: object) -> None: ...

    say = stage = advance = step = judged = close = _nothing


class Reporter:
    """Shows a run on stderr and appends one JSON object a log step to OUT/train.jsonl.

    after_step: the step from which a resumed run goes on; later log lines are dropped. None: the log starts empty. log:
    names of trackers. Raises ValueError for one whose package is not installed."""

    def __init__(
        self, out: Path, *, after_step: int | None = None, log: tuple[str, ...] = (), quiet: bool = False
    ) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.trackers = list[Tracker]()
        for name in log:
            try:
                self.trackers.append(TRACKERS[name](out, after_step))
            except ImportError as error:
                raise ValueError(f"log={name!r}: {error}; install it with `pip install 'aquiline[log]'`") from None
        self.out = out
        self.console = Console(stderr=True, quiet=quiet)
        path = out / "train.jsonl"
        kept = [] if after_step is None else [r for r in read_log(path) if r["step"] <= after_step]
        self.log = path.open("w", encoding="utf-8")
        for record in kept:
            self._write(record)
        self.tau = next((r["simulated_tau"] for r in reversed(kept) if r["kind"] == "eval"), None) or math.nan
        self.started, self.done_at_start = time.perf_counter(), 0.0
        if find_spec("matplotlib") is None:
            self.say(f"{out / 'train.png'} will not be drawn: needs matplotlib; pip install 'aquiline[train]'")
        columns = [BarColumn(24), TextColumn("{task.fields[share]}{task.fields[text]}")]
        self.bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self.console)
        self.task = self.bar.add_task("train", total=None, share="", text="")  # without a total it moves to and fro
        if self.console.is_terminal and not quiet:
            self.bar.start()

    def say(self, text: str) -> None:
        """Print a line of text."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def stage(self, text: str) -> None:
        """Say what the run does now, before its first step."""
        self.bar.update(self.task, text=text)
        if not self.console.is_terminal:
            self.say(text)

    def advance(self, done: float) -> None:
        """A step is over; `done` is the share of the budget used."""
        self.bar.update(self.task, total=1.0, completed=done, share=f"{100 * done:3.0f}%  ")

    def step(self, step: int, f: StepFigures, **run: float) -> None:
        """Log and show a training step. f: means over the steps since the line before. run: `done`, the share of the
        budget used; `grad_norm` and `lr` of the last step; `tokens` of the whole run; `tokens_per_s`."""
        self._log("step", {"step": step}, run | f.record())
        text = f"step {step} loss {f.total:.3f} acc {_percent(f.accuracy)} expected tau {f.expected_tau:.2f} "
        text += "" if math.isnan(self.tau) else f"(simulated {self.tau:.2f}) "
        text += f"{run['tokens_per_s']:.0f} tok/s"
        self.bar.update(self.task, text=text)
        if not self.console.is_terminal:
            self.say(f"{100 * run['done']:5.1f}%  {text}  ETA {self._eta(run['done'])}")

    def judged(self, step: int, seconds: float, tokens: int, j: DraftJudgement, best_step: int) -> None:
        """Log and show a judgement on held-out text. best_step: the step whose draft is in OUT now."""
        self.tau = j.tau
        self._log("eval", {"step": step, "seconds": seconds, "tokens": tokens}, j.as_dict())
        best = ", best so far, saved" if step == best_step else f"; step {best_step} is better and stays"
        best = ", the start, saved" if step == best_step == 0 else best
        self.say(
            f"step {step}: held-out loss {j.loss:.3f}, accuracy {_percent(j.accuracy)}, simulated tau {j.tau:.3f} "
            f"greedy, {j.tau_sampled:.3f} at temperature {j.temperature:g}{best}"
        )

    def close(self) -> None:
        """End the bar, close the log, draw OUT/train.png if matplotlib is there."""
        self.bar.stop()
        with writing(self.out / "train.jsonl", KEPT):
            self.log.close()
        for tracker in self.trackers:
            tracker.close()
        try:
            draw_curves(self.out)
        except OSError as error:
            self.say(str(error))

    def _eta(self, done: float) -> str:
        """Time left at the pace since the first report of this command."""
        if not self.done_at_start:
            self.started, self.done_at_start = time.perf_counter(), done
        gained = done - self.done_at_start
        if gained <= 0:
            return "-:--"
        return str(timedelta(seconds=round((time.perf_counter() - self.started) * (1 - done) / gained)))

    def _log(self, kind: str, place: dict[str, Any], record: dict[str, Any]) -> None:
        """Write a record that belongs to a place of the run, and send its figures to the trackers."""
        figures = _finite(record)
        self._write({"kind": kind, **place, **figures})
        for tracker in self.trackers:
            tracker.log(place["step"], flat_figures("train" if kind == "step" else "held_out", figures))

    def _write(self, record: dict[str, Any]) -> None:
        with writing(self.out / "train.jsonl", KEPT):
            self.log.write(json.dumps(record, allow_nan=False) + "\n")
            self.log.flush()


def _finite(value: Any) -> Any:
    """A record with None instead of NaN and infinities, which JSON cannot express."""
    return json.loads(json.dumps(value), parse_constant=lambda name: None)


def _percent(accuracy: tuple[float, ...]) -> str:
    """Accuracies by pass, in one word."""
    return "/".join(f"{100 * a:.0f}" for a in accuracy) + "%"


def last_line(out: Path, p: RunProgress) -> str:
    """A sentence on the draft that OUT holds at the end of a run."""
    if p.step == 0:
        return f"{out} holds the draft of the start: the budget was used up before the first step; raise it"
    if p.best_step == 0 and p.start_score:
        return f"{out} holds the draft of the start, mean simulated tau {p.start_score:.3f}: no look found a better one"
    start = f", the start's was {p.start_score:.3f}" if p.start_score else ""
    return f"{out} holds the draft of step {p.best_step}, mean simulated tau {p.best_score:.3f}{start}"
