"""A plot of the page: drawn by matplotlib in the page's colours, with its legend below, and put into the page as SVG.

The style sheet of page.html sets the colours of `PALETTE` for light and dark.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from aquiline.bench.plots import INK, PALETTE, RULE, SOFT, new_figure
from aquiline.bench.report.sections import ReportRow, badges

WIDTH, HEIGHT, LEGEND_LINE = 4.4, 2.3, 0.16
"""Inches: the width of a plot, its height, and the height of a line of its legend."""
CHARACTERS = 60
"""How many characters of a label fit across a plot."""
STYLE = {
    "text.color": INK, "text.parse_math": False, "axes.labelcolor": SOFT, "axes.edgecolor": SOFT, "axes.grid": True,
    "axes.axisbelow": True, "grid.color": RULE, "xtick.color": SOFT, "ytick.color": SOFT, "font.size": 8,
    "font.sans-serif": "DejaVu Sans", "figure.facecolor": "none", "axes.facecolor": "none",
}  # fmt: skip
AS_TEXT = {"svg.fonttype": "none", "svg.hashsalt": "aquiline", "savefig.facecolor": "none"}
"""Settings of matplotlib's SVG. The salt makes its ids, and so the page, the same every time."""


@dataclass(frozen=True)
class Panel:
    """One plot with its title. badges: the facts that limit the meaning of its figures."""

    title: str
    badges: list[str]
    figure: Any

    @property
    def svg(self) -> Markup:
        """The plot as an element of a page."""
        from matplotlib import rc_context

        out = io.StringIO()
        with rc_context(AS_TEXT), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # text stays text: a browser finds glyphs that matplotlib lacks
            self.figure.savefig(out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        box, drawn = re.findall(r'<svg [^>]*viewBox="([^"]*)"[^>]*>(.*)</svg>', out.getvalue(), re.DOTALL)[0]
        drawn = re.sub(r"<defs>\s*<style.*?</defs>", "", drawn, flags=re.DOTALL)
        drawn = re.sub(r'<g id="[^"]*">', "<g>", drawn)  # ids that other plots of the page have, too
        for name, (light, _) in PALETTE.items():
            drawn = drawn.replace(f": {light}", f": var(--{name})")
        opening = Markup('<svg class="plot" viewBox="{}" role="img" aria-label="{}">').format(box, self.title)
        return opening + Markup(drawn) + Markup("</svg>")


def draw_panels(
    title: str, groups: list[tuple[str, list[ReportRow]]], draw: Callable[[Any, list[ReportRow]], None]
) -> list[Panel]:
    """A panel for each named group of rows for which `draw` draws anything."""
    from matplotlib import rc_context

    panels = []
    for name, rows in groups:
        with rc_context(STYLE):
            drawing, grid = new_figure(1, 1, (WIDTH, HEIGHT))
            draw(grid[0][0], rows)
        if grid[0][0].has_data():
            _finish(drawing, grid[0][0])
            panels.append(Panel(f"{title}, {name}", badges(rows), drawing))
    return panels


def _finish(drawing: Any, axes: Any) -> None:
    """Put the legend below the axes. Nothing is clipped, and what was drawn takes no room from the axes."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        folded = [textwrap.fill(plain(label), CHARACTERS - 8) for label in labels]
        columns = max(1, min(len(labels), CHARACTERS // (7 + max(map(len, folded)))))
        drawing.legend(
            handles, folded, loc="outside lower left", ncols=columns, frameon=False, fontsize=8, labelcolor=INK,
            columnspacing=1,
        )  # fmt: skip
        lines = math.ceil(sum(label.count("\n") + 1 for label in folded) / columns)
        drawing.set_figheight(drawing.get_figheight() + LEGEND_LINE * lines + 0.1)
    for artist in drawing.findobj():
        artist.set_clip_on(False)
    for artist in (*axes.lines, *axes.collections):
        artist.set_in_layout(False)


def plain(text: str) -> str:
    """A text that can be drawn: characters that cannot be printed are replaced."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
