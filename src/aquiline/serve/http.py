"""Between the routes and the socket: bodies with bounds, keys, request ids, streams, clients that leave."""

from __future__ import annotations

import asyncio
import json
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aquiline.serve.admission import has_key, read_json
from aquiline.serve.api_errors import ApiError, draining
from aquiline.serve.logs import REQUEST_ID, log
from aquiline.serve.request_prompts import dumps
from aquiline.serve.server_config import Limits

T = TypeVar("T")

GUARDED = ("/v1/", "/tokenize", "/detokenize", "/openapi.json")
"""Paths that need a key where the server has keys; the page, health and figures do not, as at vLLM."""

POLLED = ("/health", "/ready", "/version", "/metrics")
"""Paths that machines ask for again and again: no line of the log is theirs unless it is to have all, whatever they
are answered."""

MAX_ID = 128


class ClientGone(Exception):
    """The client has closed its connection; nobody reads an answer."""


class Front:
    """The outermost layer: gives every request its id, asks for the key, bounds the body, logs what was served.

    A client's X-Request-Id is taken over if it is short and printable."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], limits: Limits, refused: Callable[[int], None]) -> None:
        self.app, self.keys, self.limits, self.refused = app, keys, limits, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, began_s = Headers(scope=scope), time.monotonic()
        given = headers.get("x-request-id", "")
        request_id = given if 0 < len(given) <= MAX_ID and given.isascii() and given.isprintable() else uuid.uuid4().hex
        token, status = REQUEST_ID.set(request_id), 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            error = self._error(scope["path"], headers)
            if error is None:
                MutableHeaders(scope=scope)["content-type"] = "application/json"  # nothing else is read here
                await self.app(scope, self._bounded(receive), answer)
            else:
                await error_response(error)(scope, receive, answer)
        except asyncio.CancelledError:  # the server ends, and this request took longer than it had time for
            if not status:
                await error_response(draining())(scope, receive, answer)
        finally:
            if status >= 400:
                self.refused(status)
            path, seconds = scope["path"], round(time.monotonic() - began_s, 4)
            level = "info" if path.startswith(GUARDED) else "debug"
            level = "warning" if status >= 500 and path not in POLLED else level
            log("served", level=level, method=scope["method"], path=path, status=status, seconds=seconds)
            REQUEST_ID.reset(token)

    def _error(self, path: str, headers: Headers) -> ApiError | None:
        if self.keys and path.startswith(GUARDED) and not has_key(headers.get("authorization"), self.keys):
            said = {"www-authenticate": "Bearer"}
            return ApiError(401, "the API key is missing or wrong", code="invalid_api_key", headers=said)
        if "origin" in headers and "json" not in headers.get("content-type", "json"):
            # A browser sends other types to any server without asking it, for whatever page the user has open.
            return ApiError(
                415, "content-type: must be application/json where a page sends the request", "content-type"
            )
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self.limits.max_body_bytes:
            return ApiError(413, f"the body has {length[:20]} bytes; {self._allowed}", code="body_too_large")
        return None

    @property
    def _allowed(self) -> str:
        return f"at most {self.limits.max_body_bytes} are allowed"

    def _bounded(self, receive: Receive) -> Receive:
        """The same messages of a client, refusing a body that is too long or does not come."""
        num_bytes, is_whole = 0, False

        async def bounded() -> Message:
            nonlocal num_bytes, is_whole
            if is_whole:
                return await receive()
            try:
                async with asyncio.timeout(self.limits.max_stalled_s):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, "the body of the request did not come") from None
            num_bytes += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if num_bytes > self.limits.max_body_bytes:
                raise HTTPException(413, f"the body is too long; {self._allowed}")
            return message

        return bounded


class Posted(Request):
    """A request whose JSON is bounded by more than its bytes."""

    async def json(self) -> Any:
        """What the body says. Raises JSONDecodeError and HTTPException."""
        try:
            return read_json(await self.body())
        except json.JSONDecodeError:
            raise
        except ValueError as error:
            raise HTTPException(400, f"the body: {error}") from None


class Route(APIRoute):
    """A route whose handler gets a `Posted`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler."""
        handle = super().get_route_handler()

        async def handle_posted(request: Request) -> Response:
            return await handle(Posted(request.scope, request.receive))

        return handle_posted


class EventStream(Response):
    """A reply of server-sent events. `close` is called once nobody reads them any more: at their end, and as soon as
    the client leaves, or takes nothing for max_stalled_s seconds. is_over: whether an event that has come is the last,
    which then ends the reply; where nobody knows, its end is written by itself."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], None],
        max_stalled_s: float,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.events, self.close, self.max_stalled_s, self.is_over = events, close, max_stalled_s, is_over
        self.sending_since = math.inf  # while an event waits to be taken

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await while_connected(self._gone(receive), self._send(send))
        except ClientGone:
            log("client gone", path=scope["path"])
        finally:
            self.close()

    async def _send(self, send: Send) -> None:
        has_more = True
        async for event in self.events:
            self.sending_since, has_more = time.monotonic(), not self.is_over()
            await send({"type": "http.response.body", "body": event, "more_body": has_more})
            self.sending_since = math.inf
        if has_more:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _gone(self, receive: Receive) -> None:
        """Return once the client has left or has taken nothing for too long. One watch over the stream costs less than
        a timeout around each event."""
        left = asyncio.ensure_future(disconnect(receive))
        try:
            while not left.done() and time.monotonic() < self.sending_since + self.max_stalled_s:
                await asyncio.wait((left,), timeout=self.max_stalled_s / 4)
        finally:
            left.cancel()


class Page(StaticFiles):
    """The page's files, and the answer to what is neither one of them nor a route."""

    def __init__(self, directory: Path, served: Sequence[str]) -> None:
        super().__init__(directory=directory, html=True, check_dir=False)
        self.served = ", ".join(served)

    async def get_response(self, path: str, scope: Scope) -> Response:
        """A file. Raises ApiError where there is none of that name, whatever the method, and HTTPException for a method
        that files do not have."""
        try:
            found = await super().get_response(path, {**scope, "method": "GET"})
        except (HTTPException, OSError, ValueError):
            message = f"{scope['method']} {scope['path'][:200]}: is not served; there is {self.served}"
            raise ApiError(404, message, code="unknown_url") from None
        if scope["method"] not in ("GET", "HEAD"):
            raise HTTPException(405)
        return found


async def while_connected(gone: Awaitable[None], work: Awaitable[T]) -> T:
    """The result of `work`. If `gone` returns first, the client has left: work is cancelled, and ClientGone raised."""
    worker, watcher = asyncio.ensure_future(work), asyncio.ensure_future(gone)
    watcher.add_done_callback(lambda _: worker.cancel())
    try:
        return await worker
    except asyncio.CancelledError:
        if watcher.done():
            raise ClientGone from None
        raise
    finally:
        watcher.cancel()


async def disconnect(receive: Receive) -> None:
    """Return once the client has left. The body of its request must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A reply of JSON."""
    return Response(dumps(value), status, headers, "application/json")


def error_response(error: ApiError) -> Response:
    """A reply that says what is wrong."""
    return json_response(error.body(), error.status, error.headers)
