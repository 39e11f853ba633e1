"""Plots as inline SVG: lines and horizontal bars from numbers and labels.

Knows nothing of results. An element has a class, never a colour: the style sheet of report.html sets the colours for
light, dark and print. Every string goes through ElementTree, which escapes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, tostring

from markupsafe import Markup

NUM_COLORS = 7
MARKERS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "M-3.6-3.6h7.2v7.2h-7.2z",
    "M0-5 4.8 3.6h-9.6z",
    "M0-5.2 5.2 0 0 5.2-5.2 0z",
    "M0 5-4.8-3.6h9.6z",
)
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 420, 46, 14, 22, 40
PLOT_HEIGHT, ROW_HEIGHT, BAR_HEIGHT = 190, 36, 11
INSET = 14  # space between an axis and the outermost marker
NARROWEST_LABEL = 34  # least distance of two x labels; closer ones are left out
CHARACTERS = 62  # how many characters of a bar's label and value fit into a row


@dataclass(frozen=True)
class Style:
    """How a series looks on the whole page. Series differ in colour and marker, so that either identifies a series."""

    color: str
    marker: str

    @classmethod
    def of(cls, index: int) -> Style:
        """Pair number `index` of 35 pairs of colour and marker; -1 is the neutral one."""
        return cls("base" if index < 0 else f"c{index % NUM_COLORS}", MARKERS[index % len(MARKERS)])


@dataclass(frozen=True)
class Point:
    """A measured value with its low and high end. text: shown when the pointer is on it."""

    x: int
    y: float
    low: float
    high: float
    text: str


@dataclass(frozen=True)
class ChartLine:
    """One series. A dashed one has no markers: it was computed, not measured."""

    label: str
    style: Style
    points: tuple[Point, ...]
    is_dashed: bool = False


@dataclass(frozen=True)
class Axes:
    """The axes of a plot. x and y: titles with units; is_log: whether x is logarithmic; top: the upper end of y, which
    begins at 0 (None: above the largest value); reference: the height of a line across."""

    x: str
    y: str
    is_log: bool = False
    top: float | None = None
    reference: float | None = None


@dataclass(frozen=True)
class Segment:
    """A stretch of a bar."""

    color: str
    length: float
    text: str


@dataclass(frozen=True)
class Bar:
    """A row of a bar chart: label and value above, segments end to end below. whisker: low and high end; mark: the
    place of an ideal."""

    label: str
    value: str
    segments: tuple[Segment, ...]
    whisker: tuple[float, float] | None = None
    mark: float | None = None


def draw_lines(lines: list[ChartLine], axes: Axes, title: str) -> Markup:
    """A plot of series over a few whole numbers, each number at its true place on the axis."""
    xs = sorted({point.x for line in lines for point in line.points})
    marks = ticks(axes.top or max([p.high for line in lines for p in line.points] + [axes.reference or 0.0]))
    bottom = TOP + PLOT_HEIGHT
    svg = _canvas(bottom + BOTTOM, title)

    def across(x: float) -> float:
        first, last, at = ((math.log(v) if axes.is_log else v) for v in (xs[0], xs[-1], x))
        share = (at - first) / (last - first) if last > first else 0.5
        return LEFT + INSET + share * (WIDTH - LEFT - RIGHT - 2 * INSET)

    def up(y: float) -> float:
        return bottom - PLOT_HEIGHT * y / marks[-1]

    _text(svg, 0, 11, axes.y, "unit")
    for mark in marks:
        _line(svg, "grid" if mark else "axis", (LEFT, up(mark)), (WIDTH - RIGHT, up(mark)))
        _text(svg, LEFT - 6, up(mark) + 4, f"{mark:,g}", "tick end")
    labelled = -math.inf
    for x in xs:
        if across(x) - labelled >= NARROWEST_LABEL:
            labelled = across(x)
            _text(svg, labelled, bottom + 16, count(x), "tick middle")
    _text(svg, (LEFT + WIDTH - RIGHT) / 2, bottom + 34, axes.x, "unit middle")
    if axes.reference is not None:
        _line(svg, "reference", (LEFT, up(axes.reference)), (WIDTH - RIGHT, up(axes.reference)))
    for line in lines:
        group = SubElement(svg, "g", {"class": f"{line.style.color}{' ideal' if line.is_dashed else ''}"})
        path = " ".join(f"{across(p.x):.1f},{up(p.y):.1f}" for p in line.points)
        SubElement(group, "polyline", {"points": path})
        for point in () if line.is_dashed else line.points:
            at = across(point.x)
            if point.high > point.low:
                _whisker(group, (at, up(point.low)), (at, up(point.high)))
            place = {"d": line.style.marker, "transform": f"translate({at:.1f} {up(point.y):.1f})"}
            SubElement(SubElement(group, "path", place), "title").text = point.text
    return _markup(svg)


def draw_bars(bars: list[Bar], unit: str, title: str) -> Markup:
    """A chart of bars below one another on one scale from 0. A label may be as long as the plot is wide."""
    ends = [max(sum(s.length for s in b.segments), (b.whisker or (0, 0))[1], b.mark or 0.0) for b in bars]
    marks = ticks(max(ends))
    bottom = len(bars) * ROW_HEIGHT + 4
    svg = _canvas(bottom + BOTTOM, title)

    def across(value: float) -> float:
        return 8 + (WIDTH - 30) * value / marks[-1]

    for mark in marks:
        _line(svg, "grid" if mark else "axis", (across(mark), 0), (across(mark), bottom))
        _text(svg, across(mark), bottom + 15, f"{mark:,g}", "tick middle")
    _text(svg, WIDTH / 2, bottom + 33, unit, "unit middle")
    for index, bar in enumerate(bars):
        top = index * ROW_HEIGHT + 18
        _text(svg, across(0) + 3, top - 5, shorten(bar.label, CHARACTERS - len(bar.value)), "name")
        _text(svg, WIDTH, top - 5, bar.value, "value end")
        start, middle = 0.0, top + BAR_HEIGHT / 2
        for part in bar.segments:
            left, right = across(start), across(start + part.length)
            box = {"x": left, "y": top, "width": right - left, "height": BAR_HEIGHT}
            attributes = {"class": f"bar {part.color}"} | {name: f"{value:.1f}" for name, value in box.items()}
            SubElement(SubElement(svg, "rect", attributes), "title").text = part.text
            start += part.length
        if bar.whisker is not None and bar.whisker[1] > bar.whisker[0]:
            _whisker(svg, (across(bar.whisker[0]), middle), (across(bar.whisker[1]), middle))
        if bar.mark is not None:
            _line(svg, "mark", (across(bar.mark), top - 2), (across(bar.mark), top + BAR_HEIGHT + 4))
    return _markup(svg)


def swatch(style: Style, is_dashed: bool = False) -> Markup:
    """The legend's sign of a series."""
    svg = Element("svg", {"class": "swatch", "viewBox": "0 0 30 12", "aria-hidden": "true"})
    group = SubElement(svg, "g", {"class": f"{style.color}{' ideal' if is_dashed else ''}"})
    SubElement(group, "polyline", {"points": "1,6 29,6"})
    if not is_dashed:
        SubElement(group, "path", {"d": style.marker, "transform": "translate(15 6)"})
    return _markup(svg)


def block(color: str) -> Markup:
    """The legend's sign of a segment of a bar."""
    svg = Element("svg", {"class": "swatch", "viewBox": "0 0 30 12", "aria-hidden": "true"})
    SubElement(svg, "rect", {"class": f"bar {color}", "x": "9", "width": "12", "height": "12"})
    return _markup(svg)


def tick(kind: str) -> Markup:
    """The legend's sign of a whisker, a mark or a reference line."""
    svg = Element("svg", {"class": "swatch", "viewBox": "0 0 30 12", "aria-hidden": "true"})
    if kind == "whisker":
        _whisker(svg, (5, 6), (25, 6))
    else:
        _line(svg, kind, *(((15, 0), (15, 12)) if kind == "mark" else ((1, 6), (29, 6))))
    return _markup(svg)


def ticks(top: float) -> list[float]:
    """At most six round numbers from 0, the last of them not below top."""
    if top < 1e-12:
        return [0.0, 1.0]
    power = math.floor(math.log10(top / 5))
    step = next(m for m in (1, 2, 2.5, 5, 10) if top <= 5 * m * 10.0**power * (1 + 1e-9)) * 10.0**power
    return [float(f"{i * step:.12g}") for i in range(math.ceil(top / step * (1 - 1e-9)) + 1)]


def count(number: int) -> str:
    """A number of tokens, sequences or positions: 8K is 8192."""
    return f"{number // 1024}K" if number >= 1024 and number % 1024 == 0 else f"{number:,}"


def figure(number: float | None) -> str:
    """A measured number to three digits or more; a dash for none."""
    if number is None:
        return "–"
    if abs(number) < 1:
        return f"{number:#.3g}"
    return f"{number:,.{2 if abs(number) < 10 else 1 if abs(number) < 100 else 0}f}"


def shorten(text: str, length: int) -> str:
    """The text, cut to `length` characters if it is longer."""
    return text if len(text) <= length else text[: length - 1] + "…"


def _canvas(height: float, title: str) -> Element:
    box = f"0 0 {WIDTH} {height:g}"
    return Element("svg", {"class": "plot", "viewBox": box, "role": "img", "aria-label": title})


def _text(parent: Element, x: float, y: float, text: str, kind: str) -> None:
    SubElement(parent, "text", {"class": kind, "x": f"{x:.1f}", "y": f"{y:.1f}"}).text = text


def _line(parent: Element, kind: str, start: tuple[float, float], end: tuple[float, float]) -> None:
    d = f"M{start[0]:.1f} {start[1]:.1f}L{end[0]:.1f} {end[1]:.1f}"
    SubElement(parent, "path", {"class": kind, "d": d})


def _whisker(parent: Element, low: tuple[float, float], high: tuple[float, float]) -> None:
    """A line with caps across both ends, over a halo that sets it off from a bar of any colour."""
    dx, dy = (0, 4) if low[1] == high[1] else (4, 0)
    pieces = [(low, high)] + [((x - dx, y - dy), (x + dx, y + dy)) for x, y in (low, high)]
    d = "".join(f"M{a[0]:.1f} {a[1]:.1f}L{b[0]:.1f} {b[1]:.1f}" for a, b in pieces)
    for kind in ("halo", "whisker"):
        SubElement(parent, "path", {"class": kind, "d": d})


def _markup(svg: Element) -> Markup:
    return Markup(tostring(svg, encoding="unicode"))  # ElementTree has escaped what it holds
