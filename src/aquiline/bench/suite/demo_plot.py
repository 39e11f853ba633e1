"""The demo as a picture: speed by setting, acceptance by position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aquiline.bench.plots import COLORS, draw_positions, name_positions, new_figure, save
from aquiline.bench.results.intervals import estimate
from aquiline.bench.suite.demo_run import TEMPERATURES, DemoResult

SHOWN = 8
"""Positions of a draft that are drawn."""


def plot_demo(result: DemoResult, path: Path) -> None:
    """Write a PNG. Raises ValueError if matplotlib is not installed."""
    figure, grid = new_figure(1, 2, (11, 3.8))
    _draw_rates(grid[0][0], result)
    _draw_acceptance(grid[0][1], result)
    sources = f"{len(result.demo.prompts)} held-out prompts, {result.system['cpu']}, {result.system['dtype']} storage"
    figure.suptitle(f"same tokens, fewer target calls: {sources}", fontsize=10)
    save(figure, path, "Nothing is left of it")


def _draw_rates(axes: Any, result: DemoResult) -> None:
    """Draw a bar for each run, with its interval, speedup and tau; the runs of a temperature stand together."""
    width = len(result.runs) // len(TEMPERATURES) + 1
    rates = [estimate(run.rates) for run in result.runs]
    named = {}
    for group, temperature in enumerate(TEMPERATURES):
        runs = [(run, rate) for run, rate in zip(result.runs, rates, strict=True) if run.temperature == temperature]
        for place, (run, rate) in enumerate(runs):
            x = group * width + place
            bar = axes.bar(x, rate.value, color=COLORS[run.drafting.name], width=0.9)
            if rate.low is not None and rate.high is not None:
                ends = [[rate.value - rate.low], [rate.high - rate.value]]
                axes.errorbar(x, rate.value, yerr=ends, color="#1a202c", capsize=3, linewidth=1)
            told = f"{run.speedup.value:.2f}x\ntau {run.counters.tau:.2f}"
            axes.text(x, rate.high or rate.value, told, ha="center", va="bottom", fontsize=7)
            named[run.name] = bar
    middles = [group * width + (width - 2) / 2 for group in range(len(TEMPERATURES))]
    axes.set_xticks(middles, [f"temperature {t:g}" for t in TEMPERATURES])
    axes.set_ylabel("decode tok/s")
    axes.set_ylim(0, 1.45 * max(rate.high or rate.value for rate in rates))
    axes.legend(list(named.values()), list(named), fontsize=8, loc="upper right")


def _draw_acceptance(axes: Any, result: DemoResult) -> None:
    """Draw acceptance by position: a line for each run that drafts, dashed where it was sampled."""
    for run in result.runs:
        if run.drafting.is_speculative:
            draw_positions(
                axes, run.counters.per_position[:SHOWN], linestyle="--" if run.temperature else "-",
                color=COLORS[run.drafting.name], label=f"{run.name}, temperature {run.temperature:g}",
            )  # fmt: skip
    name_positions(axes)
    axes.legend(fontsize=8)
