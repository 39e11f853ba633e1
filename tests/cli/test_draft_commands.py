"""`aquiline convert`, `inspect` and `vocab` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file
from tests.checkpoints import write_draft, write_target
from tests.conftest import needs_native
from tests.gguf_files import TEXTS, trained
from typer.main import get_command

from aquiline.cli.main import app
from aquiline.models.load import read_model_config

VOCAB = ("vocab", "draft", "--target", "target", "--text", "answers.txt")
ANSWERS = "\n".join(TEXTS) * 40


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a tokenizer, and a draft that names half of its tokens."""
    home = tmp_path_factory.mktemp("home")
    size = trained().get_vocab_size()
    write_target(home / "target", vocab_size=size, bos_token_id=0, eos_token_id=1, hidden_size=64, intermediate_size=96)
    trained().save(str(home / "target" / "tokenizer.json"))
    write_draft(home / "draft", read_model_config(home / "target"))
    (home / "answers.txt").write_text(ANSWERS)
    (home / "questions.jsonl").write_text('{"prompt": "def f(x):"}\n')
    return home


def run(*arguments: object) -> Result:
    return CliRunner().invoke(get_command(app), [str(each) for each in arguments])


def test_a_draft_there_and_back(home: Path, tmp_path: Path) -> None:
    there, back, target = tmp_path / "draft.gguf", tmp_path / "back", ("--target", home / "target")
    told = run("convert", home / "draft", there, "--to", "gguf", *target, "--json")
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout) == {
        "source": "specforge", "declared": "architectures=['LlamaForCausalLMEagle3']", "destination": "gguf",
        "path": str(there), "is_restored": False, "notices": [],
    }  # fmt: skip
    told = run("convert", there, back, "--to", "specforge", *target)
    assert "llama.cpp" not in told.stdout and "the same files as before" in told.stdout
    for name in ("config.json", "model.safetensors"):
        assert (back / name).read_bytes() == (home / "draft" / name).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("convert", "draft", "out", "--to", "vllm"), "to='vllm': must be one of safeailab, specforge"),
        (("convert", "draft", "target", "--to", "speculators"), "exists and is left alone; pass --force"),
        (("convert", "draft", "out", "--to", "speculators"), "target: only the target tells which layers"),
        (("convert", "target", "out", "--to", "speculators"), "this is no draft"),
        (("inspect", "nowhere"), "nowhere is neither a directory nor"),
        (("inspect", "draft", "--text", "answers.txt"), "text: goes with --target"),
        (("inspect", "draft", "--target", "target", "--text", "none.txt"), "none.txt"),
        (("vocab", "draft", "--text", "answers.txt", "--keep", "9", "--out", "out"), "target: name the target"),
        ((*VOCAB, "--keep", "999", "--out", "out"), "keep=999: must exceed its special tokens, and be below the"),
        ((*VOCAB, "--keep", "0", "--out", "out"), "keep=0: must exceed its special tokens"),
        ((*VOCAB, "--keep", "9", "--out", "out", "--questions", "none.jsonl"), "none.jsonl"),
        ((*VOCAB, "--keep", "9", "--out", "target"), "--force"),
    ],
)  # fmt: skip
@needs_native
def test_errors_are_one_line_and_leave_nothing(
    arguments: tuple[str, ...], words: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    before = sorted(home.iterdir())
    told = run(*arguments)
    assert told.exit_code == 2 and words in told.stderr, told.output
    assert "Traceback" not in told.output and sorted(home.iterdir()) == before


def test_a_draft_of_another_target_exits_with_1(home: Path, tmp_path: Path) -> None:
    write_target(tmp_path)
    told = run("inspect", home / "draft", "--target", tmp_path)
    assert told.exit_code == 1 and "does not fit: hidden_size=64, the target has 48" in told.stdout
    assert run("inspect", home / "draft", "--target", home / "target").exit_code == 0
    assert json.loads(run("inspect", home / "target", "--json").stdout)["kind"] == "target"


@needs_native
def test_coverage_of_a_text_and_of_the_targets_choices(home: Path) -> None:
    arguments = ("inspect", home / "draft", "--target", home / "target", "--text", home / "answers.txt", "--json")
    coverage = json.loads(run(*arguments).stdout)["coverage"]
    tensors = load_file(home / "draft" / "model.safetensors")
    ids = trained().encode(ANSWERS).ids
    assert coverage["text"] == pytest.approx(np.isin(ids, np.flatnonzero(tensors["t2d"])).mean())
    assert 0 < coverage["choices"] < 1


@needs_native
def test_a_smaller_vocabulary_keeps_its_rows_and_the_text(home: Path, tmp_path: Path) -> None:
    told = run(
        "vocab", home / "draft", "--target", home / "target", "--text", home / "answers.txt", "--keep", 40, "--out",
        tmp_path / "small", "--questions", home / "questions.jsonl", "--num-questions", 1, "--new-tokens", 8,
        "--rounds", 1, "--drafter", "chain", "--dtype", "float32", "--json",
    )  # fmt: skip
    assert told.exit_code == 0, told.output
    before, after = json.loads(told.stdout)["rows"]
    assert (after["tokens"], after["draft"]) == (40, "after") and before["choices"] >= after["choices"] > 0
    assert before["tau"] >= 1 and after["tokens_per_s"] > 0
    whole, small = (load_file(place / "model.safetensors") for place in (home / "draft", tmp_path / "small"))
    ids, kept = (np.arange(len(each["d2t"])) + each["d2t"] for each in (whole, small))
    rows = np.flatnonzero(np.isin(ids, kept))
    assert len(kept) == 40 and np.array_equal(whole["lm_head.weight"][rows], small["lm_head.weight"])
    assert np.array_equal(np.flatnonzero(small["t2d"]), kept)
    assert {0, 1} & set(ids) <= set(kept)  # the special tokens that it could name
    untouched = set(whole) - {"lm_head.weight", "d2t", "t2d"}
    assert all(np.array_equal(whole[name], small[name]) for name in untouched)
    (tmp_path / "small" / "model.safetensors.index.json").write_text("{}")
    told = run(*("vocab", home / "draft", "--target", home / "target", "--text", home / "answers.txt", "--keep", 40),
               "--out", tmp_path / "small", "--force")  # fmt: skip
    assert told.exit_code == 2 and "which would lie beside model.safetensors" in told.stderr
