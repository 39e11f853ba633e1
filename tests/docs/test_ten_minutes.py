"""The page of ten minutes runs as it is written, line by line, against one server."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ELSEWHERE = ("python3 -m venv", "pip install")
"""What has been done where the tests run."""
OWN = "./target"
"""A line with it is about a model of the reader's own; tests/cli/test_examples.py runs it."""

pytestmark = pytest.mark.slow


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Runs a line of shell in a folder with the repository's source, and gives what it prints; a server runs on to the
    end of the test."""
    own = tmp_path / "bin"
    own.mkdir()
    command = own / "aquiline"
    command.write_text(
        f"#!{sys.executable}\nfrom aquiline.cli.main import app\nif __name__ == '__main__':\n    app()\n"
    )
    command.chmod(0o755)
    (tmp_path / "src").symlink_to(ROOT / "src")
    environment = os.environ | {"PATH": f"{own}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    servers = list[subprocess.Popen[bytes]]()

    def run(line: str) -> str:
        line = line.replace("8000", port)
        if line.startswith("aquiline serve"):
            servers.append(subprocess.Popen(["bash", "-c", f"exec {line}"], cwd=tmp_path, env=environment))
            wait_for(f"http://127.0.0.1:{port}/ready", servers[-1])
            return ""
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        allowed = (0, 1) if line == "aquiline doctor" else (0,)
        assert done.returncode in allowed, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    yield run
    for server in servers:
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0, "Ctrl-C lets the server end"


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    """Wait until the server answers. Raises AssertionError if it ends or takes a minute."""
    for _ in range(600):
        assert server.poll() is None
        try:
            urllib.request.urlopen(url)
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError(f"{url} does not answer")


def test_the_ten_minutes(shell: Callable[[str], str], tmp_path: Path) -> None:
    page = (ROOT / "docs" / "start.md").read_text("utf-8").replace("\\\n", "")
    lines = [line for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    mine = [re.sub(r"\s+#.*", "", line) for line in lines if not line.startswith(ELSEWHERE) and OWN not in line]
    printed = {line: shell(line) for line in mine}
    first, second = (printed[line] for line in mine if line.startswith("aquiline generate --chat"))
    texts = [text.rstrip("\n").rpartition("\n")[0] for text in (first, second)]
    assert texts[0] == texts[1] and texts[0], "the same text without drafts"
    completed, metrics = (printed[line] for line in mine if line.startswith("curl"))
    assert '"text"' in completed and "vllm:generation_tokens_total" in metrics
    assert (tmp_path / "draft" / "model.safetensors").is_file() and (tmp_path / "results" / "eval.json").is_file()
