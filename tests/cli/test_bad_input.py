"""Bad input through the command: one line that names the cause, exit code 2, no traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints import edit_json, write_draft, write_target
from tests.conftest import tiny_llm
from typer.testing import CliRunner

from aquiline.cli.main import app
from aquiline.config import EngineConfig, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.errors import NumericalError, OutOfPages
from aquiline.models.load import read_model_config


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random target and draft on disk, without a tokenizer."""
    root = tmp_path_factory.mktemp("pair")
    write_target(root / "target", "llama")
    write_draft(root / "draft", read_model_config(root / "target"), "specforge")
    return root


def copy(source: Path, to: Path) -> Path:
    to.mkdir()
    for file in source.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from aquiline.cli.main import app; app()", *args]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)


def refused(*args: str) -> str:
    done = run(*args)
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr and done.stderr.strip()
    return done.stderr


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--max-tokens", "0"], "max_tokens=0"),
        (["--temperature", "-1"], "temperature=-1"),
        (["--top-p", "0"], "top_p=0"),
        (["--drafter", "chain"], "drafter='chain'"),
        (["--dtype", "float8"], "dtype='float8'"),
        (["--prompt", ""], "prompt"),
    ],
)
def test_bad_options(pair: Path, options: list[str], named: str) -> None:
    prompt = [] if "--prompt" in options else ["--prompt", "x"]
    assert named in refused("generate", "--target", str(pair / "target"), *prompt, *options)


@pytest.mark.parametrize("command", [["generate", "--prompt", "x"], ["chat"]])
def test_what_a_text_cannot_follow_is_told_before_a_model_is_loaded(command: list[str], tmp_path: Path) -> None:
    """In this process, as the library that compiles grammars takes long to import."""
    pytest.importorskip("xgrammar", reason="not installed: xgrammar")
    schema = tmp_path / "schema.json"
    schema.write_text('{"not": {}}')
    for options, named in (
        (["--regex", "("], "The parenthesis is not closed"), (["--json-schema", str(schema)], "not at #: is not"),
        (["--grammar", "root :"], "structured.grammar='root :': EBNF"),
    ):  # fmt: skip
        done = CliRunner().invoke(app, [*command, "--target", str(tmp_path / "no-such-dir"), *options])
        assert done.exit_code == 2 and named in done.stderr, (done.stderr, done.exception)


@pytest.mark.rare
def test_broken_checkpoints(pair: Path, tmp_path: Path) -> None:
    assert "no-such-dir" in refused("generate", "--target", str(tmp_path / "no-such-dir"), "--prompt", "x")
    truncated = copy(pair / "target", tmp_path / "truncated")
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "model.safetensors" in refused("generate", "--target", str(truncated), "--prompt", "x")
    unknown = copy(pair / "target", tmp_path / "unknown")
    edit_json(unknown / "config.json", lambda c: c.update(architectures=["FooForCausalLM"], model_type="foo"))
    assert "foo" in refused("generate", "--target", str(unknown), "--prompt", "x").lower()


def test_a_draft_that_does_not_fit_is_refused_with_every_mismatch(pair: Path, tmp_path: Path) -> None:
    bad = copy(pair / "draft", tmp_path / "bad")
    tensors = load_file(bad / "model.safetensors")
    tensors["d2t"] = tensors["d2t"] + 10_000
    del tensors["midlayer.mlp.up_proj.weight"]
    tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()
    save_file(tensors, bad / "model.safetensors")
    message = refused("generate", "--target", str(pair / "target"), "--draft", str(bad), "--prompt", "x")
    for part in ("midlayer.mlp.up_proj.weight", "fc.weight"):
        assert part in message, message


def test_prompts_that_cannot_run(pair: Path) -> None:
    llm = LLM(pair / "target", engine=EngineConfig(max_batch=1))
    limit = llm.models.max_positions
    with pytest.raises(ValueError, match=r"request 0: prompt=\[\]"):
        llm.generate([[]])
    with pytest.raises(ValueError, match=f"prompt of {limit} tokens"):
        llm.generate([[1] * limit], SamplingParams(max_tokens=1))
    with pytest.raises(ValueError, match=r"must be in \[0, 160\)"):
        llm.generate([[160]])
    with pytest.raises(ValueError, match="needs a tokenizer"):
        llm.generate([[1]], SamplingParams(stop=("x",)))
    small = LLM(pair / "target", engine=EngineConfig(max_batch=1, num_pages=1, page_size=16))
    with pytest.raises(OutOfPages, match="2 pages of 16"):
        small.generate([[1] * 10], SamplingParams(max_tokens=20))
    assert small.generate([[1] * 4], SamplingParams(max_tokens=4, ignore_eos=True))[0].finish_reason == "length"


def test_nan_logits_stop_the_request_and_lose_nothing(pair: Path, tmp_path: Path) -> None:
    """Weights that are finite, and so load, but overflow to infinities of both signs."""
    broken = copy(pair / "target", tmp_path / "nan")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"].fill_(3e38)
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    llm = LLM(broken, engine=EngineConfig(max_batch=2))
    for temperature in (0.0, 1.0):
        with pytest.raises(NumericalError, match="request 0: the target's logits at position 3"):
            llm.generate([[1, 2, 3]], SamplingParams(temperature=temperature, top_p=0.9))
    assert not llm.engine.is_busy and llm.engine.pool.num_available == llm.engine.pool.num_pages


def test_a_refused_prompt_leaves_the_engine_ready() -> None:
    llm = tiny_llm()
    with pytest.raises(ValueError, match="request 1"):
        llm.generate([[1], []])
    assert llm.generate([[1]], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids


def test_infinite_weights_are_refused_and_infinite_logits_an_error(pair: Path, tmp_path: Path) -> None:
    broken = copy(pair / "target", tmp_path / "inf")
    tensors = load_file(broken / "model.safetensors")
    tensors["lm_head.weight"].fill_(torch.inf)
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    assert "lm_head.weight holds 7680 of 7680 values" in refused("generate", "--target", str(broken), "--prompt", "x")
    tensors["lm_head.weight"].fill_(3e38)
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NumericalError):
        LLM(broken).generate([[1, 2]], SamplingParams(max_tokens=4))


def test_json_output_of_generate(pair: Path) -> None:
    llm = LLM(pair / "target", pair / "draft")
    from aquiline.cli.show.continuations import as_dict

    result = llm.run([[1, 2, 3]], SamplingParams(max_tokens=9, ignore_eos=True))
    data = json.loads(json.dumps(as_dict(result, llm)))
    assert len(data["outputs"][0]["token_ids"]) == len(data["outputs"][0]["accepted_by"]) == 9
    assert set(data["outputs"][0]["accepted_by"]) <= {"draft", "lookup", "target"}
    wanted = (
        "tau acceptance_rate per_position num_steps num_draft_tokens num_accepted_tokens num_committed tokens_cut "
        "target_calls_per_token decode_tokens_per_s prefill_ms decode_ms"
    )
    assert set(wanted.split()) <= set(data["metrics"])
    assert data["system"]["arithmetic"] == llm.models.arithmetic
