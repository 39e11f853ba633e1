"""What the report puts side by side and what it keeps apart, which ratios it states, and what it leaves out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from tests.bench.reports import (
    ACCEPTANCE,
    FACTS,
    SPEEDUP,
    Page,
    Results,
    legend,
    measured,
    peer_of,
    plots,
    results,
    without_plots,
)

from aquiline.bench.report.page import render
from aquiline.bench.report.sections import by_scenario, sections
from aquiline.bench.results.intervals import paired
from aquiline.bench.results.result import Result

__all__ = ["measured", "results", "without_plots"]
pytestmark = pytest.mark.usefixtures("without_plots")


def test_machines_and_ways_to_compute_are_kept_apart(results: Results) -> None:
    other = {f"b-{file}": copy.deepcopy(r) for file, r in results.items()}
    edits: list[Callable[[Result], Any]] = [
        lambda r: r["system"].update(cpu="another CPU"),
        lambda r: r["system"].update(threads=64),
        lambda r: r["model"].update(target="another"),
        lambda r: r["model"].update(dtype="float32"),
        lambda r: r["scenario"].update(profile="full"),
        lambda r: r["scenario"].update(temperature=0.8),
    ]
    for edit in edits:
        both = results | copy.deepcopy(other)
        for file in other:
            edit(both[file])
        found = sections(both)
        assert len(found) == 2 and {len(section.rows) for section in found} == {len(results)}
        assert all(len({row.file.startswith("b-") for row in section.rows}) == 1 for section in found)
        assert Page(render(both)).tags["section"] == 2


def test_peers_are_series_of_their_own(results: Results) -> None:
    peers = {f"p-{file}": peer_of(r) for file, r in results.items() if "baseline" in file or "chain-3" in file}
    (section,) = sections(results | peers)
    rows = {row.file: row for row in section.rows}
    assert rows["p-16x1-chain-3.json"].label == "llama.cpp (bfloat16): chain-3"
    own = (results[f"16x1-{name}.json"]["throughput_tokens_per_sec"]["values"] for name in ("chain-3", "baseline"))
    speedup = paired(*own).value
    assert rows["p-16x1-chain-3.json"].ratio.value == pytest.approx(speedup), "over its own baseline"
    assert rows["p-16x1-chain-3.json"].style != rows["16x1-chain-3.json"].style
    for peer in peers.values():
        peer["eagle_speculation"] = peer["eagle_speculation"] | {"total_draft_tokens": 0, "per_position": [0.5, 0.25]}
    single = {file: peer for file, peer in peers.items() if "16x1-chain-3" in file}
    acceptance = Page(render(results | single)).row(ACCEPTANCE, "llama.cpp (bfloat16): chain-3")
    assert (acceptance["at 1"], acceptance["at 2"]) == ("0.50", "0.25"), "what is plotted is in the table"
    assert Page(render(results | peers)).tables[FACTS][0][1:] == ["aquiline", "llama.cpp"]
    nameless = {file: peer | {"system": {}} for file, peer in peers.items()}
    assert sections(nameless)[0].title == "unnamed CPU: llama.cpp, tiny"
    alone = sections(peers | {f"q-{file}": peer_of(r, "OpenVINO") for file, r in results.items()})
    assert [(s.rows[0].result["engine"], len(s.rows)) for s in alone] == [("OpenVINO", 16), ("llama.cpp", 8)]


def test_no_ratio_without_a_like_baseline(results: Results) -> None:
    one = {file: r for file, r in results.items() if file.startswith("16x1") and "tree" not in file}
    page = Page(render({file: r for file, r in one.items() if "baseline" not in file}))
    assert "16x1-chain-2.json: no speedup: there is no baseline" in page.text
    one["16x1-chain-2.json"]["output"]["sha256"] = "another text"
    page = Page(render(one))
    assert "16x1-chain-2.json: no speedup: output.sha256: the texts differ" in page.text
    assert page.text.count("no speedup") == 1 and page.row(SPEEDUP, "chain-2")["speedup"] == "-"


def test_the_newest_of_equals_is_shown(results: Results) -> None:
    older = copy.deepcopy(results["16x1-chain-2.json"]) | {"date": "2001-01-01T00:00:00+00:00"}
    (section,) = sections({"a.json": older} | results | {"z.json": older | {"date": "2000-01-01T00:00:00+00:00"}})
    assert [row.file for row in section.rows] == [row.file for row in sections(results)[0].rows]
    assert section.older == ["a.json (2001-01-01T00:00:00+00:00)", "z.json (2000-01-01T00:00:00+00:00)"]
    assert "a.json (2001-01-01T00:00:00+00:00): not shown" in render({"a.json": older} | results)


def test_scenarios_of_one_shape_stay_apart(results: Results) -> None:
    other = {f"o-{file}": copy.deepcopy(r) for file, r in results.items()}
    for result in other.values():
        result["scenario"]["prompts_sha256"] = "0123456789abcdef"
    (section,) = sections(results | other)
    scenarios = dict(by_scenario(section.rows))
    assert len(scenarios) == 8 and not section.older
    assert "grid: context 16, batch 1, 12 new tokens, seed 0, prompts 01234567" in scenarios
    assert all(row.ratio.against["scenario"] == row.result["scenario"] for row in section.rows)
    told = [text for axes in plots(results | other).values() for text in legend(axes)]
    assert "chain-2, grid: context 16, batch 1, 12 new tokens, seed 0, prompts 01234567" in told
