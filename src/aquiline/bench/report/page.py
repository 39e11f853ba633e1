"""Result files as one page of plots and tables that needs no network, no script and no library to be read.

`sections` groups results, `panels` and `tables` choose what is shown, `charts` draws, page.html lays out. Jinja and
ElementTree escape every string, since result files are not trusted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jinja2

from aquiline.bench.report.panels import (
    Panel,
    acceptance_panels,
    calibration_panels,
    speedup_panels,
    stage_panels,
    throughput_panels,
)
from aquiline.bench.report.report_tables import (
    ReportTable,
    acceptance_table,
    choices_table,
    facts,
    latency_table,
    speedup_table,
    stage_table,
    throughput_table,
)
from aquiline.bench.report.sections import Section, badges, sections
from aquiline.bench.results.result import Result


@dataclass(frozen=True)
class PageGroup:
    """Plots about one question, with a table of their figures."""

    title: str
    note: str
    panels: list[Panel]
    table: ReportTable


@dataclass(frozen=True)
class Part:
    """A section as the page shows it. facts: the engines, and a row of facts for each name; remarks: what is not shown
    and why; notes: about the ideals."""

    section: Section
    badges: list[str]
    groups: list[PageGroup]
    facts: tuple[list[str], list[tuple[str, list[str]]]]
    remarks: list[str]
    notes: list[str]


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
    parts = [_part(section) for section in sections(results)]
    return environment.from_string(source).render(
        parts=parts, num_results=len(results), first=dates[0], last=dates[-1], commits=commits
    )


def _part(section: Section) -> Part:
    remarks = [f"{row.file}: no speedup: {'; '.join(row.ratio.reasons)}" for row in section.rows if row.speedup is None]
    remarks += [f"{name}: not shown, a newer run of the same is" for name in section.older]
    notes = list(dict.fromkeys(note for row in section.rows for note in row.notes))
    return Part(section, badges(section.rows), _groups(section), facts(section.rows), remarks, notes)


def _groups(section: Section) -> list[PageGroup]:
    rows, scenarios = section.rows, section.scenarios
    found = [
        PageGroup(
            "Throughput by context and batch", "Decode tokens per second of all sequences together, without prefill.",
            throughput_panels(rows, scenarios), throughput_table(scenarios),
        ),
        PageGroup(
            "Speedup by num_spec_tokens", "Throughput over that of the same engine without a drafter.",
            speedup_panels(rows), speedup_table(scenarios),
        ),
        PageGroup(
            "Acceptance by position", "Share of steps that kept the draft's token at that position.",
            acceptance_panels(scenarios), acceptance_table(scenarios),
        ),
        PageGroup(
            "Adaptive choices", "What each sequence drafted from at each step, and whether it came as foretold.",
            calibration_panels(scenarios), choices_table(scenarios),
        ),
        PageGroup("Stage times", "Where a decode step goes.", stage_panels(scenarios), stage_table(scenarios)),
        PageGroup("Latency and memory", "Time per token is of one sequence.", [], latency_table(scenarios)),
    ]  # fmt: skip
    return [group for group in found if group.table.groups]
