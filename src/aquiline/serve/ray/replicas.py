"""The replicas as the one engine that the service knows: commands become calls, what calls bring becomes messages.

A request whose replica is lost runs again on another one. It is the same request with the same seed, so the same tokens
are drawn, and those that were told already are dropped: a client sees no more of it than a pause.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayActorError, RayTaskError
from ray.serve.handle import DeploymentHandle

from aquiline.engine.sequence import Request
from aquiline.errors import AquilineError
from aquiline.serve.client import EngineClient, EngineDown
from aquiline.serve.life import Lifetime
from aquiline.serve.logs import log
from aquiline.serve.routing import Routed
from aquiline.serve.wire import Abort, Begin, Command, Delta, EngineInfo, Opening, Quit, Stats, StepMessage, Submit

MAX_TRIES = 4
"""Replicas that a request may lose before its client is told."""


class ReplicaClient(EngineClient):
    """The engine behind the server, where that is replicas, max_replicas of them at most."""

    def __init__(self, opening: Opening, handle: DeploymentHandle[Any], max_replicas: int) -> None:
        super().__init__(opening, 1)  # what replicas send is handed on as it comes
        self.handle, self.max_replicas = handle, max_replicas

    def begin(self) -> Lifetime:
        """The replicas, which Ray starts and ends."""
        config = self.opening.engine
        return ReplicasLife(self.handle, self.max_replicas, config.page_size if config.prefix_cache else 0)


@dataclass(eq=False)
class _ReplicaCall:
    """A request on its way. num_told: its tokens that the service has; begin: what was told with the first of them."""

    request: Request
    num_told: int = 0
    begin: Begin | None = None
    task: asyncio.Task[None] | None = None


class ReplicasLife(Lifetime):
    """The replicas of a deployment. The figures in its messages are of the requests that come this way: an engine's
    pages and preemptions are not among them, and a message counts as a step. page_size: 0 where no pages are cached."""

    def __init__(self, handle: DeploymentHandle[Any], max_replicas: int, page_size: int) -> None:
        super().__init__()
        self.handle, self.max_replicas, self.page_size = handle, max_replicas, page_size
        self._calls: dict[int, _ReplicaCall] = {}
        self._sum_prompt = self._sum_cached = self._sum_prefill = 0

    @property
    def pid(self) -> int | None:
        """There is no process to name."""
        return None

    async def first(self) -> EngineInfo | str:
        """What the first replica tells; slots and pages are those of as many as there may be."""
        info: EngineInfo = await self.handle.info.remote()
        most = self.max_replicas
        return info._replace(num_slots=info.num_slots * most, num_pages=info.num_pages * most)

    def send(self, *commands: Command) -> None:
        """Begin and end calls. Whatever else is for an engine, its replica does by itself."""
        for command in commands:
            if isinstance(command, Submit):
                call = self._calls[int(command.request.id)] = _ReplicaCall(command.request)
                call.task = asyncio.get_running_loop().create_task(self._serve(call))
            elif isinstance(command, Abort | Quit):
                some = [command.request_id] if isinstance(command, Abort) else list(self._calls)
                for name in some:
                    if (known := self._calls.get(name)) is not None and known.task is not None:
                        known.task.cancel()

    def end(self) -> None:
        """Ray ends the replicas."""

    def kill(self) -> None:
        """Ray ends the replicas."""

    async def _serve(self, call: _ReplicaCall) -> None:
        """Run a request to its end, or up to its deadline, wherever it waits then."""
        name = int(call.request.id)
        try:
            async with asyncio.timeout(call.request.deadline_s):
                await self._run(call)
        except TimeoutError:
            begin = Begin(0, None) if call.begin is None else None
            self._tell(call, [Delta(name, [], 0, "target", 0, 0, "deadline", None, None, begin)])
        except Exception as error:  # whatever it is: without a word the client would wait for ever
            if (stream := self.streams.pop(name, None)) is not None:
                stream.fail(_told(error))
        finally:
            del self._calls[name]
            self._step([], [])

    async def _run(self, call: _ReplicaCall) -> None:
        routed = Routed.of(call.request, self.page_size)
        for _ in range(MAX_TRIES):
            response, num_known = self.handle.options(stream=True).run.remote(routed), call.num_told
            try:
                async for deltas in response:
                    self._tell(call, after(deltas, num_known))
                    num_known = max(0, num_known - sum(len(delta.token_ids) for delta in deltas))
                return
            except RayActorError as error:
                log("a replica is lost", level="warning", error=type(error).__name__, num_tokens=call.num_told)
            finally:
                response.cancel()
        raise EngineDown(f"{MAX_TRIES} replicas were lost with this request; send it again later")

    def _tell(self, call: _ReplicaCall, deltas: list[Delta]) -> None:
        """Hand on what a replica has told of a request, which it has taken."""
        for delta in deltas:
            call.num_told += len(delta.token_ids)
            num_prompt = len(call.request.prompt_ids)
            if delta.begin is not None:
                call.begin = delta.begin
                self._sum_prefill += num_prompt - delta.begin.num_cached
            if delta.finish_reason is not None and call.begin is not None:
                self._sum_prompt += num_prompt
                self._sum_cached += call.begin.num_cached
        self._step([int(call.request.id)], deltas)

    def _step(self, added: list[int], deltas: list[Delta]) -> None:
        num_running = sum(each.begin is not None for each in self._calls.values())
        stats = Stats(
            num_running, len(self._calls) - num_running, num_running, 0, self._sum_prompt, self._sum_cached,
            self._sum_prefill, 0,
        )  # fmt: skip
        self.on_message(StepMessage(added, [], deltas, stats, 1))


def after(deltas: Sequence[Delta], num_known: int) -> list[Delta]:
    """What deltas of a request add where its next num_known tokens are known."""
    left = list[Delta]()
    for delta in deltas:
        num = min(num_known, len(delta.token_ids))
        if num:
            num_known -= num
            logprobs = None if delta.logprobs is None else delta.logprobs[num:]
            num_accepted = max(0, delta.num_accepted - num)
            delta = delta._replace(
                token_ids=delta.token_ids[num:], num_accepted=num_accepted, logprobs=logprobs, begin=None
            )
            if not delta.token_ids and delta.finish_reason is None:
                continue
        left.append(delta)
    return left


def _told(error: Exception) -> Exception:
    """An error of a replica as the error of an engine; one of Ray's own as an engine that is down."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, ValueError | AquilineError):
        return cause
    return EngineDown(f"no replica takes the request ({cause}); send it again later")
