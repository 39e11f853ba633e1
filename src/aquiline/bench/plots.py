"""What the pictures of bench share: a figure of matplotlib to draw on, colours of ways to draft, the axis of shares."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

from aquiline.spec.registry import DRAFTINGS
from aquiline.writing import writing

COLORS = dict(zip(DRAFTINGS, cycle(("#8a8f98", "#2b6cb0", "#b7791f", "#2f855a", "#6b46c1")), strict=False))
SHARES = (-0.03, 1.03)
"""The axis of shares, with room for the whole mark of a point at either end."""


def new_figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """A figure of `size` inches and its axes [rows, columns]. Raises ValueError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("plot: needs matplotlib; pip install 'aquiline[train]'") from None
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, grid


def draw_positions(axes: Any, shares: list[float], **style: Any) -> None:
    """Draw the share of steps that accepted the draft's token at each position, the first at 1."""
    axes.plot(range(1, len(shares) + 1), shares, marker="o", **style)


def name_positions(axes: Any, about: str = "") -> None:
    """Label the axes of `draw_positions`. about: what the positions are of, in brackets."""
    axes.set_xlabel(f"position in the draft{about}")
    axes.set_ylabel("share of steps accepting it")
    axes.set_ylim(SHARES)
    axes.xaxis.get_major_locator().set_params(integer=True)


def save(figure: Any, path: Path, left: str) -> None:
    """Write the figure as a PNG. left: what a disk that is full leaves, for the error's text."""
    with writing(path, left):
        figure.savefig(path, dpi=140)
