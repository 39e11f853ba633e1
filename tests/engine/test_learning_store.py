"""What a learning folder holds, within its bound, for its owner alone; and the process of its trainer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from aquiline.engine.learning.learn_config import LearnConfig
from aquiline.engine.learning.store import (
    NUM_SEGMENTS,
    Generation,
    LearningStore,
    Served,
    ServedWriter,
    ServingState,
    write_learning,
)
from aquiline.engine.learning.trainer_process import LOWEST, TrainerProcess

TICKING = "tests.engine.ticking"
MAX_BYTES = 16 * 1024


def served(number: int) -> Served:
    return Served([number] * 40, 3, [5, 17], 0.8)


def waited(is_true: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether it becomes true in time."""
    end = time.monotonic() + seconds
    while not is_true() and time.monotonic() < end:
        time.sleep(0.02)
    return is_true()


def test_what_was_served_is_read_back_in_order_and_the_oldest_goes(tmp_path: Path) -> None:
    store = LearningStore(tmp_path / "learnt")
    writer = ServedWriter(store, MAX_BYTES)
    for number in range(500):
        writer.add(served(number))
        assert sum(file.stat().st_size for file in store.segments()) <= MAX_BYTES
    found = list(store.served())
    assert found == [served(number) for number in range(500 - len(found), 500)]
    size = len(str(served(499)))
    assert len(found) * size > MAX_BYTES * (1 - 2 / NUM_SEGMENTS) / 1.5, "one segment at a time goes"
    writer.add(Served([7] * MAX_BYTES, 1, []))
    assert list(store.served()) == found, "a request that would drive all others out is left out"


def test_files_are_readable_by_their_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = LearningStore(tmp_path / "learnt")
        store.claim({"target": "a", "draft": "b"}, {"target": "1", "draft": "2"})
        store.write_state(ServingState(1, (2,)))
        ServedWriter(store, MAX_BYTES).add(served(1))
        store.lock().close()
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in [store.folder, *store.folder.rglob("*")]}
    assert modes == {
        "learnt": 0o700, "served": 0o700, "generations": 0o700, "pair.json": 0o600, "state.json": 0o600,
        "000001.jsonl": 0o600, "lock": 0o600,
    }  # fmt: skip


def test_a_line_that_was_cut_costs_itself_and_no_other(tmp_path: Path) -> None:
    store = LearningStore(tmp_path)
    writer = ServedWriter(store, MAX_BYTES)
    for number in (1, 2, 3):
        writer.add(served(number))
    [segment] = store.segments()
    lines = segment.read_bytes().splitlines(keepends=True)
    segment.write_bytes(lines[0] + lines[1][:20] + b"\n" + lines[2][:-9])
    assert list(store.served()) == [served(1)]


def test_a_folder_serves_one_process_and_one_pair(tmp_path: Path) -> None:
    store = LearningStore(tmp_path)
    told = r"learn=.*: another process serves with it; name another folder"
    with store.lock(), pytest.raises(OSError, match=told):
        LearningStore(tmp_path).lock()
    store.lock().close()
    identity = {"target": "1", "draft": "2"}
    store.claim({"target": "a", "draft": "b"}, identity)
    moved: dict[str, object] = {"target": "moved", "draft": "b", "capture": (1, 2)}
    store.claim(moved, identity)
    assert store.pair["target"] == "moved"
    written = (tmp_path / "pair.json").stat().st_ino
    store.claim(moved, identity)
    assert (tmp_path / "pair.json").stat().st_ino == written, "the disk may be full, and nothing is new"
    with pytest.raises(ValueError, match=r"learn=.*: belongs to another pair, of target 'moved' and draft 'b'"):
        store.claim({"target": "c", "draft": "d"}, identity | {"draft": "3"})


def test_generations_and_state_are_read_as_they_were_written(tmp_path: Path) -> None:
    store = LearningStore(tmp_path)
    assert (store.state(), store.serving(), store.generations()) == (ServingState(), None, [])
    told = [Generation(n, n - 1, 1000 * n, 1.5, 1.6, (1.01, 1.12), 2.0, 1.99, n == 2) for n in (1, 2)]
    for each in told:
        store.checkpoint(each.generation).mkdir()
        write_learning(store.checkpoint(each.generation), each)
    store.checkpoint(3).mkdir()  # of which nothing is told
    store.write_state(ServingState(2, (1,)))
    assert store.generations() == told
    assert (store.state(), store.serving()) == (ServingState(2, (1,)), told[1])


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"learn_share": 1.5}, r"learn_share=1\.5: must be in \[0, 1\]"),
        ({"learn_bytes": 1000}, "learn_bytes=1000: must be at least 1048576 bytes"),
        ({"learn": "dir"}, "learn='dir': must be a path or None"),
    ],
    ids=["share", "bytes", "folder"],
)
def test_settings_that_cannot_work_are_refused_by_name(settings: dict[str, object], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        LearnConfig(**settings)  # type: ignore[arg-type]


def num_ticks(folder: Path) -> int:
    return len((folder / "ticks").read_bytes()) if (folder / "ticks").exists() else 0


@pytest.mark.rare
def test_a_trainer_has_the_lowest_priority_and_runs_only_while_it_may(tmp_path: Path) -> None:
    trainer = TrainerProcess(tmp_path, TICKING)
    assert trainer.pace(False) is None and trainer.process is None, "not started before it may run"
    trainer.pace(True)
    assert waited(lambda: num_ticks(tmp_path) > 0)
    assert trainer.process is not None
    process = psutil.Process(trainer.process.pid)
    assert process.nice() == LOWEST and os.sched_getscheduler(process.pid) == os.SCHED_IDLE
    assert process.environ()["OMP_NUM_THREADS"] == "1"
    session = Path(f"/proc/{process.pid}/autogroup")
    assert not session.exists() or session.read_text().endswith(f"nice {LOWEST}\n"), "its session's too"
    trainer.pace(False)
    assert waited(lambda: process.status() == psutil.STATUS_STOPPED)
    stopped = num_ticks(tmp_path)
    time.sleep(0.3)
    assert num_ticks(tmp_path) == stopped
    trainer.pace(True)
    assert waited(lambda: num_ticks(tmp_path) > stopped)
    trainer.close()
    assert not process.is_running()


@pytest.mark.rare
def test_a_trainer_that_ends_is_told_of_and_started_again_after_a_pause(tmp_path: Path) -> None:
    trainer, told = TrainerProcess(tmp_path, "tests.engine.no_such_module"), list[str]()

    def ended() -> bool:
        told.extend(filter(None, [trainer.pace(True)]))
        return bool(told)

    assert waited(ended)
    assert "exit code 1" in told[0] and "no_such_module" in told[0]
    trainer.pace(True)
    assert trainer.process is None, "the pause has not passed"


@pytest.mark.rare
@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_trainer_never_outlives_a_server_that_is_killed(tmp_path: Path, is_stopped: bool) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from aquiline.engine.learning.trainer_process import TrainerProcess\n"
        f"trainer = TrainerProcess(Path(sys.argv[1]), {TICKING!r}); trainer.pace(True)\n"
        "print(trainer.process.pid, flush=True); sys.stdin.readline()\n"
        f"trainer.pace({not is_stopped}); print(flush=True); time.sleep(100)"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], text=True, **pipes) as server:
        assert server.stdout is not None and server.stdin is not None
        trainer = psutil.Process(int(server.stdout.readline()))
        assert waited(lambda: num_ticks(tmp_path) > 0)
        server.stdin.write("\n")
        server.stdin.flush()
        server.stdout.readline()
        server.send_signal(signal.SIGKILL)
        assert waited(lambda: not trainer.is_running() or trainer.status() == psutil.STATUS_ZOMBIE)
