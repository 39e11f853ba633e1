"""The HTTP process's side of the engine: it starts the engine process, hands requests over and deltas out, and starts
another process when one dies.

One event loop uses it, and reads and writes the pipe itself.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from typing import Literal

from aquiline.engine.sequence import Request
from aquiline.errors import AquilineError, NumericalError
from aquiline.serve.life import Life, Lifetime
from aquiline.serve.logs import log
from aquiline.serve.wire import Abort, Delta, EngineInfo, Opening, Prepare, Quit, StepMessage, Submit, TellPages

State = Literal["starting", "ready", "down", "closed"]

STEADY_S = 60.0
"""An engine process that ran for so long and died is replaced at once; one that died sooner is waited for longer."""

LONGEST_PAUSE_S = 30.0

STREAMS_PER_TOKEN = 4
"""Streams that run for each token that an event holds at least, where no number is set."""


class EngineDown(AquilineError):
    """The engine process has died or is not up yet; the same request may be sent again soon."""


class ServerEnding(EngineDown):
    """The server is told to end, and has no more time for the request."""


class Stream:
    """The deltas of one or more requests as they come, some together: what one wake of their reader costs does not grow
    with the number of tokens. `async with` it: leaving it aborts those that have not ended.

    pending: requests that the engine has not taken yet; running: those that have not ended."""

    def __init__(self, client: EngineClient, requests: Iterable[Request]) -> None:
        self.client = client
        self.running = {int(request.id) for request in requests}
        self.pending = set(self.running)
        self._loop = asyncio.get_running_loop()
        self.accepted: asyncio.Future[None] = self._loop.create_future()
        self._held: list[Delta] = []
        self._num_held = 0  # tokens of the deltas that are held
        self._error: Exception | None = None
        self._due: asyncio.Future[None] = self._loop.create_future()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()

    async def __aiter__(self) -> AsyncIterator[list[Delta]]:
        """Deltas until all requests have ended: the first and the last of a request at once, those between as soon as
        they bring the client's `interval` of tokens. Raises EngineDown, and NumericalError for bad logits."""
        while self.running:
            await self._due
            self._due = self._loop.create_future()
            held, self._held, self._num_held = self._held, [], 0
            # Others were computed before the engine heard of their requests' end.
            if known := [delta for delta in held if delta.request_id in self.running]:
                self.running -= {delta.request_id for delta in known if delta.finish_reason is not None}
                yield known
            if self._error is not None:
                raise self._error

    def end(self, request_id: int) -> None:
        """End one request where it stands."""
        self.running.discard(request_id)
        self.client.abort(self, request_id)

    def close(self) -> None:
        """End the requests that have not ended."""
        for request_id in list(self.running):
            self.end(request_id)

    def take(self, request_id: int) -> None:
        """The engine has taken a request."""
        self.pending.discard(request_id)
        if not self.pending and not self.accepted.done():
            self.accepted.set_result(None)

    def put(self, delta: Delta) -> None:
        """A delta has come."""
        if delta.error is not None:
            self.fail(NumericalError(delta.error))
            return
        self._held.append(delta)
        self._num_held += len(delta.token_ids)
        is_edge = delta.begin is not None or delta.finish_reason is not None
        if is_edge or self._num_held >= self.client.interval:
            self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream with an error; whoever waits for it, or will, gets the error."""
        if self.accepted.done():
            self._error = error
            self._wake()
        else:
            self.accepted.set_exception(error)

    def _wake(self) -> None:
        if not self._due.done():
            self._due.set_result(None)


class EngineClient:
    """The engine behind the server. on_step sees every message of the engine; on_down is called when an engine process
    has died; info is the latest EngineInfo.

    `start` waits for the first process; one that cannot start or load its models is not tried again. One that is to
    replace another is, after longer and longer pauses. What begins an engine is `begin`: a process of its own here, and
    another in `serve/ray`."""

    def __init__(self, opening: Opening, stream_interval: int | None = None) -> None:
        self.opening, self.stream_interval = opening, stream_interval
        self.on_step: Callable[[StepMessage], None] = lambda message: None
        self.on_down: Callable[[], None] = lambda: None
        self.state: State = "starting"
        self.info: EngineInfo | None = None
        self.num_restarts = 0
        self._ids = itertools.count()
        self._life: Lifetime | None = None
        self._pause_s = 0.0
        self._restarting: asyncio.Task[None] | None = None

    @property
    def num_streams(self) -> int:
        """Requests that wait or run."""
        return 0 if self._life is None else len(self._life.streams)

    @property
    def interval(self) -> int:
        """Tokens that a stream brings together, beside its first and its last. Each event takes time from the engine
        on the same cores, so by default the more streams run, the fewer events each of them gets."""
        return self.stream_interval or max(1, self.num_streams // STREAMS_PER_TOKEN)

    @property
    def pid(self) -> int | None:
        """The engine process's id."""
        return None if self._life is None else self._life.pid

    def new_id(self) -> int:
        """An id for a request."""
        return next(self._ids)

    def prepare(self) -> None:
        """Tell the engine, once, that requests with grammars will come."""
        if self.state == "ready" and self._life is not None and not self._life.is_prepared:
            self._life.is_prepared = True
            self._life.send(Prepare())

    def tell_pages(self, most: int) -> None:
        """Have the next message tell which pages are cached, `most` of them at most."""
        if self.state == "ready" and self._life is not None:
            self._life.send(TellPages(most))

    async def start(self) -> None:
        """Start the engine and wait until it is ready. Raises ValueError with the reason if it cannot start or load."""
        await self._start()

    async def submit(self, requests: Sequence[Request]) -> Stream:
        """Hand requests over that belong together. Returns once the engine has taken all of them; raises ValueError
        where it refuses one, EngineDown while there is no engine."""
        life = self._life
        if self.state == "closed":
            raise ServerEnding
        if self.state != "ready" or life is None:
            raise EngineDown("the engine is starting; send the request again")
        stream = Stream(self, requests)
        life.streams |= {int(request.id): stream for request in requests}
        life.send(*map(Submit, requests))
        try:
            await stream.accepted
        except BaseException:
            stream.close()
            raise
        return stream

    def abort(self, stream: Stream, request_id: int) -> None:
        """End a request of a stream where it stands."""
        life = self._life
        if life is not None and life.streams.get(request_id) is stream:
            del life.streams[request_id]
            life.send(Abort(request_id))

    async def close(self) -> None:
        """End the engine process; streams that still run end with ServerEnding."""
        is_loading, self.state = self.state != "ready", "closed"
        if self._restarting is not None:
            self._restarting.cancel()
        life, self._life = self._life, None
        if life is None:
            return
        for stream in set(life.streams.values()):
            stream.fail(ServerEnding())
        if is_loading:
            life.kill()  # it reads no commands yet
        else:
            life.send(Quit())
        await asyncio.to_thread(life.end)

    def kill(self) -> None:
        """Kill the engine process if it still runs; for when the event loop has ended."""
        if self._life is not None:
            self._life.kill()

    def begin(self) -> Lifetime:
        """Begin an engine; this blocks. Raises ValueError where the machine has no room for one."""
        return Life.begun(self.opening)

    async def _start(self) -> None:
        self._life = life = await asyncio.to_thread(self.begin)
        life.on_message, life.on_end = partial(self._arrived, life), partial(self._died, life)
        if self.state == "closed":  # meanwhile
            life.kill()
        first = await life.first()
        if not isinstance(first, EngineInfo):
            self._life = None
            await asyncio.to_thread(life.end)
            raise ValueError(first)
        if self.state == "closed":
            return
        self.info, self.state = first, "ready"
        log("engine ready", pid=life.pid, memory=first.memory)
        if first.learning:
            log(first.learning)

    def _arrived(self, life: Lifetime, message: StepMessage) -> None:
        streams = life.streams
        for name in message.added:
            if (stream := streams.get(name)) is not None:
                stream.take(name)
        for refused in message.refused:
            if (stream := streams.pop(refused.request_id, None)) is not None:
                stream.fail(ValueError(refused.error))
        for delta in message.deltas:
            if (stream := streams.get(delta.request_id)) is not None:
                stream.put(delta)
                if delta.finish_reason is not None:
                    del streams[delta.request_id]
        self.on_step(message)

    def _died(self, life: Lifetime) -> None:
        if self._life is not life or self.state != "ready":
            return
        error = EngineDown("the engine died while it worked on this request; send the request again")
        streams, life.streams = life.streams, {}
        log("engine died", level="error", exit_code=life.exit_code, num_requests=len(streams))
        for stream in set(streams.values()):
            stream.fail(error)
        is_steady = time.monotonic() - life.began_s >= STEADY_S
        self._pause_s = 0.0 if is_steady else min(LONGEST_PAUSE_S, 2 * self._pause_s + 0.1)
        self._life, self.state = None, "down"
        self.on_down()
        self.num_restarts += 1
        self._restarting = asyncio.get_running_loop().create_task(self._restart())

    async def _restart(self) -> None:
        while True:
            await asyncio.sleep(self._pause_s)
            try:
                await self._start()
            except Exception as error:  # whatever it is: without another try nobody would be served any more
                log("engine cannot start again", level="error", error=str(error) or repr(error))
                self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s + 0.1)
            else:
                return
