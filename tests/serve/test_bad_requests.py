"""What cannot work is refused by name, in OpenAI's shape; nothing that is refused leaves anything behind."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from tests.conftest import needs_native
from tests.serve.serving import PROMPT, Server

pytestmark = needs_native

BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"best_of": 2}, "best_of", "use n"),
    ({"suffix": "x"}, "suffix", "not supported"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a" * 5000}}},
        "response_format",
        "needs a schema",
    ),
    ({"guided_choice": ["a"]}, "guided_choice", "is superseded"),
    ({"use_beam_search": True}, "use_beam_search", "not supported"),
    ({"skip_special_tokens": False}, "skip_special_tokens", "always left out"),
    ({"temperature": -1}, "temperature", "must be 0"),
    ({"temperature": 2.1}, "temperature", "between 0 and 2"),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"top_p": 0}, "top_p", "(0, 1]"),
    ({"top_k": -2}, "top_k", ">= 0"),
    ({"min_p": 2}, "min_p", "[0, 1]"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    (
        {"max_tokens": 5000},
        "max_tokens",
        "This model's maximum context length is 1024 tokens. However, you requested 5010",
    ),
    ({"min_tokens": 99, "max_tokens": 9}, "min_tokens", "max_tokens=9"),
    ({"n": 0}, "n", "between 1 and 16"),
    ({"n": 17}, "n", "between 1 and 16"),
    ({"seed": -1}, "seed", "2^64"),
    ({"logprobs": 21}, "logprobs", "between 0 and 20"),
    ({"prompt_logprobs": 2, "stream": True}, "prompt_logprobs", "cannot be streamed"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "no token id"),
    ({"logit_bias": {"5000": 1}}, None, "token id 5000"),
    ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias", "at most 1024"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"stop": "a" * 300}, "stop", "at most 256"),
    ({"stop": ""}, "stop", "must not be empty"),
    ({"stop": ["a" * 250] * 15 + [""]}, "stop", "must not be empty"),
    ({"bad_words": ["a"] * 17}, "bad_words", "at most 16"),
    ({"prompt": {"a": 1}}, "prompt", "prompt: Input should be"),
    ({"prompt": ""}, "prompt", "is empty"),
    ({"prompt": []}, "prompt", "is empty"),
    ({"prompt": [[1], []]}, "prompt", "is empty"),
    ({"prompt": [99999]}, "prompt", "must be in [0, 4096)"),
    ({"prompt": [4095, -1]}, "prompt", "must be in [0, 4096)"),
    ({"prompt": [2**70]}, "prompt", "must be in [0, 4096)"),
    ({"prompt": "a" * 60_000}, "prompt", "maximum context length is 1024 tokens"),
    ({"drafter": "magic"}, "drafter", "must be one of none, adaptive"),
    ({"num_spec_tokens": 99}, "num_spec_tokens", "num_spec_tokens=99"),
    ({"num_spec_tokens": "4"}, "num_spec_tokens", "num_spec_tokens: Input should be a valid integer"),
    ({"echo": True, "logprobs": 1}, "echo", "not supported with logprobs"),
    ({"priority": "high"}, "priority", "integer"),
    ({"cache_salt": "a" * 257}, "cache_salt", "at most 256"),
    ({"prediction": {"content": "a" * 60_000}}, "prediction", "maximum context length is 1024 tokens"),
]


NAMES = [f"{i}-{next(iter(body))}" for i, (body, _, _) in enumerate(BAD)]


@pytest.mark.parametrize(("body", "param", "message"), BAD, ids=NAMES)
def test_by_name(server: Server, body: dict[str, Any], param: str | None, message: str) -> None:
    error = server.error("/v1/completions", **{"prompt": PROMPT} | body)
    assert message in error["message"] and error["type"] == "invalid_request_error", error
    assert error["param"] == param and len(error["message"]) < 500, error


CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "user"}, {"content": "a"}]}, "messages"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 9, "min_tokens": 10}, "min_tokens"),
    ({"tool_choice": {"type": "function", "function": {"name": "a" * 5000}}}, "tool_choice"),
    ({"temperature": 3}, "temperature"),
    ({"messages": [{"role": "user", "content": ""}]}, "messages"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    ({"functions": [{"name": "f"}]}, "functions"),
]


@pytest.mark.parametrize(("body", "param"), CHATS, ids=[str(i) for i in range(len(CHATS))])
def test_chats_by_name(server: Server, body: dict[str, Any], param: str) -> None:
    error = server.error("/v1/chat/completions", **{"messages": [{"role": "user", "content": "a"}]} | body)
    assert error["param"] in (param, None) and (error["param"] or param == "chat_template_kwargs"), error
    assert len(error["message"]) < 500


def test_a_context_that_is_too_short_is_told_in_the_words_that_clients_know(server: Server) -> None:
    """litellm and LangChain look for the first words of the message and for the code."""
    chat = {"messages": [{"role": "user", "content": PROMPT}]}
    long_chat = {"messages": [{"role": "user", "content": "a" * 60_000}]}
    asked: list[tuple[str, dict[str, Any], str]] = [
        ("completions", {"prompt": PROMPT, "max_tokens": 1015}, "max_tokens"),
        ("completions", {"prompt": "a" * 60_000}, "prompt"),
        ("chat/completions", chat | {"max_tokens": 1015}, "max_tokens"),
        ("chat/completions", chat | {"max_completion_tokens": 1015}, "max_completion_tokens"),
        ("chat/completions", long_chat, "messages"),
        ("responses", {"input": PROMPT, "max_output_tokens": 1015}, "max_output_tokens"),
        ("responses", {"input": "a" * 60_000}, "input"),
    ]
    for path, body, param in asked:
        error = server.error(f"/v1/{path}", **body)
        assert (error["code"], error["param"]) == ("context_length_exceeded", param), error
        assert error["message"].startswith("This model's maximum context length is 1024 tokens. However, ")
    server.complete(max_tokens=1014, stop="\n")


def test_a_body_is_json_whatever_it_is_called(server: Server) -> None:
    body = b'{"prompt": "def", "max_tokens": 1}'
    for kind in (None, "text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-8"):
        headers = {} if kind is None else {"content-type": kind}
        reply = server.client.post("/v1/completions", content=body, headers=headers)
        assert reply.status_code == 200, reply.text
        refused = server.client.post("/v1/completions", content=b"prompt=def", headers=headers)
        assert refused.status_code == 400 and "is not JSON" in refused.json()["error"]["message"]
    headers = {"content-type": "text/plain", "origin": "http://evil.test"}
    reply = server.client.post("/v1/completions", content=body, headers=headers)
    assert reply.status_code == 415 and "content-type" in reply.json()["error"]["message"]


def test_harmless_values_pass(server: Server) -> None:
    body = {"best_of": None, "response_format": {"type": "text"}, "use_beam_search": False, "suffix": None}
    assert server.complete(max_tokens=1, **body, user="me", unknown=1)["choices"]


def test_half_a_character(server: Server) -> None:
    for content, status in ((b'{"prompt": "\\ud800"}', 400), (b'{"prompt": "a", "user": "\\ud800"}', 200)):
        reply = server.client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert reply.status_code == status, reply.text


def test_bodies_that_are_no_requests(server: Server) -> None:
    numbers = [b'{"prompt": "a", "user": %s}' % number for number in (b"NaN", b"[-Infinity]", b"1e999")]
    for content in (b"", b"{", b"[]", b"null", b"[" * 50_000, b'{"prompt": 1e999}', b"\xff\xfe", b'"x"', *numbers):
        reply = server.client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert reply.status_code == 400 and reply.json()["error"]["type"] == "invalid_request_error", content[:20]
    server.settle()


def test_models(server: Server) -> None:
    listed = server.client.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["code", "other"] and listed[0]["max_model_len"] == 1024
    assert server.client.get("/v1/models/other").json()["id"] == "other"
    assert server.complete(model="other", max_tokens=1)["model"] == "other"
    assert server.error("/v1/completions", 404, prompt=PROMPT, model="gpt")["code"] == "model_not_found"
    assert server.client.get("/v1/models/gpt").status_code == 404


def test_keys(server: Server) -> None:
    for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": "a key for tests"}):
        client = httpx.Client(base_url=server.url, headers=given)
        for path in ("/v1/models", "/openapi.json", "/v1/completions"):
            reply = client.request("POST" if path.endswith("completions") else "GET", path)
            assert reply.status_code == 401 and reply.json()["error"]["type"] == "authentication_error"
        assert all(client.get(path).status_code == 200 for path in ("/health", "/ready", "/version", "/metrics", "/"))
    assert server.client.get("/openapi.json").json()["info"]["title"] == "aquiline"


def test_bodies_that_are_too_long(server: Server) -> None:
    assert server.error("/v1/completions", 413, prompt="a" * 200_000)["type"] == "invalid_request_error"

    def parts() -> Any:
        for _ in range(30):
            yield b"a" * 10_000

    reply = server.client.post("/v1/completions", content=parts(), headers={"content-type": "application/json"})
    assert reply.status_code == 413 and "at most 100000" in reply.json()["error"]["message"]


UNSERVED = (
    "POST /v1/embeddings", "POST /v1/moderations", "POST /v1/images/generations", "POST /v1/audio/speech",
    "POST /v1/rerank", "POST /score", "GET /nothing", "GET /v1/nothing", "DELETE /v1/nothing", "PUT /page.js/x",
)  # fmt: skip
WRONG_METHODS = {
    "PUT /v1/models": "GET", "GET /v1/completions": "POST", "PUT /v1/responses/x": "DELETE, GET", "POST /": "GET, HEAD",
    "DELETE /page.js": "GET, HEAD", "POST /health": "GET",
}  # fmt: skip


def test_unknown_paths_and_methods(server: Server) -> None:
    for asked in UNSERVED:
        reply = server.client.request(*asked.split())
        error = reply.json()["error"]
        assert reply.status_code == 404 and error["code"] == "unknown_url" and error["type"] == "not_found_error", asked
        assert error["message"].startswith(f"{asked}: is not served; there is /, ")
        assert "/v1/chat/completions" in error["message"] and "{" not in error["message"]
    for asked, methods in WRONG_METHODS.items():
        reply = server.client.request(*asked.split())
        assert reply.status_code == 405 and reply.headers["allow"] == methods, asked
        assert reply.json()["error"]["message"] == f"{asked}: takes {methods} alone"
    assert server.client.head("/").status_code == 200


def test_request_ids_and_origins(server: Server) -> None:
    assert server.client.get("/health", headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"
    made = server.client.get("/health", headers={"x-request-id": b"\xe9" * 9}).headers["x-request-id"]
    assert len(made) == 32
    allowed = server.client.get("/health", headers={"origin": "http://page.test"})
    assert allowed.headers["access-control-allow-origin"] == "http://page.test"
    other = server.client.get("/health", headers={"origin": "http://evil.test"})
    assert "access-control-allow-origin" not in other.headers


def test_tokens_and_back(server: Server) -> None:
    told = server.post("/tokenize", prompt=PROMPT, return_token_strs=True)
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"]) and told["max_model_len"] == 1024
    text = server.post("/detokenize", tokens=told["tokens"])["prompt"]
    assert text == "<|endoftext|>" + PROMPT == "".join(told["token_strs"])
    bare = server.post("/tokenize", prompt=PROMPT, add_special_tokens=False)["tokens"]
    assert server.post("/detokenize", tokens=bare)["prompt"] == PROMPT
    assert server.post("/tokenize", messages=[{"role": "user", "content": PROMPT}])["tokens"] == told["tokens"]
    assert server.error("/tokenize")["param"] == "prompt"
    tool = {"type": "function", "function": {"name": "add"}}
    assert server.error("/tokenize", messages=[], tools=[tool])["param"] == "messages"
    assert server.error("/detokenize", tokens=[9999])["param"] == "tokens"
