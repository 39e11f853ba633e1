"""What a run shows and keeps: a progress bar or log lines, OUT/train.jsonl, OUT/train.png."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from aquiline.train.evaluate import Judgement
from aquiline.train.figures import StepFigures


@dataclass(frozen=True)
class StepReport:
    """One logged step; done is the share of the budget used, tokens those of the whole run."""

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

    def judged(self, step: int, seconds: float, tokens: int, j: Judgement, is_best: bool) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Reporter:
    """Shows a run on stderr and appends one JSON object a log step to OUT/train.jsonl.

    after_step: the step that a resumed run goes on from; what was logged beyond it is dropped. None begins anew."""

    def __init__(self, out: Path, *, after_step: int | None, quiet: bool = False) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.quiet = out, quiet
        self.console = Console(stderr=True, quiet=quiet)
        path = out / "train.jsonl"
        kept = [] if after_step is None else [r for r in read_log(path) if r["step"] <= after_step]
        self.log = path.open("w", encoding="utf-8")
        for record in kept:
            self._write(record)
        self.tau = next((r["simulated_tau"] for r in reversed(kept) if r["kind"] == "eval"), float("nan"))
        self.started, self.done_at_start = time.perf_counter(), 0.0
        columns = [BarColumn(24), TextColumn("{task.percentage:>3.0f}%  {task.fields[text]}")]
        self.bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self.console)
        self.task = self.bar.add_task("train", total=1.0, text="")
        if self.console.is_terminal and not quiet:
            self.bar.start()

    def say(self, text: str) -> None:
        """A line for the reader."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def step(self, r: StepReport) -> None:
        """A logged training step."""
        self._write({"kind": "step", **r.record()})
        accuracy = "/".join(f"{100 * a:.0f}" for a in r.figures.accuracy)
        text = f"step {r.step} loss {r.figures.total:.3f} acc {accuracy}% expected tau {r.figures.expected_tau:.2f} "
        text += f"(simulated {self.tau:.2f}) {r.tokens_per_s:.0f} tok/s"
        self.bar.update(self.task, completed=r.done, text=text)
        if not self.console.is_terminal:
            self.say(f"{100 * r.done:5.1f}%  {text}  ETA {self._eta(r.done)}")

    def judged(self, step: int, seconds: float, tokens: int, j: Judgement, is_best: bool) -> None:
        """A look at held-out text."""
        self.tau = j.tau
        self._write({"kind": "eval", "step": step, "seconds": seconds, "tokens": tokens, **judgement_dict(j)})
        accuracy = "/".join(f"{100 * a:.0f}" for a in j.accuracy)
        best = "  best so far, saved" if is_best else ""
        self.say(
            f"step {step}: held-out loss {j.loss:.3f}, accuracy {accuracy}%, simulated tau {j.tau:.3f} greedy, "
            f"{j.tau_sampled:.3f} at temperature {j.temperature:g}{best}"
        )

    def close(self) -> None:
        """End the bar, close the log, draw OUT/train.png if matplotlib is there."""
        self.bar.stop()
        self.log.close()
        draw_curves(self.out)

    def _eta(self, done: float) -> str:
        """Time left at the pace since the first report of this command."""
        if not self.done_at_start:
            self.started, self.done_at_start = time.perf_counter(), done
        gained = done - self.done_at_start
        if gained <= 0:
            return "-:--"
        minutes, seconds = divmod(round((time.perf_counter() - self.started) * (1 - done) / gained), 60)
        return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"

    def _write(self, record: dict[str, Any]) -> None:
        self.log.write(json.dumps(record) + "\n")
        self.log.flush()


def judgement_dict(j: Judgement) -> dict[str, Any]:
    """A judgement as JSON."""
    return {
        "held_out_loss": j.loss,
        "accuracy": list(j.accuracy),
        "simulated_tau": j.tau,
        "simulated_tau_sampled": j.tau_sampled,
        "temperature": j.temperature,
    }


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a train.jsonl; a line that a killed run left unfinished ends them."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def draw_curves(out: Path) -> bool:
    """Loss and tau over steps, from OUT/train.jsonl to OUT/train.png. False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    records = read_log(out / "train.jsonl")
    steps = [r for r in records if r["kind"] == "step"]
    looks = [r for r in records if r["kind"] == "eval"]
    figure = Figure(figsize=(10, 4), layout="constrained")
    loss, tau = figure.subplots(1, 2)
    loss.plot([r["step"] for r in steps], [r["loss"] for r in steps], lw=0.8, label="training (weighted sum of steps)")
    loss.set(xlabel="step", ylabel="loss", yscale="log")
    loss.plot([r["step"] for r in looks], [r["held_out_loss"] for r in looks], label="held out (mean of steps)")
    loss.legend()
    for name, label in (("simulated_tau", "greedy"), ("simulated_tau_sampled", "sampled")):
        tau.plot([r["step"] for r in looks], [r[name] for r in looks], marker=".", label=label)
    tau.set(xlabel="step", ylabel="simulated tau, held-out target text")
    tau.legend()
    figure.savefig(out / "train.png", dpi=120)
    return True
