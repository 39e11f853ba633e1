"""`aquiline limits` as a user types it: the table, the JSON, several values behind an option, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.bench.published import GPT_OSS_120B, LLAMA_8B, LLAMA_8B_HEAD, write_config
from tests.checkpoints import write_target
from typer.testing import CliRunner, Result

from aquiline.bench.theory import measure
from aquiline.bench.theory.bounds import Costs, expectation
from aquiline.bench.theory.measure import measure_ceilings
from aquiline.cli.main import app
from gguf_files import chatml, trained, write_gguf_target

GIVEN = ("--bandwidth", 3000, "--flops", 800)
HELP = """
import sys
from aquiline.cli.main import app
try:
    app()
finally:
    heavy = {"torch", "transformers", "numpy", "tokenizers"} & set(sys.modules)
    assert not heavy, heavy
"""


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_config(tmp_path / "llama", LLAMA_8B)


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["limits", *map(str, args)], env={"COLUMNS": "100"})


def as_json(*args: object) -> dict[str, Any]:
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    data: dict[str, Any] = json.loads(result.stdout)
    return data


def test_the_bundled_pair_is_measured_once_and_tabulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measure, "measure_ceilings", partial(measure_ceilings, seconds=0.02))
    first = run("bundled")
    assert first.exit_code == 0 and "measuring this machine, once: copy" in first.stderr, first.output
    assert "target: llama, 17.3 M parameters, 34.6 MB as bfloat16; KV 5120 bytes per token" in first.stdout
    assert "draft: 3.15 M parameters" in first.stdout and first.stdout.count("measured: ") == 3
    assert (tmp_path / "aquiline" / "ceilings.json").exists()
    assert run("bundled").stdout == first.stdout, "the second run reads what the first one measured"
    data = as_json("bundled")
    assert [(c["context"], c["batch"]) for c in data["cells"]] == [(c, b) for c in (512, 2048) for b in (1, 4, 8)]
    assert data["draft"]["is_assumed"] is False and data["ceilings"]["bandwidth"]["source"] == "measured"


def test_json_holds_what_the_table_shows(llama: Path) -> None:
    data = as_json(llama, *GIVEN, "--context", 8192, "--batch", 1)
    assert data["target"]["num_parameters"] == 8_030_261_248 and data["target"]["weight_bytes"] == 2 * 8_030_261_248
    assert data["target"]["kv_bytes_per_token"] == 131072 and data["draft"]["is_assumed"] is True
    (cell,) = data["cells"]
    assert cell["baseline_tokens_per_s"] == pytest.approx(186.5, abs=0.1) and cell["bound"] == "memory"
    assert cell["kv_bytes"] == 8193 * 131072 and cell["fits"] is None
    chains = {(s["num_spec_tokens"], s["tau"]): s for s in cell["speculative"]}
    assert set(chains) == {(k, tau) for k in (2, 3, 4, 5) for tau in (k + 1, 2.5)}
    three = chains[3, 4]
    assert three["is_upper_bound"] and not chains[3, 2.5]["is_upper_bound"]
    assert three["tokens_per_s"] == pytest.approx(4e3 / (three["draft_ms"] + three["verify_ms"]))
    assert three["speedup"] == pytest.approx(three["tokens_per_s"] / cell["baseline_tokens_per_s"])
    assert three["speedup"] == pytest.approx(3.47, abs=0.01)
    table = run(llama, *GIVEN, "--context", 8192, "--batch", 1).stdout
    assert "│   187 │" in table and f"│ {three['tokens_per_s']:.0f} 3.47x │" in table and "is assumed" in table


def test_several_values_behind_one_option(llama: Path) -> None:
    spaced = as_json(llama, *GIVEN, "--context", 512, 2048, "--batch", 1, 4, "--num-spec-tokens", 2, 4, "--tau", 1.5, 3)
    repeated = as_json(
        llama, *GIVEN, "--context", 512, "--context", 2048, "--batch", 1, "--batch", 4, "--num-spec-tokens", 2,
        "--num-spec-tokens", 4, "--tau", 1.5, "--tau", 3,
    )  # fmt: skip
    assert spaced == repeated
    assert [(c["context"], c["batch"]) for c in spaced["cells"]] == [(512, 1), (512, 4), (2048, 1), (2048, 4)]
    for cell in spaced["cells"]:
        assert [(s["num_spec_tokens"], s["tau"]) for s in cell["speculative"]] == [(2, 1.5), (2, 3), (4, 1.5), (4, 3)]
    shown = run(llama, *GIVEN, "--num-spec-tokens", 1, 3, "--tau", 3.0, "--batch", 1, "--context", 512).stdout
    row = next(line for line in shown.splitlines() if "x │" in line)
    assert [part.strip() for part in row.split("│")][4] == "-", "a chain of one cannot commit three tokens"


def test_without_a_draft_and_with_its_own(llama: Path, tmp_path: Path) -> None:
    none = as_json(llama, *GIVEN, "--draft", "none", "--batch", 1)
    assert none["draft"] is None and none["cells"][0]["speculative"] == []
    assert "speedup" not in run(llama, *GIVEN, "--draft", "none").stdout
    own = as_json(llama, *GIVEN, "--draft", write_config(tmp_path / "head", LLAMA_8B_HEAD), "--draft-dtype", "int8")
    assert own["draft"]["num_parameters"] == 424_689_664 and own["draft"]["dtype"] == "int8"
    assert own["draft"]["weight_bytes"] < 0.51 * 2 * 424_689_664 and own["target"]["dtype"] == "bfloat16"


def test_storage_changes_bytes_and_not_flops(llama: Path) -> None:
    cells = {}
    for dtype in ("float32", "bfloat16", "int8", "int4"):
        cells[dtype] = as_json(llama, *GIVEN, "--dtype", dtype, "--context", 512, "--batch", 1)["cells"][0]
    sizes = [cells[dtype]["weight_bytes"] for dtype in cells]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == pytest.approx(2 * sizes[1])
    assert len({cell["linear_flops"] for cell in cells.values()}) == 1
    assert cells["float32"]["kv_bytes"] == 2 * cells["int4"]["kv_bytes"]
    fp8 = as_json(llama, *GIVEN, "--kv-dtype", "fp8", "--context", 512, "--batch", 1)["cells"][0]
    assert fp8["kv_bytes"] == cells["bfloat16"]["kv_bytes"] / 2


def test_notes_say_what_to_doubt(llama: Path, tmp_path: Path) -> None:
    data = as_json(llama, "--device", "rtx4090", "--context", 512, 262144, "--batch", 1, "--flops", 100)
    notes = " ".join(data["notes"])
    assert "is assumed" in notes and "the bandwidth is datasheet, the FLOPs are given" in notes
    assert "context 262144: the model was built for 131072" in notes and "262144 x 1: more than the 24 GB" in notes
    assert [cell["fits"] for cell in data["cells"]] == [True, False]
    table = run(llama, "--device", "rtx4090", "--context", 262144, "--batch", 1).stdout
    assert "datasheet: NVIDIA Ada GPU architecture white paper" in table and "measured" not in table
    moe = as_json(write_config(tmp_path / "moe", GPT_OSS_120B), "--device", "h100", "--batch", 1)
    assert any("routing is taken as uniform" in note for note in moe["notes"]) and moe["target"]["dtype"] == "mxfp4"
    bundled = as_json("bundled", "--device", "rtx4090", "--batch", 1)
    assert any("last-level cache holds" in note for note in bundled["notes"])


def test_speculation_on_a_mixture_is_bounded_by_its_experts(tmp_path: Path) -> None:
    """The figures of docs/limits.md: a chain of three on gpt-oss-120b, with every draft accepted."""
    mixture = write_config(tmp_path, GPT_OSS_120B)
    asked = (mixture, "--device", "h100", "--context", 32768, "--batch", 1, 64, "--num-spec-tokens", 3, "--tau", 4)
    for overlap, speedups, pays in (("0", (1.88, 3.43), (2.13, 1.17)), ("0.35", (2.18, 3.43), (1.84, 1.17))):
        cells = as_json(*asked, "--overlap", overlap)["cells"]
        assert [cell["speculative"][0]["speedup"] for cell in cells] == pytest.approx(speedups, abs=0.0051)
        assert [cell["break_even"][0]["tau"] for cell in cells] == pytest.approx(pays, abs=0.0051)
    shown = run(*asked, "--overlap", "0.35").stdout
    assert "tau 1.84 │" in shown and "35% of a row's experts" in shown
    slow = run(mixture, "--bandwidth", 3000, "--flops", 0.001, "--batch", 1, "--num-spec-tokens", 3, "--context", 512)
    assert "break-even │" in slow.stdout and "never │" in slow.stdout
    assert "has no effect" in run("bundled", *GIVEN, "--overlap", "0.35").stdout


def test_one_line_says_what_to_expect(llama: Path) -> None:
    """The figures of the table in words; all three cases of where weights are, and of whether a chain can pay."""
    given = (llama, *GIVEN, "--context", 512, "--batch", 1, "--num-spec-tokens", 3, "--tau", 1)
    data = as_json(*given)
    (cell,) = data["cells"]
    (three,) = cell["speculative"]
    rows, chain = (ms * cell["baseline_tokens_per_s"] / 1e3 for ms in (three["verify_ms"], three["draft_ms"]))
    assert data["expectation"] == (
        f"a step reads {cell['weight_bytes'] / 1e6:.0f} MB of weights; 4 rows cost at least {rows:.2f} steps, "
        f"and with its drafting a chain of 3 pays from a tau of at least {rows + chain:.2f} on"
    )
    assert f"Expect: {data['expectation']}\n" in run(*given).stdout
    assert as_json(*given[:-2], "--draft", "none")["expectation"].endswith(f"4 rows cost at least {rows:.2f} steps")
    for costs, said in (
        (Costs(98e6, 32_000_000, 1.2, 1.3), "a step reads 98 MB of weights from memory, past a last-level cache of 32 "
         "MB; 4 rows cost 1.20 steps, and with its drafting a chain of 3 pays from a tau of 1.30 on"),
        (Costs(98e6, 480_000_000, 3.9, 4.1), "a last-level cache of 480 MB holds the 98 MB of weights of a step, so "
         "rows cost arithmetic; 4 rows cost 3.90 steps, and with its drafting a chain of 3 costs 4.10: it "
         "cannot pay"),
    ):  # fmt: skip
        assert expectation(costs) == said


def test_a_gguf_file_counts_as_it_is_stored(tmp_path: Path) -> None:
    write_target(tmp_path / "hf", hidden_size=64, intermediate_size=96, vocab_size=trained().get_vocab_size())
    file = tmp_path / "model.gguf"

    def of_layers(name: str) -> str:
        return "Q4_1" if "layers" in name else "F32"

    write_gguf_target(file, tmp_path / "hf", vocabulary=chatml(), kind=of_layers)
    packed = as_json(file, *GIVEN, "--draft", "none")["target"]
    assert (
        packed["dtype"] == "q4_1"
        and packed["weight_bytes"]
        == as_json(file, *GIVEN, "--draft", "none", "--dtype", "q4_1+bfloat16")["target"]["weight_bytes"]
    )
    write_gguf_target(file, tmp_path / "hf", vocabulary=chatml())
    floats = as_json(file, *GIVEN)
    assert floats["target"]["dtype"] == floats["draft"]["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--context", "0"], "context=0: must be at least 1"),
        (["--batch", "0"], "batch=0"),
        (["--num-spec-tokens", "17"], "num_spec_tokens=17"),
        (["--num-spec-tokens", "0", "3"], "num_spec_tokens=0"),
        (["--tau", "7"], "tau=7: must be between 1 and 6"),
        (["--tau", "0.5"], "tau=0.5"),
        (["--overlap", "1.5"], "overlap=1.5: must be between 0"),
        (["--dtype", "int2"], "dtype='int2': must be one of float32"),
        (["--kv-dtype", "int4"], "kv_dtype='int4'"),
        (["--device", "tpu"], "device='tpu'"),
        (["--bandwidth", "-1"], "bandwidth=-1"),
        (["--draft", "nowhere/at all"], "nowhere/at all"),
    ],
    ids=str,
)
def test_bad_options_are_named(options: list[str], named: str) -> None:
    given = [] if {"--bandwidth", "--device"} & set(options) else list(map(str, GIVEN))
    result = run(*given, *options)
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
    assert result.stderr.startswith("aquiline: ") and named in result.stderr and not result.stdout


def test_a_model_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "config.json is missing" in run(tmp_path / "empty").stderr
    assert "hidden_size is missing" in run(write_config(tmp_path / "bare", {"model_type": "llama"})).stderr


def test_help_waits_for_nothing_heavy_and_has_examples() -> None:
    done = subprocess.run([sys.executable, "-c", HELP, "limits", "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "aquiline limits Qwen/Qwen3-8B" in done.stdout.replace("\n", " ") and "--num-spec-tokens" in done.stdout
