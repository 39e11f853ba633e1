"""OUT/train.jsonl as a picture, OUT/train.png: loss, accuracy by pass and acceptance length over trained tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aquiline.writing import writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

MAX_POINTS = 400
"""Steps are averaged in this many groups at most: single batches differ more than training changes the figures."""
MARKED_POINTS = 40


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a train.jsonl, up to a line that a killed run left unfinished."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def draw_curves(out: Path) -> bool:
    """Write OUT/train.png. False without matplotlib, or where nothing was logged yet."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    records = read_log(out / "train.jsonl")
    steps = [r for r in records if r["kind"] == "step"]
    looks = [r for r in records if r["kind"] == "eval"]
    if not steps:
        return False
    scale, unit = (1e6, "million ") if steps[-1]["tokens"] >= 1e6 else (1e3, "thousand ")
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    panels = figure.subplots(1, 3)
    _loss(panels[0], steps, looks, scale)
    _accuracy(panels[1], steps, looks, scale)
    _tau(panels[2], steps, looks, scale)
    for panel in panels:
        panel.set_xlabel(f"{unit}trained tokens")
        panel.grid(alpha=0.25)
        panel.legend(fontsize=8)
    with writing(out / "train.png", "The figures stand in train.jsonl"):
        figure.savefig(out / "train.png", dpi=120)
    return True


def _training(panel: Axes, points: tuple[list[float], list[float]], **style: Any) -> Line2D:
    """A line through figures of training steps. Few points have marks: a line through one point shows nothing."""
    marker = "x" if len(points[0]) <= MARKED_POINTS else ""
    return panel.plot(*points, lw=0.8, marker=marker, markersize=6, **style)[0]


def _loss(panel: Axes, steps: list[dict[str, Any]], looks: list[dict[str, Any]], scale: float) -> None:
    _training(panel, _grouped(steps, scale, lambda r: _mean(r["losses"])), label="training")
    panel.plot(*_points(looks, scale, "held_out_loss"), marker=".", label="held out")
    panel.set(ylabel="loss", title="loss, mean of passes")


def _accuracy(panel: Axes, steps: list[dict[str, Any]], looks: list[dict[str, Any]], scale: float) -> None:
    passes = len(steps[-1]["accuracy"])
    for k in sorted({0, passes // 2, passes - 1}):
        line = _training(panel, _grouped(steps, scale, lambda r, k=k: r["accuracy"][k]), alpha=0.5)
        x, held_out = [r["tokens"] / scale for r in looks], [r["accuracy"][k] for r in looks]
        label = f"pass {k + 1}, held out (pale: training)"
        panel.plot(x, held_out, marker=".", color=line.get_color(), label=label)
    panel.yaxis.set_major_formatter("{x:.0%}")
    panel.set(title="how often the best guess is the target's")


def _tau(panel: Axes, steps: list[dict[str, Any]], looks: list[dict[str, Any]], scale: float) -> None:
    expected = _grouped(steps, scale, lambda r: r["expected_tau"])
    _training(panel, expected, alpha=0.5, color="gray", label="expected, training text")
    sampled = f"sampled at {looks[-1]['temperature']:g}" if looks else "sampled"
    for name, label in (("simulated_tau", "greedy"), ("simulated_tau_sampled", sampled)):
        panel.plot(*_points(looks, scale, name), marker=".", label=f"simulated, {label}")
    panel.set(ylabel="tokens per cycle", title="acceptance length of a chain")


def _points(looks: list[dict[str, Any]], scale: float, name: str) -> tuple[list[float], list[float]]:
    return [r["tokens"] / scale for r in looks], [r[name] for r in looks]


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _grouped(
    steps: list[dict[str, Any]], scale: float, value: Callable[..., float | None]
) -> tuple[list[float], list[float]]:
    """Tokens / scale and mean value of each group of neighbouring steps; unknown values are left out."""
    size = -(-len(steps) // MAX_POINTS)
    x, y = [], []
    for start in range(0, len(steps), size):
        group = steps[start : start + size]
        mean = _mean([value(r) for r in group])
        if mean is not None:
            x.append(group[-1]["tokens"] / scale)
            y.append(mean)
    return x, y
