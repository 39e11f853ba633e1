"""The commands as a user types them: help at once, text, JSON and streams, and errors that end with exit code 2."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints import edit_json, write_draft, write_target
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner, Result

from aquiline.cli.main import app, command_of
from aquiline.models.load import read_model_config

RUN = "from aquiline.cli.main import app; app()"
HELP = """
import sys
from aquiline.cli.main import app
try:
    app()
finally:
    heavy = {"torch", "transformers", "numpy", "tokenizers"} & set(sys.modules)
    assert not heavy, heavy
"""


HIDDEN = """
import importlib.metadata, sys
class Hides:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "transformers":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hides())
found = importlib.metadata.version
def version(name):
    if name == "transformers":
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)
importlib.metadata.version = version
from aquiline.cli.main import app
from typer.testing import CliRunner
for command, code in (
    ("generate --prompt def --max-tokens 4", 0),
    ("eval --count 1 --lengths 4 --num-spec-tokens 1 --json", 0),
    ("compare --peer transformers", 2),
):
    done = CliRunner().invoke(app, [*command.split(), "--target", "bundled"])
    assert done.exit_code == code, (command, done.output, done.exception)
print(done.output)
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target with a tokenizer of letters, in shards, and a random draft."""
    root = tmp_path_factory.mktemp("pair")
    write_target(root / "target", max_shard_size="60KB")
    vocab = {chr(33 + i): i for i in range(90)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(root / "target" / "tokenizer.json"))
    write_draft(root / "draft", read_model_config(root / "target"))
    return root


def run(*args: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args], input=stdin)


def generate(pair: Path, *args: object, stdin: str | None = None) -> Result:
    options = ("--target", pair / "target", "--draft", pair / "draft", "--max-tokens", 12, "--ignore-eos")
    return run("generate", *options, *args, stdin=stdin)


def refused(result: Result) -> str:
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), (result.output, result.exception)
    assert result.stderr.startswith("aquiline: ") and not result.stdout
    return result.stderr


@pytest.mark.parametrize(
    "args", [["--help"], ["generate", "--help"], ["demo", "--help"], ["train", "--help"], ["regenerate", "--help"]]
)
def test_help_waits_for_nothing_heavy(args: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", HELP, *args], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout
    assert args[0] == "--help" or f"aquiline {args[0]} " in done.stdout.replace("\n", " "), "no example"


@pytest.mark.rare
def test_transformers_is_needed_by_its_peer_alone(tmp_path: Path) -> None:
    """A process of its own, since this one has imported it."""
    done = subprocess.run([sys.executable, "-c", HIDDEN], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pip install transformers, or 'aquiline[peers]' for all peers" in done.stdout


def test_every_option_of_the_interface_exists() -> None:
    wanted = (
        "target draft prompt prompt_file max_tokens temperature top_k top_p min_p repetition_penalty presence_penalty "
        "frequency_penalty seed stop stop_token_ids ignore_eos drafter num_spec_tokens depth draft_top_k num_nodes "
        "dtype"
    )
    command = command_of("generate")
    flags = {flag for option in command.params for flag in option.opts}
    assert {f"--{name.replace('_', '-')}" for name in wanted.split()} | {"--json"} <= flags


def test_prompt_file_and_stdin_say_the_same(pair: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("abc")
    texts = [
        generate(pair, "--prompt", "abc"),
        generate(pair, "--prompt-file", tmp_path / "prompt.txt"),
        generate(pair, stdin="abc"),
        generate(pair, "--prompt", "abc", "--drafter", "none"),
        generate(pair, "--prompt", "abc", "--drafter", "lookup", "--min-match", 1, "--min-confidence", 0),
        generate(pair, "--prompt", "abc", "--drafter", "dynamic", "--depth", 2, "--draft-top-k", 2, "--num-nodes", 5),
    ]
    assert len({t.stdout for t in texts}) == 1 and texts[0].exit_code == 0
    assert "prompt_file=" in refused(generate(pair, "--prompt", "x", "--prompt-file", tmp_path / "prompt.txt"))


def test_json_is_what_the_interface_promises(pair: Path) -> None:
    plain = generate(pair, "--prompt", "abc").stdout
    result = generate(pair, "--prompt", "abc", "--json", "--dtype", "float32", "--seed", 2**64 - 1)
    data = json.loads(result.stdout)
    (output,) = data["outputs"]
    assert set(output) == {"prompt", "token_ids", "text", "finish_reason", "accepted_by"}
    assert output["prompt"] == "abc" and output["finish_reason"] == "length" and data["system"]["dtype"] == "float32"
    assert json.loads(generate(pair, "--prompt", "abc", "--json").stdout)["outputs"][0]["text"] == plain[:-1]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a terminal")
def test_text_streams_to_a_terminal(pair: Path) -> None:
    leader, follower = pty.openpty()
    command = [sys.executable, "-c", RUN, "generate", "--target", str(pair / "target"), "--prompt", "abc",
               "--max-tokens", "12", "--ignore-eos"]  # fmt: skip
    done = subprocess.run(command, stdout=follower, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, timeout=60)
    os.close(follower)
    shown = os.read(leader, 10_000).decode().replace("\r\n", "\n")
    os.close(leader)
    assert done.returncode == 0 and shown == generate(pair, "--prompt", "abc", "--drafter", "none").stdout


@pytest.mark.parametrize("options", [(), ("--json",)])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_whoever_stops_reading_is_told_nothing(pair: Path, options: tuple[str, ...], unbuffered: str) -> None:
    """As with `| head`: the output's end is closed before anything is written. Python buffers output or does not."""
    command = [sys.executable, "-c", RUN, "generate", "--target", str(pair / "target"), "--prompt", "abc", *options]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, timeout=60,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
    )  # fmt: skip
    os.close(writer)
    assert done.returncode == 1 and done.stderr == b""


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--max-tokens", 0], "max_tokens=0"),
        (["--temperature", -1], "temperature=-1.0"),
        (["--top-k", 2**31], f"top_k={2**31}"),
        (["--logit-bias", "5:inf"], "logit_bias={5: inf}"),
        (["--logit-bias", "five:1"], "logit_bias='five:1'"),
        (["--logit-bias", "160:1"], "token id 160"),
        (["--stop-token-ids", 160], "token id 160"),
        (["--seed", -1], "seed=-1"),
        (["--stop", ""], "stop=('',)"),
        (["--drafter", "tree"], "drafter='tree'"),
        (["--num-spec-tokens", 17], "num_spec_tokens=17"),
        (["--drafter", "dynamic", "--depth", 40, "--draft-top-k", 2, "--num-nodes", 8], "depth=40"),
        (["--drafter", "dynamic", "--draft-top-k", 100, "--depth", 1, "--num-nodes", 8], "draft_top_k=100"),
        (["--dtype", "int2"], "dtype='int2'"),
        (["--max-tokens", 600], "exceeds the 512 positions"),
        (["--prompt", "a" * 501], "prompt of 501 tokens"),
    ],
    ids=str,
)
def test_bad_options_are_named(pair: Path, options: list[object], named: str) -> None:
    prompt = [] if "--prompt" in options else ["--prompt", "abc"]
    message = refused(generate(pair, *prompt, *options))
    assert named in message and message.count("\n") == 1


def weights(directory: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Edit the one file that holds the tensors an edit asks for."""
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        try:
            edit(tensors)
        except KeyError:
            continue
        save_file(tensors, file, metadata={"format": "pt"})
        return
    raise AssertionError("no shard holds it")


def copy(source: Path, place: Path) -> None:
    (place / "config.json").write_bytes((source / "config.json").read_bytes())


def truncate(target: Path) -> None:
    file = max(target.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])


def offsets(draft: Path) -> None:
    weights(draft, lambda t: t["d2t"].add_(10_000))


def norm_of(target: Path, value: float) -> None:
    weights(target, lambda t: t["model.norm.weight"].fill_(value))


BROKEN: dict[str, tuple[Callable[[Path, Path], object], list[str]]] = {
    "missing shard": (lambda t, d: max(t.glob("*.safetensors")).unlink(), ["lacks model-000"]),
    "truncated shard": (lambda t, d: truncate(t), ["truncated or corrupt"]),
    "missing tensor": (lambda t, d: weights(d, lambda w: w.pop("fc.weight")), ["missing tensor fc.weight"]),
    "unknown architecture": (
        lambda t, d: edit_json(t / "config.json", lambda c: c.update(model_type="foo")), ["model_type='foo'"]
    ),
    "a target as draft": (
        lambda t, d: copy(t, d), ["this is no draft: num_hidden_layers=8", "so it is a target"]
    ),
    "a draft as target": (lambda t, d: copy(d, t), ["this is no target: it is an EAGLE-3 draft (draft_vocab_size=80)"]),
    "wrong vocabulary": (
        lambda t, d: edit_json(d / "config.json", lambda c: c.update(vocab_size=161)), ["vocab_size=161", "has 160"]
    ),
    "d2t out of range": (lambda t, d: offsets(d), ["d2t maps 80 draft ids outside"]),
    "draft of another size": (
        lambda t, d: edit_json(d / "config.json", lambda c: c.update(hidden_size=64, vocab_size=161)),
        ["hidden_size=64, the target has 48", "vocab_size=161, the target has 160"],
    ),
    "broken tokenizer": (lambda t, d: (t / "tokenizer.json").write_text("{"), ["tokenizer.json"]),
    "NaN weights": (lambda t, d: norm_of(t, torch.nan), ["model.norm.weight holds 48 of 48 values", "48 NaN"]),
    "NaN logits": (lambda t, d: norm_of(t, 3e38), ["position 3 are NaN"]),  # finite weights that overflow
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_checkpoints_are_explained(name: str, pair: Path, tmp_path: Path) -> None:
    for part in ("target", "draft"):
        (tmp_path / part).mkdir()
        for file in (pair / part).iterdir():
            (tmp_path / part / file.name).write_bytes(file.read_bytes())
    damage, named = BROKEN[name]
    damage(tmp_path / "target", tmp_path / "draft")
    message = refused(generate(tmp_path, "--prompt", "abc"))
    assert all(words in message for words in named), message


def test_an_empty_prompt_is_refused(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty.txt").touch()
    monkeypatch.setattr("aquiline.engine.model.ResolvedPair.load", None)  # nothing is loaded for it
    for given, named in (
        (generate(pair, "--prompt", ""), "prompt=''"), (generate(pair, stdin=""), "prompt: stdin"),
        (generate(pair, "--prompt-file", tmp_path / "empty.txt"), "prompt_file="),
    ):  # fmt: skip
        message = refused(given)
        assert f"{named}" in message and "is empty; give at least one character" in message


def test_without_any_stdin_text_is_asked_for(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `<&-`: Python then has no stdin at all. Nothing is loaded for it."""
    monkeypatch.setattr("aquiline.engine.model.ResolvedPair.load", None)
    for name, said in (("generate", "prompt: give --prompt, --prompt-file"), ("chat", "chat: stdin is closed")):
        command = command_of(name)
        monkeypatch.setattr(sys, "stdin", None)
        with pytest.raises(ValueError, match=said):
            command.main(["--target", str(pair / "target")], standalone_mode=False)


def test_a_prompt_that_is_no_utf8_is_refused(pair: Path) -> None:
    assert "not UTF-8" in refused(generate(pair, "--prompt", "a\udcff"))


def test_an_option_without_effect_is_named(pair: Path) -> None:
    done = generate(pair, "--prompt", "x", "--drafter", "none", "--depth", "3", "--max-tokens", "1")
    assert done.exit_code == 0 and "--depth has no effect with drafter none" in done.stderr


def test_a_prediction_is_a_text_or_a_file(pair: Path, tmp_path: Path) -> None:
    """It saves steps, if the way to draft reads it, and leaves the text alone."""
    options = ("--prompt", "abc", "--json", "--drafter", "lookup", "--min-confidence", 0)
    plain = json.loads(generate(pair, *options).stdout)
    text = plain["outputs"][0]["text"]
    (tmp_path / "expected.txt").write_text(text, encoding="utf-8")
    for given in (text, f"@{tmp_path / 'expected.txt'}"):
        found = json.loads(generate(pair, *options, "--prediction", given).stdout)
        assert found["outputs"][0]["token_ids"] == plain["outputs"][0]["token_ids"]
        assert found["metrics"]["num_steps"] < plain["metrics"]["num_steps"]
    done = generate(pair, "--prompt", "abc", "--prediction", text, "--drafter", "chain")
    assert done.exit_code == 0 and done.stderr.startswith("aquiline: --prediction has no effect with drafter chain\n")
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    told = refused(generate(pair, "--prompts-file", rows, "--out", out, "--prediction", text))
    assert "prediction: goes with one prompt; give rows of --prompts-file" in told
    assert "No such file" in refused(generate(pair, "--prompt", "abc", "--drafter", "lookup", "--prediction", "@none"))


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["profile", "--trace", "nowhere/trace.json"], "nowhere/trace.json: nowhere is no folder that can be written"),
        (["profile", "--trace", "folder"], "folder: is a folder; name a file"),
        (["demo", "--plot", "nowhere/demo.png"], "nowhere/demo.png: nowhere is no folder"),
        (["eval", "--out", "file"], "file: is a file; name a folder"),
        (["compare", "--out", "file/results"], "file/results: file is no folder"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_loaded(
    command: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*given: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("folder").mkdir()
    monkeypatch.setattr("aquiline.engine.model.ResolvedPair.load", loaded)
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2 and told in refused.stderr, refused.output
