"""`aquiline serve` as a process, and a client that costs little, for the benchmarks of the server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import psutil

RUN = "from aquiline.cli.main import app; app()"


@dataclass(frozen=True)
class Served:
    """A running server on this machine. pid: of its HTTP process, None for a server that somebody else started."""

    host: str
    port: int
    pid: int | None = None

    @property
    def processes(self) -> list[psutil.Process]:
        """The HTTP process, then the engine process: of its children the one that has loaded the native library. Others
        compile grammars."""
        http = psutil.Process(self.pid)
        engines = [child for child in http.children() if any("_native" in part.path for part in child.memory_maps())]
        return [http, *engines]

    def get(self, path: str) -> str:
        """The text of a page. Raises OSError for an error or without a server."""
        with urllib.request.urlopen(f"http://{self.host}:{self.port}{path}", timeout=60) as reply:
            return str(reply.read().decode())

    def figure(self, name: str) -> float:
        """A figure of /metrics, summed over its labels."""
        lines = self.get("/metrics").splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + "{", name + " ")))

    def is_ready(self) -> bool:
        """Whether the engine takes requests."""
        try:
            return bool(self.get("/ready"))
        except OSError:
            return False


@contextlib.contextmanager
def serving(*options: str) -> Iterator[Served]:
    """A server with these options on a free port of the loopback interface. Raises RuntimeError if it ends early, and
    TimeoutError if it does not end within a minute of SIGTERM."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-c", RUN, "serve", "--port", str(port), "--log-level", "error", *options]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    served = Served("127.0.0.1", port, process.pid)
    try:
        while not served.is_ready():
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with code {process.returncode}")
            time.sleep(0.1)
        yield served
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            raise TimeoutError("the server did not end within a minute of SIGTERM") from None
    finally:
        process.kill()


class Reply:
    """A reply whose head has come."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        self.reader, self.writer = reader, writer
        status, *lines = head.decode("latin-1").split("\r\n")
        self.status = int(status.split()[1])
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}

    async def events(self) -> AsyncIterator[bytes]:
        """The data of server-sent events as they come, the mark of the end too."""
        held = b""
        async for piece in self._pieces():
            *whole, held = (held + piece).split(b"\n\n")
            for event in whole:
                yield event.removeprefix(b"data: ")

    async def body(self) -> bytes:
        """The whole body."""
        return b"".join([piece async for piece in self._pieces()])

    async def _pieces(self) -> AsyncIterator[bytes]:
        if "content-length" in self.headers:
            yield await self.reader.readexactly(int(self.headers["content-length"]))
            return
        while size := int(await self.reader.readline(), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readline()


@contextlib.asynccontextmanager
async def posted(
    served: Served, path: str, body: bytes | dict[str, Any], length: int | None = None
) -> AsyncIterator[Reply]:
    """A reply to a body, on a connection of its own that is closed afterwards. length: what to say instead of the
    body's length."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(served.host, served.port)
    try:
        size = len(content) if length is None else length
        head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {size}\r\n"
        writer.write(f"{head}connection: close\r\n\r\n".encode() + content)
        yield Reply(reader, writer, (await reader.readuntil(b"\r\n\r\n"))[:-4])
    finally:
        writer.close()
