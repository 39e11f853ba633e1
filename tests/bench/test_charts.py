"""The report's plots: round scales, lengths and places in proportion, colours that everybody can tell apart."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from xml.etree.ElementTree import Element, fromstring

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from aquiline.bench.report import charts
from aquiline.bench.report.charts import (
    NUM_COLORS,
    WIDTH,
    Axes,
    Bar,
    ChartLine,
    Point,
    Segment,
    Style,
    count,
    draw_bars,
    draw_lines,
    figure,
    ticks,
)


@given(st.floats(1e-9, 1e15))
def test_ticks_are_few_round_and_enough(top: float) -> None:
    marks = ticks(top)
    assert marks[0] == 0 and marks[-1] >= top * (1 - 1e-9) and 3 <= len(marks) <= 6
    assert np.diff(marks) == pytest.approx(marks[1], rel=1e-6)
    digits = f"{marks[1]:.6e}".split("e")[0].rstrip("0").rstrip(".")
    assert digits in ("1", "2", "2.5", "5") and marks[-2] < top


def test_ticks_of_nothing() -> None:
    assert ticks(0.0) == ticks(5e-324) == [0.0, 1.0]


def points(*values: tuple[int, float]) -> tuple[Point, ...]:
    return tuple(Point(x, y, 0.9 * y, 1.1 * y, f"{x}: {y}") for x, y in values)


def places(svg: Element) -> list[list[tuple[float, float]]]:
    """The corners of each line."""
    lines = [e.attrib["points"].split() for e in svg.iter("polyline")]
    return [[(float(x), float(y)) for x, y in (corner.split(",") for corner in line)] for line in lines]


def test_lines_stand_in_proportion() -> None:
    lines = [ChartLine("a", Style.of(0), points((1024, 10.0), (4096, 40.0), (8192, 20.0)))]
    lines += [ChartLine("b", Style.of(1), points((1024, 5.0), (8192, 50.0)), is_dashed=True)]
    svg = fromstring(draw_lines(lines, Axes("x", "y", is_log=True), "title"))
    (a1, a4, a8), (b1, b8) = places(svg)
    assert (a1[0], a8[0]) == (b1[0], b8[0]) and (a4[0] - a1[0]) / (a8[0] - a4[0]) == pytest.approx(2, abs=0.01)
    rises = [a1[1] - a4[1], a1[1] - a8[1], b1[1] - b8[1]]
    assert rises == pytest.approx([30 * rises[1] / 10, rises[1], 45 * rises[1] / 10], abs=0.5) and rises[1] > 10
    assert [e.text for e in svg.iter("text") if "middle" in e.attrib["class"]] == ["1K", "4K", "8K", "x"]
    assert len(list(svg.iter("title"))) == 3, "markers of what was measured only"
    linear = places(fromstring(draw_lines(lines, Axes("x", "y"), "title")))[0]
    assert (linear[1][0] - linear[0][0]) / (linear[2][0] - linear[1][0]) == pytest.approx(3 / 4, abs=0.01)


def test_labels_that_would_touch_are_left_out() -> None:
    lines = [ChartLine("a", Style.of(0), points((1, 1.0), (1000, 1.0), (1001, 1.0)))]
    svg = fromstring(draw_lines(lines, Axes("x", "y"), "title"))
    assert [e.text for e in svg.iter("text") if e.attrib["class"] == "tick middle"] == ["1", "1,000"]


def test_one_point_is_drawn_too() -> None:
    (((x, y),),) = places(fromstring(draw_lines([ChartLine("a", Style.of(0), points((7, 0.0)))], Axes("x", "y"), "t")))
    assert 0 < x < WIDTH and y == charts.TOP + charts.PLOT_HEIGHT


def test_bars_are_as_long_as_their_figures() -> None:
    bars = [
        Bar("a", "30", (Segment("c0", 10.0, ""), Segment("c1", 20.0, "")), (25.0, 40.0), 60.0),
        Bar("b", "15", (Segment("c0", 15.0, ""),)),
    ]
    svg = fromstring(draw_bars(bars, "ms", "title"))
    first, second, third = ({k: float(v) for k, v in e.attrib.items() if k != "class"} for e in svg.iter("rect"))
    unit = third["width"] / 15
    assert (first["width"], second["width"]) == pytest.approx((10 * unit, 20 * unit), abs=0.1)
    assert first["x"] + first["width"] == pytest.approx(second["x"], abs=0.1)
    paths = {e.attrib["class"]: [float(n) for n in re.findall(r"[\d.]+", e.attrib["d"])] for e in svg.iter("path")}
    low, _, high, _ = paths["whisker"][:4]
    assert (low - first["x"], high - first["x"]) == pytest.approx((25 * unit, 40 * unit), abs=0.1)
    assert paths["mark"][0] - first["x"] == pytest.approx(60 * unit, abs=0.1)


def test_numbers_are_short() -> None:
    assert [figure(n) for n in (None, 0.0, 0.1234, 1.234, 12.34, 999.6, 12345.6)] == [
        "–", "0.00", "0.123", "1.23", "12.3", "1,000", "12,346"
    ]  # fmt: skip
    assert [count(n) for n in (1, 512, 1000, 1024, 65536)] == ["1", "512", "1,000", "1K", "64K"]


SIMULATED = {
    "everybody": np.eye(3),
    "no red": np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
    "no green": np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
    "no blue": np.array([[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]]),
}
"""How linear RGB looks without one kind of cone. Source: Machado, Oliveira, Fernandes 2009, severity 1.0."""
LMS = np.array([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]])
LAB = np.array([[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]])
"""Linear RGB to Oklab, where distance is how different two colours look. Source: Ottosson 2020, Oklab."""


def linear(color: str) -> NDArray[np.float64]:
    c = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colors_can_be_told_apart_and_seen(theme: int) -> None:
    source = Path(charts.__file__).with_name("page.html").read_text(encoding="utf-8")
    palette = dict(
        re.findall(r"--([a-z0-9]+): (#[0-9a-f]{6})", re.findall(r":root \{(.*?)\n *\}", source, re.S)[theme])
    )
    colors = [linear(palette[name]) for name in ["base", *(f"c{i}" for i in range(NUM_COLORS))]]
    card = linear(palette["card"])
    light = np.array([0.2126, 0.7152, 0.0722])
    for color in colors:
        dim, bright = sorted((light @ color, light @ card))
        assert (bright + 0.05) / (dim + 0.05) >= 3, "WCAG 2.1, 1.4.11: graphical objects"
    for seen_by, matrix in SIMULATED.items():
        labs = [LAB @ np.cbrt(LMS @ np.clip(matrix @ color, 0, 1)) for color in colors]
        assert min(np.linalg.norm(a - b) for a, b in combinations(labs, 2)) > 0.1, seen_by
    assert len({Style.of(i) for i in range(-1, 35)}) == 36
