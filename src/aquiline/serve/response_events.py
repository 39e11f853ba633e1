"""Replies of /v1/responses: an answer as items, and the events by which a client follows them."""

from __future__ import annotations

import uuid
from typing import Any, Literal

from tokenizers import Tokenizer

from aquiline.serve.api_errors import ApiError
from aquiline.serve.chat_completions import logprob_entry
from aquiline.serve.choices import Choice, Gain, Job
from aquiline.serve.protocol import ResponseRequest
from aquiline.serve.reply import drafting_so_far, sources
from aquiline.serve.request_prompts import dumps
from aquiline.serve.responses import Item, ResponseStore, StoredResponse
from aquiline.text.parsers import Call, Text

Kind = Literal["message", "reasoning"]
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class ResponseReply:
    """Words a job as a response. At most one item is open at a time: text goes on in it until another kind follows."""

    def __init__(
        self, job: Job, request: ResponseRequest, items: list[Item], store: ResponseStore, tokenizer: Tokenizer
    ) -> None:
        self.job, self.request, self.input, self.store, self.tokenizer = job, request, items, store, tokenizer
        self.output: list[Item] = []
        self.open: Kind | None = None
        self.pieces: list[str] = []  # the text of the open item
        self.logprobs: list[dict[str, Any]] = []
        self.num_events = 0
        self.status = "in_progress"
        self.events: list[bytes] = []

    def begin(self) -> list[bytes]:
        """The response as it begins."""
        self._event("response.created", response=self.response())
        self._event("response.in_progress", response=self.response())
        return self._taken()

    def add(self, choice: Choice, gain: Gain) -> list[bytes]:
        """The events of what a step added."""
        entries = [logprob_entry(self.tokenizer, entry) for entry in gain.logprobs]
        told: dict[str, Any] = {"logprobs": entries}
        if self.request.return_token_sources:
            told |= {"sources": sources(gain), "drafting": drafting_so_far(choice)}
        for part in [part for piece in gain.pieces for part in piece.parts]:
            if isinstance(part, Call):
                self._close()
                self._call(part)
            else:
                self._text(part, told)
                told = {"logprobs": []}  # with the first event of the step alone
        return self._taken()

    def end(self) -> list[bytes]:
        """The end of the last item and of the response, which is kept unless the request says otherwise."""
        self._finish()
        self._event(f"response.{self.status}", response=self.response())
        return self._taken()

    def failed(self, error: ApiError) -> bytes:
        """The event that ends a stream in which an error came up."""
        self._event("error", code=error.code, message=error.message, param=error.param)
        return b"".join(self._taken())

    def whole(self) -> dict[str, Any]:
        """The reply that is not streamed."""
        self._finish()
        return self.response()

    def response(self) -> dict[str, Any]:
        """The response as it stands."""
        request, usage = self.request, self.job.usage
        is_cut = self.status == "incomplete"
        return {
            "id": self.job.id, "object": "response", "created_at": self.job.created, "status": self.status,
            "model": self.job.model, "output": list(self.output), "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": request.instructions, "previous_response_id": request.previous_response_id,
            "max_output_tokens": request.max_output_tokens, "metadata": request.metadata or {},
            "temperature": self.job.wanted.sampling.temperature, "top_p": self.job.wanted.sampling.top_p,
            "tools": request.tools or [], "tool_choice": request.tool_choice or "auto",
            "parallel_tool_calls": request.parallel_tool_calls is not False, "store": request.store is not False,
            "text": {"format": {"type": "text"}} | (request.text or {}), "truncation": "disabled",
            "usage": None if self.status == "in_progress" else {
                "input_tokens": usage["prompt_tokens"], "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"], "total_tokens": usage["total_tokens"],
                "output_tokens_details": usage["completion_tokens_details"],
            },
        }  # fmt: skip

    def _text(self, part: Text, told: dict[str, Any]) -> None:
        kind: Kind = "message" if part.channel == "content" else "reasoning"
        if self.open != kind:
            self._close()
            self._open(kind)
        self.pieces.append(part.text)
        self.logprobs += told["logprobs"]
        name = "response.output_text.delta" if kind == "message" else "response.reasoning_text.delta"
        self._event(name, **self._place, content_index=0, delta=part.text, **told)

    def _open(self, kind: Kind) -> None:
        self.open, self.pieces, self.logprobs = kind, [], []
        item = self._item(kind, "in_progress")
        self.output.append(item | {"content": []})
        self._event("response.output_item.added", output_index=len(self.output) - 1, item=self.output[-1])
        self._event("response.content_part.added", **self._place, content_index=0, part=item["content"][0])

    def _close(self) -> None:
        """End the open item, if there is one."""
        if self.open is None:
            return
        kind, self.open, text, place = self.open, None, "".join(self.pieces), self._place
        self.output[-1] = self._item(kind, "completed") | {"id": self.output[-1]["id"]}
        part = self.output[-1]["content"][0]
        if kind == "message":
            self._event("response.output_text.done", **place, content_index=0, text=text, logprobs=self.logprobs)
        else:
            self._event("response.reasoning_text.done", **place, content_index=0, text=text)
        self._event("response.content_part.done", **place, content_index=0, part=part)
        self._event("response.output_item.done", output_index=place["output_index"], item=self.output[-1])

    def _call(self, call: Call) -> None:
        item = {
            "id": _new_id("function_call"), "type": "function_call", "status": "in_progress", "name": call.name,
            "call_id": f"call_{uuid.uuid4().hex[:24]}", "arguments": "",
        }  # fmt: skip
        self.output.append(item)
        self._event("response.output_item.added", output_index=len(self.output) - 1, item=item)
        self._event("response.function_call_arguments.delta", **self._place, delta=call.arguments)
        self._event("response.function_call_arguments.done", **self._place, name=call.name, arguments=call.arguments)
        self.output[-1] = item | {"status": "completed", "arguments": call.arguments}
        self._event("response.output_item.done", output_index=len(self.output) - 1, item=self.output[-1])

    def _finish(self) -> None:
        self._close()
        (choice,) = self.job.choices
        self.status = "completed" if choice.finish_reason == "stop" else "incomplete"
        if self.request.store is not False:
            self.store.put(self.job.id, StoredResponse(dumps(self.response()), dumps(self.input)))

    def _item(self, kind: Kind, status: str) -> Item:
        text = "".join(self.pieces)
        if kind == "reasoning":
            content: Item = {"type": "reasoning_text", "text": text}
            return {"id": _new_id(kind), "type": kind, "status": status, "summary": [], "content": [content]}
        content = {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs}
        return {"id": _new_id(kind), "type": kind, "status": status, "role": "assistant", "content": [content]}

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}

    def _event(self, kind: str, /, **fields: Any) -> None:
        body = {"type": kind, "sequence_number": self.num_events} | fields
        self.events.append(f"event: {kind}\ndata: ".encode() + dumps(body) + b"\n\n")
        self.num_events += 1

    def _taken(self) -> list[bytes]:
        events, self.events = self.events, []
        return events


def _new_id(kind: str) -> str:
    return f"{PREFIXES[kind]}_{uuid.uuid4().hex}"
