"""The report's plots: lengths and places in proportion, labels that do not touch, colours that all can tell apart."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.bench.reports import Results, legend, measured, plots, results

from aquiline.bench.plots import PALETTE, look
from aquiline.bench.report.panels import _mark_places
from aquiline.bench.report.report_tables import figure
from aquiline.bench.report.sections import amount, sections
from aquiline.bench.results.intervals import spread

__all__ = ["measured", "results"]


def lines(axes: Any) -> dict[str, list[list[float]]]:
    """The corners of each line that was measured, by its label."""
    return {bars.get_label(): bars.lines[0].get_xydata().tolist() for bars in axes.containers}


def test_lines_stand_at_their_figures(results: Results) -> None:
    for file, result in results.items():
        rate = float(file.split("x")[0])
        result["throughput_tokens_per_sec"] = spread([rate, 3 * rate])
    drawn = plots(results)
    axes = drawn["Throughput by context, batch 1"]
    assert lines(axes)["chain-3"] == [[16, 32], [48, 96]] and axes.get_xscale() == "log"
    whiskers = axes.containers[0].lines[2][0].get_segments()
    assert [[low[1], high[1]] for low, high in whiskers] == [[16, 48], [48, 144]]
    assert axes.get_ylim()[0] == 0 < 144 < axes.get_ylim()[1]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["16", "48"]
    assert set(legend(axes)) == {"baseline", "chain-2", "chain-3", "tree N=6"}
    speedups = drawn["Speedup by num_spec_tokens, batch 1"]
    assert lines(speedups) == {f"context {n}": [[2, 1], [3, 1]] for n in (16, 48)} and "no gain" in legend(speedups)


def test_every_line_has_a_look_of_its_own(results: Results) -> None:
    for title, axes in plots(results).items():
        if title.startswith("Throughput by"):
            looks = {(bars.lines[0].get_color(), bars.lines[0].get_marker()) for bars in axes.containers}
            assert len(looks) == len(axes.containers) == 4


def test_labels_that_would_touch_are_left_out() -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    axes.set_xlim(0, 1010)
    _mark_places(axes, [1, 1000, 1001])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "1,000"]
    _mark_places(axes, [7])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["7"]


def test_bars_are_as_long_as_their_figures(results: Results) -> None:
    for result in results.values():
        result["throughput_tokens_per_sec"] = spread([25.0, 30.0, 40.0])
        result["roofline"] = {"ideal_tokens_per_s": 60.0}
        result["stage_ms"] = {"draft": 10.0, "verify": 20.0}
    drawn = plots(results)
    axes = drawn["Throughput, grid: context 16, batch 1, 12 new tokens"]
    bars, whiskers = axes.containers
    assert [bar.get_width() for bar in bars] == [30.0] * 4
    assert [[low[0], high[0]] for low, high in whiskers.lines[2][0].get_segments()] == [[25, 40]] * 4
    assert axes.collections[-1].get_offsets().tolist() == [[60, place] for place in range(4)]
    texts = [text.get_text() for text in axes.texts]
    assert texts[:4] == ["baseline", "30.0 tok/s, 1.00x", "chain-2", "30.0 tok/s, 1.00x"]
    stages = drawn["Stage times, grid: context 16, batch 1, 12 new tokens"]
    draft, verify = stages.containers
    assert [(bar.get_x(), bar.get_width()) for bar in draft] == [(0, 10)] * 4
    assert [(bar.get_x(), bar.get_width()) for bar in verify] == [(10, 20)] * 4
    assert legend(stages) == ["draft", "verify"] and stages.texts[1].get_text() == "30.0 ms"


def test_long_labels_are_cut_beside_bars_and_folded_in_legends(results: Results) -> None:
    name = "a name " * 20
    for result in results.values():
        result["setting"]["name"] += f" {name}\ud800$x$"
    drawn = plots(results)
    bars = drawn["Throughput, grid: context 16, batch 1, 12 new tokens"]
    assert all(len(text.get_text()) <= 60 for text in bars.texts) and bars.texts[0].get_text().endswith("…")
    axes = drawn["Throughput by context, batch 1"]
    told = legend(axes)
    folded = [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert all(len(line) <= 52 for text in folded for line in text.splitlines())
    assert told[0].endswith("a name \ufffd$x$")
    assert len({row.label for row in sections(results)[0].rows}) == 4


def test_numbers_are_short() -> None:
    assert [figure(n) for n in (None, 0.0, 0.1234, 1.234, 12.34, 999.6, 12345.6)] == [
        "-", "0.00", "0.123", "1.23", "12.3", "1,000", "12,346"
    ]  # fmt: skip
    assert [amount(n) for n in (1, 512, 1000, 1024, 65536)] == ["1", "512", "1,000", "1K", "64K"]


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
    palette = {name: colors[theme] for name, colors in PALETTE.items()}
    colors = [linear(palette[name]) for name in ("base", "c0", "c1", "c2", "c3", "c4", "c5", "c6")]
    card = linear(palette["card"])
    light = np.array([0.2126, 0.7152, 0.0722])
    for color in colors:
        dim, bright = sorted((light @ color, light @ card))
        assert (bright + 0.05) / (dim + 0.05) >= 3, "WCAG 2.1, 1.4.11: graphical objects"
    for seen_by, matrix in SIMULATED.items():
        labs = [LAB @ np.cbrt(LMS @ np.clip(matrix @ color, 0, 1)) for color in colors]
        assert min(np.linalg.norm(a - b) for a, b in combinations(labs, 2)) > 0.1, seen_by
    assert len({tuple(look(style).values()) for style in range(-1, 35)}) == 36
