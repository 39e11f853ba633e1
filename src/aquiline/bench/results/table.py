"""Results as tables, in Markdown and on a terminal, from the same rows. Regressions against an older run are marked.

A table holds the settings of one scenario, model, engine and machine. Only comparable figures are compared; where a
ratio is missing, a note below the table says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from aquiline.bench.results import speedups
from aquiline.bench.results.intervals import estimate
from aquiline.bench.results.result import Result, is_dirty, is_speculative, require
from aquiline.bench.results.speedups import Change, Place, Ratio

if TYPE_CHECKING:
    from rich.console import Group

Results = Mapping[str, Result]

OPTIONAL = ("% of ideal", "spec efficiency")
"""Columns that are left out if no row has a figure for them."""
LEGEND = (
    "tok/s: decoding by the wall clock, median over the rounds [its 95 % interval]. speedup: median of the rounds' own "
    "ratios [its interval]; an interval needs six rounds. tau: tokens committed per step and sequence. "
    "repeated: share of 8-grams of the output that stood earlier in the same text; loops flatter every drafter. "
    "accepted: of all drafted tokens, and by position. KV: of the whole pool."
)


@dataclass(frozen=True)
class ResultRow:
    """One setting. cells: by column; notes: what the cells have no room for; is_regression: whether it fell behind the
    older run."""

    cells: dict[str, str]
    notes: list[str]
    is_regression: bool = False


@dataclass(frozen=True)
class ResultTable:
    """The settings of one place. facts: a line of facts that hold for all of them."""

    title: str
    facts: str
    columns: list[str]
    rows: list[ResultRow]

    @property
    def notes(self) -> list[str]:
        """The notes of all rows."""
        return [note for row in self.rows for note in row.notes]


@dataclass(frozen=True)
class ResultTables:
    """All tables. ideal: notes about the column "% of ideal"; vanished: settings that only the older run has."""

    tables: list[ResultTable]
    ideal: list[str]
    vanished: list[str] = field(default_factory=list)
    has_older: bool = False

    @property
    def regressions(self) -> list[str]:
        """Each setting that fell behind, with the table it stands in."""
        return [f"{t.title}: {row.cells['setting']}" for t in self.tables for row in t.rows if row.is_regression]

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
    parts = []
    for table in found.tables:
        lines = [[_escape(row.cells[column]) for column in table.columns] for row in table.rows]
        head = [table.columns, ["---" if column == "setting" else "---:" for column in table.columns]]
        grid = "\n".join(f"| {' | '.join(line)} |" for line in [*head, *lines])
        notes = "".join(f"\n- {_escape(note)}" for note in table.notes)
        parts.append(
            f"### {_escape(table.title)}\n\n{_escape(table.facts)}\n\n{grid}\n" + (f"{notes}\n" if notes else "")
        )
    closing = "".join(f"- {_escape(line)}\n" for line in found.closing)
    return "\n".join([*parts, LEGEND + "\n"] + ([closing] if closing else []))


def console(results: Results, older: Results | None = None) -> Group:
    """The report for a rich console. Raises ResultError naming every result that cannot be believed."""
    from rich.console import Group, RenderableType
    from rich.table import Table as Grid
    from rich.text import Text

    found = report(results, older)
    parts: list[RenderableType] = []
    for table in found.tables:
        grid = Grid(
            title=Text(table.title), caption=Text("\n".join([table.facts, *table.notes])), caption_justify="left"
        )
        for column in table.columns:
            grid.add_column(column, justify="left" if column == "setting" else "right")
        for row in table.rows:
            grid.add_row(
                *(Text(row.cells[column]) for column in table.columns), style="red" if row.is_regression else None
            )
        parts.append(grid)
    return Group(*parts, Text("\n".join([LEGEND, *found.closing])))


def _table(place: Place, names: list[str], results: Results, older: Results | None) -> ResultTable:
    here = {name: results[name] for name in sorted(names, key=lambda n: (is_speculative(results[n]), n))}
    labels = _labels(here)
    rows = [_row(labels[name], result, results, older) for name, result in here.items()]
    columns = [c for c in rows[0].cells if c not in OPTIONAL or any(row.cells[c] != "-" for row in rows)]
    return ResultTable(_place_name(place), _facts(place, list(here.values())), columns, rows)


def _row(label: str, result: Result, results: Results, older: Results | None) -> ResultRow:
    ratio = speedups.speedup(result, results)
    cells = {"setting": label} | _cells(result, ratio)
    notes = _note(f"{label}, speedup", ratio) if is_speculative(result) else []
    if older is None:
        return ResultRow(cells, notes)
    past = speedups.against_older(result, older)
    changes = speedups.changes(result, older[past.other]) if past.value is not None and past.other is not None else []
    cells["against older"] = _changed(changes) if changes else "not comparable"
    notes += _note(f"{label}, older", past)
    return ResultRow(cells, notes, any(change.is_regression for change in changes))


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
        "accepted": f"{drafting['mean_acceptance_rate']:.0%}" if is_drafting else "-",
        "by position": " ".join(f"{share:.2f}" for share in drafting["per_position"]) or "-",
        "TTFT ms": f"{result['ttft_ms']['median']:.0f}",
        "ITL ms": f"{result['itl_ms']['median']:.2f}",
        "KV MB": f"{memory['kv_bytes'] / 1e6:.0f}",
        "peak MB": f"{memory['peak_bytes'] / 1e6:.0f}",
        "% of ideal": f"{roofline['percent_of_ideal']:.0f}" if "percent_of_ideal" in roofline else "-",
        "spec efficiency": f"{efficiency:.0%}" if efficiency is not None else "-",
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


def _escape(text: str) -> str:
    """A text whose bars and line ends cannot break a Markdown table; names come from result files."""
    return " ".join(text.replace("|", "\\|").split())
