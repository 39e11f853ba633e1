"""One engine from its start to its end, as the HTTP process sees it, and the engine process as one.

The event loop reads and writes our end of the pipe. A thread that read it would wake at each message, wait for the
interpreter's lock and then wake the loop.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from aquiline.serve.engine_process import run_engine
from aquiline.serve.wire import Command, EngineInfo, Opening, StepMessage

if TYPE_CHECKING:
    from aquiline.serve.client import Stream

LENGTH = struct.Struct("!i")
"""What stands before a pickle on the pipe, as multiprocessing's connections have it: the other end is one of them.
*Source*: CPython, Lib/multiprocessing/connection.py, `Connection._send_bytes`."""


class Lifetime(ABC):
    """An engine from its start to its end. streams: the requests that it runs, by id; is_prepared: for grammars.
    on_message sees every message but the first, on_end is called when the engine is gone."""

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        self.is_prepared, self.began_s = False, time.monotonic()
        self.on_message: Callable[[StepMessage], None] = lambda message: None
        self.on_end: Callable[[], None] = lambda: None

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """The id of the engine's process, if it is one."""

    @property
    def exit_code(self) -> int | None:
        """How the engine's process ended, which has closed its end of the pipe; this may block for a second."""
        return None

    @abstractmethod
    async def first(self) -> EngineInfo | str:
        """Wait until the engine has loaded its models: what it tells of them, or why it could not load them."""

    @abstractmethod
    def send(self, *commands: Command) -> None:
        """Have the engine carry out commands; they come together."""

    @abstractmethod
    def end(self) -> None:
        """Wait until the engine has ended, and kill it if it does not; this blocks."""

    @abstractmethod
    def kill(self) -> None:
        """End the engine at once."""


class Life(Lifetime, asyncio.Protocol):
    """An engine process and our end of its pipe."""

    def __init__(self, process: Any, pipe: socket.socket) -> None:
        super().__init__()
        self.process, self.pipe = process, pipe
        self._held = bytearray()  # what has come of messages that are not whole

    @classmethod
    def begun(cls, opening: Opening) -> Life:
        """Start a process; this blocks. Raises ValueError, leaving nothing behind, where the machine has no room for
        one."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise unstarted(error) from error
        with Connection(theirs.detach()) as connection:
            args, context = (connection, opening), multiprocessing.get_context("spawn")
            process = context.Process(target=run_engine, args=args, name="aquiline-engine", daemon=True)
            try:
                process.start()
            except (OSError, RuntimeError) as error:
                ours.close()
                raise unstarted(error) from error
        return cls(process, ours)

    @property
    def pid(self) -> int | None:
        """The process's id."""
        found: int | None = self.process.pid
        return found

    @property
    def exit_code(self) -> int | None:
        """How the process ended."""
        self.process.join(1.0)
        found: int | None = self.process.exitcode
        return found

    async def first(self) -> EngineInfo | str:
        """Wait until the process has loaded its models: what it tells of them, or why it could not load them."""
        loop = asyncio.get_running_loop()
        self._first: asyncio.Future[EngineInfo | str | None] = loop.create_future()
        self._transport, _ = await loop.create_unix_connection(lambda: self, sock=self.pipe)
        if (told := await self._first) is None:
            await asyncio.to_thread(self.process.join, 5.0)
            code = self.process.exitcode
            return f"the engine process ended while it was loading (exit code {code}); see its output"
        return told

    def send(self, *commands: Command) -> None:
        """Have the process carry out commands; they come together. One that is gone carries out nothing: on_end is
        about to be called."""
        if not self._transport.is_closing():
            message = pickle.dumps(commands)
            self._transport.write(LENGTH.pack(len(message)) + message)

    def data_received(self, data: bytes) -> None:
        """Messages have come, the last one perhaps in part."""
        self._held += data
        while len(self._held) >= (begin := LENGTH.size):
            end = begin + LENGTH.unpack_from(self._held)[0]
            if len(self._held) < end:
                break
            message = pickle.loads(self._held[begin:end])
            del self._held[:end]
            if self._first.done():
                self.on_message(message)
            else:
                self._first.set_result(message)

    def connection_lost(self, error: Exception | None) -> None:
        """The process has closed its end, or is gone."""
        if not self._first.done():
            self._first.set_result(None)
        asyncio.get_running_loop().call_soon(self.on_end)  # after whoever waits for `first`

    def kill(self) -> None:
        """Kill the process."""
        self.process.kill()

    def end(self) -> None:
        """Wait until the process has ended, and kill it if it does not; this blocks."""
        self.process.join(5.0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def unstarted(error: Exception) -> ValueError:
    """There is no memory, process, thread or file descriptor to be had for an engine process."""
    fix = "free memory, or raise the limits of processes, threads and open files"
    return ValueError(f"the engine process cannot be started ({error}); {fix}")
