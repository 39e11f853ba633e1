"""What every endpoint that generates does alike: a request becomes choices, the engine's deltas become their gains.

Owns the order of things: limits first, then prompts, then the engine; figures are counted here, once.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from aquiline.engine.encode import ending_with
from aquiline.engine.learning.store import LearningStore
from aquiline.engine.sequence import Request
from aquiline.errors import AquilineError
from aquiline.serve.admission import Admission, check_choices, check_entries
from aquiline.serve.api_errors import ApiError, as_api_error, context_error, in_words_of
from aquiline.serve.choices import Choice, Gain, Job
from aquiline.serve.client import EngineClient, EngineDown, Stream
from aquiline.serve.compiling import Compiling
from aquiline.serve.logs import log
from aquiline.serve.prometheus import Metrics
from aquiline.serve.protocol import ChatRequest, CompletionRequest
from aquiline.serve.request_prompts import Prompts, several
from aquiline.serve.sampling import Wanted, wanted
from aquiline.serve.server_config import Limits, ServerConfig
from aquiline.serve.wire import Delta
from aquiline.spec.drafting import Drafting
from aquiline.text.parsers import GENERIC
from aquiline.text.parsing import Parsing

T = TypeVar("T")

SHORT = 4096
"""Bytes of a request that is made tokens at once, in less than a millisecond."""


class Service:
    """The model behind the server. names: what clients call it by, the first in replies. learning: what its draft
    learns with, if it does."""

    def __init__(
        self,
        client: EngineClient,
        prompts: Prompts,
        compiling: Compiling,
        drafting: Drafting,
        names: tuple[str, ...],
        config: ServerConfig,
        limits: Limits,
    ) -> None:
        self.client, self.prompts, self.drafting, self.names = client, prompts, drafting, names
        self.compiling = compiling
        self.config, self.limits = config, limits
        self.parsing = Parsing.of(
            prompts.template.source, prompts.tokenizer, config.reasoning_parser, config.tool_call_parser
        )
        prompts.is_generic = self.parsing.tools == GENERIC
        folder = client.opening.learning.learn
        self.learning = None if folder is None else LearningStore(folder)
        self.metrics = Metrics(names[0], self.learning)
        self.gate = Admission(1, limits.max_waiting)
        self.began = int(time.time())
        self.failure: str | None = None
        self.on_failure: Callable[[], None] = lambda: None
        client.on_step, client.on_down = self.metrics.on_step, self.metrics.on_down

    async def start(self) -> None:
        """Start the engine. If that fails, `failure` says why and on_failure is called."""
        try:
            await self.client.start()
        except Exception as error:  # whatever it is: without a word the server would say "starting" for ever
            if self.client.state != "closed":
                self.failure = str(error) if isinstance(error, ValueError) else repr(error)
                log("engine cannot start", level="error", error=self.failure)
                self.on_failure()
            return
        info = self.client.info
        assert info is not None
        self.gate = Admission(info.num_slots, self.limits.max_waiting)
        self.metrics.on_start(info)

    def model(self, name: str | None) -> str:
        """The name of the model that a request asks for. Raises ApiError for one that is not served."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            known = ", ".join(self.names)
            raise ApiError(404, f"model={name[:200]!r}: is not served; there is {known}", "model", "model_not_found")
        return name

    async def completion(self, request: CompletionRequest, size: int) -> Job:
        """A completion request whose body has `size` bytes, checked and as token ids."""
        with explained():
            asked, model = wanted(request, self.limits, self.drafting), self.model(request.model)
            given, most = several(request.prompt), self.max_length
            check_choices(len(given), asked.n, self.limits)

            def encoded() -> Job:
                prompts = self.prompts.completions(given, most)
                prediction = self.prompts.prediction(request.prediction, most)
                return self._job("cmpl", model, asked, prompts, prediction, request)

            return await self.apart(size, encoded)

    async def chat(self, request: ChatRequest, size: int, prefix: str = "chatcmpl") -> Job:
        """A chat request whose body has `size` bytes, checked and as token ids."""
        length = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        with in_words_of({"max_tokens": length}), explained():
            asked, model = wanted(request, self.limits, self.drafting, self.parsing.tools), self.model(request.model)
            tools, most = self._tools(request), self.max_length
            asked = replace(asked, sampling=ending_with(self.prompts.template, asked.sampling, self.parsing))

            def encoded() -> Job:
                options, begins = request.chat_template_kwargs, request.add_generation_prompt
                text, ids = self.prompts.chat(request.messages, most, tools, options, begins)
                prediction = self.prompts.prediction(request.prediction, most)
                return self._job(prefix, model, asked, [ids], prediction, request, text)

            return await self.apart(size, encoded)

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence. Raises EngineDown until the engine has told it."""
        if self.client.info is None:
            raise EngineDown("the engine is starting; send the request again")
        return self.client.info.max_length

    @staticmethod
    async def apart(size: int, work: Callable[[], T]) -> T:
        """Do work on a request of `size` bytes, in another thread if it is long, so that streams go on meanwhile."""
        return work() if size < SHORT else await asyncio.to_thread(work)

    async def open(self, job: Job) -> Run:
        """Hand a job to the engine, with its grammar if it asks for one. Raises ApiError where there is no room, no
        engine, or what cannot work."""
        num_choices = len(job.choices)
        self.gate.enter(num_choices)
        try:
            with explained():
                requests = [choice.request for choice in job.choices]
                if (grammar := await self._grammar(job.wanted)) is not None:
                    requests = [replace(request, grammar=grammar) for request in requests]
                stream = await self.client.submit(requests)
        except BaseException:
            self.gate.leave(num_choices, 0.0)
            raise
        return Run(self, job, stream)

    def _job(
        self,
        prefix: str,
        model: str,
        asked: Wanted,
        prompts: Sequence[list[int]],
        prediction: tuple[int, ...],
        request: CompletionRequest | ChatRequest,
        text: str = "",
    ) -> Job:
        is_detailed = len(prompts) * asked.n == 1 and self.config.per_request_spec_decode_metrics == "detailed"
        has_tools = isinstance(request, ChatRequest) and request.has_tools
        parsing = self.parsing if isinstance(request, ChatRequest) else Parsing()
        choices = []
        for ids in prompts:
            room, prompt_ids = self._room(ids, asked, request), tuple(ids)
            for index in range(asked.n):
                engine_request = Request(
                    self.client.new_id(), prompt_ids, asked.choice(index, room), asked.drafting, asked.priority,
                    self.limits.max_request_s, None, asked.cache_salt, prediction, with_text=False,
                    learn=request.learn is not False,
                )  # fmt: skip
                reader = parsing.reader(self.prompts.tokenizer, prompt_ids, text, asked.sampling.stop, has_tools)
                choices.append(Choice(engine_request, reader, bool(request.return_token_sources), is_detailed))
        if not request.stream or prefix == "resp":  # whose end repeats what was streamed
            has_sources = bool(request.return_token_sources)
            check_entries([choice.request for choice in choices], has_sources)
        return Job(f"{prefix}-{uuid.uuid4().hex}", model, asked, list(prompts), choices)

    def _room(self, ids: list[int], asked: Wanted, request: CompletionRequest | ChatRequest) -> int:
        """New tokens that fit after a prompt, however they are drafted. Raises ApiError where fewer fit than were
        asked for, or none, or where an id is no token."""
        info = self.client.info
        if info is None:
            raise EngineDown("the engine is starting; send the request again")
        if bad := [token for token in ids if not 0 <= token < info.vocab_size]:
            raise ApiError(400, f"prompt token {bad[0]}: must be in [0, {info.vocab_size})", "prompt")
        room, least = info.max_length - len(ids), asked.max_tokens or 1
        if room < least:
            field = "messages" if isinstance(request, ChatRequest) else "prompt"
            raise context_error(info.max_length, len(ids), least, field, "max_tokens")
        return room

    async def _grammar(self, asked: Wanted) -> str | None:
        """The compiled grammar that a request asks for, if it asks for one. Raises ApiError."""
        if asked.sampling.structured is None:
            return None
        self.client.prepare()
        return await self.compiling.compiled(asked.sampling, asked.structured_by)

    def _tools(self, request: ChatRequest) -> Any:
        """The tools that the template is to show. Raises ApiError where the model cannot be told of tools."""
        if not request.has_tools:
            return None
        if self.parsing.tools is None:
            raise ApiError(400, "tools: the model's chat template has no form for calls of tools", "tools")
        return request.tools

    def count(self, job: Job, choice: Choice, num_tokens: int) -> None:
        """A choice has got so many tokens."""
        now, metrics = time.monotonic(), self.metrics
        if not num_tokens:
            return
        metrics.on_tokens(num_tokens)
        if not job.first_s:
            job.first_s = job.last_s = now
            metrics.time_to_first_token.observe(now - job.began_s)
        if len(job.choices) == 1:  # those that come with the first token come no time after it
            metrics.on_gap(now - job.last_s, num_tokens - (choice.num_tokens == num_tokens))
        job.last_s = now

    def end(self, job: Job) -> None:
        """A job has ended, however it did."""
        now, usage = time.monotonic(), job.usage
        self.gate.leave(len(job.choices), now - job.began_s)
        reasons = [choice.finish_reason or "abort" for choice in job.choices]
        self.metrics.on_end(job, reasons, now)
        for problem in [choice.reader.problem for choice in job.choices if choice.reader.problem is not None]:
            log("part of an answer was not understood and is told as text", level="warning", id=job.id, why=problem)
        log(
            "request ended", id=job.id, finish_reasons=reasons, prompt_tokens=usage["prompt_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"], completion_tokens=usage["completion_tokens"],
            seconds=round(now - job.began_s, 4), ttft_s=round(job.first_s - job.began_s, 4) if job.first_s else None,
        )  # fmt: skip


class Run:
    """A job that the engine has taken. Iterate over what is added to its choices; `close` it in any case."""

    def __init__(self, service: Service, job: Job, stream: Stream) -> None:
        self.service, self.job, self.stream = service, job, stream
        self.is_closed = False

    def is_over(self) -> bool:
        """Whether all choices have ended."""
        return not self.stream.running

    async def __aiter__(self) -> AsyncIterator[list[tuple[Choice, Gain]]]:
        """Gains of choices that have come together, in the order in which the engine made them. Raises ApiError."""
        by_id = {int(choice.request.id): choice for choice in self.job.choices}
        with explained():
            async for deltas in self.stream:
                held: dict[int, list[Delta]] = {}
                for delta in deltas:
                    held.setdefault(delta.request_id, []).append(delta)
                gains: list[tuple[Choice, Gain]] = []
                for name, some in held.items():
                    choice = by_id[name]
                    if choice.finish_reason is not None:
                        continue  # computed after a stop string
                    gain = choice.take(*some)
                    if gain.finish_reason is not None and some[-1].finish_reason is None:
                        self.stream.end(name)  # a stop string, which the engine does not know
                    self.service.count(self.job, choice, len(gain.token_ids))
                    gains.append((choice, gain))
                yield gains

    def close(self) -> None:
        """End the choices that have not ended, and give the room back."""
        if not self.is_closed:
            self.is_closed = True
            self.stream.close()
            self.service.end(self.job)


@contextmanager
def explained() -> Iterator[None]:
    """Errors of the engine and of settings inside, as what a client is told."""
    try:
        yield
    except RecursionError:
        raise ApiError(400, "the body nests lists and objects too deep") from None
    except (ValueError, AquilineError) as error:
        raise as_api_error(error) from error
