"""The table of README is the one that the committed results give."""

from __future__ import annotations

from pathlib import Path

import pytest

from aquiline.bench.integrity import recomputed_tau
from aquiline.bench.result import read_results
from aquiline.bench.summary import summary

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"


@pytest.mark.skipif(not RESULTS.is_dir(), reason="an installed package has no results beside it")
def test_readme_shows_the_committed_results() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = text.split("<!-- aquiline bench table results --short -->\n")[1].split("<!-- end -->")[0]
    assert shown == summary(read_results(RESULTS)), "write it again: aquiline bench table results --short"


@pytest.mark.skipif(not RESULTS.is_dir(), reason="an installed package has no results beside it")
def test_tau_of_every_committed_result_follows_from_its_lengths() -> None:
    for name, result in read_results(RESULTS).items():
        stated = result["eagle_speculation"]["mean_acceptance_length"]
        assert recomputed_tau(result) == pytest.approx(stated, abs=1e-12), name
        assert not result["model"]["target"].startswith("/"), "no machine's paths"
