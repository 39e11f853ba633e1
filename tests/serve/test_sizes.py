"""Sizes are judged before work is done: what is refused is neither made, encoded nor kept."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any, cast

import pytest
from pydantic import BaseModel, ValidationError
from tests.conftest import needs_native
from tests.serve.serving import PROMPT, Server
from tests.serve.test_choices import tokenizer
from tokenizers import Tokenizer

from aquiline.config import SamplingParams
from aquiline.engine.sequence import Request
from aquiline.serve.admission import MAX_ENTRIES, MAX_PARTS, check_entries, read_json
from aquiline.serve.api_errors import MAX_MESSAGE, ApiError
from aquiline.serve.protocol import ChatRequest, CompletionRequest, Prediction, ResponseRequest, TokenizeRequest
from aquiline.serve.request_prompts import Prompts
from aquiline.spec.drafting import NoDraft
from aquiline.text.chat_template import ChatTemplate

MANY = 1000
NULLS: list[Any] = [None] * MANY
EMPTY: list[Any] = [{}] * MANY
NAMED = {str(i): [] for i in range(MANY)}
USER = {"role": "user", "content": "a"}

WRONG: list[tuple[type[BaseModel], dict[str, Any]]] = [
    *((CompletionRequest, {"prompt": value}) for value in (NULLS, EMPTY, [NULLS], [["a"] * MANY] * MANY)),
    *((CompletionRequest, {"prompt": "a", "stop": value}) for value in ([1] * MANY, NULLS)),
    *((CompletionRequest, {"prompt": "a", name: NULLS}) for name in ("stop_token_ids", "bad_words")),
    (CompletionRequest, {"prompt": "a", "logit_bias": NAMED}),
    *((CompletionRequest, {"prompt": "a", "prediction": {"content": value}}) for value in (NULLS, EMPTY)),
    *((ChatRequest, {"messages": value}) for value in (NULLS, EMPTY)),
    *((ChatRequest, {"messages": [USER | {"content": value}]}) for value in (NULLS, EMPTY)),
    *((ChatRequest, {"messages": [USER | {"tool_calls": value}]}) for value in (NULLS, EMPTY)),
    *((ChatRequest, {"messages": [USER], "tools": value}) for value in (NULLS, EMPTY)),
    *((ResponseRequest, {"input": value}) for value in (NULLS, [1] * MANY)),
    *((ResponseRequest, {"input": "a", name: NULLS}) for name in ("tools", "metadata")),
    (ResponseRequest, {"input": "a", "metadata": NAMED}),
    (TokenizeRequest, {"messages": EMPTY}),
]


@pytest.mark.parametrize(("kind", "body"), WRONG, ids=[f"{i}-{list(body)[-1]}" for i, (_, body) in enumerate(WRONG)])
def test_what_is_wrong_a_thousand_times_is_found_once(kind: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as found:
        kind.model_validate(body)
    assert found.value.error_count() <= 4  # one for each type that a field may have


def test_parts_of_json_are_counted_before_they_are_made() -> None:
    text = json.dumps({"prompt": "[{:.e" * MAX_PARTS})
    assert read_json(text.encode()) == json.loads(text), "what stands in a text is no part"
    assert read_json(b"\xef\xbb\xbf[1]") == [1]
    for unit in ("[]", "{}", "1.5", "1e1", "true", '{"a":1}'):
        body = f"[{','.join([unit] * (MAX_PARTS + 1))}]".encode()
        with pytest.raises(ValueError, match="at most 32768"):
            read_json(body)
    with pytest.raises(ValueError, match="at most 32768"):  # a text that does not end
        read_json(b"[" * (MAX_PARTS + 1) + b'"' + b'\\"' * MAX_PARTS + b"\\")
    for number in (b"NaN", b"Infinity", b"-Infinity", b"1e999"):
        with pytest.raises(ValueError, match="is no number of JSON"):
            read_json(b"[" + number + b"]")


class Unasked:
    """A tokenizer that nobody may ask for tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.to_str, self.get_vocab = tokenizer.to_str, tokenizer.get_vocab

    def encode_batch_fast(self, *args: object, **kwargs: object) -> None:
        raise AssertionError("a text that cannot fit was encoded")


def test_a_text_that_cannot_fit_is_not_encoded() -> None:
    prompts = Prompts(cast(Tokenizer, Unasked(tokenizer())), ChatTemplate(None, {}, None))
    long = "def f(x):\n" * 5_000
    for name, call in (
        ("prompt", lambda: prompts.text(long, 1024)),
        ("messages", lambda: prompts.chat(ChatRequest(messages=[USER | {"content": long}]).messages, 1024)),
        ("prediction", lambda: prompts.prediction(Prediction(content=long), 1024)),
    ):
        with pytest.raises(ApiError, match="maximum context length is 1024 tokens") as refused:
            call()
        assert refused.value.param == name and "50000 characters" in refused.value.message


def test_a_prediction_is_not_longer_than_a_context() -> None:
    prompts = Prompts(tokenizer(), ChatTemplate(None, {}, tokenizer()))
    assert len(prompts.prediction(Prediction(content="é" * 50), 200)) <= 200
    with pytest.raises(ApiError, match=r"prediction has [0-9]+ tokens"):
        prompts.prediction(Prediction(content="\u1234" * 100), 200)


@needs_native
def test_choices_are_counted_before_prompts_are_encoded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def completions(*args: object) -> None:
        raise AssertionError("prompts were encoded")

    monkeypatch.setattr(server.service.prompts, "completions", completions)
    for prompt in (["a"] * 17, [[1]] * 17):
        with pytest.raises(ApiError, match="17 prompts with n=1: at most 16"):
            asyncio.run(server.service.completion(CompletionRequest(prompt=prompt), 100))


def test_a_reply_that_is_sent_whole_is_bounded() -> None:
    def request(num_prompt: int, **sampling: Any) -> Request:
        return Request(0, (1,) * num_prompt, SamplingParams(**sampling, seed=1), NoDraft())

    fits = request(1, max_tokens=MAX_ENTRIES // 21, logprobs=20)
    check_entries([fits], has_sources=False)
    check_entries([request(MAX_ENTRIES // 2, max_tokens=1, prompt_logprobs=1)], has_sources=False)
    check_entries([request(1, max_tokens=MAX_ENTRIES)], has_sources=True)
    for requests, has_sources in (([fits, fits], False), ([fits], True)):
        with pytest.raises(ApiError, match="at most 32768 are sent in one piece"):
            check_entries(requests, has_sources)
    with pytest.raises(ApiError, match="or stream"):
        check_entries([request(MAX_ENTRIES, max_tokens=1, prompt_logprobs=0)] * 2, has_sources=False)


@needs_native
def test_streams_may_bring_more(server: Server) -> None:
    body: dict[str, Any] = {"prompt": PROMPT, "n": 4, "max_tokens": 900, "logprobs": 20}
    assert server.error("/v1/completions", **body)["param"] == "max_tokens"
    with server.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
        assert reply.status_code == 200 and next(reply.iter_lines())
    server.settle()


def test_a_message_of_an_error_is_short() -> None:
    error = ApiError(400, "a" * 10**6, "b" * 10**6)
    assert len(error.message) == MAX_MESSAGE == len(error.param or "") and ApiError(400, "a").param is None


@needs_native
def test_a_conversation_is_no_longer_than_a_body(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Going on from a response is short for sending all of it again."""
    noted = [{"role": "user", "content": PROMPT}, {"type": "reasoning", "note": "a" * 4_000}]
    asked = {"input": noted, "max_output_tokens": 2, "temperature": 0}
    first = server.post("/v1/responses", **asked)["id"]
    second = server.post("/v1/responses", **asked, previous_response_id=first)["id"]
    monkeypatch.setattr(server.service, "limits", replace(server.service.limits, max_body_bytes=10_000))
    server.post("/v1/responses", **asked)
    error = server.error("/v1/responses", **asked, previous_response_id=second)
    assert error["param"] == "previous_response_id" and "at most 10000 are allowed" in error["message"]


@needs_native
def test_no_error_names_a_path_of_the_server(server: Server) -> None:
    body = {"messages": [USER], "chat_template_kwargs": {"a": 1}}
    message = server.error("/v1/chat/completions", **body)["message"]
    assert "the model's chat template does not exist" in message and "/" not in message
