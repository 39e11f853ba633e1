"""`aquiline parity` on the bundled pair: the table, the JSON, dumps and the exit code."""

from __future__ import annotations

import json
from pathlib import Path

from tests.conftest import needs_native
from typer.testing import CliRunner

from aquiline.cli.main import app

pytestmark = needs_native

PAIR = ("parity", "--target", "bundled", "--reference", "eager", "--length", "8")


def run(*args: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, args)
    return done.exit_code, done.output


def test_a_sound_pair_passes_and_its_dump_is_a_reference(tmp_path: Path) -> None:
    place = str(tmp_path / "stages")
    code, output = run(*PAIR, "--dtype", "float32", "--dump", place, "--json")
    found = json.loads(output)
    assert code == 0 and found["passed"] and found["findings"] == []
    [keys] = [stage for stage in found["stages"] if stage["stage"] == "draft.keys"]
    assert keys["passed"] and {row["phase"] for row in keys["rows"]} == {"prompt", "decode", "tree"}
    assert keys["rows"][0]["position"] == 1 and 0 <= keys["rows"][0]["max"] < 1e-4
    assert "draft.attn_out" in found["unseen"] and found["tolerances"]["draft"]["cosine"] == 0.9999

    code, output = run("parity", "--target", "bundled", "--reference", f"dump:{place}")
    assert code == 0 and "target.layers.9" in output and "stages agree" in output
    code, output = run("parity", "--target", "bundled", "--capture", "2,5,7", "--reference", f"dump:{place}")
    assert code == 1 and "draft.features differs from position 0 (prompt) on. Cause: not looked for" in output


def test_errors_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for args, told in (
        (("--reference", f"dump:{tmp_path}"), "is no dump of stages"),
        (("--stages", "attention"), "stages='attention'"),
        (("--reference", "vllm"), "reference='vllm'"),
        (("--reference", "dump:"), "names no directory"),
        (("--dump", str(tmp_path / "file")), "is a file; name a folder"),
    ):
        code, output = run("parity", "--target", "bundled", *args)
        assert code == 2 and told in output, output
