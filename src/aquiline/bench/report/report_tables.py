"""A section's figures as tables: the figures of its plots, latency and memory, and facts about the runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from markupsafe import Markup

from aquiline.bench.report.charts import figure, swatch
from aquiline.bench.report.panels import Scenarios
from aquiline.bench.report.sections import OWN, ReportRow, badges, number
from aquiline.bench.results import speedups
from aquiline.bench.results.intervals import estimate
from aquiline.bench.results.result import Result, is_speculative

NONE = "–"
SOURCE_NAMES = {
    "none": "nothing drafted", "draft": "by the draft", "lookup": "copied", "both": "both in one tree",
    "probe": "draft probed",
}  # fmt: skip
Column = Callable[[ReportRow], str]


@dataclass(frozen=True)
class ReportLine:
    """A setting's figures, in the order of the columns."""

    label: str
    swatch: Markup
    cells: list[str]


@dataclass(frozen=True)
class ReportTable:
    """A table of settings, grouped by scenario. Columns without any figure are left out."""

    badges: list[str]
    columns: list[str]
    groups: list[tuple[str, list[ReportLine]]]


def throughput_table(scenarios: Scenarios) -> ReportTable:
    """Throughput with its spread, beside the baseline's and the roofline's ideal."""
    return _table(scenarios, {
        "tok/s": _rate,
        "min to max": lambda row: f"{figure(row.throughput['min'])} to {figure(row.throughput['max'])}",
        "runs": lambda row: str(row.result["scenario"]["measurement_runs"]),
        "speedup": lambda row: NONE if row.speedup is None else str(row.ratio),
        "tau": tau,
        "repeated": lambda row: _percent(number(row.result["scenario"]["repeated_share"])),
        "ideal tok/s": lambda row: figure(row.roofline("ideal_tokens_per_s")),
        "of ideal": lambda row: _percent(_share(row.roofline("percent_of_ideal"))),
        "bound": lambda row: row.bound or NONE,
    })  # fmt: skip


def speedup_table(scenarios: Scenarios) -> ReportTable:
    """Speedup beside the ideal speedup at the same tau."""
    return _table(_chosen(scenarios, lambda row: is_speculative(row.result)), {
        "num_spec_tokens": lambda row: NONE if row.num_spec_tokens is None else str(row.num_spec_tokens),
        "tok/s": _rate,
        "baseline tok/s": lambda row: NONE if row.against is None else figure(
            row.against["throughput_tokens_per_sec"]["median"]
        ),
        "speedup": lambda row: NONE if row.speedup is None else str(row.ratio),
        "tau": tau,
        "ideal speedup": lambda row: _times(row.roofline("ideal_speedup")),
        "spec efficiency": lambda row: _percent(row.spec_efficiency),
    })  # fmt: skip


def acceptance_table(scenarios: Scenarios) -> ReportTable:
    """Acceptance as a whole and by position in the draft."""
    chosen = _chosen(
        scenarios, lambda row: number(row.speculation["total_draft_tokens"]) or row.speculation["per_position"]
    )
    depth = max((len(row.speculation["per_position"]) for _, rows in chosen for row in rows), default=0)
    columns: dict[str, Column] = {
        "tau": tau,
        "accepted": lambda row: _percent(number(row.speculation["mean_acceptance_rate"])),
        "steps with 2 or more": lambda row: _percent(number(row.speculation["fraction_steps_accept_ge2"])),
        "drafted": lambda row: _whole(row.speculation["total_draft_tokens"]),
        "kept": lambda row: _whole(row.speculation["total_accepted_tokens"]),
        "cut": lambda row: _whole(row.speculation["tokens_cut"]),
    }
    for position in range(depth):
        columns[f"at {position + 1}"] = _at(position)
    return _table(chosen, columns)


def choices_table(scenarios: Scenarios) -> ReportTable:
    """What adaptive drafting gained over each fixed setting, what it chose, how much was right, and its times."""
    beside = {row.file: rows for _, rows in scenarios for row in rows}
    fixed = [row for _, rows in scenarios for row in rows if row.result["engine"] == OWN and not row.adaptive]
    columns: dict[str, Column] = {
        f"over {label}": _over(label, beside) for label in dict.fromkeys(r.label for r in fixed)
    }
    columns |= {label: _chosen_from(source) for source, label in SOURCE_NAMES.items()}
    return _table(_chosen(scenarios, lambda row: row.adaptive), columns | {
        "drafted and kept": lambda row: _accepted(row, "draft"),
        "copied and kept": lambda row: _accepted(row, "lookup"),
        "of both and kept": lambda row: _accepted(row, "both"),
        "step foretold (ms)": _timed("predicted_ms"),
        "step measured (ms)": _timed("measured_ms"),
        "mean distance (ms)": _timed("error_ms"),
        "to choose (µs)": lambda row: figure(row.adaptive["choosing_us"]),
    })  # fmt: skip


def _timed(name: str) -> Column:
    """A time of adaptive drafting, where any step was timed."""
    return lambda row: figure(row.adaptive[name] if row.adaptive["num_timed"] else None)


def stage_table(scenarios: Scenarios) -> ReportTable:
    """Milliseconds of a decode step by stage."""
    chosen = _chosen(scenarios, lambda row: row.stage_ms)
    stages = dict.fromkeys(stage for _, rows in chosen for row in rows for stage in row.stage_ms)
    columns: dict[str, Column] = {f"{stage} (ms)": _stage(stage) for stage in stages}
    return _table(chosen, columns | {"step (ms)": lambda row: figure(sum(row.stage_ms.values()))})


def latency_table(scenarios: Scenarios) -> ReportTable:
    """Time per token, to the first token, and memory."""
    return _table(scenarios, {
        "ms/token": _spread("latency_ms_per_token"),
        "between tokens (ms)": _spread("itl_ms"),
        "to the first token (ms)": _spread("ttft_ms"),
        "prefill tok/s": _spread("prefill_tokens_per_sec"),
        "KV per token": _memory("kv_bytes_per_token"),
        "KV": _memory("kv_bytes"),
        "peak memory": _memory("peak_bytes"),
    })  # fmt: skip


def facts(rows: list[ReportRow]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The engines, and rows of facts about their runs: a name, and one value for each engine."""
    by_engine: dict[str, list[Result]] = {}
    for row in sorted(rows, key=lambda row: (row.result["engine"] != OWN, row.result["engine"])):
        by_engine.setdefault(row.result["engine"], []).append(row.result)
    known: dict[str, list[dict[str, object]]] = {e: [_facts(r) for r in found] for e, found in by_engine.items()}
    names = dict.fromkeys(name for found in known.values() for fact in found for name in fact)
    return list(by_engine), [(name, [_distinct(found, name) for found in known.values()]) for name in names]


def tau(row: ReportRow) -> str:
    """Mean acceptance length, marked if it was simulated."""
    if not row.speculation["num_steps"]:
        return NONE
    return f"{row.speculation['mean_acceptance_length']:.2f}{' simulated' if row.is_simulated else ''}"


def _facts(result: Result) -> dict[str, object]:
    model, scenario = result["model"], result["scenario"]
    weights = {True: "random", False: "trained"}[model["random_weights"]]
    return {
        "target": model["target"], "draft": model["draft"],
        "weights": f"{weights}, {_bytes(model['weight_bytes'])}, {model['dtype']}, {model['arithmetic']} arithmetic",
        **result["system"],
        "ceilings": _ceilings(result.get("roofline", {}).get("ceilings")),
        "profile": scenario["profile"], "prompts": scenario["prompts_source"], "temperature": scenario["temperature"],
        "seed": scenario["seed"], "warm-up runs": scenario["warmup_runs"],
        "measured runs": scenario["measurement_runs"], "commit": result["commit"], "date": result["date"],
    }  # fmt: skip


def _ceilings(ceilings: object) -> str | None:
    """The ceilings that ideals are computed from, with the source of each."""
    found = []
    for name, rate in ceilings.items() if isinstance(ceilings, dict) else ():
        per_s = number(rate.get("per_s")) if isinstance(rate, dict) else None
        if per_s is not None:
            unit = "GFLOP/s" if name.endswith("flops") else "GB/s"
            found.append(f"{name} {figure(per_s / 1e9)} {unit} ({rate.get('source')})")
    return ", ".join(found) or None


def _distinct(found: list[dict[str, object]], name: str) -> str:
    """The different values of a fact; of dates, the first and the last."""
    values = list(dict.fromkeys(str(fact[name]) for fact in found if fact.get(name) is not None))
    if name == "date" and len(values) > 2:
        return f"{min(values)} to {max(values)}"
    return ", ".join(values) or NONE


def _table(scenarios: Scenarios, columns: dict[str, Column]) -> ReportTable:
    groups = [
        (name, [ReportLine(row.label, swatch(row.style), [column(row) for column in columns.values()]) for row in rows])
        for name, rows in scenarios
    ]
    lines = [line for _, group in groups for line in group]
    used = [i for i in range(len(columns)) if any(line.cells[i] != NONE for line in lines)]
    kept = [
        (name, [ReportLine(x.label, x.swatch, [x.cells[i] for i in used]) for x in group]) for name, group in groups
    ]
    names = [name for i, name in enumerate(columns) if i in used]
    return ReportTable(badges([row for _, rows in scenarios for row in rows]), names, kept)


def _chosen(scenarios: Scenarios, holds: Callable[[ReportRow], object]) -> Scenarios:
    kept = [(name, [row for row in rows if holds(row)]) for name, rows in scenarios]
    return [(name, rows) for name, rows in kept if rows]


def _chosen_from(source: str) -> Column:
    return lambda row: _percent(row.adaptive["steps"][source] / max(1, sum(row.adaptive["steps"].values())))


def _over(label: str, beside: dict[str, list[ReportRow]]) -> Column:
    """Throughput over the setting with this label, where there is one of the same scenario."""

    def cell(row: ReportRow) -> str:
        others = [other for other in beside[row.file] if other.label == label]
        ratios = [speedups.over_setting(row.result, other.result) for other in others]
        return next((str(ratio) for ratio in ratios if ratio.value is not None), NONE)

    return cell


def _accepted(row: ReportRow, source: str) -> str:
    num = row.adaptive["nodes"][source]
    return f"{row.adaptive['accepted'][source] / num:.0%} of {num:,}" if num else NONE


def _at(position: int) -> Column:
    def cell(row: ReportRow) -> str:
        shares = row.speculation["per_position"]
        share = number(shares[position]) if position < len(shares) else None
        return NONE if share is None else f"{share:.2f}"

    return cell


def _rate(row: ReportRow) -> str:
    """Median throughput, with its interval if there is one."""
    found = estimate(row.result["throughput_tokens_per_sec"]["values"])
    low, high = found.low, found.high
    return figure(found.value) + (f" [{figure(low)}, {figure(high)}]" if low is not None and high is not None else "")


def _stage(name: str) -> Column:
    return lambda row: figure(row.stage_ms.get(name))


def _spread(name: str) -> Column:
    """A column with median, smallest and largest value; a dash if the median is 0, which means not measured."""

    def cell(row: ReportRow) -> str:
        median, low, high = (number(row.result[name][key]) for key in ("median", "min", "max"))
        if not median or low is None or high is None:
            return NONE
        ends = figure(low), figure(high)
        return figure(median) if ends[0] == ends[1] else f"{figure(median)} ({ends[0]} to {ends[1]})"

    return cell


def _memory(name: str) -> Column:
    return lambda row: _bytes(row.result["memory"][name])


def _whole(value: object) -> str:
    found = number(value)
    return NONE if found is None else f"{found:,.0f}"


def _times(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}x"


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{share:.0%}"


def _share(percent: float | None) -> float | None:
    return None if percent is None else percent / 100


def _bytes(value: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{figure(value / size)} {unit}"
    return f"{value} B" if value else NONE
