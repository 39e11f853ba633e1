"""An evaluation as a picture: speedup and tau by length, acceptance by position, a row per temperature."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

from aquiline.bench.eval.eval_plan import Evaluated
from aquiline.bench.eval.figures import Figures, Tables
from aquiline.bench.plots import COLORS, draw_positions, name_positions, new_figure, save
from aquiline.spec.drafting import Drafting, NoDraft
from aquiline.spec.registry import DRAFTINGS

MAPS = dict(zip(DRAFTINGS, cycle(("Greys", "Blues", "YlOrBr", "Greens", "Purples")), strict=False))


def plot_evaluation(found: Evaluated, derived: Tables, headline: str, path: Path) -> None:
    """Write a PNG. Raises ValueError if matplotlib is not installed."""
    temperatures = list(dict.fromkeys(group[0].temperature for group in derived.by_length))
    figure, grid = new_figure(len(temperatures), 3, (12, 0.9 + 3.2 * len(temperatures)))
    colors = _colors(found.plan.settings)
    for temperature, row in zip(temperatures, grid, strict=True):
        groups = [group for group in derived.by_length if group[0].temperature == temperature]
        _draw_lengths(row[0], row[1], groups, colors)
        _draw_positions(row[2], groups[-1], colors)
        row[0].set_title(f"temperature {temperature:g}", loc="left", fontsize=10)
    figure.get_layout_engine().set(wspace=0.06)
    handles, labels = grid[0][1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=8, frameon=False)
    figure.suptitle(headline, fontsize=10)
    save(figure, path, "eval.json and eval.md are whole")


def _colors(settings: dict[str, Drafting]) -> dict[str, Any]:
    """Colors of the settings: one hue per way to draft, from light to dark within it."""
    from matplotlib import colormaps

    by_kind: dict[str, list[str]] = {}
    for name, drafting in settings.items():
        by_kind.setdefault(drafting.name, []).append(name)
    colors = {}
    for kind, names in by_kind.items():
        for place, name in enumerate(names):
            shade = 0.4 + 0.55 * place / max(1, len(names) - 1)
            colors[name] = COLORS[kind] if len(names) == 1 else colormaps[MAPS[kind]](shade)
    return colors


def _draw_lengths(speed: Any, tau: Any, groups: list[list[Figures]], colors: dict[str, Any]) -> None:
    """Draw speedup with its interval, and tau, over lengths; the settings stand side by side at each length."""
    for number, setting in enumerate(colors):
        own = [next(f for f in group if f.setting == setting) for group in groups]
        shift = (number - (len(colors) - 1) / 2) * min(0.08, 0.6 / len(colors))
        places = [i + shift for i in range(len(own))]
        taus = [f.counters.tau for f in own]
        tau.plot(range(len(own)), taus, marker="o", markersize=4, color=colors[setting], label=setting)
        timed = [(place, f.speedup) for place, f in zip(places, own, strict=True) if f.speedup is not None]
        if not number or not timed:
            continue
        values = [ratio.value for _, ratio in timed]
        spans = [(r.value - (r.low or r.value), (r.high or r.value) - r.value) for _, r in timed]
        speed.errorbar(
            [place for place, _ in timed], values, [list(side) for side in zip(*spans, strict=True)],
            marker="o", markersize=4, capsize=2, color=colors[setting],
        )  # fmt: skip
    speed.axhline(1, color=COLORS[NoDraft.name], linewidth=1.5)
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


def _draw_positions(axes: Any, group: list[Figures], colors: dict[str, Any]) -> None:
    """Draw, for one length, the share of steps that accept the draft at each place."""
    for f in group[1:]:
        draw_positions(axes, f.counters.per_position, markersize=4, color=colors[f.setting])
    name_positions(axes, f" ({group[0].length} new tokens)")
