"""Tables of results: ratios that may be formed and reasons where not, labels, and regressions beyond the noise."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path

import pytest
from rich.console import Console
from tests.results import BASELINE, CHAIN, NOTHING, at_speed, changed, measured, write_all
from typer.testing import CliRunner

from aquiline.bench.results.result import Result, read_results
from aquiline.bench.results.table import Results, report
from aquiline.bench.tables import Table
from aquiline.cli.main import app
from aquiline.errors import ResultError


def rows_of(table: Table) -> dict[str, dict[str, str]]:
    """Cells by setting and column."""
    return {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}


def rows(results: Results, older: Results | None = None) -> dict[str, dict[str, str]]:
    """The same, where all results share one table."""
    (table,) = report(results, older).tables
    return rows_of(table)


def notes(results: Results, older: Results | None = None) -> list[str]:
    """The notes below that table."""
    (table,) = report(results, older).tables
    return list(table.notes)


def regressed(results: Results, older: Results) -> bool:
    """Whether the table's row of chain-3 is marked as a regression, and no other row is."""
    (table,) = report(results, older).tables
    marked = [table.rows[number][0] for number in table.marked]
    assert marked in ([], ["chain-3"])
    return bool(marked)


def printed(results: Results, older: Results | None = None) -> str:
    """What a wide terminal shows."""
    out = io.StringIO()
    Console(width=250, file=out).print(report(results, older).console())
    return out.getvalue()


def steady() -> dict[str, Result]:
    """Chains at 150 and 200 tokens per second over a baseline of 100, all runs within 2 %."""
    found = measured()
    speeds = {BASELINE: 100.0, "chain-2.json": 150.0, CHAIN: 200.0}
    return {
        name: at_speed(result, speeds[name], 0.99 * speeds[name], 1.01 * speeds[name]) for name, result in found.items()
    }


def test_a_row_says_what_was_measured() -> None:
    found, result = rows(steady()), steady()[CHAIN]
    assert list(found) == ["baseline", "chain-2", "chain-3"], "the baseline comes first"
    drafting, cells = result["eagle_speculation"], found["chain-3"]
    assert cells["tok/s"] == "200 (3 runs)" and cells["speedup"] == "2.00x"
    assert cells["tau"] == f"{drafting['mean_acceptance_length']:.2f}"
    assert cells["accepted"] == f"{drafting['mean_acceptance_rate']:.0%}"
    assert cells["by position"] == " ".join(f"{p:.2f}" for p in drafting["per_position"])
    assert cells["repeated"] == f"{result['scenario']['repeated_share']:.0%}"
    assert cells["TTFT ms"] == f"{result['ttft_ms']['median']:.0f}"
    assert cells["ITL ms"] == f"{result['itl_ms']['median']:.2f}"
    assert cells["peak MB"] == f"{result['memory']['peak_bytes'] / 1e6:.0f}"
    assert found["baseline"]["speedup"] == "baseline" and found["baseline"]["accepted"] == "-"
    assert not notes(steady())


def test_columns_of_the_roofline_are_there_where_a_result_has_one() -> None:
    assert "% of ideal" not in report(steady()).tables[0].columns
    roofline = {"ideal_tokens_per_s": 400.0, "percent_of_ideal": 50.0, "ideal_speedup": 2.5}
    stated = changed(steady()[CHAIN], roofline=roofline | {"spec_efficiency": 0.7})
    for result, efficiency in ((changed(steady()[CHAIN], roofline=roofline), "80%"), (stated, "70%")):
        found = rows(steady() | {CHAIN: result})
        assert (found["chain-3"]["% of ideal"], found["chain-3"]["spec efficiency"]) == ("50", efficiency)
        assert (found["chain-2"]["% of ideal"], found["chain-2"]["spec efficiency"]) == ("-", "-")
    noted = {name: changed(r, roofline={"notes": ["routing is uniform"]}) for name, r in steady().items()}
    assert report(noted).closing == ["ideal: routing is uniform"], "said once"
    alone = {CHAIN: stated}
    assert "spec efficiency" not in report(alone).tables[0].columns, "no ratio, so no share of one"


def test_markdown_and_console_have_the_same_cells() -> None:
    text = printed(steady(), steady())
    (table,) = report(steady(), steady()).tables
    for row in table.rows:
        assert f"| {' | '.join(row)} |" in report(steady(), steady()).markdown()
        assert all(cell in text for cell in row)


UNFAIR = {
    "other prompts": ({"scenario__prompts_sha256": "f" * 64}, "scenario.prompts_sha256: "),
    "another length": ({"scenario__context_tokens": 8}, "scenario.context_tokens: 4 against 8"),
    "another batch's temperature": ({"scenario__temperature": 0.5}, "scenario.temperature: 0.8 against 0.5"),
    "another seed": ({"scenario__seed": 4}, "scenario.seed: 3 against 4"),
    "another text": ({"output__sha256": "f" * 64}, "output.sha256: the texts differ"),
    "another arithmetic": ({"model__arithmetic": "bfloat16"}, "model.arithmetic: 'float32' against 'bfloat16'"),
    "another CPU": ({"system__cpu": "Other CPU"}, "system.cpu: 'Some CPU' against 'Other CPU'"),
    "more threads": ({"system__threads": 64}, "system.threads: "),
    "another instruction set": ({"system__isa": "avx512"}, "system.isa: 'avx2' against 'avx512'"),
    "the torch path": ({"system__path": "torch"}, "system.path: 'native' against 'torch'"),
    "another commit": ({"commit": "ba9876543210"}, "commit: '0123456789ab' against 'ba9876543210'"),
}


@pytest.mark.parametrize("name", UNFAIR)
def test_no_ratio_without_a_fair_baseline(name: str) -> None:
    fields, reason = UNFAIR[name]
    results = steady() | {BASELINE: changed(steady()[BASELINE], **fields)}
    tables = report(results).tables
    found = {name: cells for table in tables for name, cells in rows_of(table).items()}
    assert found["chain-3"]["speedup"] == "none"
    (note,) = [note for table in tables for note in table.notes if note.startswith("chain-3, ")]
    assert note.startswith("chain-3, speedup against baseline.json: ") and reason in note
    assert note in report(results).markdown()


def shorter(result: Result) -> Result:
    """A copy that wrote a token less, and says so everywhere."""
    drafting = result["eagle_speculation"]
    tau = (drafting["num_committed"] - 1) / drafting["num_steps"]
    return changed(
        result, output__num_tokens=[23, *result["output"]["num_tokens"][1:]],
        eagle_speculation__num_committed=drafting["num_committed"] - 1, eagle_speculation__mean_acceptance_length=tau,
        eagle_speculation__tokens_cut=drafting["tokens_cut"] + 1,
    )  # fmt: skip


def test_no_ratio_of_unequal_outputs() -> None:
    results = steady() | {CHAIN: shorter(steady()[CHAIN])}
    found = rows(results)
    assert found["chain-3"]["speedup"] == "none" and found["chain-2"]["speedup"] == "1.50x"
    assert "output.num_tokens: 143 against 144" in notes(results)[0]


def test_no_ratio_without_a_baseline_or_with_two() -> None:
    alone = {CHAIN: steady()[CHAIN]}
    assert notes(alone) == ["chain-3, speedup: there is no baseline"]
    two = steady() | {"again.json": steady()[BASELINE]}
    assert "2 baselines would do (baseline.json, again.json); keep one" in notes(two)[0]
    peer = changed(steady()[BASELINE], engine="llama.cpp")
    assert "there is no baseline" in report(alone | {"peer.json": peer}).markdown(), "another engine's is none of ours"


BROKEN = {
    "throughput_tokens_per_sec: is 0": {"throughput_tokens_per_sec": NOTHING},
    "output.num_tokens: 120 tokens, but": {"output__num_tokens": [24] * 5},
    "eagle_speculation.mean_acceptance_length: nan": {"eagle_speculation__mean_acceptance_length": math.nan},
    "memory: 'kv_bytes_per_token' is a required": {"memory": {}},
}


@pytest.mark.parametrize("reason", BROKEN)
def test_a_broken_result_is_refused_on_either_side(reason: str, tmp_path: Path) -> None:
    sound = write_all(steady(), tmp_path / "sound")
    broken = write_all(steady() | {CHAIN: changed(steady()[CHAIN], **BROKEN[reason])}, tmp_path / "broken")
    for directory, older in ((broken, sound), (sound, broken)):
        for form in ([], ["--markdown"], ["--short"]):
            done = CliRunner().invoke(app, ["bench", "table", str(directory), "--older", str(older), *form])
            assert done.exit_code == 2 and f"chain-3.json: {reason}" in done.stderr


def test_a_broken_file_is_refused_when_it_is_read(tmp_path: Path) -> None:
    write_all(steady() | {CHAIN: {"schema": "aquiline.result/2"}}, tmp_path)
    with pytest.raises(ResultError, match=r"chain-3\.json: result: 'scenario' is a required property"):
        report(read_results(tmp_path)).markdown()


@pytest.mark.parametrize("field", ["system__cpu", "system__isa", "model__dtype", "engine", "scenario__batch"])
def test_what_is_of_different_places_shares_no_table(field: str) -> None:
    other = {"scenario__batch": 3}.get(field, "other")
    result = changed(steady()[CHAIN], **{field: other})
    if field == "scenario__batch":
        result = at_speed(result, 1, 1, 1)
        result["output"]["num_tokens"] = [16] * 9  # as many tokens from three requests a run
    tables = report(steady() | {"other.json": result}).tables
    assert sorted(len(table.rows) for table in tables) == [1, 3]


def test_labels_say_what_is_not_a_measurement_of_a_real_model() -> None:
    facts = report(steady()).tables[0].facts
    assert "CPU PROFILE" in facts and "SIMULATED" not in facts and "RANDOM" not in facts
    random = {name: changed(result, model__random_weights=True) for name, result in steady().items()}
    random[CHAIN] = changed(random[CHAIN], model__simulated_tau=2.5)
    (table,) = report(random).tables
    assert "SIMULATED TAU" in table.facts and "RANDOM WEIGHTS" in table.facts and "random weights" in table.title
    taus = {name: row["tau"] for name, row in rows_of(table).items()}
    assert taus["chain-3"].endswith(" simulated") and not taus["chain-2"].endswith("simulated")
    full = {name: changed(result, scenario__profile="full") for name, result in steady().items()}
    assert "CPU" not in report(full).tables[0].facts.replace("Some CPU", "")


def test_rows_that_share_a_name_are_told_apart() -> None:
    again = steady() | {"again.json": steady()[CHAIN]}
    assert {"chain-3 (chain-3.json)", "chain-3 (again.json)"} < set(rows(again))
    drafts = steady() | {"again.json": changed(steady()[CHAIN], model__draft="other head")}
    assert {"chain-3 with bundled", "chain-3 with other head", "baseline"} < set(rows(drafts))


def test_names_from_elsewhere_do_not_break_a_table() -> None:
    odd = {name: changed(result, model__target="a|b\n# c") for name, result in steady().items()}
    lines = report(odd).markdown().splitlines()
    assert not any(line.startswith("# c") for line in lines)
    grid = [line for line in lines if line.startswith("|")]
    assert len({line.count(" | ") for line in grid}) == 1 and "a\\|b # c" in report(odd).markdown()
    odd = {name: changed(result, model__target="[bold]x[/nothing]") for name, result in steady().items()}
    assert "[bold]x[/nothing]" in printed(odd)


AGAINST = {
    "as it was": ((200, 198, 202), "1.00x, within the noise", False),
    "slower by less than 3 %": ((195, 195, 195), "0.97x, within the noise", False),
    "slower": ((180, 181, 179), "REGRESSION: tok/s 0.90x", True),
    "slower by less than its own runs differ": ((180, 200, 160), "0.90x, within the noise", False),
    "slower by more than that": ((150, 170, 130), "REGRESSION: tok/s 0.75x", True),
    "faster": ((220, 221, 219), "better: tok/s 1.10x", False),
}


@pytest.mark.parametrize("name", AGAINST)
def test_a_regression_is_what_no_noise_explains(name: str) -> None:
    speeds, said, is_regression = AGAINST[name]
    results = steady() | {CHAIN: at_speed(steady()[CHAIN], *speeds)}
    found = rows(results, steady())
    assert (found["chain-3"]["against older"], regressed(results, steady())) == (said, is_regression)
    assert found["chain-2"]["against older"] == "1.00x, within the noise"


def test_the_spread_of_the_older_run_counts_too() -> None:
    wild = steady() | {CHAIN: at_speed(steady()[CHAIN], 200, 260, 140)}
    assert not regressed(steady() | {CHAIN: at_speed(steady()[CHAIN], 150, 150, 150)}, wild)
    assert regressed(steady() | {CHAIN: at_speed(steady()[CHAIN], 70, 70, 70)}, wild)


def test_one_run_has_no_spread_so_three_percent_stand_alone() -> None:
    once = {name: at_speed(result, 200.0) for name, result in measured(num_runs=1).items()}
    assert rows(once)["chain-3"]["tok/s"] == "200 (one run)"
    assert regressed(once | {CHAIN: at_speed(once[CHAIN], 190.0)}, once)
    assert not regressed(once | {CHAIN: at_speed(once[CHAIN], 195.0)}, once)


def test_tau_that_fell_is_a_regression_at_any_speed() -> None:
    drafting = steady()[CHAIN]["eagle_speculation"]
    committed, steps = drafting["num_committed"], drafting["num_steps"] + 12
    accepted = committed + drafting["tokens_cut"] - steps
    worse = changed(
        at_speed(steady()[CHAIN], 220, 220, 220),
        eagle_speculation=drafting
        | {
            "num_steps": steps, "num_drafts": steps, "total_draft_tokens": 3 * steps, "total_accepted_tokens": accepted,
            "mean_acceptance_rate": accepted / (3 * steps), "mean_acceptance_length": committed / steps,
            "per_position": [accepted / steps / 3] * 3,
        },
    )  # fmt: skip
    results = steady() | {CHAIN: worse}
    assert (
        regressed(results, steady())
        and rows(results, steady())["chain-3"]["against older"]
        == f"better: tok/s 1.10x; REGRESSION: tau {(steps - 12) / steps:.2f}x"
    )


def test_regressions_and_what_vanished_close_the_report() -> None:
    slower = {BASELINE: steady()[BASELINE], CHAIN: at_speed(steady()[CHAIN], 100, 100, 100)}
    found = report(slower, steady())
    assert [name.split(": ")[-1] for name in found.regressions] == ["chain-3"]
    gone = [line for line in found.closing if line.startswith("gone since the older run: ")]
    assert len(gone) == 1 and gone[0].endswith("aquiline: chain-2 (chain-2.json)")
    text = report(slower, steady()).markdown()
    assert (
        "- gone since the older run: baseline: 4 tokens x 2" in text and "- regressions: 1; baseline: 4 tokens" in text
    )
    assert "regressions" not in report(slower).markdown(), "nothing was compared"


def test_what_may_not_be_compared_with_the_older_run_is_said() -> None:
    other = {name: changed(result, system__cpu="Other CPU") for name, result in steady().items()}
    row = rows(steady(), other)["chain-3"]
    assert row["against older"] == "not comparable" and not regressed(steady(), other)
    assert [note for note in notes(steady(), other) if note.startswith("chain-3")] == [
        "chain-3, older against chain-3.json: system.cpu: 'Some CPU' against 'Other CPU'"
    ]
    assert report(steady(), other).closing == ["regressions: 0"], "it was measured elsewhere, it is not gone"
    text = {name: changed(result, output__sha256="0" * 64) for name, result in steady().items()}
    assert "output.sha256: the texts differ" in notes(steady(), text)[0]
    assert notes(steady(), {BASELINE: steady()[BASELINE]}) == [
        f"chain-{length}, older: there is no older result" for length in (2, 3)
    ]


def test_headings_stand_above_their_rows() -> None:
    rows = ("a", "1", "-"), ("b", "2", "-"), ("<c>", "3", "-")
    lines = [dict(zip(("setting", "tok/s", "tau"), row, strict=True)) for row in rows]
    table = Table.of_cells(lines, headings={0: "one", 2: "t<w>o"})
    assert table.markdown().splitlines() == [
        "| setting | tok/s |", "| --- | ---: |", "| **one** |  |", "| a | 1 |", "| b | 2 |",
        "| **t<w>o** |  |", "| <c> | 3 |",
    ]  # fmt: skip
    out = io.StringIO()
    Console(width=60, file=out).print(table.console())
    words = [word for word in re.split("[\\s│┃]", out.getvalue()) if word.isalnum()]
    assert words == ["setting", "one", "a", "1", "b", "2", "3"] and "t<w>o" in out.getvalue()
