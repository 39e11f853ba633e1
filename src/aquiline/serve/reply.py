"""What the replies of /v1/completions and /v1/chat/completions have in common: fields, records, events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from aquiline.serve.api_errors import ApiError
from aquiline.serve.choices import Choice, Gain, Job, SpeculationRecord
from aquiline.serve.protocol import ChatRequest, CompletionRequest
from aquiline.serve.request_prompts import dumps
from aquiline.serve.server_config import Detail
from aquiline.text.parsers import Text

DONE = b"data: [DONE]\n\n"

FINISH_REASONS = {"stop": "stop", "length": "length", "deadline": "length", "abort": "abort", "error": "error"}
"""A text that a deadline ended counts as cut at a length; `stop_reason` of the choice then says "deadline"."""

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class Reply(Protocol):
    """How one endpoint words what a job gives: `add` every gain in order; then `whole`, or the events on the way."""

    def begin(self) -> list[bytes]:
        """Events before the first gain."""
        ...

    def add(self, choice: Choice, gain: Gain) -> list[bytes]:
        """The events of a gain."""
        ...

    def end(self) -> list[bytes]:
        """Events after the last gain."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """The event that ends a stream in which an error came up."""
        ...

    def whole(self) -> dict[str, Any]:
        """The reply that is not streamed."""
        ...


class ChunkedReply:
    """A reply whose events are chunks, each with some of the choices, as completions and chats have it.

    is_whole: it is sent in one piece, so what its tokens bring beside the text is kept up to the end."""

    kind = ""  # "object" of the reply, and of its chunks
    chunk_kind = ""

    def __init__(self, job: Job, request: CompletionRequest | ChatRequest, detail: Detail) -> None:
        self.job, self.request, self.detail = job, request, detail
        self.places = {id(choice): place for place, choice in enumerate(job.choices)}
        self.is_whole, options = not request.stream, request.stream_options
        self.has_usage = options is not None and bool(options.include_usage)
        self.has_running_usage = self.has_usage and options is not None and bool(options.continuous_usage_stats)
        self.head: dict[str, Any] = {
            "id": job.id, "object": self.chunk_kind, "created": job.created, "model": job.model,
        }  # fmt: skip
        self.before = b"data: " + dumps(self.head)[:-1] + b',"choices":'  # of every chunk, encoded once

    def event(self, choices: list[dict[str, Any]]) -> bytes:
        """A chunk."""
        if not self.has_usage:
            return self.before + dumps(choices) + b"}\n\n"
        usage = dumps(self.job.usage) if self.has_running_usage else b"null"
        return self.before + dumps(choices) + b',"usage":' + usage + b"}\n\n"

    def end(self) -> list[bytes]:
        """The chunk without choices that has the usage, where asked for, and the end of the stream."""
        if not self.has_usage:
            return [DONE]
        chunk = self.head | {"choices": [], "usage": self.job.usage} | self.metrics()
        return [b"data: " + dumps(chunk) + b"\n\n", DONE]

    def failed(self, error: ApiError) -> bytes:
        """The error as clients know it from replies; nothing follows, not even the mark of the end."""
        return b"data: " + dumps(error.body()) + b"\n\n"

    def metrics(self) -> dict[str, Any]:
        """vLLM's record of what speculation did, null for several choices; nothing unless the server is set so."""
        if self.detail == "none":
            return {}
        if len(self.job.choices) > 1:
            return {"metrics": None}
        (choice,) = self.job.choices
        num_spec_tokens = choice.request.drafting.max_nodes - 1
        return {"metrics": {"speculative_decoding": record(choice.speculation, num_spec_tokens)}}

    def reply(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The reply that is not streamed."""
        head = self.head | {"object": self.kind, "choices": choices, "usage": self.job.usage}
        return head | self.metrics()


def record(speculation: SpeculationRecord, num_spec_tokens: int) -> dict[str, Any]:
    """What speculation did for one answer, in vLLM's words: histograms count steps by their accepted tokens."""
    steps, drafted, accepted = speculation.num_drafts, speculation.num_drafted, speculation.num_accepted
    by_length = {
        length: [counts[n] for n in range(length + 1)] for length, counts in sorted(speculation.accepted_of.items())
    }
    widest = max((n for counts in speculation.accepted_of.values() for n in counts), default=0)
    told: dict[str, Any] = {
        "mean_acceptance_length": 1 + accepted / steps if steps else None,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_histogram": [
            sum(counts[n] for counts in speculation.accepted_of.values()) for n in range(widest + 1)
        ],
        "acceptance_histogram_by_draft_length": {str(length): counts for length, counts in by_length.items()},
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": num_spec_tokens,
    }
    if speculation.steps is not None:
        told["per_step_accepted"] = [confirmed for _, confirmed in speculation.steps]
        told["per_step_drafted"] = [length for length, _ in speculation.steps]
    return told


def sources(gain: Gain) -> list[dict[str, str]]:
    """Who wrote which text of a gain: "draft", "lookup" or "target"; the texts of a channel joined are its text."""
    return [
        {"text": part.text, "by": piece.by, "in": part.channel}
        for piece in gain.pieces
        for part in piece.parts
        if isinstance(part, Text)
    ]


def drafting_so_far(choice: Choice) -> dict[str, int]:
    """Decode steps of an answer and the tokens that these added, its drafted tokens and those that were accepted."""
    names = ("num_steps", "num_committed", "num_drafted", "num_accepted")
    return {name: getattr(choice.speculation, name) for name in names}


def texts(gain: Gain, channel: str) -> Iterator[str]:
    """The pieces of one channel in a gain."""
    for piece in gain.pieces:
        for part in piece.parts:
            if isinstance(part, Text) and part.channel == channel:
                yield part.text


def finite(logprob: float) -> float:
    """A log-probability that JSON has."""
    return max(logprob, LEAST_LOGPROB)


def stop_reason(choice: Choice) -> str | None:
    """What ended an answer where finish_reason does not say it: the deadline."""
    return "deadline" if choice.finish_reason == "deadline" else None
