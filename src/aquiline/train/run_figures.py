"""The figures of a run: losses and accuracies of a training step by pass, and OUT/train.jsonl as a picture.

A step's figures are those of all parts of its batch and all ranks. The picture, OUT/train.png, shows loss, accuracy by
pass and acceptance length over trained tokens.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aquiline.train.ttt import TTTResult
from aquiline.types import Float64
from aquiline.writing import writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

Records = list[dict[str, Any]]

MAX_POINTS = 400
"""Steps are averaged in this many groups at most: single batches differ more than training changes the figures."""
MARKED_POINTS = 40


@dataclass(frozen=True)
class StepFigures:
    """The figures of one step, or the mean of several (`mean_of`).

    total: the loss that was minimised. tokens: positions that are not padding. Per pass: losses, the mean loss;
    accuracy, how often the best guess was the target's; conditional, the same among rows that were right in all earlier
    passes. NaN where no row counts."""

    total: float
    tokens: int
    losses: tuple[float, ...]
    accuracy: tuple[float, ...]
    conditional: tuple[float, ...]

    @property
    def expected_tau(self) -> float:
        """Tokens that a chain commits per cycle if drafts are right as often as here: 1 + c1 + c1 c2 + ... with the
        conditional accuracies c, up to the first pass that no row reached."""
        reached = itertools.takewhile(lambda c: not math.isnan(c), self.conditional)
        return 1 + sum(itertools.accumulate(reached, lambda a, b: a * b))

    def record(self) -> dict[str, Any]:
        """The figures as a line of train.jsonl has them."""
        passes = {name: getattr(self, name) for name in ("losses", "accuracy", "conditional", "expected_tau")}
        return {"loss": self.total} | passes


def combine(
    results: Sequence[TTTResult], tokens: int, over_ranks: Callable[[Sequence[float]], list[float]]
) -> StepFigures:
    """Figures of a step from the results of its parts; over_ranks sums numbers over all ranks."""

    def sums(counts: str, mean: str) -> tuple[Float64, Float64]:
        """Per pass, the rows that a figure is the mean of, and the sum of the figure over these rows."""
        rows, means = (np.array([getattr(r, name) for r in results], np.float64) for name in (counts, mean))
        return rows.sum(0), np.where(rows > 0, rows * means, 0.0).sum(0)

    own = np.array([sums("counted", "losses"), sums("counted", "accuracy"), sums("alive", "conditional")])
    total = sum(float(result.total.detach()) for result in results)
    whole = over_ranks([total, float(tokens), *own.ravel().tolist()])
    rows, summed = np.reshape(whole[2:], own.shape).swapaxes(0, 1)
    means = np.divide(summed, rows, out=np.full_like(rows, np.nan), where=rows > 0)
    return StepFigures(whole[0], round(whole[1]), *map(tuple, means.tolist()))


def mean_of(steps: Sequence[StepFigures]) -> StepFigures:
    """The mean of several steps' figures, since a single small batch says little. A figure that a step did not measure
    (NaN) is left out; tokens are summed."""
    columns = [zip(*(getattr(s, name) for s in steps), strict=True) for name in ("losses", "accuracy", "conditional")]
    means = [tuple(map(mean_of_known, passes)) for passes in columns]
    return StepFigures(mean_of_known(s.total for s in steps), sum(s.tokens for s in steps), *means)


def mean_of_known(values: Iterable[float | None]) -> float:
    """The mean of values without those that are not known, which are None or NaN; NaN if none is known."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def read_log(path: Path) -> Records:
    """The records of a train.jsonl, up to a line that a killed run left unfinished."""
    records: Records = []
    with contextlib.suppress(json.JSONDecodeError):
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            records.append(json.loads(line))
    return records


def draw_curves(out: Path) -> None:
    """Write OUT/train.png, if matplotlib is installed and a step was logged."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    records = read_log(out / "train.jsonl")
    steps = [r for r in records if r["kind"] == "step"]
    looks = [r for r in records if r["kind"] == "eval"]
    if not steps:
        return
    scale, unit = (1e6, "million ") if steps[-1]["tokens"] >= 1e6 else (1e3, "thousand ")
    for record in records:
        record["tokens"] /= scale
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    for panel, draw in zip(figure.subplots(1, 3), (_loss, _accuracy, _tau), strict=True):
        draw(panel, steps, looks)
        panel.set_xlabel(f"{unit}trained tokens")
        panel.grid(alpha=0.25)
        panel.legend(fontsize=8)
    with writing(out / "train.png", "The figures stand in train.jsonl"):
        figure.savefig(out / "train.png", dpi=120)


def _loss(panel: Axes, steps: Records, looks: Records) -> None:
    _training(panel, _points(steps, lambda r: mean_of_known(r["losses"])), label="training")
    panel.plot(*_points(looks, itemgetter("held_out_loss")), marker=".", label="held out")
    panel.set(ylabel="loss", title="loss, mean of passes")


def _accuracy(panel: Axes, steps: Records, looks: Records) -> None:
    passes = len(steps[-1]["accuracy"])
    for k in sorted({0, passes // 2, passes - 1}):
        line = _training(panel, _points(steps, lambda r, k=k: r["accuracy"][k]), alpha=0.5)
        label = f"pass {k + 1}, held out (pale: training)"
        panel.plot(*_points(looks, lambda r, k=k: r["accuracy"][k]), marker=".", color=line.get_color(), label=label)
    panel.yaxis.set_major_formatter("{x:.0%}")
    panel.set(title="how often the best guess is the target's")


def _tau(panel: Axes, steps: Records, looks: Records) -> None:
    expected = _points(steps, itemgetter("expected_tau"))
    _training(panel, expected, alpha=0.5, color="gray", label="expected, training text")
    sampled = f"sampled at {looks[-1]['temperature']:g}" if looks else "sampled"
    for name, label in (("simulated_tau", "greedy"), ("simulated_tau_sampled", sampled)):
        panel.plot(*_points(looks, itemgetter(name)), marker=".", label=f"simulated, {label}")
    panel.set(ylabel="tokens per cycle", title="acceptance length of a chain")


def _training(panel: Axes, points: tuple[list[float], list[float]], **style: Any) -> Line2D:
    """A line through figures of training steps. Few points have marks: a line through one point shows nothing."""
    marker = "x" if len(points[0]) <= MARKED_POINTS else ""
    return panel.plot(*points, lw=0.8, marker=marker, markersize=6, **style)[0]


def _points(records: Records, value: Callable[..., float | None]) -> tuple[list[float], list[float]]:
    """Tokens and mean value of each group of neighbouring records; groups without a known value are left out."""
    size = -(-len(records) // MAX_POINTS) or 1
    groups = [records[start : start + size] for start in range(0, len(records), size)]
    points = [(group[-1]["tokens"], mean_of_known(value(r) for r in group)) for group in groups]
    known = [point for point in points if not math.isnan(point[1])]
    return [x for x, _ in known], [y for _, y in known]
