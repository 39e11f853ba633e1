"""The routes of the server. They parse, call and word the reply; service.py has what happens in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import Match

from aquiline.serve.api_errors import ApiError, bad_request, in_words_of, validation_error
from aquiline.serve.chat_completions import ChatReply
from aquiline.serve.choices import Job
from aquiline.serve.completions import CompletionReply
from aquiline.serve.http import (
    ClientGone,
    EventStream,
    Front,
    Page,
    Route,
    disconnect,
    error_response,
    json_response,
    while_connected,
)
from aquiline.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponseRequest,
    TokenizeRequest,
)
from aquiline.serve.reply import Reply
from aquiline.serve.request_prompts import token_text
from aquiline.serve.response_events import ResponseReply
from aquiline.serve.responses import CHAT_FIELDS, ResponseStore, as_chat, conversation_of, kept_before
from aquiline.serve.service import Run, Service, explained

PAGE = Path(__file__).resolve().parent / "page"
CLIENT_CLOSED = 499


def make_app(service: Service) -> FastAPI:
    """The application over a service, whose engine it starts and ends. Until the engine is ready, requests for it get a
    503."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        starting = asyncio.create_task(service.start())  # the page and /health answer meanwhile
        yield
        service.compiling.close()
        await service.client.close()
        await starting

    app = FastAPI(
        title="aquiline", version=version("aquiline"), lifespan=lifespan, docs_url=None, redoc_url=None,
        responses={code: {"description": "An error in OpenAI's shape."} for code in (400, 401, 404, 413, 429, 503)},
    )  # fmt: skip
    app.router.route_class = Route
    _handle_errors(app)
    _add_generation(app, service)  # routes are tried in their order
    _add_responses(app, service)
    _add_tokens(app, service)
    _add_operations(app, service)
    paths = [route.path for route in app.routes if isinstance(route, APIRoute) and "{" not in route.path]
    app.router.default = Page(PAGE, ["/", *dict.fromkeys(paths)])
    config = service.config
    app.add_middleware(Front, keys=config.api_key, limits=service.limits, refused=service.metrics.on_refused)
    if config.allowed_origins:  # outermost, so that refusals can be read by the page too
        app.add_middleware(
            CORSMiddleware, allow_origins=list(config.allowed_origins), allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["authorization", "content-type", "x-request-id"], expose_headers=["x-request-id"],
        )  # fmt: skip
    return app


def _handle_errors(app: FastAPI) -> None:
    """Every error has OpenAI's shape."""

    async def known(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_response(error)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(validation_error(error.errors()))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        headers = {name.lower(): value for name, value in (error.headers or {}).items()}
        if error.status_code == 405:
            headers["allow"] = ", ".join(_methods_at(request))
            message = f"{request.method} {request.url.path[:200]}: takes {headers['allow']} alone"
        return error_response(ApiError(error.status_code, message, headers=headers))

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED)

    async def unknown(request: Request, error: Exception) -> Response:
        return error_response(ApiError(500, "the server made an error; its log has more"))

    app.add_exception_handler(ApiError, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientGone, gone)
    app.add_exception_handler(Exception, unknown)


def _methods_at(request: Request) -> list[str]:
    """The methods that the path of a request takes; those of a file of the page where no route has it."""
    routes = [route for route in request.app.routes if isinstance(route, APIRoute)]
    found = [route.methods or () for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for methods in found for method in methods}) or ["GET", "HEAD"]


def _add_operations(app: FastAPI, service: Service) -> None:
    """Whether the server lives, what it is, how it does."""

    @app.get("/health")
    async def health() -> Response:
        """The HTTP process answers; of a draft that learns, with the generation that serves."""
        if service.learning is None:
            return Response()
        found = service.learning.serving()
        return json_response({"draft_generation": 0} if found is None else {
            "draft_generation": found.generation, "tau_before": found.tau_before, "tau_after": found.tau_after,
        })  # fmt: skip

    @app.get("/ready")
    async def ready() -> Response:
        """The engine takes requests."""
        if service.client.state != "ready" or service.gate.is_closed:
            raise ApiError(503, f"the engine is {service.client.state}", headers={"retry-after": "2"})
        return json_response({"status": "ready"})

    @app.get("/version")
    async def told_version() -> Response:
        """The version of aquiline."""
        return json_response({"version": version("aquiline")})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    async def models() -> Response:
        """The names that the model is served by."""
        return json_response({"object": "list", "data": [_model(service, name) for name in service.names]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        """One of the names."""
        return json_response(_model(service, service.model(model)))


def _model(service: Service, name: str) -> dict[str, Any]:
    info = service.client.info
    length = None if info is None else info.max_length
    told = {"id": name, "object": "model", "created": service.began, "owned_by": "aquiline", "root": service.names[0]}
    return told | {"max_model_len": length, "speculation": service.drafting.as_dict()}


def _add_tokens(app: FastAPI, service: Service) -> None:
    """Text as token ids and back."""
    prompts = service.prompts

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Token ids of a prompt, or of messages through the chat template."""
        service.model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("prompt: give prompt or messages, one of them", "prompt")

        def told() -> Response:
            most = service.max_length
            if body.messages is None:
                ids = prompts.text(body.prompt or "", most, body.add_special_tokens)
            else:
                options = body.chat_template_kwargs
                _, ids = prompts.chat(body.messages, most, body.tools, options, body.add_generation_prompt)
            found: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": most}
            if body.return_token_strs:
                found["token_strs"] = [token_text(prompts.tokenizer, token) for token in ids]
            return json_response(found)

        with explained():
            return await service.apart(await size_of(request), told)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """The text of token ids."""
        service.model(body.model)
        vocab_size = prompts.tokenizer.get_vocab_size()

        def told() -> Response:
            if bad := [token for token in body.tokens if not 0 <= token < vocab_size]:
                raise bad_request(f"tokens: {bad[0]}: must be in [0, {vocab_size})", "tokens")
            # A batch, as for it the tokenizer lets other threads run meanwhile.
            (text,) = prompts.tokenizer.decode_batch([body.tokens], skip_special_tokens=False)
            return json_response({"prompt": text})

        return await service.apart(await size_of(request), told)


def _add_generation(app: FastAPI, service: Service) -> None:
    """Completions and chats."""
    detail, tokenizer = service.config.per_request_spec_decode_metrics, service.prompts.tokenizer

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or several."""
        job = await service.completion(body, await size_of(request))
        reply = CompletionReply(job, body, detail, tokenizer)
        return await answer(service, job, reply, request, bool(body.stream))

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        job = await service.chat(body, await size_of(request))
        return await answer(service, job, ChatReply(job, body, detail, tokenizer), request, bool(body.stream))


def _add_responses(app: FastAPI, service: Service) -> None:
    """Responses, and those that are kept."""
    store, tokenizer = ResponseStore(service.limits.max_stored_bytes), service.prompts.tokenizer

    @app.post("/v1/responses")
    async def responses(body: ResponseRequest, request: Request) -> Response:
        """Answer a conversation of items; keep the answer unless `store` is false."""
        size, before = await size_of(request), kept_before(body, store)
        if before is not None:
            size += before.num_bytes
        if size > service.limits.max_body_bytes:
            told = f"the conversation has {size} bytes; at most {service.limits.max_body_bytes} are allowed"
            raise bad_request(f"previous_response_id: {told}; begin another", "previous_response_id")
        with in_words_of(CHAT_FIELDS), explained():
            items = conversation_of(body, before)
            job = await service.chat(as_chat(body, items), size, "resp")
            reply = ResponseReply(job, body, items, store, tokenizer)
            return await answer(service, job, reply, request, bool(body.stream))

    @app.get("/v1/responses/{response_id}")
    async def kept(response_id: str) -> Response:
        """A response that was kept."""
        return Response(store.get(response_id).response, media_type="application/json")

    @app.delete("/v1/responses/{response_id}")
    async def drop(response_id: str) -> Response:
        """Forget a response."""
        store.drop(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @app.get("/v1/responses/{response_id}/input_items")
    async def input_items(response_id: str) -> Response:
        """The conversation that a response answered, the latest item first."""
        items = json.loads(store.get(response_id).input)[::-1]
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {}
        return json_response({"object": "list", "data": items, "has_more": False} | ends)


async def size_of(request: Request) -> int:
    """Bytes of a request's body: more than anything in it has."""
    return len(await request.body())


async def answer(service: Service, job: Job, reply: Reply, request: Request, is_stream: bool) -> Response:
    """Run a job and send its reply, as events or whole. The client's leaving ends the job."""
    run = await while_connected(disconnect(request.receive), service.open(job))
    if is_stream:
        return EventStream(_events(reply, run), run.close, service.limits.max_stalled_s, run.is_over)

    async def collect() -> dict[str, Any]:
        async for gains in run:
            for choice, gain in gains:
                reply.add(choice, gain)
        return reply.whole()

    try:
        return json_response(await while_connected(disconnect(request.receive), collect()))
    finally:
        run.close()


async def _events(reply: Reply, run: Run) -> AsyncIterator[bytes]:
    """The events of a job, those that come together as one. An error on the way is the last event."""
    try:
        if begun := reply.begin():
            yield b"".join(begun)
        async for gains in run:
            events = [event for choice, gain in gains for event in reply.add(choice, gain)]
            if events := events + (reply.end() if run.is_over() else []):
                yield b"".join(events)
    except ApiError as error:
        yield reply.failed(error)
