"""A GGUF file wherever the commands take a target: what they do with it is what they do with its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import write_draft, write_target
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from aquiline.cli.main import app
from aquiline.engine.llm import LLM
from aquiline.models.load import read_model_config
from gguf_files import TEMPLATE, TEXTS, chatml, trained, write_gguf_target

QUESTIONS = [{"question_id": 1, "category": "maths", "turns": ["What is  12?", "And 7?"]}]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One random target as a checkpoint and as a GGUF file in a folder of its own, and a draft for it."""
    root = tmp_path_factory.mktemp("gguf")
    tokenizer = trained()
    write_target(root / "hf", vocab_size=tokenizer.get_vocab_size(), bos_token_id=0, eos_token_id=1)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", chat_template=TEMPLATE
    ).save_pretrained(root / "hf")
    (root / "gguf").mkdir()
    write_gguf_target(root / "gguf" / "model.gguf", root / "hf", vocabulary=chatml())
    write_draft(root / "draft", read_model_config(root / "hf"))
    (root / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    for name in ("data", "held"):
        (root / name).mkdir()
        (root / name / "text.txt").write_text("\n".join(TEXTS) * 8)
    return root


def result_of(*args: object) -> dict[str, Any]:
    """The last line of stdout, which is JSON."""
    done = CliRunner().invoke(app, [str(a) for a in args])
    assert done.exit_code == 0, (done.output, done.exception)
    data: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return data


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_generate_writes_the_same_text(dtype: str, root: Path) -> None:
    """From the file, from its folder, and from the checkpoint; also the draft's guesses are the same."""

    def outputs(target: Path) -> Any:
        options = (
            "--draft",
            root / "draft",
            "--prompt",
            "In 2024,  12 <think>",
            "--max-tokens",
            16,
            "--ignore-eos",
            "--drafter",
            "chain",
            "--json",
        )
        found = result_of("generate", "--target", target, *options, "--dtype", dtype, "--temperature", 0.8, "--seed", 1)
        return [(o["token_ids"], o["text"], o["accepted_by"]) for o in found["outputs"]]

    expected = outputs(root / "hf")
    assert outputs(root / "gguf") == outputs(root / "gguf" / "model.gguf") == expected


def test_the_interface_takes_a_file(root: Path) -> None:
    llm = LLM(root / "gguf" / "model.gguf", dtype="float32")
    assert llm.generate(["a b"])[0].token_ids == LLM(root / "hf", dtype="float32").generate(["a b"])[0].token_ids


def test_eval_asks_through_the_files_own_template(root: Path, tmp_path: Path) -> None:
    def document(target: Path) -> Any:
        options = ("--draft", root / "draft", "--dataset", root / "questions.jsonl", "--lengths", 8)
        done = CliRunner().invoke(
            app, ["eval", "--target", str(target), *map(str, options), "--out", str(tmp_path / target.name)]
        )
        assert done.exit_code == 0, (done.output, done.exception)
        return json.loads((tmp_path / target.name / "eval.json").read_text())

    found, expected = document(root / "gguf"), document(root / "hf")
    assert found["data"] == expected["data"] and found["data"]["chat_template"] is True
    assert found["data"]["prompts_sha256"]


def test_train_makes_a_draft_for_a_file(root: Path, tmp_path: Path) -> None:
    file, out = root / "gguf" / "model.gguf", tmp_path / "draft"
    options = ("--data", root / "data", "--held-out", root / "held", "--capture", "1,3,5", "--context", 48)
    trained = ("--batch-size", 2, "--ttt-steps", 2, "--steps", 2, "--draft-vocab-size", 200, "--json")
    result = result_of("train", "--target", file, *options, *trained, "--out", out)
    assert result["steps"] == 2
    made = result_of("generate", "--target", file, "--draft", out, "--prompt", "In", "--max-tokens", 4, "--json")
    assert len(made["outputs"][0]["token_ids"]) == 4


def test_limits_counts_a_file_as_it_is_loaded(root: Path) -> None:
    given = ("--bandwidth", 100, "--flops", 1, "--context", 64, "--batch", 1, "--json")
    file = result_of("limits", root / "gguf" / "model.gguf", *given)
    checkpoint = result_of("limits", root / "hf", "--dtype", "bfloat16", *given)
    assert file["cells"] == checkpoint["cells"]
