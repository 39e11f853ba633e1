"""`aquiline generate --prompts-file`: results in input order, resumable, a bad row is reported and skipped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.checkpoints import edit_json, write_draft, write_target
from tests.conftest import engine_config, tiny_models
from tests.disk import MESSAGE, full_after
from tests.engine.test_stops import letters
from typer.testing import CliRunner

from aquiline.cli.main import app
from aquiline.config import SamplingParams
from aquiline.engine.bulk import BulkResult, BulkRun
from aquiline.engine.llm import LLM
from aquiline.models.families import read_model_config
from aquiline.spec.drafting import Chain
from aquiline.text.chat_template import ChatTemplate

ROOT = Path(__file__).resolve().parents[2]

ROWS = [
    {"prompt": "abcdefgh", "id": "first", "max_tokens": 12},
    {"prompt": "zyx", "max_tokens": 2},
    "no json",
    {"prompt": ""},
    {"token_ids": [1, 2, 3], "temperature": 0.8, "seed": 3, "logprobs": 1, "note": "ignored"},
    {"prompt": "x", "temperature": "hot"},
    {"prompt": "x", "max_tokens": 100_000},
    {"id": 7},
    {"token_ids": [5000]},
    {"prompt": "longer than the others, and last", "logit_bias": {"5": -3.0}},
]
BAD = {3, 4, 6, 7, 8, 9}  # lines, from 1
SAMPLING = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture
def llm() -> LLM:
    import dataclasses

    models = dataclasses.replace(tiny_models(), tokenizer=letters())
    return LLM.from_models(models, engine_config(3), Chain(3))  # adaptive drafting's tau depends on the time


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in ROWS) + "\n")
    return file


def run(llm: LLM, rows: Path, out: Path, sampling: SamplingParams = SAMPLING) -> BulkResult:
    return BulkRun(rows, out, sampling, {"target": None}).run(llm)


def read(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_results_stand_in_input_order_and_bad_rows_say_why(llm: LLM, rows: Path, tmp_path: Path) -> None:
    result = run(llm, rows, tmp_path / "out.jsonl")
    found = read(tmp_path / "out.jsonl")
    assert [f["line"] for f in found] == list(range(1, len(ROWS) + 1))
    assert set(result.failed) == BAD == {f["line"] for f in found if "error" in f}
    for line, part in (
        (3, "not JSON"),
        (4, "is empty"),
        (6, "temperature='hot'"),
        (7, "exceeds"),
        (8, '"prompt"'),
        (9, "5000"),
    ):
        assert part in result.failed[line], result.failed[line]
    assert found[0]["id"] == "first" and len(found[0]["token_ids"]) == 12  # type: ignore[arg-type]
    assert [len(found[i]["token_ids"]) for i in (1, 4, 9)] == [2, 6, 6]  # type: ignore[arg-type]
    assert len(found[4]["logprobs"]) == 6  # type: ignore[arg-type]
    alone = llm.run("abcdefgh", SamplingParams(max_tokens=12, ignore_eos=True)).outputs[0]
    assert (found[0]["text"], found[0]["token_ids"]) == (alone.text, alone.token_ids)


def test_a_full_disk_is_named_and_costs_no_row(llm: LLM, rows: Path, tmp_path: Path) -> None:
    run(llm, rows, tmp_path / "whole.jsonl")
    whole = (tmp_path / "whole.jsonl").read_text()
    out = tmp_path / "out.jsonl"
    with full_after(len(whole) // 2), pytest.raises(OSError, match=rf"out\.jsonl: {MESSAGE}\. Its whole lines stay"):
        run(llm, rows, out)
    result = run(llm, rows, out)
    assert 0 < result.num_resumed < len(ROWS) and out.read_text() == whole


@pytest.mark.parametrize("num_kept", [0, 1, 4, 9])
@pytest.mark.parametrize("torn", ["", '{"line": 2, "te'])
def test_a_stopped_run_goes_on_where_it_stood(llm: LLM, rows: Path, tmp_path: Path, num_kept: int, torn: str) -> None:
    run(llm, rows, tmp_path / "whole.jsonl")
    lines = (tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)
    out = tmp_path / "out.jsonl"
    out.write_text("".join(lines[:num_kept]) + torn)
    result = run(llm, rows, out)
    assert result.num_resumed == num_kept
    assert out.read_text() == "".join(lines)
    assert set(result.failed) == BAD
    again = run(llm, rows, out)
    assert again.num_resumed == len(ROWS) and again.summary.num_target_forwards == 0


def test_results_of_other_rows_or_settings_are_not_mixed(llm: LLM, rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run(llm, rows, out)
    with pytest.raises(ValueError, match="line 1 is not a result of the same line"):
        run(llm, rows, out, SamplingParams(max_tokens=7))
    rows.write_text(rows.read_text().replace("zyx", "zyw"))
    with pytest.raises(ValueError, match="line 2 is not a result of the same line"):
        run(llm, rows, out)
    (tmp_path / "text.txt").write_text("my notes\n")
    with pytest.raises(ValueError, match="choose another --out"):
        run(llm, rows, tmp_path / "text.txt")


def test_killed_in_the_middle_loses_no_line(
    llm: LLM, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, step, count = tmp_path / "out.jsonl", llm.engine.step, iter(range(100))

    def dies() -> object:
        if next(count) == 14:
            raise KeyboardInterrupt
        return step()

    long = SamplingParams(max_tokens=30, ignore_eos=True)
    monkeypatch.setattr(llm.engine, "step", dies)
    with pytest.raises(KeyboardInterrupt):
        run(llm, rows, out, long)
    assert not llm.engine.is_busy and llm.engine.pool.num_available == llm.engine.pool.num_pages
    monkeypatch.setattr(llm.engine, "step", step)
    before = out.read_text()
    run(llm, rows, out, long)
    assert before and out.read_text().startswith(before) and len(read(out)) == len(ROWS)


def test_no_kill_loses_a_line(llm: LLM, rows: Path, tmp_path: Path) -> None:
    """Real signals: one in the middle of a run, then one while the next run drops the line that was cut."""
    long, whole, out = SamplingParams(max_tokens=30, ignore_eos=True), tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run(llm, rows, whole, long)
    assert killed_at("25", rows, out) == -signal.SIGKILL
    kept = out.read_bytes()
    assert kept and len(kept) < whole.stat().st_size and whole.read_bytes().startswith(kept)
    out.write_bytes(kept + b'{"line": ')
    assert killed_at("write", rows, out) == -signal.SIGXFSZ
    assert out.read_bytes().startswith(kept)
    run(llm, rows, out, long)
    assert out.read_bytes() == whole.read_bytes()


def killed_at(moment: str, rows: Path, out: Path) -> int:
    paths = [str(ROOT), *sys.path]
    command = [sys.executable, str(ROOT / "tests/cli/bulk_process.py"), str(rows), str(out), moment]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, timeout=120).returncode


CHECKPOINT_CHANGES = {
    "target": lambda target, draft: edit_json(target / "generation_config.json", lambda c: c.update(top_k=7)),
    "weights": lambda target, draft: write_target(target, seed=5),
    "draft": lambda target, draft: write_draft(draft, read_model_config(target), seed=9),
}


@pytest.mark.parametrize("changed", CHECKPOINT_CHANGES)
def test_results_of_other_checkpoints_of_the_same_name_are_not_mixed(changed: str, tmp_path: Path) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    write_target(target)
    write_draft(draft, read_model_config(target))
    (tmp_path / "rows.jsonl").write_text('{"token_ids": [5, 6]}\n')
    args = ["generate", "--target", str(target), "--draft", str(draft), "--prompts-file", str(tmp_path / "rows.jsonl")]
    args += ["--out", str(tmp_path / "out.jsonl"), "--max-tokens", "4"]
    assert CliRunner().invoke(app, args).exit_code == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    target.rename(tmp_path / "moved")
    args[2] = str(tmp_path / "moved")
    again = CliRunner().invoke(app, args)
    assert again.exit_code == 0 and "1 were there" in again.stderr, "a checkpoint is what it holds, not where it lies"
    for other in (["--dtype", "float32"], ["--num-spec-tokens", "2"], ["--drafter", "none"], ["--drafter", "lookup"]):
        assert "under these settings and checkpoints" in CliRunner().invoke(app, [*args, *other]).stderr
    CHECKPOINT_CHANGES[changed](tmp_path / "moved", draft)
    refused = CliRunner().invoke(app, args)
    assert refused.exit_code == 2 and "line 1 is not a result of the same line" in refused.stderr
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_the_command(tmp_path: Path) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text('{"prompt": "import os"}\n{"prompt": ""}\n{"prompt": "def f(x):"}\n')
    args = ["generate", "--target", "bundled", "--prompts-file", str(rows), "--out", str(out), "--max-batch", "2"]
    args += ["--max-tokens", "5"]
    shown = CliRunner().invoke(app, args)
    assert shown.exit_code == 1, shown.output
    last = shown.stderr.splitlines()[-1]
    assert last.startswith("aquiline: 1 of 3 rows failed (line 2); ") and str(out) in last
    assert "KV 7168 bytes per token" in shown.stderr and "line 2: prompt=''" in shown.stderr
    assert "3 rows (0 were there, 1 failed)" in shown.stderr and "disabled_other 0" in shown.stderr
    again = CliRunner().invoke(app, [*args, "--json"])
    data = json.loads(again.stdout)
    assert again.exit_code == 1, "what failed before still has no text"
    assert (data["num_rows"], data["num_resumed"], list(data["failed"])) == (3, 3, ["2"])
    assert data["memory"]["kv_bytes_per_token"] == 7168 and data["metrics"]["peak_memory_bytes"] > 0
    assert CliRunner().invoke(app, args[:5]).exit_code == 2
    rows.write_text('{"prompt": "import os"}\n')
    out.unlink()
    assert CliRunner().invoke(app, args).exit_code == 0


@pytest.mark.parametrize("out", ["notes.txt", "other.jsonl", "nowhere/out.jsonl"])
def test_a_file_that_cannot_be_the_output_is_refused_before_anything_is_loaded(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "import os"}\n')
    Path("notes.txt").write_text("my notes\n")
    args = ["generate", "--target", "bundled", "--max-tokens", "2", "--prompts-file", "rows.jsonl", "--out"]
    assert CliRunner().invoke(app, [*args, "other.jsonl"]).exit_code == 0

    def loaded(*given: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("aquiline.engine.model.ResolvedPair.load", loaded)
    refused = CliRunner().invoke(app, [*args, out, "--seed", "5", "--temperature", "1"])
    assert refused.exit_code == 2 and out in refused.stderr and refused.stderr.count("\n") == 1
    assert "No such file" in refused.stderr if "/" in out else "line 1 is not a result" in refused.stderr


def test_a_row_of_a_chat_with_stop_tokens_of_its_own_ends_where_its_turn_does(llm: LLM, tmp_path: Path) -> None:
    """`end_ids` are put beside a row's own stop tokens."""
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    template = ChatTemplate(source, {}, llm.models.tokenizer)
    first = llm.run("ab", SAMPLING).outputs[0].token_ids[0]
    template.__dict__["end_ids"] = (first,)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "ab", "ignore_eos": false, "stop_token_ids": [7]}\n')
    BulkRun(tmp_path / "rows.jsonl", tmp_path / "out.jsonl", SAMPLING, {}).run(llm, template)
    (found,) = read(tmp_path / "out.jsonl")
    assert found["finish_reason"] == "stop" and found["token_ids"] == [first]
