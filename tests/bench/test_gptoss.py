"""benchmarks/gptoss.py on a small random mixture: its three parts, and what it cannot do here."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints import write_draft, write_mxfp4
from tests.conftest import needs_native
from tests.gguf_files import trained

from aquiline.bench.theory import measure
from aquiline.bench.theory.measure import measure_ceilings
from aquiline.models.load import read_model_config

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gptoss

pytestmark = needs_native


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder, tokenizer = tmp_path_factory.mktemp("gptoss"), trained()
    write_mxfp4(folder / "hf", num_hidden_layers=8, vocab_size=tokenizer.get_vocab_size())
    tokenizer.save(str(folder / "hf" / "tokenizer.json"))
    write_draft(folder / "draft", read_model_config(folder / "hf"), dtype=torch.bfloat16)
    return folder / "hf", folder / "draft"


@pytest.fixture
def report(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    """The JSON of a run with short contexts, beside its page."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(measure, "measure_ceilings", partial(measure_ceilings, seconds=0.02))
    weights, draft = pair
    options = ["--context", "48", "--batch", "2", "--steps", "12", "--runs", "1", "--gates"]
    monkeypatch.setattr(sys, "argv", ["gptoss.py", "--weights", str(weights), "--draft", str(draft), "--out",
                                      str(tmp_path / "out"), *options])  # fmt: skip
    gptoss.main()
    told: dict[str, Any] = json.loads((tmp_path / "out" / "report.json").read_text())
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said.items() <= told.items() and said["benchmark"] == "gptoss"
    return told | {"page": (tmp_path / "out" / "report.md").read_text()}


@pytest.mark.rare
def test_a_small_mixture_gets_a_whole_report(report: dict[str, Any]) -> None:
    assert report["parity"]["worst"] < 1e-4 and report["parity"]["same_best"] == 1.0
    assert report["same_text"] and len(report["rows"]) == 2 * 2 * 6
    by_setting = {(r["work"], r["temperature"], r["setting"]): r for r in report["rows"]}
    alone, chain = (by_setting["single, 48 x 1", 0.0, name] for name in ("baseline", "chain-3"))
    assert (alone["rows"], alone["experts_read"], alone["experts_independent"]) == pytest.approx((1, 4, 4))
    assert alone["overlap"] is None and alone["speedup"] is None
    assert chain["rows"] == 4 and 4 <= chain["experts_read"] <= 8 and chain["experts_independent"] == pytest.approx(7.5)
    assert chain["overlap"] == pytest.approx(gptoss_overlap(chain["experts_read"]))
    assert chain["spec_efficiency"] == pytest.approx(chain["speedup"] / chain["ideal_speedup"])
    assert chain["ideal_speedup_as_routed"] >= chain["ideal_speedup"] - 1e-9 or chain["overlap"] < 0
    together = by_setting["batch, 48 x 2", 0.8, "baseline"]
    assert 4 <= together["experts_read"] <= 8 and together["experts_independent"] == pytest.approx(6)
    assert {gate["name"]: gate["verdict"] for gate in report["gates"]} == {
        "micro-32k-single": "red", "micro-16k-batch-4": "red"
    }  # fmt: skip
    assert sum("built for 512 positions" in note for note in report["notes"]) == 2
    assert "| single, 48 x 1 | 0 | chain-3 |" in report["page"] and "| micro-32k-single | red |" in report["page"]


def gptoss_overlap(read: float) -> float:
    """Four rows of which each chooses 4 of 8: as many independent ones leave 1 / 2 to their power unread."""
    independent = -torch.tensor(1 - read / 8, dtype=torch.float64).log2().item()
    return 1 - (independent - 1) / 3


def test_what_does_not_fit_is_skipped_by_name(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    free = type("Memory", (), {"available": 1_000_000})
    monkeypatch.setattr(gptoss.psutil, "virtual_memory", lambda: free)
    (reason,) = gptoss.parity(str(pair[0])).values()
    assert reason.startswith("transformers needs 0.0 GB for float32 weights, 0.0 GB are free")
