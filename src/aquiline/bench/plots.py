"""Parts that the pictures of bench share: a figure of matplotlib to draw on, the palette, the axis of shares."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from aquiline.spec.registry import DRAFTINGS
from aquiline.writing import writing

PALETTE = {
    "ink": ("#1b1f27", "#e6e9ee"), "soft": ("#596170", "#a3abb8"), "rule": ("#dfe3e9", "#2c313a"),
    "card": ("#ffffff", "#16181d"), "base": ("#6b7280", "#9aa1ac"),
    "c0": ("#1728d0", "#6fa9ff"), "c1": ("#b05428", "#f49744"), "c2": ("#00a982", "#4ce2ba"),
    "c3": ("#842a8d", "#d225a8"), "c4": ("#b98a00", "#ffe066"), "c5": ("#210e69", "#9025fe"),
    "c6": ("#642200", "#90575c"),
}  # fmt: skip
"""Colours by the name of their CSS variable in the report: in light and in dark."""
INK, SOFT, RULE, CARD, BASE, *LINE_COLORS = (light for light, _ in PALETTE.values())
MARKERS = "osD^v"
SHARES = (-0.03, 1.03)
"""The axis of shares, with room for the whole mark of a point at either end."""


def look(style: int) -> dict[str, Any]:
    """The look of the line of a style: 35 pairs of colour and marker, of which either identifies a series; -1 is the
    neutral one, for the baseline."""
    color = BASE if style < 0 else LINE_COLORS[style % len(LINE_COLORS)]
    marker = MARKERS[style % len(MARKERS)]
    return {"color": color, "marker": marker, "markeredgecolor": CARD, "markersize": 6}


COLORS = {name: look(number - 1)["color"] for number, name in enumerate(DRAFTINGS)}
"""Colours of the ways to draft; without drafts, the neutral one."""


def what_is_missing() -> str | None:
    """The reason why no picture can be drawn; None if matplotlib is installed."""
    return None if find_spec("matplotlib") else "needs matplotlib; pip install 'aquiline[train]'"


def new_figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """A figure of `size` inches and its axes [rows, columns]. Raises ValueError if matplotlib is not installed."""
    missing = what_is_missing()
    if missing is not None:
        raise ValueError(f"plot: {missing}")
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, grid


def draw_positions(axes: Any, shares: list[float], **style: Any) -> None:
    """Draw the share of steps that accepted the draft's token at each position, the first at 1."""
    axes.plot(range(1, len(shares) + 1), shares, **{"marker": "o"} | style)


def name_positions(axes: Any, about: str = "") -> None:
    """Label the axes of `draw_positions`. about: what the positions are of, in brackets."""
    axes.set_xlabel(f"position in the draft{about}")
    axes.set_ylabel("share of steps accepting it")
    axes.set_ylim(SHARES)
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)


def save_plot(figure: Any, path: Path, left: str) -> None:
    """Write the figure as a PNG. left: the error's words about the files that a full disk leaves."""
    with writing(path, left):
        figure.savefig(path, dpi=140)
