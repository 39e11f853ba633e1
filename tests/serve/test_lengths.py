"""How long a reply may be: by what is asked, by the limits, by the room, and never by how it is drafted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.serve.silent import INFO, silent_service

from aquiline.serve.api_errors import ApiError
from aquiline.serve.choices import Job
from aquiline.serve.protocol import ChatRequest, CompletionRequest, ResponseRequest
from aquiline.serve.responses import as_chat
from aquiline.serve.server_config import Limits
from aquiline.serve.service import Service

WAYS: list[dict[str, Any]] = [
    {"drafter": "none"}, {}, {"num_spec_tokens": 1}, {"drafter": "chain"}, {"drafter": "static"}, {"drafter": "lookup"},
]  # fmt: skip


def started(limits: Limits | None = None, max_length: int = INFO.max_length) -> Service:
    service = silent_service(limits)
    service.client.info = INFO._replace(max_length=max_length)
    return service


def chat(service: Service, **body: Any) -> Job:
    request = ChatRequest(messages=[{"role": "user", "content": "a"}], **body)
    return asyncio.run(service.chat(request, size=100))


def length_of(job: Job) -> int:
    (choice,) = job.choices
    return choice.request.sampling.max_tokens


@pytest.mark.parametrize("way", WAYS)
def test_the_room_does_not_depend_on_the_way_to_draft(way: dict[str, Any]) -> None:
    service = started()
    job = chat(service, **way)
    room = INFO.max_length - len(job.prompts[0])
    assert length_of(job) == room
    assert length_of(chat(service, **way, max_tokens=room)) == room
    with pytest.raises(ApiError, match="maximum context length"):
        chat(service, **way, max_tokens=room + 1)


def test_a_reply_that_names_no_length_is_not_as_long_as_the_context() -> None:
    service = started(max_length=8192)
    assert length_of(chat(service)) == 1024
    assert length_of(chat(service, min_tokens=3000)) == 3000
    assert length_of(chat(service, max_tokens=5000)) == 5000
    response = as_chat(ResponseRequest(input="a"), [{"type": "message", "role": "user", "content": "a"}])
    assert length_of(asyncio.run(service.chat(response, size=100))) == 1024
    assert length_of(asyncio.run(service.completion(CompletionRequest(prompt="a"), size=100))) == 16
    assert length_of(chat(started(Limits(default_output_tokens=99), 8192))) == 99
    assert length_of(chat(started(Limits(max_output_tokens=300), 8192))) == 300
    with pytest.raises(ApiError, match="max_completion_tokens=301: at most 300 are allowed") as refused:
        chat(started(Limits(max_output_tokens=300), 8192), max_completion_tokens=301)
    assert refused.value.param == "max_completion_tokens"
