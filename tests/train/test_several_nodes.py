"""The recipe of docs/training-on-several-nodes.md, with an agent for each node on this machine."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "training-on-several-nodes.md"
SIZES = (
    "--held-out held.bin --capture 0,1,2 --draft-vocab-size 40 --context 48 --batch-size 5 --ttt-steps 3 --lr 5e-3 "
    "--steps 4 --eval-every 2 --eval-rows 2 --eval-tokens 8 --json"
)  # fmt: skip
LAST = Path("draft", "step-0000004", "training.pt")
FIRST = Path("draft", "step-0000002")


def recipes() -> list[str]:
    """The lines of shell of the page: one node, two nodes, one process that resumes."""
    text = PAGE.read_text("utf-8").replace("\\\n", "")
    return [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the page names, and a command `aquiline`."""
    home = tmp_path_factory.mktemp("nodes")
    tiny.write_target(home / "target")
    tiny.write_bin(home / "answers.bin", 40)
    tiny.write_bin(home / "held.bin", 12, seed=1)
    own = "import torch\nfrom aquiline.cli.main import app\ntorch.set_num_threads(1)\n"
    (home / "aquiline").write_text(f"#!{sys.executable}\n{own}if __name__ == '__main__':\n    app()\n")
    (home / "aquiline").chmod(0o755)
    return home


def started(line: str, home: Path, port: int = 0) -> subprocess.Popen[str]:
    """A line of the page on one of its nodes, with the sizes of this test."""
    line = line.replace("answers.jsonl", "answers.bin").replace("--nproc-per-node 8", "--nproc-per-node 1")
    words = shlex.split(line.replace("node0:29500", f"127.0.0.1:{port}"))
    if words[0] == "torchrun":
        words[:1] = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1"]
    settings = {"PATH": f"{home}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "AQUILINE_THREADS": "1"}
    return subprocess.Popen(
        [*words, *SIZES.split()], cwd=home, env=os.environ | settings, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip


def printed(running: list[subprocess.Popen[str]]) -> list[str]:
    """What processes print that run beside each other; each must end well."""
    said = [process.communicate(timeout=900) for process in running]
    for process, (_, problems) in zip(running, said, strict=True):
        assert process.returncode == 0, problems[-3000:]
    return [out for out, _ in said]


def distance(one: Path, other: Path) -> float:
    """The largest relative distance between the weights of two checkpoints."""
    a, b = (torch.load(file, weights_only=True)["head"] for file in (one, other))
    assert set(a) == set(b)
    return max(float((a[name] - b[name]).norm() / b[name].norm().clamp_min(1e-30)) for name in b)


@pytest.mark.rare
def test_two_nodes_train_what_one_process_does_and_one_goes_on_with_it(home: Path) -> None:
    _, both, alone = recipes()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = [out for out in printed([started(both, home, port) for _ in range(2)]) if out.strip()]
    assert len(told) == 1, "the first rank of all nodes tells the result"
    assert json.loads(told[0].splitlines()[-1])["steps"] == 4
    shutil.move(home / "draft", home / "of-two-nodes")

    printed([started(alone.removesuffix("--resume"), home)])
    assert distance(home / LAST, home / "of-two-nodes" / LAST.relative_to("draft")) < 1e-2
    shutil.rmtree(home / "draft")

    (home / "draft").mkdir()
    shutil.copytree(home / "of-two-nodes" / FIRST.name, home / FIRST)
    printed([started(alone, home)])
    assert distance(home / FIRST / "training.pt", home / LAST) > 0, "it went on"
    assert distance(home / LAST, home / "of-two-nodes" / LAST.relative_to("draft")) < 1e-2


def test_the_lines_of_the_page_differ_in_their_ranks_alone() -> None:
    one, both, alone = recipes()
    assert "--nnodes 2" in both and "--rdzv-backend c10d" in both and alone.endswith("--resume")
    assert one.partition("aquiline")[2] == both.partition("aquiline")[2] == alone.removesuffix(" --resume")[8:]
