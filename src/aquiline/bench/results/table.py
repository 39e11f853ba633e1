"""Results as tables: one `Table` per work and machine with a row for each setting, and one short table of all works.

Only comparable figures are compared; where a ratio is missing, a note below the table says why. Regressions against an
older run are marked.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aquiline.bench.results import speedups
from aquiline.bench.results.intervals import estimate
from aquiline.bench.results.result import Result, is_dirty, is_speculative, require_published
from aquiline.bench.results.speedups import Change, Ratio, Results
from aquiline.bench.tables import NO_FIGURE, Table, escape, percent
from aquiline.spec.drafting import Chain

if TYPE_CHECKING:
    from rich.console import Group

LEGEND = (
    "tok/s: decoding by the wall clock, median over the rounds [its 95 % interval]. speedup: median of the rounds' own "
    "ratios [its interval]; an interval needs six rounds. tau: tokens committed per step and sequence. "
    "repeated: share of 8-grams of the output that stood earlier in the same text; loops flatter every drafter. "
    "accepted: of all drafted tokens, and by position. KV: of the whole pool."
)
DEFAULT = Chain().num_spec_tokens
SUMMARY = (
    "scenario", "temperature", "baseline tok/s", f"chain K={DEFAULT}, tok/s", f"speedup of K={DEFAULT}", "tau",
    "fastest of", "its speedup", "its tau", "% of ideal", "repeated",
)  # fmt: skip


@dataclass(frozen=True)
class ResultTables:
    """All tables. closing: the lines below them, about ideals, vanished settings and regressions; regressions: each
    setting that is slower than in the older run, with the table it stands in."""

    tables: list[Table]
    closing: list[str]
    regressions: list[str]

    def markdown(self) -> str:
        """The tables as Markdown."""
        closing = "".join(f"- {escape(line)}\n" for line in self.closing)
        return "\n".join([*(table.markdown() for table in self.tables), LEGEND + "\n", *filter(None, [closing])])

    def console(self) -> Group:
        """The tables for a rich console."""
        from rich.console import Group
        from rich.text import Text

        return Group(*(table.console() for table in self.tables), Text("\n".join([LEGEND, *self.closing])))


def report(results: Results, older: Results | None = None) -> ResultTables:
    """Tables of checked results (by file name), compared with those of an older run if it is given."""
    tables = [_table(group, results, older) for _, group in sorted(_by_table(results).items())]
    notes = [note for result in results.values() for note in result.get("roofline", {}).get("notes", [])]
    closing = [f"ideal: {note}" for note in dict.fromkeys(notes)]
    if older is None:
        return ResultTables(tables, closing, [])
    gone = [(name, older[name]) for name in speedups.vanished(results.values(), older)]
    closing += [f"gone since the older run: {_title(r)}: {r['setting']['name']} ({name})" for name, r in gone]
    regressions = [f"{table.title}: {table.rows[number][0]}" for table in tables for number in sorted(table.marked)]
    closing.append("; ".join([f"regressions: {len(regressions)}", *regressions]))
    return ResultTables(tables, closing, regressions)


def summary(results: Results) -> str:
    """One small table in Markdown, from checked results, as in docs/results.md: a row per scenario, the default chain
    beside the fastest setting. A scenario without a comparable baseline has no row.

    The fastest of several settings is chosen on the same runs that it is judged by, which flatters it. So the chain of
    the default length is shown beside it, and its column says how many settings it was chosen from.

    Raises ResultError naming results of uncommitted changes, since this table is for publishing."""
    require_published(results)
    rows = []
    for group in _by_table(results).values():
        ratios = [(r, speedups.speedup(r, results)) for r in group.values() if is_speculative(r)]
        drafted = [(r, ratio) for r, ratio in ratios if ratio.value is not None]
        if drafted:
            rows.append(_summary_row(drafted))
    rows.sort(key=lambda row: row[0])
    return Table(SUMMARY, [cells for _, cells in rows]).markdown()


def _by_table(results: Results) -> dict[tuple[Any, ...], dict[str, Result]]:
    """The results of each table, by a key that orders the tables."""
    groups: dict[tuple[Any, ...], dict[str, Result]] = defaultdict(dict)
    for name, result in results.items():
        groups[speedups.work(result), speedups.machine(result)][name] = result
    return groups


def _table(group: Results, results: Results, older: Results | None) -> Table:
    here = dict(sorted(group.items(), key=lambda item: (is_speculative(item[1]), item[0])))
    labels = _labels(here)
    rows: list[dict[str, str]] = []
    notes: list[str] = []
    older_notes: list[str] = []
    marked: set[int] = set()
    for name, result in here.items():
        ratio = speedups.speedup(result, results)
        cells = {"setting": labels[name]} | _cells(result, ratio)
        if is_speculative(result):
            notes += _note(f"{labels[name]}, speedup", ratio)
        if older is not None:
            past = speedups.against_older(result, older)
            changes = speedups.changes(result, past.against) if past.against else []
            cells["against older"] = _changed(changes)
            older_notes += _note(f"{labels[name]}, older", past)
            if any(change.is_regression for change in changes):
                marked.add(len(rows))
        rows.append(cells)
    facts, title = _facts(list(here.values())), _title(next(iter(here.values())))
    return Table.of_cells(rows, title=title, facts=facts, notes=notes + older_notes, marked=frozenset(marked))


def _cells(result: Result, ratio: Ratio) -> dict[str, str]:
    drafting, memory, roofline = result["eagle_speculation"], result["memory"], result.get("roofline", {})
    is_drafting = is_speculative(result)
    return {
        "tok/s": _spread(result["throughput_tokens_per_sec"]["values"]),
        "speedup": str(ratio) if is_drafting else "baseline",
        "tau": speedups.tau(result),
        "repeated": percent(result["scenario"]["repeated_share"]),
        "accepted": percent(drafting["mean_acceptance_rate"] if is_drafting else None),
        "by position": " ".join(f"{share:.2f}" for share in drafting["per_position"]) or NO_FIGURE,
        "TTFT ms": f"{result['ttft_ms']['median']:.0f}",
        "ITL ms": f"{result['itl_ms']['median']:.2f}",
        "KV MB": f"{memory['kv_bytes'] / 1e6:.0f}",
        "peak MB": f"{memory['peak_bytes'] / 1e6:.0f}",
        "% of ideal": f"{roofline['percent_of_ideal']:.0f}" if "percent_of_ideal" in roofline else NO_FIGURE,
        "spec efficiency": percent(speedups.spec_efficiency(result, ratio)),
    }


def _note(about: str, ratio: Ratio) -> list[str]:
    against = f" against {ratio.other}" if ratio.other is not None else ""
    return [f"{about}{against}: {'; '.join(ratio.reasons)}"] if ratio.reasons else []


def _spread(rates: list[float]) -> str:
    found, runs = estimate(rates), len(rates)
    return found.whole() + ("" if found.is_sure else f" ({runs} runs)" if runs > 1 else " (one run)")


def _changed(changes: list[Change]) -> str:
    if not changes:
        return "not comparable"
    return "; ".join(filter(None, map(str, changes))) or f"{changes[0].ratio:.2f}x, within the noise"


def _labels(results: Results) -> dict[str, str]:
    """Names of a table's rows: the setting, with the draft or the file if settings alone are not unique."""
    drafts = {result["model"]["draft"] for result in results.values() if is_speculative(result)}
    labels = [
        r["setting"]["name"] + (f" with {r['model']['draft']}" if len(drafts) > 1 and is_speculative(r) else "")
        for r in results.values()
    ]
    named = zip(results, labels, strict=True)
    return {name: f"{label} ({name})" if labels.count(label) > 1 else label for name, label in named}


def _title(result: Result) -> str:
    """The title of the table that a result belongs to."""
    s = result["scenario"]
    profile = " (CPU profile)" if s["profile"] == "cpu" else ""
    asked = f"{s['context_tokens']} tokens x {s['batch']}, temperature {s['temperature']:g}{profile}"
    return f"{s['name']}: {asked}; {speedups.model(result)}; {result['engine']}"


def _facts(results: list[Result]) -> str:
    commits = sorted({result["commit"] for result in results})
    drafts = sorted({result["model"]["draft"] for result in results if result["model"]["draft"] is not None})
    sources = sorted({result["scenario"]["prompts_source"] for result in results})
    parts = [speedups.machine(results[0]), f"draft {', '.join(drafts) or 'none'}", f"commit {', '.join(commits)}"]
    warnings = {
        "RANDOM WEIGHTS: speed only, the text is noise": lambda r: r["model"]["random_weights"],
        "SIMULATED TAU: chosen, no acceptance was measured": lambda r: r["model"]["simulated_tau"] is not None,
        "UNCOMMITTED CHANGES: nobody can measure this again; not to be published": is_dirty,
        "CPU PROFILE: contexts that a CPU can run, not to be set beside the full profile's": lambda r: (
            r["scenario"]["profile"] == "cpu"
        ),
    }
    parts += [text for text, applies in warnings.items() if any(map(applies, results))]
    return "; ".join([*parts, f"prompts: {', '.join(sources)}"])


def _summary_row(drafted: list[tuple[Result, Ratio]]) -> tuple[tuple[Any, ...], list[str]]:
    """A row's sort key and its cells: those of the default chain, then those of the fastest setting."""
    best, ratio = max(drafted, key=lambda pair: pair[1].value or 0.0)
    usual = next((_measured(*pair) for pair in drafted if pair[0]["setting"].get("num_spec_tokens") == DEFAULT), None)
    s, simulated = best["scenario"], best["model"]["simulated_tau"]
    name = f"{s['name']}, {s['context_tokens']} x {s['batch']}" + (", random weights" if simulated else "")
    efficiency = speedups.spec_efficiency(best, ratio)
    cells = [
        name, f"{s['temperature']:g}", _rate(ratio.against),
        *(usual or ["not run"] * 3), f"{len(drafted)}: {best['setting']['name']}", *_measured(best, ratio)[1:],
        f"{efficiency:.0%}" if efficiency is not None else "not measured", f"{s['repeated_share']:.0%}",
    ]  # fmt: skip
    return (simulated is not None, s["batch"], s["context_tokens"], s["temperature"]), cells


def _measured(result: Result, ratio: Ratio) -> list[str]:
    return [_rate(result), str(ratio), speedups.tau(result)]


def _rate(result: Result) -> str:
    return estimate(result["throughput_tokens_per_sec"]["values"]).whole()
