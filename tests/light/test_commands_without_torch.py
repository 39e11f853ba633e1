"""Commands where torch is not installed: they answer with the bundled pair, and what needs torch says so in a line.

Each command runs in a process of its own, in which torch cannot be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from aquiline.backends.cpu import calls
from aquiline.models.known_pairs import BUNDLED_DRAFT, BUNDLED_TARGET

pytestmark = pytest.mark.skipif(calls.missing_reason() is not None, reason=f"native library: {calls.missing_reason()}")

WITHOUT = str(Path(__file__).parent / "blocked")
PAIR = ("--target", "bundled")
PROMPT = ("--prompt", "import os\n")


def run(*args: object, isa: str = "", stdin: str = "", place: Path | None = None) -> tuple[int, str, str]:
    """Exit code, output and errors of `aquiline ARGS`, from another directory."""
    environment = {**os.environ, "PYTHONPATH": WITHOUT, "AQUILINE_THREADS": "1", "AQUILINE_ISA": isa}
    code = "import sys; from aquiline.cli.main import app; sys.argv[0] = 'aquiline'; app()"
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, env=environment, input=stdin,
        cwd=place, timeout=300,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_torch_is_not_there() -> None:
    environment = {**os.environ, "PYTHONPATH": WITHOUT}
    done = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, text=True, env=environment)
    assert "ModuleNotFoundError: torch is kept from import here" in done.stderr


def test_the_text_is_the_same_with_every_way_to_draft_and_storage(tmp_path: Path) -> None:
    for storage in ("bfloat16", "int4"):
        texts = set()
        for way in ("none", "chain", "dynamic", "lookup", "adaptive"):
            settings = ("--drafter", way, "--dtype", storage, "--temperature", 0.8, "--seed", 3, "--max-tokens", 24)
            code, out, errors = run("generate", *PAIR, *PROMPT, *settings, "--json", place=tmp_path)
            assert code == 0, errors
            texts.add(json.loads(out)["outputs"][0]["text"])
        assert len(texts) == 1


@pytest.mark.parametrize(
    "command",
    [
        ("eval", *PAIR, "--num-spec-tokens", 2, "--lengths", 16, "--count", 2, "--repeats", 1, "--out", "found"),
        ("profile", *PAIR, "--new-tokens", 8, "--context", 64),
        ("limits", BUNDLED_TARGET, "--context", 256),
        ("parity", *PAIR, "--reference", "eager", "--length", 8),
        ("bench", *PAIR, "--out", "found", "--scenario", "baseline", "--contexts", 512, "--batches", 1,
         "--micro-steps", 4, "--measurement-runs", 1, "--warmup-runs", 0, "--json"),
    ],
    ids=lambda command: command[0],
)  # fmt: skip
def test_commands_run(command: tuple[object, ...], tmp_path: Path) -> None:
    code, out, errors = run(*command, place=tmp_path)
    assert code == 0 and out, errors


def test_a_conversation(tmp_path: Path) -> None:
    code, out, errors = run("chat", *PAIR, "--max-tokens", 8, stdin="import os\n", place=tmp_path)
    assert code == 0 and out.strip(), errors


def test_no_native_library_and_no_torch_names_both_ways_out(tmp_path: Path) -> None:
    code, _, errors = run("generate", *PAIR, *PROMPT, isa="off", place=tmp_path)
    assert code == 2 and len(errors.strip().splitlines()) == 1
    assert "AQUILINE_ISA=off" in errors and "C++ compiler" in errors and "pip install 'aquiline[torch]'" in errors


def test_a_comparison_with_transformers_names_what_is_missing(tmp_path: Path) -> None:
    code, _, errors = run("parity", *PAIR, place=tmp_path)
    assert code == 2 and "torch is not installed" in errors and "pip install torch transformers, or compare" in errors


def test_structured_output_names_what_it_needs(tmp_path: Path) -> None:
    code, _, errors = run("generate", *PAIR, *PROMPT, "--regex", "a", place=tmp_path)
    assert code == 2 and errors.startswith("aquiline: structured: needs pip install 'aquiline[grammar]' (")


def test_a_draft_in_torchs_own_format_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((BUNDLED_DRAFT / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"whatever is in it")
    code, _, errors = run("generate", "--target", BUNDLED_TARGET, "--draft", tmp_path, *PROMPT)
    assert code == 2 and "pytorch_model.bin is in torch's own format, and torch is not installed" in errors
    assert "pip install 'aquiline[torch]'" in errors
