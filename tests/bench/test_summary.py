"""The tables of docs/results.md: what they say of results, and that the committed results give them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.results import BASELINE, CHAIN, at_speed, changed, measured

from aquiline.bench.results.integrity import recomputed_tau
from aquiline.bench.results.result import Result, read_results, write_result
from aquiline.bench.results.table import summary
from aquiline.errors import ResultError

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from compared import COLUMNS, published, read_comparisons  # noqa: E402

RESULTS = ROOT / "results"
needs_results = pytest.mark.skipif(not RESULTS.is_dir(), reason="there are no results beside this source")


def shown(mark: str) -> str:
    """The block of docs/results.md after a mark."""
    return (ROOT / "docs" / "results.md").read_text(encoding="utf-8").split(f"{mark}\n")[1].split("<!-- end -->")[0]


@needs_results
def test_the_page_shows_the_committed_results() -> None:
    expected = summary(read_results(RESULTS))
    assert shown("<!-- aquiline bench table results --short -->") == expected, (
        "python benchmarks/results_page.py --only suite"
    )


@needs_results
def test_the_page_shows_the_committed_comparisons() -> None:
    expected = published(read_comparisons(RESULTS / "peers")).markdown()
    assert shown("<!-- aquiline compare -->") == expected, "python benchmarks/results_page.py --only peers"


@needs_results
def test_tau_of_every_committed_result_follows_from_its_lengths() -> None:
    for name, result in read_results(RESULTS).items():
        stated = result["eagle_speculation"]["mean_acceptance_length"]
        assert recomputed_tau(result) == pytest.approx(stated, abs=1e-12), name
        assert not result["model"]["target"].startswith("/"), "no machine's paths"


def cells(table: str, row: int) -> list[str]:
    return [cell.strip() for cell in table.splitlines()[2 + row].strip("|").split("|")]


def test_the_fastest_of_several_says_so_and_the_default_chain_stands_beside_it() -> None:
    """Six rounds in which the machine slows down: ratios of rounds hold, ratios of means would not."""
    found = measured(num_runs=6)
    machine = [1.0, 0.6, 0.9, 0.5, 1.0, 0.7]
    speeds = {"baseline": 1000, "chain-2": 1500, "chain-3": 1200}
    results = {f"{n}.json": at_speed(found[f"{n}.json"], *(v * m for m in machine)) for n, v in speeds.items()}
    row = cells(summary(results), 0)
    assert row[2] == "800 [500, 1000]" and row[3] == "960 [600, 1200]"
    assert row[4] == "1.20x [1.20, 1.20]" and row[6:8] == ["2: chain-2", "1.50x [1.50, 1.50]"]
    alone = {name: result for name, result in results.items() if name != CHAIN}
    assert cells(summary(alone), 0)[3:6] == ["not run"] * 3


def peer(result: Result, label: str, **fields: object) -> Result:
    """A peer's result of the same prompts."""
    kind = label.split()[0]
    drafter = "other" if "eagle" in label or "ngram" in label else "none"
    draft = "bundled" if "eagle" in label else None
    defaults = {"engine": kind, "setting": {"name": label, "drafter": drafter}, "model__draft": draft, "void": ""}
    return changed(result, **(defaults | fields))


def test_comparisons_name_the_settings_and_how_many_they_are_the_fastest_of(tmp_path: Path) -> None:
    base, chain = (measured(num_runs=6)[name] for name in (BASELINE, CHAIN))

    def rate(result: Result, value: float) -> Result:
        return at_speed(result, *[value] * 5, value * 9)

    settings = [
        rate(base, 100), rate(chain, 210), rate(peer(base, "llamacpp"), 80), rate(peer(base, "llamacpp noflash"), 90),
        rate(peer(base, "openvino", void="another model"), 900), rate(peer(base, "llamacpp eagle=4"), 70),
        rate(peer(base, "llamacpp ngram-simple=3x8"), 140),
    ]  # fmt: skip
    out = tmp_path / "peers" / "bundled"
    out.mkdir(parents=True)
    for number, result in enumerate(settings):
        write_result(result, out / f"{number}.json")
    text = published(read_comparisons(tmp_path / "peers")).markdown()
    assert cells(text, -2) == list(COLUMNS)
    ours, best = "100 [100, 900]", "210 [210, 1890]"
    assert [cells(text, row)[1:] for row in range(3)] == [
        ["plain decoding", "1: baseline", ours, "2: llamacpp noflash", "90 [90, 810]", "1.11x [1.11, 1.11]"],
        ["with the same EAGLE-3 draft", "1: chain-3", best, "1: llamacpp eagle=4", "70 [70, 630]",
         "3.00x [3.00, 3.00]"],
        ["our best, their lookup in the text", "2: chain-3", best, "1: llamacpp ngram-simple=3x8", "140 [140, 1260]",
         "1.50x [1.50, 1.50]"],
    ]  # fmt: skip
    where = "bundled, temperature 0.8, 2 at once"
    assert cells(text, 0)[0] == where
    flash = "flash attention of llama.cpp, tok/s: llamacpp 80 [80, 720] with, 90 [90, 810] without."
    assert text.endswith(f"\n\n- {where}: {flash}\n- {where}: openvino is void: another model.\n")
    write_result(changed(settings[2], commit="0123456789ab-dirty"), out / "2.json")
    with pytest.raises(ResultError, match=r"2\.json: commit: '0123456789ab-dirty'"):
        published(read_comparisons(tmp_path / "peers"))
