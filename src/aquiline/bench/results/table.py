"""Results as tables: one `Table` per scenario, model, engine and machine. Regressions against an older run are marked.

Only comparable figures are compared; where a ratio is missing, a note below the table says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from aquiline.bench.results import speedups
from aquiline.bench.results.intervals import estimate
from aquiline.bench.results.result import Result, is_dirty, is_speculative, require
from aquiline.bench.results.speedups import Change, Place, Ratio
from aquiline.bench.tables import NO_FIGURE, Table, escape

if TYPE_CHECKING:
    from rich.console import Group

Results = Mapping[str, Result]

LEGEND = (
    "tok/s: decoding by the wall clock, median over the rounds [its 95 % interval]. speedup: median of the rounds' own "
    "ratios [its interval]; an interval needs six rounds. tau: tokens committed per step and sequence. "
    "repeated: share of 8-grams of the output that stood earlier in the same text; loops flatter every drafter. "
    "accepted: of all drafted tokens, and by position. KV: of the whole pool."
)


@dataclass(frozen=True)
class ResultTables:
    """All tables. ideal: notes about the column "% of ideal"; vanished: settings that only the older run has."""

    tables: list[Table]
    ideal: list[str]
    vanished: list[str] = field(default_factory=list)
    has_older: bool = False

    @property
    def regressions(self) -> list[str]:
        """Each setting that is slower than in the older run, with the table it stands in."""
        return [f"{table.title}: {table.rows[number][0]}" for table in self.tables for number in sorted(table.marked)]

    @property
    def closing(self) -> list[str]:
        """The lines below all tables: notes about ideals, vanished settings, regressions."""
        found = [f"ideal: {note}" for note in self.ideal]
        found += [f"gone since the older run: {name}" for name in self.vanished]
        if self.has_older:
            found.append(f"regressions: {len(self.regressions)}" + "".join(f"; {name}" for name in self.regressions))
        return found


def report(results: Results, older: Results | None = None) -> ResultTables:
    """Tables of results (by file name), compared with those of an older run if it is given.

    Raises ResultError naming every result that cannot be believed."""
    require(results)
    require(older or {})
    places: dict[Place, list[str]] = {}
    for name, result in results.items():
        places.setdefault(speedups.place(result), []).append(name)
    tables = [_table(place, places[place], results, older) for place in sorted(places)]
    ideal = [note for result in results.values() for note in result.get("roofline", {}).get("notes", [])]
    found = ResultTables(tables, list(dict.fromkeys(ideal)))
    if older is None:
        return found
    gone = [(older[name], name) for name in speedups.vanished(results.values(), older)]
    said = [f"{_place_name(speedups.place(r))}: {r['setting']['name']} ({name})" for r, name in gone]
    return replace(found, vanished=said, has_older=True)


def markdown(results: Results, older: Results | None = None) -> str:
    """The report as Markdown. Raises ResultError naming every result that cannot be believed."""
    found = report(results, older)
    closing = "".join(f"- {escape(line)}\n" for line in found.closing)
    return "\n".join([*(table.markdown() for table in found.tables), LEGEND + "\n", *filter(None, [closing])])


def console(results: Results, older: Results | None = None) -> Group:
    """The report for a rich console. Raises ResultError naming every result that cannot be believed."""
    from rich.console import Group
    from rich.text import Text

    found = report(results, older)
    return Group(*(table.console() for table in found.tables), Text("\n".join([LEGEND, *found.closing])))


def _table(place: Place, names: list[str], results: Results, older: Results | None) -> Table:
    here = {name: results[name] for name in sorted(names, key=lambda n: (is_speculative(results[n]), n))}
    labels = _labels(here)
    ratios = {name: speedups.speedup(result, results) for name, result in here.items()}
    cells = [{"setting": labels[name]} | _cells(result, ratios[name]) for name, result in here.items()]
    notes = [
        note for name in here if is_speculative(here[name]) for note in _note(f"{labels[name]}, speedup", ratios[name])
    ]
    marked = set()
    for number, (name, result) in enumerate(here.items() if older is not None else ()):
        past = speedups.against_older(result, older or {})
        changes = _changes(result, past, older or {})
        cells[number]["against older"] = _changed(changes) if changes else "not comparable"
        notes += _note(f"{labels[name]}, older", past)
        marked |= {number} if any(change.is_regression for change in changes) else set()
    rows = [list(row.values()) for row in cells]
    facts = _facts(place, list(here.values()))
    return Table(list(cells[0]), rows, _place_name(place), facts, notes, frozenset(marked)).without_empty_columns()


def _changes(result: Result, past: Ratio, older: Results) -> list[Change]:
    """How a result differs from the older one that it may be compared with; empty if there is none."""
    if past.value is None or past.other is None:
        return []
    return speedups.changes(result, older[past.other])


def _cells(result: Result, ratio: Ratio) -> dict[str, str]:
    drafting, memory, roofline = result["eagle_speculation"], result["memory"], result.get("roofline", {})
    is_drafting = is_speculative(result)
    is_simulated = result["model"]["simulated_tau"] is not None
    efficiency = speedups.spec_efficiency(result, ratio)
    return {
        "tok/s": _spread(result["throughput_tokens_per_sec"]),
        "speedup": str(ratio) if is_drafting else "baseline",
        "tau": f"{drafting['mean_acceptance_length']:.2f}" + " (simulated)" * is_simulated,
        "repeated": f"{result['scenario']['repeated_share']:.0%}",
        "accepted": f"{drafting['mean_acceptance_rate']:.0%}" if is_drafting else NO_FIGURE,
        "by position": " ".join(f"{share:.2f}" for share in drafting["per_position"]) or NO_FIGURE,
        "TTFT ms": f"{result['ttft_ms']['median']:.0f}",
        "ITL ms": f"{result['itl_ms']['median']:.2f}",
        "KV MB": f"{memory['kv_bytes'] / 1e6:.0f}",
        "peak MB": f"{memory['peak_bytes'] / 1e6:.0f}",
        "% of ideal": f"{roofline['percent_of_ideal']:.0f}" if "percent_of_ideal" in roofline else NO_FIGURE,
        "spec efficiency": f"{efficiency:.0%}" if efficiency is not None else NO_FIGURE,
    }


def _note(about: str, ratio: Ratio) -> list[str]:
    against = f" against {ratio.other}" if ratio.other is not None else ""
    return [f"{about}{against}: {'; '.join(ratio.reasons)}"] if ratio.reasons else []


def _spread(figure: Result) -> str:
    found = estimate(figure["values"])
    runs = len(figure["values"])
    return found.whole() + ("" if found.is_sure else f" ({runs} runs)" if runs > 1 else " (one run)")


def _changed(changes: list[Change]) -> str:
    said = [
        f"{'REGRESSION' if change.is_regression else 'better'}: {change.figure} {change.ratio:.2f}x"
        for change in changes
        if change.above_noise
    ]
    return "; ".join(said) or f"{changes[0].ratio:.2f}x, within the noise"


def _labels(results: Results) -> dict[str, str]:
    """Names of a table's rows: the setting, with the draft or the file if settings alone are not unique."""
    drafts = {result["model"]["draft"] for result in results.values() if is_speculative(result)}
    named = {
        name: result["setting"]["name"]
        + (f" with {result['model']['draft']}" if len(drafts) > 1 and is_speculative(result) else "")
        for name, result in results.items()
    }
    labels = list(named.values())
    return {name: f"{label} ({name})" if labels.count(label) > 1 else label for name, label in named.items()}


def _place_name(place: Place) -> str:
    profile = " (CPU profile)" if place.profile == "cpu" else ""
    work = f"{place.context_tokens} tokens x {place.batch}, temperature {place.temperature:g}{profile}"
    return f"{place.scenario}: {work}; {place.model}; {place.engine}"


def _facts(place: Place, results: list[Result]) -> str:
    commits = sorted({result["commit"] for result in results})
    drafts = sorted({result["model"]["draft"] for result in results if result["model"]["draft"] is not None})
    sources = sorted({result["scenario"]["prompts_source"] for result in results})
    parts = [place.machine, f"draft {', '.join(drafts) or 'none'}", f"commit {', '.join(commits)}"]
    if any(result["model"]["random_weights"] for result in results):
        parts.append("RANDOM WEIGHTS: speed only, the text is noise")
    if any(result["model"]["simulated_tau"] is not None for result in results):
        parts.append("SIMULATED TAU: chosen, no acceptance was measured")
    if any(map(is_dirty, results)):
        parts.append("UNCOMMITTED CHANGES: nobody can measure this again; not to be published")
    if place.profile == "cpu":
        parts.append("CPU PROFILE: contexts that a CPU can run, not to be set beside the full profile's")
    return "; ".join([*parts, f"prompts: {', '.join(sources)}"])
