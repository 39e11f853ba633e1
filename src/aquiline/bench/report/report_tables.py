"""The figures of a section: each function gives the cells of one row by the names of their columns."""

from __future__ import annotations

from collections.abc import Callable

from aquiline.bench.report.sections import OWN, ReportRow
from aquiline.bench.results import speedups
from aquiline.bench.results.intervals import estimate
from aquiline.bench.results.result import Result
from aquiline.bench.tables import NO_FIGURE, Table, cell, percent

SOURCE_NAMES = {
    "none": "nothing drafted", "draft": "by the draft", "lookup": "copied", "both": "both in one tree",
    "probe": "draft probed",
}  # fmt: skip
NAMES_OF_KEPT = {"draft": "drafted and kept", "lookup": "copied and kept", "both": "of both and kept"}
NAMES_OF_TIMES = {
    "step foretold (ms)": "predicted_ms", "step measured (ms)": "measured_ms", "mean distance (ms)": "error_ms",
}  # fmt: skip
TENTHS = range(10)


def figure_table(rows: list[ReportRow], cells: Callable[[ReportRow], dict[str, str]]) -> Table:
    """The cells of all rows, under a heading for each scenario. A figure that no row has makes no column."""
    lines = [{"setting": row.label} | cells(row) for row in rows]
    headings = {i: row.scenario for i, row in enumerate(rows) if i == 0 or rows[i - 1].scenario != row.scenario}
    return Table.of_cells(lines, headings=headings)


def throughput(row: ReportRow) -> dict[str, str]:
    """Throughput with its spread, beside the baseline's and the roofline's ideal."""
    rates, scenario, roofline = row.result["throughput_tokens_per_sec"], row.result["scenario"], row.part("roofline")
    return {
        "tok/s": _rate(row),
        "min to max": f"{figure(rates['min'])} to {figure(rates['max'])}",
        "runs": str(scenario["measurement_runs"]),
        "speedup": cell(row.ratio.value, str(row.ratio)),
        "tau": speedups.tau(row.result),
        "repeated": percent(scenario["repeated_share"]),
        "ideal tok/s": figure(roofline.get("ideal_tokens_per_s")),
        "of ideal": cell(roofline.get("percent_of_ideal"), "{:.0f}%"),
        "bound": roofline.get("bound", NO_FIGURE),
    }


def speedup(row: ReportRow) -> dict[str, str]:
    """Speedup beside the ideal speedup at the same tau."""
    return {
        "num_spec_tokens": cell(row.result["setting"].get("num_spec_tokens")),
        "tok/s": _rate(row),
        "baseline tok/s": figure(row.ratio.against.get("throughput_tokens_per_sec", {}).get("median")),
        "speedup": cell(row.ratio.value, str(row.ratio)),
        "tau": speedups.tau(row.result),
        "ideal speedup": cell(row.part("roofline").get("ideal_speedup"), "{:.2f}x"),
        "spec efficiency": percent(speedups.spec_efficiency(row.result, row.ratio)),
    }


def acceptance(row: ReportRow) -> dict[str, str]:
    """Acceptance as a whole and by position in the draft."""
    counted = row.result["eagle_speculation"]
    return {
        "tau": speedups.tau(row.result),
        "accepted": percent(counted["mean_acceptance_rate"]),
        "steps with 2 or more": percent(counted["fraction_steps_accept_ge2"]),
        "drafted": f"{counted['total_draft_tokens']:,}",
        "kept": f"{counted['total_accepted_tokens']:,}",
        "cut": f"{counted['tokens_cut']:,}",
    } | {f"at {place}": f"{share:.2f}" for place, share in enumerate(counted["per_position"], 1)}


def has_acceptance(row: ReportRow) -> bool:
    """Whether anything was drafted."""
    counted = row.result["eagle_speculation"]
    return bool(counted["total_draft_tokens"] or counted["per_position"])


def choices(row: ReportRow) -> dict[str, str]:
    """The gain of adaptive drafting over each fixed setting, its choices, the share of them that was right, and its
    times."""
    chose = row.part("adaptive")
    num_steps, nodes, kept = max(1, sum(chose["steps"].values())), chose["nodes"], chose["accepted"]
    came = {
        min(TENTHS[-1], int(part["foretold"] * len(TENTHS))):
            f"{part['foretold']:.0%}: {part['right']:.0%} of {part['tokens']:,}"
        for part in chose.get("calibration", ())
    }  # fmt: skip
    return (
        {f"over {label}": str(ratio) for label, ratio in row.over.items()}
        | {name: percent(chose["steps"][source] / num_steps) for source, name in SOURCE_NAMES.items()}
        | {
            name: f"{kept[source] / nodes[source]:.0%} of {nodes[source]:,}" if nodes[source] else NO_FIGURE
            for source, name in NAMES_OF_KEPT.items()
        }
        | {name: figure(chose[key] if chose["num_timed"] else None) for name, key in NAMES_OF_TIMES.items()}
        | {"to choose (µs)": figure(chose["choosing_us"])}
        | {f"foretold {10 * tenth}-{10 * tenth + 10}%": came.get(tenth, NO_FIGURE) for tenth in TENTHS}
    )


def stages(row: ReportRow) -> dict[str, str]:
    """Milliseconds of a decode step, and of each of its stages."""
    parts = row.stage_ms
    return {"step (ms)": figure(sum(parts.values()))} | {f"{name} (ms)": figure(ms) for name, ms in parts.items()}


def latency(row: ReportRow) -> dict[str, str]:
    """Time per token, time to the first token, and memory."""
    memory = row.result["memory"]
    return {
        "ms/token": _spread(row.result["latency_ms_per_token"]),
        "between tokens (ms)": _spread(row.result["itl_ms"]),
        "to the first token (ms)": _spread(row.result["ttft_ms"]),
        "prefill tok/s": _spread(row.result["prefill_tokens_per_sec"]),
        "KV per token": _bytes(memory["kv_bytes_per_token"]),
        "KV": _bytes(memory["kv_bytes"]),
        "peak memory": _bytes(memory["peak_bytes"]),
    }


def facts_table(rows: list[ReportRow]) -> Table:
    """Facts about the runs: a column for each engine, with the different values of its runs."""
    by_engine: dict[str, list[dict[str, object]]] = {}
    for row in sorted(rows, key=lambda row: (row.result["engine"] != OWN, row.result["engine"])):
        by_engine.setdefault(row.result["engine"], []).append(_facts(row.result))
    names = dict.fromkeys(name for found in by_engine.values() for facts in found for name in facts)
    cells = [[name, *(_distinct(found, name) for found in by_engine.values())] for name in names]
    return Table(["fact", *by_engine], cells)


def _facts(result: Result) -> dict[str, object]:
    model, scenario = result["model"], result["scenario"]
    weights = "random" if model["random_weights"] else "trained"
    ceilings = result.get("roofline", {}).get("ceilings", {})
    rates = [
        f"{name} {figure(rate['per_s'] / 1e9)} {'GFLOP/s' if name.endswith('flops') else 'GB/s'} ({rate['source']})"
        for name, rate in ceilings.items()
        if isinstance(rate, dict)
    ]
    return {
        "target": model["target"], "draft": model["draft"],
        "weights": f"{weights}, {_bytes(model['weight_bytes'])}, {model['dtype']}, {model['arithmetic']} arithmetic",
        **result["system"],
        "ceilings": ", ".join(rates) or None,
        "profile": scenario["profile"], "prompts": scenario["prompts_source"], "temperature": scenario["temperature"],
        "seed": scenario["seed"], "warm-up runs": scenario["warmup_runs"],
        "measured runs": scenario["measurement_runs"], "commit": result["commit"], "date": result["date"],
    }  # fmt: skip


def _distinct(found: list[dict[str, object]], name: str) -> str:
    """The different values of a fact; of dates, the first and the last."""
    values = list(dict.fromkeys(str(fact[name]) for fact in found if fact.get(name) is not None))
    if name == "date" and len(values) > 2:
        return f"{min(values)} to {max(values)}"
    return ", ".join(values) or NO_FIGURE


def figure(value: float | None) -> str:
    """A measured number to three digits or more; a dash for none."""
    if value is None:
        return NO_FIGURE
    if abs(value) < 1:
        return f"{value:#.3g}"
    return f"{value:,.{2 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f}"


def _rate(row: ReportRow) -> str:
    """Median throughput, with its interval if there is one."""
    found = estimate(row.result["throughput_tokens_per_sec"]["values"])
    return figure(found.value) + (f" [{figure(found.low)}, {figure(found.high)}]" if found.is_sure else "")


def _spread(quantity: Result) -> str:
    """Median, smallest and largest value; a dash if the median is 0, which means not measured."""
    median, low, high = (figure(quantity[key]) for key in ("median", "min", "max"))
    return (median if low == high else f"{median} ({low} to {high})") if quantity["median"] else NO_FIGURE


def _bytes(value: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{figure(value / size)} {unit}"
    return f"{value} B" if value else NO_FIGURE
