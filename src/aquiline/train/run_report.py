"""What a run shows and keeps: a progress bar or log lines, OUT/train.jsonl, figures for trackers, OUT/train.png."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from aquiline.train import schedule
from aquiline.train.curves import draw_curves, read_log
from aquiline.train.run_figures import StepFigures
from aquiline.train.simulated_tau import DraftJudgement
from aquiline.train.trackers import flat_figures, open_trackers
from aquiline.writing import writing

KEPT = "Checkpoints stay; with room on the disk go on with --resume"


@dataclass(frozen=True)
class StepReport:
    """A line of the log. figures: means over the steps since the line before. grad_norm and lr: of the last step.
    done: the share of the budget used. tokens: of the whole run."""

    step: int
    done: float
    figures: StepFigures
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_s: float

    def record(self) -> dict[str, Any]:
        """As one line of train.jsonl."""
        own = {name: value for name, value in vars(self).items() if name != "figures"}
        f = self.figures
        return own | {
            "loss": f.total, "losses": f.losses, "accuracy": f.accuracy, "conditional": f.conditional,
            "expected_tau": f.expected_tau,
        }  # fmt: skip


class Silent:
    """The reporter of ranks that are not the first: says and writes nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def step(self, r: StepReport) -> None:
        """Nothing."""

    def stage(self, text: str) -> None:
        """Nothing."""

    def advance(self, done: float) -> None:
        """Nothing."""

    def judged(self, step: int, seconds: float, tokens: int, j: DraftJudgement, best_step: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Reporter:
    """Shows a run on stderr and appends one JSON object a log step to OUT/train.jsonl.

    after_step: the step from which a resumed run goes on; later log lines are dropped. None: the log starts empty."""

    def __init__(
        self, out: Path, *, after_step: int | None = None, log: tuple[str, ...] = (), quiet: bool = False
    ) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.trackers = open_trackers(log, out, after_step)
        self.out, self.quiet = out, quiet
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
        self.task = self.bar.add_task("train", total=None, share="", text="")  # moves to and fro until the first step
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

    def step(self, r: StepReport) -> None:
        """Log and show a training step."""
        record = r.record()
        self._write({"kind": "step", **record})
        self._track(r.step, flat_figures("train", _finite(record)))
        accuracy = "/".join(f"{100 * a:.0f}" for a in r.figures.accuracy)
        text = f"step {r.step} loss {r.figures.total:.3f} acc {accuracy}% expected tau {r.figures.expected_tau:.2f} "
        text += "" if math.isnan(self.tau) else f"(simulated {self.tau:.2f}) "
        text += f"{r.tokens_per_s:.0f} tok/s"
        self.bar.update(self.task, text=text)
        if not self.console.is_terminal:
            self.say(f"{100 * r.done:5.1f}%  {text}  ETA {self._eta(r.done)}")

    def judged(self, step: int, seconds: float, tokens: int, j: DraftJudgement, best_step: int) -> None:
        """Log and show a judgement on held-out text. best_step: whose draft stands in OUT now."""
        self.tau = j.tau
        self._write({"kind": "eval", "step": step, "seconds": seconds, "tokens": tokens, **judgement_dict(j)})
        self._track(step, flat_figures("held_out", judgement_dict(j)))
        accuracy = "/".join(f"{100 * a:.0f}" for a in j.accuracy)
        best = ", best so far, saved" if step == best_step else f"; step {best_step} is better and stays"
        best = ", the start, saved" if step == best_step == 0 else best
        self.say(
            f"step {step}: held-out loss {j.loss:.3f}, accuracy {accuracy}%, simulated tau {j.tau:.3f} greedy, "
            f"{j.tau_sampled:.3f} at temperature {j.temperature:g}{best}"
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
        minutes, seconds = divmod(round((time.perf_counter() - self.started) * (1 - done) / gained), 60)
        return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"

    def _track(self, step: int, figures: dict[str, float]) -> None:
        for tracker in self.trackers:
            tracker.log(step, figures)

    def _write(self, record: dict[str, Any]) -> None:
        with writing(self.out / "train.jsonl", KEPT):
            self.log.write(json.dumps(_finite(record), allow_nan=False) + "\n")
            self.log.flush()


def _finite(value: Any) -> Any:
    """A record with None in the place of NaN and infinities, which JSON cannot express."""
    if isinstance(value, dict):
        return {name: _finite(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def verdict(out: Path, p: schedule.RunProgress) -> str:
    """What OUT holds at the end of a run."""
    if p.step == 0:
        return f"{out} holds the draft of the start: the budget was used up before the first step; raise it"
    if p.best_step == 0 and p.start_score:
        return f"{out} holds the draft of the start, mean simulated tau {p.start_score:.3f}: no look found a better one"
    start = f", the start's was {p.start_score:.3f}" if p.start_score else ""
    return f"{out} holds the draft of step {p.best_step}, mean simulated tau {p.best_score:.3f}{start}"


def judgement_dict(j: DraftJudgement) -> dict[str, Any]:
    """A judgement as JSON."""
    return {
        "held_out_loss": j.loss,
        "accuracy": list(j.accuracy),
        "simulated_tau": j.tau,
        "simulated_tau_sampled": j.tau_sampled,
        "temperature": j.temperature,
    }
