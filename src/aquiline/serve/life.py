"""One engine process from its start to its end, as the HTTP process sees it. All of this blocks: threads call it."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from aquiline.serve.engine_process import run_engine
from aquiline.serve.wire import Command, EngineInfo, Opening, Quit

if TYPE_CHECKING:
    from aquiline.serve.client import Stream


@dataclass(eq=False)
class Life:
    """An engine process and our end of its pipe. commands: what it is still to be sent; streams: the requests that it
    runs, by id."""

    process: Any
    connection: Connection
    commands: queue.SimpleQueue[Command] = field(default_factory=queue.SimpleQueue)
    streams: dict[int, Stream] = field(default_factory=dict)
    is_prepared: bool = False  # for grammars
    began_s: float = field(default_factory=time.monotonic)

    @classmethod
    def begun(cls, opening: Opening) -> Life:
        """Start a process. Raises ValueError, leaving nothing behind, where the machine has no room for one."""
        context = multiprocessing.get_context("spawn")
        try:
            ours, theirs = context.Pipe()
        except OSError as error:
            raise unstarted(error) from error
        process = context.Process(target=run_engine, args=(theirs, opening), name="aquiline-engine", daemon=True)
        try:
            process.start()
        except (OSError, RuntimeError) as error:
            ours.close()
            raise unstarted(error) from error
        finally:
            theirs.close()
        return cls(process, ours)

    def first(self) -> EngineInfo | str:
        """Wait until the process has loaded its models: what it tells of them, or why it could not load them."""
        try:
            told: EngineInfo | str = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(5.0)
            code = self.process.exitcode
            return f"the engine process ended while it was loading (exit code {code}); see its output"
        return told

    def write(self) -> None:
        """Send commands, those that wait together in one message, up to Quit or until the process has died."""
        commands: list[Command] = []
        with contextlib.suppress(OSError):
            while not (commands and isinstance(commands[-1], Quit)):
                commands = [self.commands.get()]
                while not self.commands.empty():
                    commands.append(self.commands.get())
                self.connection.send(commands)

    def end(self) -> None:
        """Have the process end after its step; kill it if it does not."""
        self.commands.put(Quit())
        self.process.join(5.0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def unstarted(error: Exception) -> ValueError:
    """There is no memory, process, thread or file descriptor to be had for an engine process."""
    fix = "free memory, or raise the limits of processes, threads and open files"
    return ValueError(f"the engine process cannot be started ({error}); {fix}")
