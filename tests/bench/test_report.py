"""The report: its plots, figures and marks, and that nothing in a result file becomes part of the page."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.bench.reports import (
    ACCEPTANCE,
    ATTACK,
    FACTS,
    LATENCY,
    SETTINGS,
    SPEEDUP,
    STAGES,
    THROUGHPUT,
    Page,
    Results,
    legend,
    measured,
    plots,
    results,
    without_plots,
)
from typer.testing import CliRunner

from aquiline.bench.report.page import render, write_report
from aquiline.bench.results.integrity import problems
from aquiline.bench.results.intervals import paired, spread
from aquiline.bench.results.result import write_result
from aquiline.cli.main import app
from aquiline.ledger import Ledger

__all__ = ["measured", "results", "without_plots"]


def test_the_page_is_whole_by_itself(results: Results) -> None:
    page = Page(render(results))
    assert not {"script", "link", "img", "iframe", "object", "embed", "image", "base", "metadata"} & set(page.tags)
    for tag, attributes in page.elements:
        assert not {"src", "srcset", "action", "data"} & set(attributes)
        assert "style" not in attributes or tag in {"path", "g", "use", "text"}, "matplotlib's own"
        assert all(str(attributes.get(name, "#")).startswith("#") for name in ("href", "xlink:href"))
    assert "://" not in page.text and "url(" not in page.text and "@import" not in page.text
    policies = [a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in str(policies[0])
    assert any(a.get("name") == "viewport" for tag, a in page.elements if tag == "meta"), "a phone's own width"
    assert page.text == render(results), "the same results, the same page"


def test_the_questions_have_plots_and_figures(results: Results) -> None:
    page = Page(render(results))
    titles = " | ".join(page.figures)
    for title in (
        "Throughput by context, batch 1", "Throughput by context, batch 2", "Throughput by batch, context 16",
        "Throughput by batch, context 48", "Throughput, grid: context 48, batch 2, 12 new tokens",
        "Speedup by num_spec_tokens, batch 1", "Acceptance by position, grid: context 16, batch 1",
        "Stage times, grid: context 48, batch 2",
    ):  # fmt: skip
        assert title in titles
    assert page.tags["figure"] == page.tags["figcaption"] == 4 + 4 + 2 + 4 + 4
    named = [a["aria-label"] for tag, a in page.elements if tag == "svg" and a["class"] == "plot"]
    assert len(named) == len(set(named)) == page.tags["figure"]
    for unit in ("tok/s", "context (tokens)", "batch (sequences)", "num_spec_tokens", "position in the draft", "ms"):
        assert unit in titles


@pytest.mark.usefixtures("without_plots")
def test_figures_are_those_of_the_results(results: Results) -> None:
    one = {file: r for file, r in results.items() if file.startswith("48x2")}
    chain, base = one["48x2-chain-3.json"], one["48x2-baseline.json"]
    for result, values in ((chain, [1100.0, 1500.0]), (base, [900.0, 1100.0])):
        result["throughput_tokens_per_sec"] = spread(values)
    chain["roofline"] = {
        "ideal_tokens_per_s": 2600.0, "percent_of_ideal": 50.0, "ideal_speedup": 2.6, "bound": "memory",
        "ceilings": {"device": "here", "bandwidth": {"per_s": 33.34e9, "source": "measured"}, "cache_bytes": 1},
        "notes": ["the cache may beat it"],
    }  # fmt: skip
    page, drafting, ms = Page(render(one)), chain["eagle_speculation"], chain["stage_ms"]
    tau, repeated = f"{drafting['mean_acceptance_length']:.2f}", f"{chain['scenario']['repeated_share']:.0%}"
    assert page.row(THROUGHPUT, "chain-3") == {
        "tok/s": "1,300", "min to max": "1,100 to 1,500", "runs": "2", "speedup": "1.29x", "tau": tau,
        "repeated": repeated, "ideal tok/s": "2,600", "of ideal": "50%", "bound": "memory",
    }  # fmt: skip
    assert page.row(SPEEDUP, "chain-3") == {
        "num_spec_tokens": "3", "tok/s": "1,300", "baseline tok/s": "1,000", "speedup": "1.29x", "tau": tau,
        "ideal speedup": "2.60x", "spec efficiency": "50%",
    }  # fmt: skip
    acceptance = page.row(ACCEPTANCE, "chain-3")
    assert (acceptance["tau"], acceptance["drafted"]) == (tau, str(drafting["total_draft_tokens"]))
    assert [acceptance[f"at {i}"] for i, _ in enumerate(drafting["per_position"], 1)] == [
        f"{share:.2f}" for share in drafting["per_position"]
    ]
    stages = {name: float(value) for name, value in page.row(STAGES, "chain-3").items()}
    expected = {f"{name} (ms)": value for name, value in ms.items()} | {"step (ms)": sum(ms.values())}
    assert stages == pytest.approx(expected, rel=0.01)
    latency = page.row(LATENCY, "chain-3")
    assert (latency["KV per token"], latency["KV"]) == ("896 B", f"{chain['memory']['kv_bytes'] / 1e6:.2f} MB")
    assert page.row(FACTS, "cpu") == {"aquiline": chain["system"]["cpu"]}
    assert page.row(FACTS, "ceilings") == {"aquiline": "bandwidth 33.3 GB/s (measured)"}
    assert "<li>the cache may beat it</li>" in page.text
    assert page.row(FACTS, "numpy") == {"aquiline": chain["system"]["numpy"]}
    assert page.row(FACTS, "commit") == {"aquiline": chain["commit"]}


@pytest.mark.usefixtures("without_plots")
def test_adaptive_choices_are_shown_beside_what_was_foretold(results: Results) -> None:
    ledger = Ledger(num_chosen=100, choosing_ms=3.0)
    ledger.steps = {"none": 10, "draft": 60, "lookup": 24, "both": 5, "probe": 1}
    ledger.nodes, ledger.accepted = (
        {"none": 0, "draft": n, "lookup": 80, "both": n // 30, "probe": 0} for n in (1200, 900)
    )
    for chance, is_right in ((0.25, False), (0.25, True), (0.75, True)):
        ledger.add_token(chance, is_right)
    ledger.add_time(2.0, 3.0)
    found = ledger.as_dict()
    results["48x2-chain-3.json"]["adaptive"] = found
    assert problems(results["48x2-chain-3.json"]) == []
    page = Page(render(results))
    table = next(i for i, rows in enumerate(page.tables) if "copied" in rows[0])
    row = page.row(table, "chain-3")
    for name, label in {"baseline": "baseline", "chain-2": "chain-2", "tree": "tree N=6"}.items():
        pair = (results[f"48x2-{each}.json"]["throughput_tokens_per_sec"]["values"] for each in ("chain-3", name))
        assert row.pop(f"over {label}") == f"{paired(*pair).value:.2f}x"
    assert row == {
        "nothing drafted": "10%", "by the draft": "60%", "copied": "24%", "both in one tree": "5%",
        "draft probed": "1%",
        "drafted and kept": "75% of 1,200", "copied and kept": "100% of 80", "of both and kept": "75% of 40",
        "step foretold (ms)": "2.00",
        "step measured (ms)": "3.00", "mean distance (ms)": "1.00", "to choose (µs)": "30.0",
        "foretold 20-30%": "25%: 50% of 2", "foretold 70-80%": "75%: 100% of 1",
    }  # fmt: skip
    (plot,) = [axes for title, axes in plots(results).items() if "Foretold and true chances" in title]
    assert plot.lines[1].get_xydata().tolist() == [[25, 0.5], [75, 1.0]]
    assert legend(plot) == ["as foretold", "chain-3"]
    assert found is not None
    del found["steps"]
    results["48x2-chain-3.json"]["adaptive"] = found
    assert problems(results["48x2-chain-3.json"]) == ["adaptive: 'steps' is a required property"]


def test_a_figure_nobody_has_makes_no_column(results: Results) -> None:
    results = {file: result for file, result in results.items() if file.startswith("16x1")}
    assert "ideal tok/s" not in Page(render(results)).tables[THROUGHPUT][0]
    results["16x1-tree.json"]["roofline"] = {"ideal_tokens_per_s": 1e9}
    page = Page(render(results))
    assert page.tables[THROUGHPUT][0][-1] == "ideal tok/s"
    assert any("roofline ideals are beyond the scale" in figure for figure in page.figures), "it would flatten the plot"
    bars = plots(results)["Throughput, grid: context 16, batch 1, 12 new tokens"]
    assert bars.get_xlim()[1] < 1e8


def test_ideals_are_dashed_lines(results: Results) -> None:
    for result in results.values():
        result["throughput_tokens_per_sec"] = spread([9.0, 11.0])
        result["roofline"] = {"ideal_tokens_per_s": 20.0, "ideal_speedup": 2.0}
    drawn = plots(results)
    lines = [line for title, axes in drawn.items() if " by " in title for line in axes.lines]
    dashed = [line for line in lines if line.get_linestyle() == "--" and len(line.get_xdata())]
    by_throughput, by_speedup = 4 * len(SETTINGS), 2 * 2
    assert len(dashed) == by_throughput + by_speedup and {line.get_ydata()[0] for line in dashed} == {20.0, 2.0}
    bars = [axes for title, axes in drawn.items() if title.startswith("Throughput, ")]
    marks = [mark.tolist() for axes in bars for mark in axes.collections[-1].get_offsets()]
    assert len(bars) == 4 and [x for x, _ in marks] == [20.0] * len(results)
    told = [axes for axes in drawn.values() if "roofline ideal" in legend(axes)]
    assert len(told) == 4 + 2 + 4


def test_without_matplotlib_the_page_has_its_tables(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = {file: result for file, result in results.items() if file.startswith("16x1")}
    whole = Page(render(results))
    (tmp_path / "results").mkdir()
    for file, result in results.items():
        write_result(result, tmp_path / "results" / file)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "report.html"
    done = run(tmp_path / "results", "-o", out)
    missing = "needs matplotlib; pip install 'aquiline[train]'"
    assert done.exit_code == 0 and f"aquiline: {out} has no plots: {missing}" in done.stderr
    page = Page(out.read_text(encoding="utf-8"))
    assert page.tables == whole.tables and not page.figures and "No plots were drawn: needs matplotlib" in page.text


MARKS = {
    "CPU profile": lambda r: r["scenario"].update(profile="cpu"),
    "random weights": lambda r: r["model"].update(random_weights=True),
    "simulated tau": lambda r: r["model"].update(simulated_tau=2.5),
}


@pytest.mark.parametrize("mark", MARKS)
def test_what_limits_a_figure_is_said_wherever_it_is(mark: str, results: Results) -> None:
    results = {file: result for file, result in results.items() if file.startswith("16x1")}
    for result in results.values():
        result["scenario"]["profile"] = "full"
        result["model"]["random_weights"] = False
    page = Page(render(results))
    assert not any(mark in figure for figure in page.figures)
    for result in results.values():
        MARKS[mark](result)
    page = Page(render(results))
    badges = page.text.count(f'<span class="badge">{mark}</span>')
    assert badges == page.tags["figure"] + page.tags["table"] + 1 and all(mark in figure for figure in page.figures)
    others = set(MARKS) - {mark}
    assert not any(f'<span class="badge">{other}</span>' in page.text for other in others)


def test_a_simulated_tau_is_told_from_a_measured_one(results: Results) -> None:
    simulated = copy.deepcopy(results["16x1-chain-2.json"])
    simulated["model"]["simulated_tau"] = 2.5
    page = Page(render(results | {"simulated.json": simulated}))
    assert page.row(THROUGHPUT, "chain-2, simulated tau 2.5")["tau"].endswith(" simulated")
    marked = [figure for figure in page.figures if "simulated tau" in figure]
    assert marked and all("batch 1" in figure or "context 16" in figure for figure in marked)


def strings(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a result has strings."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from [(*path, key)] if isinstance(inner, str) else strings(inner, (*path, key))


def test_no_string_of_a_result_becomes_markup(results: Results) -> None:
    attacked = {}
    for file, result in results.items():
        for path in strings(result):
            if path not in {("schema",), ("engine",), ("scenario", "profile"), ("setting", "drafter")}:
                place = result
                for key in path[:-1]:
                    place = place[key]
                place[path[-1]] = ATTACK
        result["system"] |= {ATTACK: ATTACK, "nested": {ATTACK: [ATTACK]}}
        result["stage_ms"] |= {ATTACK: 1.0}
        result["roofline"] = {
            "bound": ATTACK, "notes": [ATTACK],
            "ceilings": {ATTACK: {"per_s": 1e9, "source": ATTACK}, "bandwidth": ATTACK},
        }  # fmt: skip
        assert not problems(result)
        attacked[file + ATTACK] = result
        attacked["peer" + file + ATTACK] = result | {"engine": ATTACK}
    page = Page(render(attacked))
    assert ATTACK.split("\ud800")[0] in "".join(page.figures) and "{{ 7 * 7 }}" in page.text
    assert not {"script", "img"} & set(page.tags) and page.text.count("</style>") == 1
    harmless = Page(render(json.loads(json.dumps(attacked).replace(json.dumps(ATTACK)[1:-1], "harmless"))))
    drawing = {"g", "path", "use", "text", "defs"}  # a longer legend has more lines
    assert {tag: n for tag, n in page.tags.items() if tag not in drawing} == {
        tag: n for tag, n in harmless.tags.items() if tag not in drawing
    }
    assert set(page.tags) == set(harmless.tags)
    known = {name for _, attributes in harmless.elements for name in attributes}
    assert {name for _, attributes in page.elements for name in attributes} == known


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("stage_ms", {"verify": 1e300}), ("stage_ms", {"draft": 10**400}), ("roofline", {"ceilings": []}),
        ("roofline", {"bound": {}}), ("roofline", {"ceilings": {"bandwidth": {"per_s": None}}}),
        ("roofline", {"ceilings": {"linear_flops": {"per_s": -1.0, "source": "given"}}}),
    ],
    ids=str,
)  # fmt: skip
def test_parts_that_cannot_be_shown_are_refused(name: str, part: dict[str, Any], results: Results) -> None:
    found = problems(next(iter(results.values())) | {name: part})
    assert found and all(problem.startswith(name) for problem in found)


@pytest.mark.usefixtures("without_plots")
def test_each_scenario_of_a_table_has_a_body_of_its_own_under_a_heading(results: Results) -> None:
    page = render({file: result for file, result in results.items() if "baseline" in file})
    table = page[page.index("<table>") : page.index("</table>")].splitlines()
    assert table[:2] == ["<table>", '<thead><tr><th scope="col">setting</th>' + table[1].split("setting</th>")[1]]
    kinds = [line.split(">")[0] for line in table[2:]]
    assert kinds == ["<tbody", "<tr", "<tr"] * 4 and sum('scope="rowgroup"' in line for line in table) == 4


def test_empty_parts_make_no_columns(results: Results) -> None:
    for index, result in enumerate(results.values()):
        result["stage_ms"] = [{}, {"host": 0.0}][index % 2]
        result["roofline"] = [{}, {"notes": [], "ceilings": {"bandwidth": 7}}][index % 2]
        result["system"]["cores"] = [None, {}, [1], 1e99][index % 4]
        assert not problems(result)
    page = Page(render(results))
    assert page.tags["section"] == 1 and "bound" not in page.tables[THROUGHPUT][0]
    facts = FACTS - 1  # no table of stages
    assert page.row(facts, "ceilings") == {"aquiline": "-"}
    assert page.row(facts, "cores") == {"aquiline": "{}, [1], 1e+99"}
    assert not any("Stage times" in figure for figure in page.figures)


def run(*args: object) -> Any:
    return CliRunner().invoke(app, ["report", *map(str, args)])


def test_the_command(results: Results, tmp_path: Path) -> None:
    results = {file: result for file, result in results.items() if file.startswith("16x1")}
    for file, result in results.items():
        write_result(result, tmp_path / file)
    out = tmp_path / "report.html"
    done = run(tmp_path, "-o", out)
    assert done.exit_code == 0 and done.stdout.strip() == f"{out}: {len(results)} results"
    assert out.read_text(encoding="utf-8") == render(dict(sorted(results.items())))
    assert run(tmp_path, "--out", tmp_path / "again.html").exit_code == 0
    assert "aquiline report results/ -o report.html" in run("--help").stdout


def test_what_cannot_be_read_or_written_is_named(results: Results, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert "holds no results" in run(tmp_path, "-o", out).stderr and not out.exists()
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.json").write_text("{}")
    refused = run(tmp_path, "-o", out)
    assert refused.exit_code == 2 and "a.json: not JSON" in refused.stderr and "b.json: result: " in refused.stderr
    assert "is no directory" in run(tmp_path / "missing", "-o", out).stderr and not out.exists()
    write_report({"\ud800.json": results["16x1-chain-2.json"]}, out)
    assert "?.json: no speedup" in out.read_text(encoding="utf-8"), "a name that is no text does not stop it"
    for place in (tmp_path, tmp_path / "missing" / "report.html"):
        with pytest.raises(ValueError, match=r"out='.*': .*; name a file in a folder that can be written") as error:
            write_report(results, place)
        assert str(place) in str(error.value)
