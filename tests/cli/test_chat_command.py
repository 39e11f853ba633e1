"""`aquiline chat` and `generate --chat` as a user has them: through a pipe, in a terminal, and what is refused."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.checkpoints import write_draft, write_target
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner, Result

from aquiline.cli.main import app
from aquiline.models.load import read_model_config

RUN = "from aquiline.cli.main import app; app()"
SOURCE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}a:{{ mood }}{% endif %}"
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target with a tokenizer of letters and a chat template, and a random draft."""
    root = tmp_path_factory.mktemp("pair")
    write_target(root / "target")
    tokenizer = Tokenizer(models.WordLevel({chr(33 + i): i for i in range(93)}, unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(root / "target" / "tokenizer.json"))
    (root / "target" / "chat_template.jinja").write_text(SOURCE)
    write_draft(root / "draft", read_model_config(root / "target"))
    return root


def run(*args: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args], input=stdin)


def chat(pair: Path, *args: object, stdin: str) -> Result:
    options = ("--target", pair / "target", "--draft", pair / "draft", "--max-tokens", 6, "--temperature", 0.9)
    return run("chat", *options, "--seed", 4, *args, stdin=stdin)


def test_each_line_of_a_pipe_is_a_turn(pair: Path) -> None:
    plain = chat(pair, stdin="hello\n\n  more  \n/exit\nnever\n")
    rows = [json.loads(line) for line in chat(pair, "--json", stdin="hello\nmore\n").stdout.splitlines()]
    assert plain.exit_code == 0 and [row["prompt"] for row in rows] == ["hello", "more"]
    assert plain.stdout == "".join(row["text"] + "\n" for row in rows)
    assert [line.split(",")[0] for line in plain.stderr.splitlines()] == [f"{len(r['token_ids'])} tokens" for r in rows]
    assert {"token_ids", "finish_reason", "accepted_by", "share_by_draft", "metrics"} <= set(rows[0])
    history = len(f"u:hello;a:{rows[0]['text']};u:more;a:")
    assert rows[1]["metrics"]["num_prompt_tokens"] == history
    without = [
        json.loads(line) for line in chat(pair, "--json", "--drafter", "none", stdin="hello\n").stdout.splitlines()
    ]
    assert without[0]["token_ids"] == rows[0]["token_ids"] and without[0]["metrics"]["num_draft_tokens"] == 0


def test_commands_of_a_conversation(pair: Path) -> None:
    lines = ["hi", "/reset", "hi", "/system sys", "hi", "/system", "/reset", "hi", "/nope", "/etc/x"]
    done = chat(pair, "--json", "--system", "be", stdin="\n".join(lines))
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    lengths = [row["metrics"]["num_prompt_tokens"] for row in rows]
    alone, answer = len("u:hi;a:"), len(rows[1]["text"]) + len("u:hi;a:;")
    assert lengths[:4] == [alone + 5, alone + 5, alone + 6 + answer, alone] and len(rows) == 5
    assert [line.removeprefix("aquiline: ").split(":")[0] for line in done.stderr.splitlines()] == [
        "the conversation begins anew", "the system message is set", "there is no system message",
        "the conversation begins anew", "/nope is no command",
    ]  # fmt: skip


def test_what_cannot_be_answered_ends_a_pipe(pair: Path) -> None:
    done = chat(pair, stdin="x" * 600)
    assert done.exit_code == 2 and not done.stdout and "tokens and the model takes 512" in done.stderr
    for options, named in (
        (("--template-options", "["), "template_options='['"), (("--temperature", -1), "temperature=-1"),
        (("--drafter", "tree"), "drafter='tree'"),
    ):  # fmt: skip
        refused = chat(pair, *options, stdin="hi\n")
        assert refused.exit_code == 2 and named in refused.stderr


def test_options_reach_the_template(pair: Path) -> None:
    done = chat(pair, "--json", "--template-options", '{"mood": "gay"}', stdin="hi\n")
    assert json.loads(done.stdout)["metrics"]["num_prompt_tokens"] == len("u:hi;a:gay")


def test_generate_wraps_a_prompt_where_told(pair: Path, tmp_path: Path) -> None:
    options = ("generate", "--target", pair / "target", "--max-tokens", 6, "--json")
    wrapped = json.loads(run(*options, "--chat", "--system", "be", "--prompt", "hi").stdout)
    plain = json.loads(run(*options, "--prompt", "s:be;u:hi;a:").stdout)
    assert wrapped["outputs"][0] == plain["outputs"][0] | {"prompt": "hi"}
    (tmp_path / "in.jsonl").write_text('{"prompt": "hi"}\n{"prompt": "there"}\n')
    files = ("--prompts-file", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl")
    assert run(*options, "--chat", "--system", "be", *files).exit_code == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert rows[0]["token_ids"] == plain["outputs"][0]["token_ids"]
    assert rows[1]["num_prompt_tokens"] == len("s:be;u:there;a:")
    other = run(*options, "--chat", *files)
    assert other.exit_code == 2 and "is not a result of the same line" in other.stderr


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--system", "be"], "go with --chat"),
        (["--template-options", "{}"], "go with --chat"),
        (["--chat", "--template-options", "5"], "must be a JSON object"),
    ],
)
def test_options_of_a_chat_need_one(pair: Path, options: list[str], named: str) -> None:
    done = run("generate", "--target", pair / "target", "--prompt", "hi", *options)
    assert done.exit_code == 2 and named in done.stderr


def test_a_target_without_a_template() -> None:
    """One rule wherever somebody chats: messages are plain text, and it is said."""
    options = ("--target", "bundled", "--max-tokens", 4)
    plain = run("generate", *options, "--prompt", "def f(x):")
    for done in (
        run("chat", *options, stdin="def f(x):\n"),
        run("generate", *options, "--chat", "--prompt", "def f(x):"),
    ):
        assert done.exit_code == 0 and done.stdout == plain.stdout
        assert "does not exist: messages are written one after another and continued as plain text" in done.stderr


class Terminal:
    """`aquiline chat` in a terminal of its own."""

    def __init__(self, *args: str) -> None:
        self.leader, follower = pty.openpty()
        environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN, "chat", *args], env=environment | {"TERM": "xterm", "COLUMNS": "200"},
            preexec_fn=lambda: self._begin(follower), pass_fds=[follower],
        )  # fmt: skip
        os.close(follower)
        self.shown = ""

    @staticmethod
    def _begin(follower: int) -> None:
        os.login_tty(follower)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # jobs in the background inherit that it is ignored

    def type(self, text: str) -> None:
        os.write(self.leader, text.encode())

    def wait_for(self, pattern: str, seconds: float = 60) -> None:
        """Read until the pattern stands in what came since it was last found."""
        ends = time.monotonic() + seconds
        while (found := re.search(pattern, self.shown)) is None:
            assert time.monotonic() < ends, f"{pattern!r} did not come: {self.shown!r}"
            if select.select([self.leader], [], [], 0.2)[0]:
                self.shown += os.read(self.leader, 4096).decode(errors="replace")
        self.shown = self.shown[found.end() :]

    def interrupt_until(self, pattern: str) -> None:
        """Press Ctrl-C until the pattern comes: one that is pressed between two waits of readline goes unseen until the
        next. All typed text must have been shown by then: Ctrl-C drops what a terminal still holds, and a readline
        that was told of a key waits for one, whatever else is pressed."""
        for _ in range(20):
            self.type("\x03")
            with contextlib.suppress(AssertionError):
                return self.wait_for(pattern, seconds=3)
        raise AssertionError(f"{pattern!r} did not come")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.leader)


def test_a_conversation_in_a_terminal() -> None:
    terminal = Terminal("--target", "bundled", "--max-tokens", "3000", "--max-context", "2000")
    with contextlib.closing(terminal):
        terminal.wait_for(r"written by \x1b\[32mthe draft\x1b\[0m")
        terminal.wait_for("> ")
        terminal.type("def add(a, b):\n")
        terminal.wait_for(r"\x1b\[32m")  # a token of the draft
        terminal.type("\x03")
        terminal.wait_for(r"tokens, \d+ tok/s, tau [\d.]+, \d+% by the draft; stopped")
        terminal.wait_for("> ")
        terminal.type("half a li")
        terminal.wait_for("half a li")
        terminal.interrupt_until("> ")
        terminal.type("a b " * 1200 + "\n")
        terminal.wait_for("begin anew with /reset")
        terminal.wait_for("> ")
        terminal.type("/reset\n")
        terminal.wait_for("the conversation begins anew")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.process.wait(timeout=30) == 0
