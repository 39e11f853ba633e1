"""A server whose engine takes every request, gives one token and nothing more: no process, no model."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

from aquiline.config import ChatConfig, EngineConfig, PairConfig
from aquiline.serve.client import EngineClient
from aquiline.serve.life import Life
from aquiline.serve.server import open_service
from aquiline.serve.server_config import Limits, ServerConfig
from aquiline.serve.service import Service
from aquiline.serve.wire import Begin, Command, Delta, EngineInfo, Opening, Stats, StepMessage, Submit
from aquiline.spec.adaptive import Adaptive

INFO = EngineInfo(254, 4096, 4, 4, True, "", {})
"""Of pages that hold 254 tokens of a sequence."""


class SilentLife(Life):
    """A process that is none. With a client, it gives each request its first token."""

    def __init__(self, client: EngineClient | None = None) -> None:
        process: Any = SimpleNamespace(pid=0, kill=lambda: None)
        super().__init__(process, socket.socket())
        self.client = client

    async def first(self) -> EngineInfo | str:
        return INFO

    def send(self, *commands: Command) -> None:
        for name in [int(command.request.id) for command in commands if isinstance(command, Submit)]:
            if self.client is not None:
                delta = Delta(name, [5], 0, "target", 0, 0, None, None, None, Begin(0, None))
                message = StepMessage([name], [], [delta], Stats(1, 0, 0, 0, 0, 0, 0, 0), 1)
                asyncio.get_running_loop().call_soon(self.client._arrived, self, message)

    def end(self) -> None:
        """There is nothing to end."""
        self.pipe.close()


class SilentClient(EngineClient):
    """The client of such an engine."""

    async def start(self) -> None:
        self._life = SilentLife(self)
        self.info, self.state = INFO, "ready"


def silent_service(limits: Limits | None = None, **config: Any) -> Service:
    """A service in front of it, which is not started."""
    settings = ServerConfig(port=0, **config)
    service = open_service(
        PairConfig("bundled"), EngineConfig(), Adaptive(), settings, limits or Limits(), ChatConfig()
    )
    service.client = SilentClient(Opening(PairConfig("bundled"), EngineConfig(), Adaptive()))
    return service
