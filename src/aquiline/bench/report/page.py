"""Result files as one page of plots and tables that needs no network, no script and no library to be read.

`sections` groups results, `report_tables` and `panels` choose what is shown, page.html lays out. Without matplotlib the
page has no plots and says so. Jinja and markupsafe escape every string, since result files are not trusted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jinja2

from aquiline.bench.plots import PALETTE, what_is_missing
from aquiline.bench.report import panels, report_tables
from aquiline.bench.report.panels import Panel
from aquiline.bench.report.report_tables import facts_table, figure_table
from aquiline.bench.report.sections import ReportRow, Section, badges, sections
from aquiline.bench.results.result import Result, is_speculative


@dataclass(frozen=True)
class PageGroup:
    """Plots about one question, with a table of their figures. holds: whether a row has such figures; cells: of a row
    of the table; draw: the plots of the rows."""

    title: str
    note: str
    holds: Callable[[ReportRow], object]
    cells: Callable[[ReportRow], dict[str, str]]
    draw: Callable[[list[ReportRow]], list[Panel]]


GROUPS = (
    PageGroup(
        "Throughput by context and batch", "Decode tokens per second of all sequences together, without prefill.",
        lambda row: True, report_tables.throughput, panels.throughput_panels,
    ),
    PageGroup(
        "Speedup by num_spec_tokens", "Throughput over that of the same engine without a drafter.",
        lambda row: is_speculative(row.result), report_tables.speedup, panels.speedup_panels,
    ),
    PageGroup(
        "Acceptance by position", "Share of steps that kept the draft's token at that position.",
        report_tables.has_acceptance, report_tables.acceptance,
        partial(panels.scenario_panels, "Acceptance by position", panels.draw_acceptance),
    ),
    PageGroup(
        "Adaptive choices", "What each sequence drafted from at each step, and whether it came as foretold.",
        lambda row: row.part("adaptive"), report_tables.choices,
        partial(panels.scenario_panels, "Foretold and true chances", panels.draw_calibration),
    ),
    PageGroup(
        "Stage times", "Where a decode step goes.",
        lambda row: row.stage_ms, report_tables.stages,
        partial(panels.scenario_panels, "Stage times", panels.draw_stages),
    ),
    PageGroup(
        "Latency and memory", "Time per token is of one sequence.",
        lambda row: True, report_tables.latency, lambda rows: [],
    ),
)  # fmt: skip


def write_report(results: dict[str, Result], out: Path) -> None:
    """Write the page of results that `read_results` returned. Raises ValueError if the file cannot be written."""
    page = render(results)
    try:
        out.write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"out={str(out)!r}: {error.strerror}; name a file in a folder that can be written") from None


def render(results: dict[str, Result]) -> str:
    """The page as HTML. The same results always give the same page."""
    source = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    dates = sorted(result["date"] for result in results.values())
    commits = list(dict.fromkeys(result["commit"] for result in results.values()))
    return environment.from_string(source).render(
        parts=[(section, _groups(section)) for section in sections(results)], missing=what_is_missing(),
        palette=PALETTE, badges_of=badges, figure_table=figure_table, facts_table=facts_table,
        num_results=len(results), first=dates[0], last=dates[-1], commits=commits,
    )  # fmt: skip


def _groups(section: Section) -> list[tuple[PageGroup, list[ReportRow]]]:
    """The groups that a section has figures for, with the rows that have them."""
    chosen = [(group, [row for row in section.rows if group.holds(row)]) for group in GROUPS]
    return [(group, rows) for group, rows in chosen if rows]
