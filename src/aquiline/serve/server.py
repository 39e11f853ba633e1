"""The server as a process: what settings name is opened, uvicorn runs it, signals end it."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType

import uvicorn

from aquiline.config import ChatConfig, EngineConfig, Environment, PairConfig
from aquiline.engine.grammar import Grammars
from aquiline.engine.learning.learn_config import LearnConfig
from aquiline.models.known_pairs import checkpoints
from aquiline.models.load import read_model_config, resolve
from aquiline.ops.allocator import share_memory
from aquiline.serve.app import make_app
from aquiline.serve.client import EngineClient
from aquiline.serve.compiling import Compiling
from aquiline.serve.logs import log, set_up
from aquiline.serve.request_prompts import Prompts
from aquiline.serve.server_config import Limits, ServerConfig
from aquiline.serve.service import Service
from aquiline.serve.wire import Opening
from aquiline.spec.drafting import Drafting
from aquiline.text.chat_template import ChatTemplate
from aquiline.text.tokenizer import load_tokenizer

LAST_S = 5
"""Seconds in which clients can still be told that their requests took too long for a server that ends."""


def open_service(
    pair: PairConfig,
    engine: EngineConfig,
    drafting: Drafting,
    config: ServerConfig,
    limits: Limits,
    chat: ChatConfig,
    learning: LearnConfig = LearnConfig(),
    *,
    client_of: Callable[[Opening], EngineClient] | None = None,
) -> Service:
    """The service that settings describe; its engine is started by the application. client_of: what stands for the
    engine, where that is no process of its own. Raises ValueError and CheckpointError for what cannot be read."""
    target = checkpoints(pair.target, pair.draft).target
    checkpoint = resolve(target)
    model = read_model_config(checkpoint)  # no target: refused before a process starts for it
    tokenizer = load_tokenizer(checkpoint)
    if tokenizer is None:
        raise ValueError(f"target={str(checkpoint)!r}: has no tokenizer.json, and clients send text; add one")
    template = ChatTemplate.load(checkpoint, tokenizer)
    if config.chat_template is not None:
        source = Path(config.chat_template).read_text(encoding="utf-8")
        template = ChatTemplate(source, template.special, tokenizer, None, f"the chat template {config.chat_template}")
    template = template.with_options(chat.template_options or {}, "the model's chat template")
    template.check_ends(model.vocab_size)
    names = config.served_model_name or (str(target),)
    opening = Opening(pair, engine, drafting, learning)
    client = EngineClient(opening, config.stream_interval) if client_of is None else client_of(opening)
    compiling = Compiling(Grammars(tokenizer, model.vocab_size), model.eos_token_ids, limits.max_compile_s)
    return Service(client, Prompts(tokenizer, template), compiling, drafting, names, config, limits)


def serve(service: Service) -> None:
    """Serve until a signal comes. The first one drains: no new requests, those that run go on for drain_s seconds at
    most. The second one ends at once. Raises ValueError if the engine cannot load its models."""
    config = service.config
    share_memory()
    set_up(config.log_level)
    listener = _listen(config.host, config.port)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    if (notice := service.prompts.template.notice) is not None:
        print(f"aquiline: {notice}", file=sys.stderr)
    print(f"aquiline: http://{shown}:{port}; the engine is loading; Ctrl-C ends the server", file=sys.stderr)
    server = Server(service)
    service.on_failure = lambda: setattr(server, "should_exit", True)
    gc.freeze()  # what was imported stays; collections need not walk over it
    try:
        server.run(sockets=[listener])
    finally:
        service.client.kill()
    if service.failure is not None:
        raise ValueError(service.failure)


class Server(uvicorn.Server):
    """uvicorn with signals as `serve` has them. Its own second SIGTERM would wait too, and once time is up it would cut
    replies without a word."""

    def __init__(self, service: Service) -> None:
        config = uvicorn.Config(
            make_app(service), log_config=None, access_log=False, server_header=False, lifespan="on",
            timeout_graceful_shutdown=round(service.config.drain_s) + LAST_S, timeout_keep_alive=30,
        )  # fmt: skip
        super().__init__(config)
        self.service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests go on for drain_s seconds; those that still run then end with an error that says so. At a second
        signal they do at once."""
        limit = asyncio.create_task(self._end_late())
        await super().shutdown(sockets)
        limit.cancel()
        if self.force_exit:
            self.service.client.kill()
            await self.lifespan.shutdown()

    async def _end_late(self) -> None:
        await asyncio.sleep(self.service.config.drain_s)
        log("out of time", level="warning", num_requests=self.service.client.num_streams)
        await self.service.client.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, end at the second."""
        self.service.gate.is_closed = True
        self.force_exit = self.should_exit
        self.should_exit = True
        log("ending" if self.force_exit else "draining", signal=signal.Signals(sig).name)


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises OSError naming the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"host={host!r}, port={port}: cannot be listened at ({error.strerror}); choose another") from None
    listener.listen(1024)
    return listener


def with_environment(config: ServerConfig, environment: Environment) -> ServerConfig:
    """The same settings with the key of the environment, which command lines would show to every user of a machine."""
    if environment.api_key is None:
        return config
    return replace(config, api_key=(*config.api_key, environment.api_key))
