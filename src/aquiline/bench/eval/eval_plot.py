"""An evaluation as a picture: speedup and tau by length, acceptance by position, a row per temperature."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aquiline.bench.eval.eval_report import EvalReport
from aquiline.bench.eval.figures import Figures
from aquiline.bench.plots import BASE, draw_positions, look, name_positions, new_figure, save_plot


def plot_evaluation(report: EvalReport, path: Path) -> None:
    """Write a PNG. Raises ValueError if matplotlib is not installed."""
    found = report.found
    temperatures = list(dict.fromkeys(group[0].temperature for group in found.by_length))
    figure, grid = new_figure(len(temperatures), 3, (12, 0.9 + 3.2 * len(temperatures)))
    looks = {name: look(number - 1) for number, name in enumerate(found.plan.settings)}
    for temperature, row in zip(temperatures, grid, strict=True):
        groups = [group for group in found.by_length if group[0].temperature == temperature]
        _draw_lengths(row[0], row[1], groups, looks)
        _draw_positions(row[2], groups[-1], looks)
        row[0].set_title(f"temperature {temperature:g}", loc="left", fontsize=10)
    figure.get_layout_engine().set(wspace=0.06)
    handles, labels = grid[0][1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=8, frameon=False)
    figure.suptitle(f"{report.facts.dataset}, {len(found.questions)} questions: {report.facts}", fontsize=10)
    save_plot(figure, path, "eval.json and eval.md are whole")


def _draw_lengths(speed: Any, tau: Any, groups: list[list[Figures]], looks: dict[str, dict[str, Any]]) -> None:
    """Draw speedup with its interval, and tau, over lengths; the settings stand side by side at each length."""
    for number, setting in enumerate(looks):
        own = [next(f for f in group if f.setting == setting) for group in groups]
        shift = (number - (len(looks) - 1) / 2) * min(0.08, 0.6 / len(looks))
        places = [i + shift for i in range(len(own))]
        taus = [f.counters.tau for f in own]
        tau.plot(range(len(own)), taus, **looks[setting], label=setting)
        timed = [(place, f.speedup) for place, f in zip(places, own, strict=True) if f.speedup is not None]
        if not number or not timed:
            continue
        values = [ratio.value for _, ratio in timed]
        spans = [(r.value - (r.low or r.value), (r.high or r.value) - r.value) for _, r in timed]
        speed.errorbar(
            [place for place, _ in timed], values, [list(side) for side in zip(*spans, strict=True)],
            capsize=2, **looks[setting],
        )  # fmt: skip
    speed.axhline(1, color=BASE, linewidth=1.5)
    speed.set_ylabel("speedup of decoding (95 % over questions)")
    tau.set_ylabel("tau: tokens per target call")
    tau.set_ylim(0, None)
    lengths = [str(group[0].length) for group in groups]
    repeated = [f"{length}\n{group[0].repeated_share:.0%}" for length, group in zip(lengths, groups, strict=True)]
    speed.set_xlabel("new tokens")
    tau.set_xlabel("new tokens, and their repeated 8-grams")
    for axes, labels in ((speed, lengths), (tau, repeated)):
        axes.set_xticks(range(len(groups)), labels)
        axes.set_xlim(-0.5, len(groups) - 0.5)


def _draw_positions(axes: Any, group: list[Figures], looks: dict[str, dict[str, Any]]) -> None:
    """Draw, for one length, the share of steps that accept the draft at each place."""
    for f in group[1:]:
        draw_positions(axes, f.counters.per_position, **looks[f.setting])
    name_positions(axes, f" ({group[0].length} new tokens)")
