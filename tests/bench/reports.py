"""Results of a tiny pair, and what a browser would make of a page: for the tests of the report."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

import pytest
from tests.conftest import tiny_llm

from aquiline.bench.report import page
from aquiline.bench.report.sections import sections
from aquiline.bench.results.intervals import spread
from aquiline.bench.results.result import ModelFacts, Result, Scenario, describe, tokens_sha256
from aquiline.config import SamplingParams
from aquiline.spec.drafting import Chain, Dynamic, NoDraft

SETTINGS = {
    "baseline": NoDraft(),
    "chain-2": Chain(2),
    "chain-3": Chain(3),
    "tree": Dynamic(),
}
Results = dict[str, Result]
THROUGHPUT, SPEEDUP, ACCEPTANCE, STAGES, LATENCY, FACTS = range(6)
ATTACK = "<script>hit()</script>\"'><img src=x onerror=hit()>&lt;/style></style>\ud800\x00{{ 7 * 7 }}"


def measure(contexts: tuple[int, ...] = (16, 48), batches: tuple[int, ...] = (1, 2)) -> Results:
    """Results of a tiny random pair, by file name."""
    llm = tiny_llm()
    facts = ModelFacts("tiny", "tiny draft", "bfloat16", "float32", True, None, 123_456)
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, seed=0)
    found = {}
    for context in contexts:
        for batch in batches:
            prompts = [[1 + (7 * i + j) % 90 for j in range(context)] for i in range(batch)]
            source = tokens_sha256(prompts), "counting"
            scenario = Scenario("grid", "cpu", context, batch, 12, 0.0, 0, *source, warmup_runs=0, measurement_runs=2)
            for name, drafting in SETTINGS.items():
                runs = [llm.run(prompts, sampling, drafting=drafting) for _ in range(2)]
                found[f"{context}x{batch}-{name}.json"] = describe(scenario, name, drafting, facts, llm, runs)
    return found


@pytest.fixture(scope="session")
def measured() -> Results:
    return measure()


@pytest.fixture
def results(measured: Results) -> Results:
    """A copy to edit."""
    return copy.deepcopy(measured)


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without plots, which are quicker to make."""
    monkeypatch.setattr(page, "what_is_missing", lambda: "nothing")


def plots(results: Results) -> dict[str, Any]:
    """The axes of every plot of a report of one section, by title."""
    (section,) = sections(results)
    panels = [panel for group in page.GROUPS for panel in group.draw([row for row in section.rows if group.holds(row)])]
    return {panel.title: panel.figure.axes[0] for panel in panels}


def legend(axes: Any) -> list[str]:
    """The texts below a plot, unfolded."""
    return [text.get_text().replace("\n", " ") for legend in axes.figure.legends for text in legend.get_texts()]


@dataclass
class Page(HTMLParser):
    """What a browser would make of a page: its elements, and tables as rows of texts."""

    text: str
    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    tables: list[list[list[str]]] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.inside: list[str] = []
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.inside.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "figure":
            self.figures.append("")

    def handle_endtag(self, tag: str) -> None:
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "td" in self.inside or "th" in self.inside:
            self.tables[-1][-1][-1] += data
        if "figure" in self.inside:
            self.figures[-1] += data

    def row(self, table: int, label: str) -> dict[str, str]:
        """The one row of a table that begins so, by the names of its columns."""
        head, *rows = self.tables[table]
        (found,) = [row for row in rows if row[0] == label]
        return dict(zip(head[1:], found[1:], strict=True))

    @property
    def tags(self) -> Counter[str]:
        return Counter(tag for tag, _ in self.elements)


def peer_of(result: Result, engine: str = "llama.cpp", share: float = 0.5) -> Result:
    """The same work by another engine, so much slower."""
    peer = copy.deepcopy(result)
    values = result["throughput_tokens_per_sec"]["values"]
    peer["throughput_tokens_per_sec"] = spread([share * value for value in values])
    return peer | {"engine": engine, "stage_ms": {}, "system": {n: result["system"][n] for n in ("cpu", "threads")}}
