"""Every example that a help text or a page shows runs, and every line of shell on a page is one that something runs.

An example names known pairs, ids of the hub, and files of the user's own, which `home` makes; it runs in their folder
until a model would be loaded or a server would wait. tests/docs/test_ten_minutes.py runs a page to its end."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.checkpoints import write_draft, write_target
from tests.cli.learnt import write_learnt
from typer.main import get_command

from aquiline.cli.main import app
from aquiline.models.known_pairs import PAIRS, KnownPair
from aquiline.models.load import read_model_config
from aquiline.parity.record import StageRecord, save
from gguf_files import chatml, trained, write_gguf_target

ROOT = Path(__file__).parents[2]
PAGES = {
    str(page.relative_to(ROOT)): "".join(re.findall(r"```sh\n(.*?)```", page.read_text("utf-8"), re.DOTALL))
    for page in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("*/*/README.md"),
        *ROOT.glob("src/*/data/*/*.md"),
    ]
}
"""The lines of shell of every page that shows any."""
RUN_ELSEWHERE = {
    r"pip install ": "an environment of its own, as .ci/run makes one",
    r"python3 -m venv ": "the same",
    r"make (\w+)$": "tests/docs/test_site.py for docs, .ci/run for the others",
    r"curl ": "tests/docs/test_ten_minutes.py",
    r"(\w+=\S+ |\w+=\"[^\"]*\" )*examples/other_engines/compare.sh ": "tests/bench/test_beside.py",
    r"vllm serve ": "another engine's own command",
    r"torchrun ": "tests/train/test_several_nodes.py",
    r"python (prepare|train_target|make_draft)\.py ": "the recipe of examples/demo_pair, which takes hours",
}
"""How lines of shell begin that are no examples of ours, and what runs them."""
OWN = ("cpu-baseline-512x1-t0-baseline.json", "cpu-baseline-512x1-t0-chain-3.json")
RESULTS = {
    "results": OWN,
    "results-of-last-week": OWN,
    "results-of-another-engine": ("peers/bundled/llamacpp-eagle=3.json",),
    "compared": ("peers/bundled/llamacpp-eagle=3.json", "peers/bundled/aquiline-chain-3.json"),
}
KEPT = "64"
"""How many tokens of a draft's vocabulary are kept, where examples keep thousands: the draft of `home` has 196."""
EXAMPLE = r"(aquiline |[a-z]+ .*\| aquiline )"
WAITS = (
    "aquiline.bench.suite.tile_tuning.device_named",
    "aquiline.engine.model.ResolvedPair.load",
    "aquiline.serve.server.serve",
    "aquiline.train.trainer.train", "aquiline.train.estimate.measure_rate", "aquiline.bench.data.datasets.fetch",
    "aquiline.bench.theory.ceilings.measured_once", "huggingface_hub.hf_hub_download",
    "aquiline.bench.peers.comparison.conversion", "aquiline.doctor.examination.examine",
)  # fmt: skip
"""Where an example has shown that it runs: what is called then takes long, or needs a network."""


class Reached(Exception):
    """An example came as far as one of WAITS."""


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command below a group, by its full name."""
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        if hasattr(command, "list_commands"):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def examples(text: str) -> list[list[str]]:
    """The arguments of every `aquiline ...` in lines of shell, also behind a pipe and before a redirection."""
    found = []
    for line in commands_of(text):
        if re.match(EXAMPLE, line):
            words = shlex.split(line)
            end = words.index(">") if ">" in words else len(words)
            found.append(words[words.index("aquiline") + 1 : end])
    return found


def commands_of(text: str) -> list[str]:
    """The commands in lines of shell, each in one line and without its comment."""
    lines = text.replace("\\\n", "").replace(".venv/bin/", "").splitlines()
    return [line for line in (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines) if line]


def parsed(arguments: list[str]) -> list[dict[str, Any]]:
    """What each command that would run is called with; none of them runs."""
    root, calls = get_command(app), list[dict[str, Any]]()
    with pytest.MonkeyPatch.context() as patch:
        for _, command in commands(root):
            patch.setattr(command, "callback", lambda **given: calls.append(given))
        result = CliRunner().invoke(root, arguments)
    assert result.exit_code == 0, f"aquiline {shlex.join(arguments)}\n{result.output}{result.exception or ''}"
    return calls


HELPS = {name: command.help or "" for name, command in commands(get_command(app))}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that examples call the user's own."""
    home = tmp_path_factory.mktemp("home")
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    write_target(home / "target", vocab_size=trained().get_vocab_size(), bos_token_id=0, eos_token_id=1, **sizes)
    trained().save(str(home / "target" / "tokenizer.json"))
    write_draft(home / "draft", read_model_config(home / "target"))
    write_gguf_target(home / "model.gguf", home / "target", vocabulary=chatml())
    (home / "city.schema.json").write_text('{"enum": ["Paris", "Rome"]}')
    for name in ("prompt.txt", "task.txt", "draft.py", "book.txt", "answers.txt"):
        (home / name).write_text("import os\n")
    row = json.dumps({"prompt": "Hi 1", "id": 0}) + "\n"
    for name in ("questions", "prompts", "chats", "answers", "held_out", "own_text", "long", "served"):
        (home / f"{name}.jsonl").write_text(row * 30)
    write_learnt(home / "learnt", home / "draft")
    save(StageRecord((1, 2, 3, 4)), home / "their-stages")
    (home / "more.jsonl.gz").write_bytes(gzip.compress(row.encode()))
    for folder, names in RESULTS.items():
        (home / folder).mkdir()
        for name in names:
            shutil.copy(ROOT / "results" / name, home / folder)
    for name in ("path/to/checkpoint", "path/to/draft", "DIR", "draft-own"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(home / ("draft" if "draft" in name else "target"), home / name)
    shutil.copy(home / "prompts.jsonl", home / "in.jsonl")
    return home


def reached(*given: object, **named: object) -> None:
    raise Reached


SHOWN = HELPS | {name: text for name, text in PAGES.items() if examples(text)}


@pytest.mark.parametrize("name", SHOWN)
def test_every_example_runs(name: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = examples(SHOWN[name])
    assert shown, "its help shows no example"
    own = KnownPair(home / "model.gguf", home / "draft", home / "questions.jsonl", home / "questions.jsonl")
    monkeypatch.setitem(PAIRS, "smollm2", own)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for place in WAITS:
        monkeypatch.setattr(place, reached)
    for number, arguments in enumerate(shown):
        if "--keep" in arguments:
            arguments[arguments.index("--keep") + 1] = KEPT
        here = shutil.copytree(home, tmp_path / str(number))
        monkeypatch.chdir(here)
        out = Path(arguments[arguments.index("--out") + 1]) if "--out" in arguments else Path("none")
        if out.is_file():
            out.unlink()  # other examples read it
        done = CliRunner().invoke(get_command(app), arguments, input="import os\n")
        is_refused = done.exit_code not in (0, 1) or isinstance(done.exception, Exception)
        assert not is_refused or isinstance(done.exception, Reached), (
            shlex.join(arguments),
            done.output,
            done.exception,
        )


def test_every_line_of_shell_on_a_page_is_run_by_something() -> None:
    lines = [line for text in PAGES.values() for line in commands_of(text)]
    assert len(lines) >= 60
    for line in lines:
        assert re.match("|".join((EXAMPLE, *RUN_ELSEWHERE)), line), line
        target = re.match(r"make (\w+)$", line)
        assert target is None or f"\n{target[1]}: " in (ROOT / "Makefile").read_text("utf-8"), line


def test_what_is_taken_is_what_was_meant() -> None:
    (train,) = parsed(shlex.split("train --target T --data ./src ./docs --out ./draft --minutes 45"))
    assert train["data"] == [Path("src"), Path("docs")] and train["minutes"] == 45 and train["target"] == Path("T")
    with pytest.raises(AssertionError, match="--no-such-option"):
        parsed(["train", "--no-such-option"])
