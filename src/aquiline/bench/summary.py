"""A suite in one small table, as README shows it: a row per scenario, its baseline and its fastest setting."""

from __future__ import annotations

from collections import defaultdict

from aquiline.bench.compare import Place, place
from aquiline.bench.integrity import differences
from aquiline.bench.result import Result

COLUMNS = (
    "scenario", "temperature", "baseline tok/s", "fastest", "tok/s", "speedup", "tau", "% of ideal speedup", "repeated"
)  # fmt: skip


def summary(results: dict[str, Result]) -> str:
    """Markdown of checked results. A scenario without a baseline to compare with has no row."""
    groups: dict[Place, list[Result]] = defaultdict(list)
    for result in results.values():
        groups[place(result)].append(result)
    rows = []
    for group in groups.values():
        baseline = next((r for r in group if r["setting"]["drafter"] == "none"), None)
        drafted = [r for r in group if r is not baseline and baseline is not None and not differences(r, baseline)]
        if baseline is not None and drafted:
            rows.append(_row(baseline, max(drafted, key=_rate)))
    rows.sort(key=lambda row: row[0])
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(cells for _, cells in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _row(baseline: Result, best: Result) -> tuple[tuple[object, ...], list[str]]:
    s, simulated = best["scenario"], best["model"]["simulated_tau"]
    name = f"{s['name']}, {s['context_tokens']} x {s['batch']}" + (", random weights" if simulated else "")
    tau = f"{best['eagle_speculation']['mean_acceptance_length']:.2f}" + (" simulated" if simulated else "")
    efficiency = best.get("roofline", {}).get("spec_efficiency")
    cells = [
        name, f"{s['temperature']:g}", f"{_rate(baseline):.0f}", best["setting"]["name"], f"{_rate(best):.0f}",
        f"{_rate(best) / _rate(baseline):.2f}x", tau, f"{efficiency:.0%}" if efficiency is not None else "not measured",
        f"{s['repeated_share']:.0%}",
    ]  # fmt: skip
    return (simulated is not None, s["batch"], s["context_tokens"], s["temperature"]), cells


def _rate(result: Result) -> float:
    return float(result["throughput_tokens_per_sec"]["mean"])
