"""The process that trains the next generation of a draft: its start, its pace, its end.

It runs at the lowest priority, on one thread, only while `pace` lets it, and never longer than the process that
started it: the system kills it when that one ends, however it does.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from aquiline.engine.learning.store import private

TRAINER = "aquiline.train.learner"
"""The module that trains, run as a program with the folder as its argument. The layers below it do not import it."""

LOWEST = 19
SET_DEATH_SIGNAL = 1
"""Of Linux's prctl: the signal that a process gets when its parent ends."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 3600.0
"""A trainer that has ended is started again after a pause; each pause is twice as long as the one before."""

CODE = f"from {__name__} import become_trainer; become_trainer()"


class TrainerProcess:
    """The trainer of a folder. Not started before `pace` first lets it run; to be used by one thread, with which it
    dies."""

    def __init__(self, folder: Path, module: str = TRAINER) -> None:
        self.folder, self.module, self.log = folder, module, folder / "trainer.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.is_running = False
        self._pause_s, self._start_s = FIRST_PAUSE_S, 0.0

    def pace(self, may_run: bool) -> str | None:
        """Let the trainer run from now on, or stop it where it stands. Returns why it has ended, if it has."""
        if self.process is not None and (code := self.process.poll()) is not None:
            self.process, self.is_running = None, False
            self._wait()
            lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
            return f"the trainer has ended (exit code {code}): {next(filter(None, reversed(lines)), 'said nothing')}"
        if may_run == self.is_running:
            return None
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT if may_run else signal.SIGSTOP)
            self.is_running = may_run
        elif time.monotonic() >= self._start_s:
            try:
                self._start()
            except OSError as error:  # no room on the disk, or for another process
                self._wait()
                return f"the trainer cannot be started: {error}"
        return None

    def close(self) -> None:
        """Kill the trainer. What it has not written is trained again."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _wait(self) -> None:
        self._start_s, self._pause_s = time.monotonic() + self._pause_s, min(LONGEST_PAUSE_S, 2 * self._pause_s)

    def _start(self) -> None:
        environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "AQUILINE_THREADS"), "1")
        command = [sys.executable, "-c", CODE, self.module, str(self.folder), str(os.getpid())]
        with open(self.log, "wb", opener=private) as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self.is_running = True


def become_trainer() -> None:
    """The body of the process. Its arguments: the module to run, the folder, and the id of the process that has started
    it."""
    module, folder, parent = sys.argv[1:]
    os.nice(LOWEST)
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        with suppress(OSError):  # where Linux shares processors out by sessions, a low priority counts within one alone
            Path("/proc/self/autogroup").write_text(str(LOWEST), encoding="ascii")
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != int(parent):  # it ended before the system was told
        return
    sys.argv = [module, folder]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
