"""Data sets: real downloads from a server on this machine, and one clear line when there is none; counts of questions
are honoured or refused, and a seed draws a sample."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from aquiline.bench.data.datasets import SOURCES, Source, fetch, load_questions, locate

ROW = json.dumps({"question_id": 7, "category": "math", "turns": ["1 + 1?"]}).encode() + b"\n"
CLOSED = "http://127.0.0.1:9"  # the discard port, where nothing listens


@dataclass
class Web:
    """A web server's files, its address and the requests it got."""

    files: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    cuts_short: bool = False
    address: str = ""


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    web = Web()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            web.requests.append(f"{self.command} {self.path}")
            data = web.files.get(self.path)
            self.send_response(404 if data is None else 200)
            self.send_header("Content-Length", str(len(data or b"")))
            if data is not None:
                self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
                self.send_header("X-Repo-Commit", "0" * 40)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write((data or b"")[: 5 if web.cuts_short else None])

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    web.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield web
    server.shutdown()
    server.server_close()


def pinned(web: Web, data: bytes = ROW, algorithm: str = "sha256") -> Source:
    return Source(f"{web.address}/q.jsonl", f"{algorithm}:{hashlib.new(algorithm, data).hexdigest()}")


@pytest.mark.parametrize("algorithm", ["sha256", "md5"])
def test_a_pinned_file_is_downloaded_once(web: Web, tmp_path: Path, algorithm: str) -> None:
    web.files["/q.jsonl"] = ROW
    source = pinned(web, algorithm=algorithm)
    for _ in range(2):
        assert fetch("toy", source, tmp_path / "cache").read_bytes() == ROW
    assert web.requests == ["GET /q.jsonl"]
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["q.jsonl"], "no partial file is left"


def test_a_damaged_copy_is_replaced(web: Web, tmp_path: Path) -> None:
    web.files["/q.jsonl"] = ROW
    (tmp_path / "q.jsonl").write_bytes(ROW[:-5])
    assert fetch("toy", pinned(web), tmp_path).read_bytes() == ROW


def test_other_bytes_than_the_pinned_ones_are_refused(web: Web, tmp_path: Path) -> None:
    web.files["/q.jsonl"] = ROW + ROW
    with pytest.raises(ValueError, match=r"dataset='toy'.*does not hold the pinned file.*pass its path"):
        fetch("toy", pinned(web), tmp_path)
    assert not list(tmp_path.iterdir())


def test_no_file_and_no_server_are_one_clear_line(web: Web, tmp_path: Path) -> None:
    for source in (pinned(web), Source(f"{CLOSED}/q.jsonl", "md5:0")):
        with pytest.raises(ValueError, match=r"dataset='toy'.*cannot be read.*pass its path") as caught:
            fetch("toy", source, tmp_path)
        assert "\n" not in str(caught.value)


def load(dataset: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Load a data set in a process of its own: the hub's library reads its environment when it is imported."""
    code = f"from aquiline.bench.data.datasets import load_questions\nprint(load_questions({dataset!r}))"
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment)


def test_a_file_of_a_hub_repository(web: Web, tmp_path: Path) -> None:
    web.files["/datasets/own/er.s_set/resolve/main/raw/q.jsonl"] = ROW
    done = load("hf://datasets/own/er.s_set/raw/q.jsonl", HF_ENDPOINT=web.address, HF_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "Question(id=7, category='math', turns=('1 + 1?',)" in done.stdout


@pytest.mark.parametrize(
    ("dataset", "environment"),
    [
        ("hf://datasets/own/set/q.jsonl", {"HF_HUB_OFFLINE": "1"}),
        ("gsm8k", {"HTTPS_PROXY": CLOSED, "https_proxy": CLOSED, "NO_PROXY": "", "no_proxy": ""}),
    ],
)
def test_what_cannot_be_reached_says_so_and_what_to_do(
    dataset: str, environment: dict[str, str], tmp_path: Path
) -> None:
    done = load(dataset, HF_HOME=str(tmp_path), **environment)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith(f"ValueError: dataset={dataset!r}: ")
    assert last.endswith("download it where the network allows and pass its path")


@pytest.mark.rare
def test_a_transfer_cut_short(web: Web, tmp_path: Path) -> None:
    web.files |= {"/q.jsonl": ROW, "/datasets/own/set/resolve/main/q.jsonl": ROW}
    web.cuts_short = True
    with pytest.raises(ValueError, match="cannot be read"):
        fetch("toy", pinned(web), tmp_path)
    done = load("hf://datasets/own/set/q.jsonl", HF_ENDPOINT=web.address, HF_HOME=str(tmp_path))
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError: dataset='hf://datasets/own/set/q.jsonl': the hub did not give it (")


def test_a_file_the_hub_does_not_have(web: Web, tmp_path: Path) -> None:
    done = load("hf://datasets/own/set/q.jsonl", HF_ENDPOINT=web.address, HF_HOME=str(tmp_path))
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError: dataset='hf://datasets/own/set/q.jsonl': the hub did not give it (")


def test_what_is_neither_name_nor_file_lists_what_is_read(tmp_path: Path) -> None:
    for wrong, why in (("mtbench", "is no file here"), (str(tmp_path), "is a folder"), ("hf://datasets/a/b", "FILE")):
        with pytest.raises(ValueError, match=why):
            locate(wrong)
    with pytest.raises(ValueError, match="mt_bench, gsm8k, humaneval, alpaca, spec_bench"):
        locate("mtbench")


def test_a_path_is_never_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gsm8k").write_bytes(ROW)
    monkeypatch.chdir(tmp_path)
    assert locate("./gsm8k").read_bytes() == locate(Path("gsm8k")).read_bytes() == ROW


def test_every_named_file_is_pinned_by_a_whole_digest() -> None:
    lengths = {"sha256": 64, "md5": 32}
    for source in SOURCES.values():
        algorithm, _, digest = source.digest.partition(":")
        assert source.url.startswith("https://") and len(bytes.fromhex(digest)) * 2 == lengths[algorithm]


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_count_is_honoured_or_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", *({"id": i, "prompt": f"p{i}"} for i in range(5)))
    assert [q.id for q in load_questions(path)] == [0, 1, 2, 3, 4]
    assert [q.id for q in load_questions(path, 3)] == [0, 1, 2]
    with pytest.raises(ValueError, match=r"count=6: .* holds 5 questions"):
        load_questions(path, 6)
    with pytest.raises(ValueError, match="count=0"):
        load_questions(path, 0)


def test_a_seed_draws_a_sample_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", *({"id": i, "prompt": f"p{i}"} for i in range(40)))
    samples = {seed: [q.id for q in load_questions(path, 10, seed)] for seed in range(4)}
    for seed, ids in samples.items():
        assert len(set(ids)) == 10 and ids == sorted(ids)  # type: ignore[type-var]
        assert [q.id for q in load_questions(path, 10, seed)] == ids
    assert len({tuple(ids) for ids in samples.values()}) == 4
    assert [q.id for q in load_questions(path, 40, 1)] == list(range(40))
