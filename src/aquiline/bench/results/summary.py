"""A suite in one small table, as in docs/results.md: a row per scenario, the default chain beside the fastest setting.

The fastest of several settings is chosen on the same runs that it is judged by, which flatters it. So the chain of the
default length is shown beside it, and its column says how many settings it was chosen from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from aquiline.bench.results import speedups
from aquiline.bench.results.intervals import estimate
from aquiline.bench.results.result import Result, is_speculative, require_published
from aquiline.bench.results.speedups import Place, Ratio, place
from aquiline.bench.tables import Table
from aquiline.spec.drafting import Chain

DEFAULT = Chain().num_spec_tokens
COLUMNS = (
    "scenario", "temperature", "baseline tok/s", f"chain K={DEFAULT}, tok/s", f"speedup of K={DEFAULT}", "tau",
    "fastest of", "its speedup", "its tau", "% of ideal", "repeated",
)  # fmt: skip


def summary(results: Mapping[str, Result]) -> str:
    """The table in Markdown, from checked results. A scenario without a comparable baseline has no row.

    Raises ResultError naming results of uncommitted changes, since this table is for publishing."""
    require_published(results)
    groups: dict[Place, list[Result]] = defaultdict(list)
    for result in results.values():
        groups[place(result)].append(result)
    rows = []
    for group in groups.values():
        ratios = [(r, speedups.speedup(r, results)) for r in group if is_speculative(r)]
        drafted = [(r, ratio) for r, ratio in ratios if ratio.value is not None]
        if drafted:
            rows.append(_row(results, drafted))
    rows.sort(key=lambda row: row[0])
    return Table(COLUMNS, [cells for _, cells in rows]).markdown()


def _row(results: Mapping[str, Result], drafted: list[tuple[Result, Ratio]]) -> tuple[tuple[object, ...], list[str]]:
    """A row's sort key and its cells: those of the default chain, then those of the fastest setting."""
    best, ratio = max(drafted, key=lambda pair: pair[1].value or 0.0)
    usual = next((pair for pair in drafted if pair[0]["setting"].get("num_spec_tokens") == DEFAULT), None)
    baseline = results[ratio.other or ""]
    s, simulated = best["scenario"], best["model"]["simulated_tau"]
    name = f"{s['name']}, {s['context_tokens']} x {s['batch']}" + (", random weights" if simulated else "")
    efficiency = speedups.spec_efficiency(best, ratio)
    cells = [
        name, f"{s['temperature']:g}", _rate(baseline),
        *((_rate(usual[0]), str(usual[1]), _tau(usual[0])) if usual is not None else ("not run", "not run", "not run")),
        f"{len(drafted)}: {best['setting']['name']}", str(ratio), _tau(best),
        f"{efficiency:.0%}" if efficiency is not None else "not measured", f"{s['repeated_share']:.0%}",
    ]  # fmt: skip
    return (simulated is not None, s["batch"], s["context_tokens"], s["temperature"]), cells


def _rate(result: Result) -> str:
    return estimate(result["throughput_tokens_per_sec"]["values"]).whole()


def _tau(result: Result) -> str:
    simulated = " simulated" if result["model"]["simulated_tau"] is not None else ""
    return f"{result['eagle_speculation']['mean_acceptance_length']:.2f}{simulated}"
