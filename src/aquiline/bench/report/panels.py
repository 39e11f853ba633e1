"""The plots of a section: which rows make which lines and bars. matplotlib draws each in the page's colours, with its
legend below, and it goes into the page as SVG. The style sheet of page.html sets the colours of `PALETTE` for light and
dark.
"""

from __future__ import annotations

import io
import math
import operator
import re
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from aquiline.bench import plots
from aquiline.bench.plots import BASE, CARD, INK, RULE, SOFT, look
from aquiline.bench.report.report_tables import figure
from aquiline.bench.report.sections import ReportRow, amount, badges, by_scenario

BEYOND = 3.0
"""An ideal this many times above all measurements would flatten the plot; it is shown in the table only."""
BAR, BARS = 0.42, {"height": 0.4, "edgecolor": CARD}
"""Inches that a bar with its label adds to a plot's height, and the look of bars."""
RATE = "tok/s: median and range"
ACROSS = {"context_tokens": ("context", "context (tokens)"), "batch": ("batch", "batch (sequences)")}

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
class LinePlot:
    """The meaning of a plot's lines. x and y: of a row, y with the distances to its smallest and largest run. ideal:
    the name of the roofline's ideal. names: functions that name the line of a row, each more specific than the one
    before."""

    x: Callable[[ReportRow], int]
    y: Callable[[ReportRow], tuple[float, float, float]]
    ideal: str
    names: tuple[Callable[[ReportRow], str], ...]

    def series(self, rows: list[ReportRow]) -> dict[str, list[ReportRow]]:
        """Rows by the name of their line, sorted by x; the first names with which no line has two rows at one x."""
        found: dict[str, list[ReportRow]] = {}
        for name in self.names:
            found = {}
            for row in sorted(rows, key=self.x):
                found.setdefault(name(row), []).append(row)
            if all(len(set(map(self.x, members))) == len(members) for members in found.values()):
                break
        return found


def throughput_panels(rows: list[ReportRow]) -> list[Panel]:
    """Plots of throughput: over contexts for each batch, over batches for each context, and bars for every scenario."""
    trends = _trends(rows, "context_tokens", "batch") + _trends(rows, "batch", "context_tokens")
    return trends + scenario_panels("Throughput", _draw_throughput, rows)


def speedup_panels(rows: list[ReportRow]) -> list[Panel]:
    """Plots of speedup over the length of a chain: a plot for each batch, a line for each context."""
    chains = [row for row in rows if row.result["setting"].get("num_spec_tokens") and row.ratio.value is not None]
    batches = sorted({row.result["scenario"]["batch"] for row in chains})
    groups = [(f"batch {b}", [row for row in chains if row.result["scenario"]["batch"] == b]) for b in batches]
    return draw_panels("Speedup by num_spec_tokens", groups, _draw_speedups)


def scenario_panels(title: str, draw: Callable[[Any, list[ReportRow]], None], rows: list[ReportRow]) -> list[Panel]:
    """A plot for each scenario."""
    return draw_panels(title, by_scenario(rows), draw)


def _trends(rows: list[ReportRow], across: str, fixed: str) -> list[Panel]:
    """A plot for each value of `fixed` for which there are several values of `across`."""
    word, axis = ACROSS[across]
    plot = LinePlot(
        lambda row: int(row.result["scenario"][across]), _spread, "ideal_tokens_per_s",
        names=(lambda row: row.label, lambda row: _join(row.label, row.scenario)),
    )  # fmt: skip

    def draw(axes: Any, rows: list[ReportRow]) -> None:
        axes.set(xscale="log", xlabel=axis, ylabel=RATE)
        _draw_lines(axes, rows, plot)

    groups = []
    for value in sorted({row.result["scenario"][fixed] for row in rows}):
        chosen = [row for row in rows if row.result["scenario"][fixed] == value]
        if len({plot.x(row) for row in chosen}) > 1:
            groups.append((f"{ACROSS[fixed][0]} {amount(value)}", chosen))
    return draw_panels(f"Throughput by {word}", groups, draw)


def _draw_speedups(axes: Any, rows: list[ReportRow]) -> None:
    plot = LinePlot(
        lambda row: int(row.result["setting"]["num_spec_tokens"]), lambda row: (row.ratio.value or 0.0, 0.0, 0.0),
        "ideal_speedup",
        names=(
            lambda row: _join(f"context {amount(row.result['scenario']['context_tokens'])}", row.variant),
            lambda row: _join(row.scenario, row.variant),
            lambda row: _join(row.scenario, row.label),
        ),
    )  # fmt: skip
    axes.axhline(1, color=INK, linewidth=1, linestyle=":", label="no gain")
    axes.set(xlabel="num_spec_tokens", ylabel="speedup")
    _draw_lines(axes, rows, plot)


def draw_acceptance(axes: Any, rows: list[ReportRow]) -> None:
    """Acceptance over positions in the draft: a line for each setting."""
    for row in rows:
        shares = row.result["eagle_speculation"]["per_position"]
        if shares:
            plots.draw_positions(axes, shares, label=row.label, **look(row.style))
    plots.name_positions(axes)


def draw_calibration(axes: Any, rows: list[ReportRow]) -> None:
    """Adaptive drafting's foretold chances against what came."""
    lines = [(row, parts) for row in rows if (parts := row.part("adaptive").get("calibration"))]
    for row, parts in lines:
        if row is lines[0][0]:
            axes.plot((0, 100), (0, 1), color=BASE, linestyle="--", label="as foretold")
        foretold = [100 * part["foretold"] for part in parts]
        axes.plot(foretold, [part["right"] for part in parts], label=row.label, **look(row.style))
    axes.set(xlabel="foretold chance (%)", ylabel="share accepted", ylim=plots.SHARES)


def draw_stages(axes: Any, rows: list[ReportRow]) -> None:
    """A bar for each setting, divided into the stages of a decode step."""
    starts = [0.0] * len(rows)
    for index, stage in enumerate(dict.fromkeys(stage for row in rows for stage in row.stage_ms)):
        lengths = [row.stage_ms.get(stage, 0.0) for row in rows]
        color = plots.LINE_COLORS[index % len(plots.LINE_COLORS)]
        axes.barh(range(len(rows)), lengths, left=starts, color=color, label=stage, **BARS)
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    _name_bars(axes, rows, [f"{figure(total)} ms" for total in starts])
    axes.set_xlabel("ms per decode step")


def _draw_lines(axes: Any, rows: list[ReportRow], plot: LinePlot) -> None:
    """Draw a line for each series, with whiskers from the smallest to the largest run, and its ideal, dashed. A line of
    one setting has the setting's style; other lines take styles in turn."""
    series = plot.series(rows)
    are_settings = all(name == members[0].label for name, members in series.items())
    top, num_ideals = BEYOND * max(y + above for y, _, above in map(plot.y, rows)), 0
    for index, (name, members) in enumerate(series.items()):
        style = look(members[0].style if are_settings else index)
        middles, *ends = zip(*map(plot.y, members), strict=True)
        whiskers = ends if any(map(any, ends)) else None
        axes.errorbar([plot.x(row) for row in members], middles, whiskers, label=name, capsize=3, **style)
        ideals = [
            (plot.x(row), ideal) for row in members if 0 < (ideal := row.part("roofline").get(plot.ideal, 0.0)) <= top
        ]
        if len(ideals) > 1:
            axes.plot(*zip(*ideals, strict=True), color=style["color"], linestyle="--", linewidth=1.2)
            num_ideals += 1
    is_beyond = any(row.part("roofline").get(plot.ideal, 0.0) > top for row in rows)
    axes.plot([], [], color=BASE, linestyle="--", label=_about_ideals(num_ideals, is_beyond))
    _mark_places(axes, sorted({plot.x(row) for row in rows}))
    axes.set_ylim(0, None)
    axes.yaxis.set_major_formatter("{x:,g}")


def _mark_places(axes: Any, places: list[int]) -> None:
    """Mark the x of each point; of labels that would touch, only the first stands."""
    positions = axes.transData.transform([(place, 1) for place in places])[:, 0]
    kept = [0]
    for i in range(1, len(places)):
        if positions[i] - positions[kept[-1]] >= (positions[-1] - positions[0]) / 10:
            kept.append(i)
    axes.set_xticks([places[i] for i in kept], [amount(places[i]) for i in kept])
    axes.minorticks_off()


def _draw_throughput(axes: Any, rows: list[ReportRow]) -> None:
    """Draw a bar for each setting, with the smallest and the largest run and the ideal."""
    medians, below, above = zip(*map(_spread, rows), strict=True)
    axes.barh(range(len(rows)), medians, **BARS, color=[look(row.style)["color"] for row in rows])
    axes.errorbar(medians, range(len(rows)), xerr=(below, above), linestyle="", color=INK, capsize=3)
    top = BEYOND * max(map(operator.add, medians, above))
    ideals = [row.part("roofline").get("ideal_tokens_per_s", 0.0) for row in rows]
    drawn = [(ideal, place) for place, ideal in enumerate(ideals) if 0 < ideal <= top]
    about = _about_ideals(len(drawn), max(ideals) > top)
    axes.scatter(*zip(*drawn or [(math.nan, 0)], strict=True), marker="|", s=120, linewidths=2, color=INK, label=about)
    ratios = ["" if row.ratio.value is None else str(row.ratio) for row in rows]
    _name_bars(axes, rows, [_join(f"{figure(rate)} tok/s", ratio) for rate, ratio in zip(medians, ratios, strict=True)])
    axes.set_xlabel(RATE)


def _name_bars(axes: Any, rows: list[ReportRow], values: list[str]) -> None:
    """Write label and value above each bar, the first at the top, and make room for that many bars."""
    axes.figure.set_figheight(BAR * len(rows) + 0.4)
    style = {"transform": axes.get_yaxis_transform(), "color": INK, "in_layout": False}
    for place, (row, value) in enumerate(zip(rows, values, strict=True)):
        label = textwrap.shorten(plain(row.label), CHARACTERS - len(value), placeholder="…")
        axes.text(0.01, place - 0.28, label, **style)
        axes.text(1, place - 0.28, value, ha="right", **style)
    axes.set(xlim=(0, None), ylim=(len(rows) - 0.6, -0.8), yticks=[])
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.spines["left"].set_visible(False)


def _about_ideals(num_drawn: int, is_beyond: bool) -> str | None:
    """The legend's line about ideals, also about ideals beyond the scale of the plot; None without ideals."""
    if num_drawn:
        return "roofline ideal, others beyond the scale" if is_beyond else "roofline ideal"
    return "roofline ideals are beyond the scale" if is_beyond else None


def _spread(row: ReportRow) -> tuple[float, float, float]:
    """Median throughput, with the distances to the smallest and the largest run; 0 where the file's rounding would make
    them negative."""
    spread = row.result["throughput_tokens_per_sec"]
    median = spread["median"]
    return median, max(0.0, median - spread["min"]), max(0.0, spread["max"] - median)


def _join(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


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
        for name, (light, _) in plots.PALETTE.items():
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
            drawing, grid = plots.new_figure(1, 1, (WIDTH, HEIGHT))
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
