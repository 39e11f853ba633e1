"""Replies of /v1/chat/completions."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from aquiline.serve.choices import Choice, Gain, Job
from aquiline.serve.protocol import ChatRequest
from aquiline.serve.reply import FINISH_REASONS, ChunkedReply, drafting_so_far, finite, sources, stop_reason, texts
from aquiline.serve.request_prompts import token_text
from aquiline.serve.server_config import Detail
from aquiline.text.parsers import Call
from aquiline.types import TokenLogprobs


@dataclass
class _Message:
    """An answer so far."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    sources: list[dict[str, str]] = field(default_factory=list)


class ChatReply(ChunkedReply):
    """Words a job as a chat completion."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, job: Job, request: ChatRequest, detail: Detail, tokenizer: Tokenizer) -> None:
        super().__init__(job, request, detail)
        self.tokenizer = tokenizer
        self.wants_logprobs = bool(request.logprobs)
        self.wants_sources = bool(request.return_token_sources)
        self.messages = [_Message() for _ in job.choices]

    def begin(self) -> list[bytes]:
        """One chunk with the role of every choice."""
        delta = {"role": "assistant", "content": ""}
        choices = [
            {"index": place, "delta": delta, "logprobs": None, "finish_reason": None}
            for place in range(len(self.messages))
        ]
        return [self.event(choices)]

    def add(self, choice: Choice, gain: Gain) -> list[bytes]:
        """A chunk with what the step added to one choice; none where nothing became certain."""
        place = self.places[id(choice)]
        message = self.messages[place]
        delta: dict[str, Any] = {}
        for name, channel, known in (
            ("reasoning_content", "reasoning", message.reasoning),
            ("content", "content", message.content),
        ):
            if text := "".join(texts(gain, channel)):
                delta[name] = text
                known.append(text)
        parts = [part for piece in gain.pieces for part in piece.parts]
        if calls := [self._call(message, part) for part in parts if isinstance(part, Call)]:
            delta["tool_calls"] = calls
        told: dict[str, Any] = {"index": place, "delta": delta, "logprobs": None, "finish_reason": None}
        if self.wants_logprobs and gain.logprobs:
            entries = [logprob_entry(self.tokenizer, entry) for entry in gain.logprobs]
            message.logprobs += entries if self.is_whole else ()
            told["logprobs"] = {"content": entries}
        if self.wants_sources:
            delta["sources"] = sources(gain)
            message.sources += delta["sources"] if self.is_whole else ()
            told["drafting"] = drafting_so_far(choice)
        if gain.finish_reason is not None:
            told |= self._finish(choice, message)
        elif not (told["logprobs"] or delta.keys() - {"sources"}):
            return []
        return [self.event([told])]

    def whole(self) -> dict[str, Any]:
        """The reply that is not streamed."""
        choices = []
        for place, (choice, message) in enumerate(zip(self.job.choices, self.messages, strict=True)):
            content = "".join(message.content)
            said: dict[str, Any] = {"role": "assistant", "content": None if message.calls and not content else content}
            if message.reasoning:
                said["reasoning_content"] = "".join(message.reasoning)
            if message.calls:
                said["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in message.calls]
            if self.wants_sources:
                said["sources"] = message.sources
            logprobs = {"content": message.logprobs} if self.wants_logprobs else None
            choices.append({"index": place, "message": said, "logprobs": logprobs} | self._finish(choice, message))
        reply = self.reply(choices)
        if self.job.wanted.sampling.prompt_logprobs is not None:
            reply["prompt_logprobs"] = prompt_logprobs(self.tokenizer, self.job.choices[0])
        return reply

    def _finish(self, choice: Choice, message: _Message) -> dict[str, Any]:
        assert choice.finish_reason is not None
        reason = FINISH_REASONS[choice.finish_reason]
        if reason == "stop" and message.calls:
            reason = "tool_calls"
        return {"finish_reason": reason, "stop_reason": stop_reason(choice)}

    @staticmethod
    def _call(message: _Message, part: Call) -> dict[str, Any]:
        function = {"name": part.name, "arguments": part.arguments}
        name = f"call_{uuid.uuid4().hex[:24]}"
        call = {"index": len(message.calls), "id": name, "type": "function", "function": function}
        message.calls.append(call)
        return call


def logprob_entry(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[str, Any]:
    """A token's log-probability as chats have it, with the most probable tokens at its place."""
    top = [_named(tokenizer, token, logprob) for token, logprob in entry.top.items()]
    return _named(tokenizer, entry.token_id, entry.logprob) | {"top_logprobs": top}


def _named(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    text = token_text(tokenizer, token)
    return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}


def prompt_logprobs(tokenizer: Tokenizer, choice: Choice) -> list[dict[str, Any] | None]:
    """vLLM's field: per prompt token the log-probability of it and of the best at its place; null for the first."""
    told: list[dict[str, Any] | None] = [None]
    for entry in choice.begin.prompt_logprobs or ():
        found = {entry.token_id: (entry.logprob, entry.rank)}
        found |= {token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top.items(), 1)}
        told.append({
            str(token): {
                "logprob": finite(logprob), "rank": rank, "decoded_token": token_text(tokenizer, token),
            }
            for token, (logprob, rank) in found.items()
        })  # fmt: skip
    return told
