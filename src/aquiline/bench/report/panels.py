"""A section's plots: which rows make which lines and bars."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from markupsafe import Markup

from aquiline.bench.report.charts import (
    Axes,
    Bar,
    ChartLine,
    Point,
    Segment,
    Style,
    block,
    count,
    draw_bars,
    draw_lines,
    figure,
    swatch,
    tick,
)
from aquiline.bench.report.sections import ReportRow, badges, number

BEYOND = 3.0
"""An ideal this many times above all measurements would flatten the plot; it is shown in the table only."""
ACROSS = {"context_tokens": ("context", "context (tokens)"), "batch": ("batch", "batch (sequences)")}

Scenarios = list[tuple[str, list[ReportRow]]]
Legend = list[tuple[Markup, str]]


@dataclass(frozen=True)
class Panel:
    """One plot with its title and legend. badges: what limits the meaning of its figures."""

    title: str
    badges: list[str]
    svg: Markup
    legend: Legend


@dataclass(frozen=True)
class Series:
    """The rows of one line, sorted by x."""

    name: str
    style: Style
    rows: list[ReportRow]


@dataclass(frozen=True)
class Over:
    """What the lines of a plot show. x and y: of a row, y with its smallest and largest run. ideal: the name of its
    ideal in the roofline. names: functions that name the line of a row, each more specific than the one before."""

    x: Callable[[ReportRow], int]
    y: Callable[[ReportRow], tuple[float, float, float]]
    ideal: str
    axes: Axes
    names: tuple[Callable[[ReportRow], str], ...]


def throughput_panels(rows: list[ReportRow], scenarios: Scenarios) -> list[Panel]:
    """Plots of throughput: over contexts for each batch, over batches for each context, and bars for every scenario."""
    trends = _trends(rows, "context_tokens", "batch") + _trends(rows, "batch", "context_tokens")
    return trends + [_throughput_bars(*each) for each in scenarios]


def speedup_panels(rows: list[ReportRow]) -> list[Panel]:
    """Plots of speedup over the length of a chain: a plot for each batch, a line for each context."""
    over = Over(
        x=lambda row: row.num_spec_tokens or 0, y=lambda row: (row.speedup or 0.0,) * 3, ideal="ideal_speedup",
        axes=Axes("num_spec_tokens", "speedup", reference=1.0),
        names=(
            lambda row: _join(f"context {count(row.context_tokens)}", row.variant),
            lambda row: _join(row.scenario, row.variant),
            lambda row: _join(row.scenario, row.label),
        ),
    )  # fmt: skip
    chains = [row for row in rows if row.num_spec_tokens is not None and row.speedup is not None]
    panels = []
    for batch in sorted({row.batch for row in chains}):
        panel = _lines(f"Speedup by num_spec_tokens, batch {batch}", [r for r in chains if r.batch == batch], over)
        panels.append(Panel(panel.title, panel.badges, panel.svg, [*panel.legend, (tick("reference"), "no gain")]))
    return panels


def acceptance_panels(scenarios: Scenarios) -> list[Panel]:
    """Plots of acceptance over positions in the draft: a plot for each scenario, a line for each setting."""
    panels = []
    for name, rows in scenarios:
        lines = []
        for row in rows:
            shares = row.result["eagle_speculation"]["per_position"]
            points = [
                Point(position, share, share, share, f"{row.label}, position {position}: {share:.3f}")
                for position, share in enumerate(map(number, shares), 1)
                if share is not None
            ]
            lines += [ChartLine(row.label, row.style, tuple(points))] if points else []
        if lines:
            title = f"Acceptance by position, {name}"
            svg = draw_lines(lines, Axes("position in the draft", "share of steps", top=1.0), title)
            panels.append(Panel(title, badges(rows), svg, [(swatch(line.style), line.label) for line in lines]))
    return panels


def calibration_panels(scenarios: Scenarios) -> list[Panel]:
    """Plots of adaptive drafting's foretold chances against what came: a plot for each scenario."""
    panels = []
    for name, rows in scenarios:
        lines = []
        for row in rows:
            points = tuple(
                Point(round(100 * part["foretold"]), part["right"], part["right"], part["right"],
                      f"{row.label}, foretold {part['foretold']:.0%}: {part['right']:.0%} of {part['tokens']:,} tokens")
                for part in row.adaptive.get("calibration", ())
            )  # fmt: skip
            lines += [ChartLine(row.label, row.style, points)] if points else []
        if lines:
            title = f"Foretold and true chances, {name}"
            ends = tuple(Point(x, x / 100, x / 100, x / 100, "") for x in (0, 100))
            equal = ChartLine("", Style.of(-1), ends, is_dashed=True)
            svg = draw_lines([equal, *lines], Axes("foretold chance (%)", "share accepted", top=1.0), title)
            legend = [(swatch(line.style), line.label) for line in lines]
            legend.append((swatch(Style.of(-1), is_dashed=True), "as foretold"))
            panels.append(Panel(title, badges(rows), svg, legend))
    return panels


def stage_panels(scenarios: Scenarios) -> list[Panel]:
    """Plots of stage times: a bar for each setting, divided into the stages of a decode step."""
    panels = []
    for name, rows in scenarios:
        timed = [row for row in rows if row.stage_ms]
        stages = list(dict.fromkeys(stage for row in timed for stage in row.stage_ms))
        colors = {stage: Style.of(index).color for index, stage in enumerate(stages)}
        bars = [
            Bar(
                row.label, f"{figure(sum(row.stage_ms.values()))} ms",
                tuple(
                    Segment(colors[stage], ms, f"{row.label}, {stage}: {figure(ms)} ms")
                    for stage, ms in row.stage_ms.items()
                ),
            )
            for row in timed
        ]  # fmt: skip
        if bars:
            title = f"Stage times, {name}"
            svg = draw_bars(bars, "ms per decode step", title)
            panels.append(Panel(title, badges(timed), svg, [(block(colors[stage]), stage) for stage in stages]))
    return panels


def _trends(rows: list[ReportRow], across: str, fixed: str) -> list[Panel]:
    """A plot for each value of `fixed` for which there are several values of `across`."""
    word, axis = ACROSS[across]
    over = Over(
        x=lambda row: int(row.result["scenario"][across]), y=_spread, ideal="ideal_tokens_per_s",
        axes=Axes(axis, "tok/s", is_log=True),
        names=(lambda row: row.label, lambda row: _join(row.label, row.scenario)),
    )  # fmt: skip
    panels = []
    for value in sorted({row.result["scenario"][fixed] for row in rows}):
        chosen = [row for row in rows if row.result["scenario"][fixed] == value]
        if len({over.x(row) for row in chosen}) > 1:
            panels.append(_lines(f"Throughput by {word}, {ACROSS[fixed][0]} {count(value)}", chosen, over))
    return panels


def _series(rows: list[ReportRow], over: Over) -> list[Series]:
    """Rows grouped into named lines. A line of one setting has the setting's style; other lines take styles in turn."""
    named = _named(rows, over.x, over.names)
    are_settings = all(name == members[0].label for name, members in named)
    return [
        Series(name, members[0].style if are_settings else Style.of(index), sorted(members, key=over.x))
        for index, (name, members) in enumerate(named)
    ]


def _named(
    rows: list[ReportRow], x: Callable[[ReportRow], int], names: tuple[Callable[[ReportRow], str], ...]
) -> list[tuple[str, list[ReportRow]]]:
    """Rows grouped by the first of `names`; a group with two rows at one x is divided by the next name."""
    by_name: defaultdict[str, list[ReportRow]] = defaultdict(list)
    for row in rows:
        by_name[names[0](row)].append(row)
    found = []
    for name, members in by_name.items():
        is_clear = len({x(row) for row in members}) == len(members)
        found += [(name, members)] if is_clear or len(names) == 1 else _named(members, x, names[1:])
    return found


def _lines(title: str, rows: list[ReportRow], over: Over) -> Panel:
    measured, ideals = [], []
    most = BEYOND * max(over.y(row)[2] for row in rows)
    for series in _series(rows, over):
        points = []
        for row in series.rows:
            y, low, high = over.y(row)
            text = f"{series.name}, {over.axes.x} {over.x(row)}: {figure(y)} {over.axes.y}"
            points.append(Point(over.x(row), y, low, high, text))
        measured.append(ChartLine(series.name, series.style, tuple(points)))
        bounds = [(over.x(row), row.roofline(over.ideal)) for row in series.rows]
        ideal = tuple(Point(x, bound, bound, bound, "") for x, bound in bounds if bound and bound <= most)
        ideals += [ChartLine(series.name, series.style, ideal, is_dashed=True)] if len(ideal) > 1 else []
    legend = [(swatch(line.style), line.label) for line in measured]
    if any(over.y(row)[1] < over.y(row)[2] for row in rows):
        legend.append((tick("whisker"), "smallest to largest run"))
    beyond = any((row.roofline(over.ideal) or 0.0) > most for row in rows)
    legend += _ideal_legend(swatch(Style.of(-1), is_dashed=True), bool(ideals), beyond)
    return Panel(title, badges(rows), draw_lines(ideals + measured, over.axes, title), legend)


def _throughput_bars(name: str, rows: list[ReportRow]) -> Panel:
    most = BEYOND * max(_spread(row)[2] for row in rows)
    bars = []
    for row in rows:
        median, low, high = _spread(row)
        ideal = row.roofline("ideal_tokens_per_s")
        value = f"{figure(median)} tok/s" + (f", {row.ratio}" if row.speedup is not None else "")
        text = f"{row.label}: {figure(median)} tok/s, {figure(low)} to {figure(high)}"
        mark = ideal if ideal and ideal <= most else None
        bars.append(Bar(row.label, value, (Segment(row.style.color, median, text),), (low, high), mark))
    legend = [(block("base"), "median")]
    if any(bar.whisker and bar.whisker[0] < bar.whisker[1] for bar in bars):
        legend.append((tick("whisker"), "smallest to largest run"))
    beyond = any((row.roofline("ideal_tokens_per_s") or 0.0) > most for row in rows)
    legend += _ideal_legend(tick("mark"), any(bar.mark for bar in bars), beyond)
    title = f"Throughput, {name}"
    return Panel(title, badges(rows), draw_bars(bars, "tok/s", title), legend)


def _ideal_legend(icon: Markup, is_drawn: bool, is_beyond: bool) -> Legend:
    """The legend's line about ideals, also about ideals beyond the scale of the plot."""
    texts = {
        (True, False): "roofline ideal",
        (True, True): "roofline ideal, others beyond the scale",
        (False, True): "roofline ideals are beyond the scale",
    }
    return [(icon, texts[is_drawn, is_beyond])] if is_drawn or is_beyond else []


def _spread(row: ReportRow) -> tuple[float, float, float]:
    spread = row.throughput
    return spread["median"], spread["min"], spread["max"]


def _join(*parts: str) -> str:
    return ", ".join(part for part in parts if part)
