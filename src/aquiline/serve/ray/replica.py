"""One engine as a replica: it runs requests that come as token ids, and tells the routers how it stands."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from aquiline.serve.client import EngineClient
from aquiline.serve.logs import set_up
from aquiline.serve.ray.router import packed
from aquiline.serve.routing import EngineReport, Routed
from aquiline.serve.wire import Delta, EngineInfo, Opening, StepMessage

MAX_PAGES = 2**14
"""Cached pages of which a report tells, eight bytes each."""

OUTPUTS = 16
"""Requests over whose outputs, about, the mean is taken."""


class EngineReplica:
    """An engine process of its own, and the requests that it runs. The replica ends with its engine, so that there is
    one kind of failure, of which Ray tells whoever waits."""

    async def __init__(  # type: ignore[misc]  # Ray waits for it
        self, opening: Opening, stream_interval: int | None, log_level: str, num_threads: int
    ) -> None:
        """Load the models. Raises ValueError if that fails."""
        os.environ.setdefault("AQUILINE_THREADS", str(num_threads))  # for the engine process
        set_up(log_level)
        self.client = EngineClient(opening, stream_interval)
        self.client.on_down = lambda: os._exit(1)
        self.client.on_step = self._saw
        self._left: dict[int, int] = {}  # tokens that each request has still to compute
        self._mean_output, self._numbers = 0.0, itertools.count(1)
        self._pages: asyncio.Future[list[int]] | None = None
        await self.client.start()

    async def info(self) -> EngineInfo:
        """What the engine's models are."""
        assert self.client.info is not None
        return self.client.info

    async def run(self, routed: Routed) -> AsyncIterator[list[Delta]]:
        """The deltas of a request: an empty list once the engine has taken it, then what comes together. Raises
        ValueError where the engine refuses it."""
        given = routed.request
        request = replace(given, id=self.client.new_id(), arrival=time.monotonic())  # clocks differ between machines
        if given.grammar is not None:
            self.client.prepare()
        name, num_new = int(request.id), 0
        expected = min(given.sampling.max_tokens, round(self._mean_output) or given.sampling.max_tokens)
        self._left[name] = len(request.prompt_ids) + expected
        try:
            async with await self.client.submit([request]) as stream:
                yield []
                async for deltas in stream:
                    num_new += sum(len(delta.token_ids) for delta in deltas)
                    self._left[name] = max(0, expected - num_new)
                    yield [delta._replace(request_id=int(given.id)) for delta in deltas]
            self._mean_output += (num_new - self._mean_output) / (OUTPUTS if self._mean_output else 1)
        finally:
            del self._left[name]

    async def record_routing_stats(self) -> dict[str, Any]:
        """How the engine stands, for the routers."""
        self._pages = asyncio.get_running_loop().create_future()
        self.client.tell_pages(MAX_PAGES)
        pages = frozenset(await self._pages)
        return packed(EngineReport(next(self._numbers), sum(self._left.values()), self._mean_output, pages))

    def _saw(self, message: StepMessage) -> None:
        if message.pages is not None and self._pages is not None and not self._pages.done():
            self._pages.set_result(message.pages)
