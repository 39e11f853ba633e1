"""The asynchronous interface: `async for delta in AsyncLLM(...).generate(prompt)`.

One thread owns the engine. Event loops send it commands through one queue. The thread returns deltas with one callback
per event loop and step.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field

from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.sequence import Request, TokenDelta
from aquiline.errors import EngineStopped, NumericalError
from aquiline.spec.drafting import Drafting


@dataclass(eq=False)
class _OpenRequest:
    """A request and the queue on which its caller waits for deltas, or for the error that ends it."""

    request: Request
    loop: asyncio.AbstractEventLoop
    arrived: asyncio.Queue[TokenDelta | Exception] = field(default_factory=asyncio.Queue)


class AsyncLLM:
    """Runs an LLM in a thread of its own for any number of concurrent callers.

    `async with AsyncLLM(LLM(...)) as engine:` ends the thread; requests that have not finished then raise
    EngineStopped. Nothing else may use the LLM while the thread runs."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[int | str, _OpenRequest] = {}  # the engine thread's
        self._ids = itertools.count()
        self._stopped: str | None = None
        self._thread = threading.Thread(target=self._run, name="aquiline-engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """End the engine thread after its current step."""
        self._commands.put(None)
        self._thread.join()

    async def generate(
        self,
        prompt: str | Iterable[int],
        sampling: SamplingParams | None = None,
        *,
        drafting: Drafting | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        request_id: int | str | None = None,
        prediction: str | Iterable[int] | None = None,
    ) -> AsyncGenerator[TokenDelta]:
        """Continue one prompt. Yields deltas as they are computed; the last delta has a finish_reason.

        prediction: the output that is expected, text or token ids; see LLM.generate.

        Closing the iterator, or cancelling the task that waits for it, aborts the request. Raises as LLM.run does,
        ValueError for a request_id that is in use or a field of a wrong type, EngineStopped once the engine has
        ended."""
        chosen = f"async-{next(self._ids)}" if request_id is None else request_id
        params = sampling or SamplingParams()
        request = await asyncio.to_thread(
            self.llm.request, chosen, prompt, params, drafting, priority, deadline_s, prediction=prediction
        )
        stream = _OpenRequest(request, asyncio.get_running_loop())
        self._commands.put(lambda: self._add(stream))
        if self._stopped is not None:  # set before the thread looks at its commands for the last time
            raise EngineStopped(self._stopped)
        is_over = False
        try:
            while not is_over:
                arrived = await stream.arrived.get()
                is_over = isinstance(arrived, Exception) or arrived.finish_reason is not None
                if isinstance(arrived, Exception):
                    raise arrived
                if arrived.error is not None:
                    raise NumericalError(arrived.error)
                yield arrived
        finally:
            if not is_over:
                self._commands.put(lambda: self._abort(stream))

    def _run(self) -> None:
        reason = "the engine was closed"
        try:
            while self._obey():
                by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_OpenRequest, TokenDelta]]] = {}
                for delta in self.llm.engine.step():
                    stream = self._streams[delta.request_id]
                    by_loop.setdefault(stream.loop, []).append((stream, delta))
                    if delta.finish_reason is not None:
                        del self._streams[delta.request_id]
                for loop, deltas in by_loop.items():
                    self._deliver(loop, deltas)
        except Exception as error:  # no caller may wait for ever, whatever went wrong
            reason = f"the engine stopped: {type(error).__name__}: {error}"
            raise
        finally:
            self._stopped = reason
            streams, self._streams = self._streams, {}
            for stream in streams.values():
                self._tell(stream, EngineStopped(reason))
            while not self._commands.empty():
                command = self._commands.get()
                if command is not None:
                    command()
            self.llm.engine.reset()

    def _obey(self) -> bool:
        """Carry out the queued commands, and wait for one if the engine is idle. False: the thread must end."""
        while not self._commands.empty() or not self.llm.engine.is_busy:
            command = self._commands.get()
            if command is None:
                return False
            command()
        return True

    def _add(self, stream: _OpenRequest) -> None:
        try:
            if self._stopped is not None:
                raise EngineStopped(self._stopped)
            self.llm.engine.add(stream.request)
        except Exception as error:
            self._tell(stream, error)
        else:
            self._streams[stream.request.id] = stream

    def _abort(self, stream: _OpenRequest) -> None:
        if self._streams.get(stream.request.id) is stream:  # otherwise it has finished
            del self._streams[stream.request.id]
            self.llm.engine.abort(stream.request.id)

    def _deliver(self, loop: asyncio.AbstractEventLoop, deltas: list[tuple[_OpenRequest, TokenDelta]]) -> None:
        def put() -> None:
            for stream, delta in deltas:
                stream.arrived.put_nowait(delta)

        try:
            loop.call_soon_threadsafe(put)
        except RuntimeError:  # that loop has ended, and its callers with it
            for stream, _ in deltas:
                self._abort(stream)

    @staticmethod
    def _tell(stream: _OpenRequest, error: Exception) -> None:
        with contextlib.suppress(RuntimeError):  # that loop has ended, and its callers with it
            stream.loop.call_soon_threadsafe(stream.arrived.put_nowait, error)
