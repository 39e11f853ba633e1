"""The demo as a picture: speed by setting, acceptance by position."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

from aquiline.bench.results.intervals import estimate
from aquiline.bench.suite.demo_run import TEMPERATURES, DemoResult
from aquiline.spec.registry import DRAFTINGS
from aquiline.writing import writing

SHARES = (-0.03, 1.03)
"""The axis of shares, with room for the whole mark of a point at either end."""
COLORS = dict(zip(DRAFTINGS, cycle(("#8a8f98", "#2b6cb0", "#b7791f", "#2f855a", "#6b46c1")), strict=False))

SHOWN = 8
"""Positions of a draft that are drawn."""


def plot_demo(result: DemoResult, path: Path) -> None:
    """Write a PNG. Raises ValueError if matplotlib is not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ValueError("plot: needs matplotlib; pip install 'aquiline[train]'") from None

    figure, (speed, accepted) = pyplot.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    runs_of = {t: [r for r in result.runs if r.temperature == t] for t in TEMPERATURES}
    for group, (temperature, runs) in enumerate(runs_of.items()):
        baseline = result.baseline(temperature)
        for place, run in enumerate(runs):
            x = group * (len(runs) + 1) + place
            rate = estimate(run.rates)
            bar = speed.bar(x, rate.value, color=COLORS[run.drafting.name], width=0.9)
            if rate.low is not None and rate.high is not None:
                ends = [[rate.value - rate.low], [rate.high - rate.value]]
                speed.errorbar(x, rate.value, yerr=ends, color="#1a202c", capsize=3, linewidth=1)
            label = f"{run.speedup(baseline).value:.2f}x\ntau {run.counters.tau:.2f}"
            speed.bar_label(bar, [label], fontsize=7)
            shares = run.counters.per_position[:SHOWN]
            positions = range(1, len(shares) + 1)
            style = "-" if temperature == 0 else "--"
            if run.drafting.is_speculative:
                color = COLORS[run.drafting.name]
                name = f"{run.name}, temperature {temperature:g}"
                accepted.plot(positions, shares, style, marker="o", color=color, label=name)
    middle = (len(result.runs) // len(TEMPERATURES) - 1) / 2
    width = len(result.runs) // len(TEMPERATURES) + 1
    speed.set_xticks([middle + width * g for g in range(len(runs_of))], [f"temperature {t:g}" for t in runs_of])
    speed.set_ylabel("decode tok/s")
    rates = [estimate(run.rates) for run in result.runs]
    speed.set_ylim(0, 1.35 * max(rate.high or rate.value for rate in rates))
    kinds = {run.drafting.name: run.name for run in result.runs}
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLORS[kind]) for kind in kinds]
    speed.legend(handles, kinds.values(), fontsize=8, loc="upper right")
    accepted.set_xlabel("position in the draft")
    accepted.set_ylabel("share of steps accepting it")
    accepted.set_ylim(SHARES)
    accepted.xaxis.get_major_locator().set_params(integer=True)
    accepted.legend(fontsize=8)
    for axes in (speed, accepted):
        axes.spines[["top", "right"]].set_visible(False)
    sources = f"{len(result.demo.prompts)} held-out prompts, {result.system['cpu']}, {result.system['dtype']} storage"
    figure.suptitle(f"same tokens, fewer target calls: {sources}", fontsize=10)
    with writing(path, "Nothing is left of it"):
        figure.savefig(path, dpi=140)
    pyplot.close(figure)
