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
    ({"response_format": {"type": "json_object"}}, "response_format", "structured output is not supported yet"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs", "not supported yet"),
    ({"guided_choice": ["a"]}, "guided_choice", "not supported yet"),
    ({"use_beam_search": True}, "use_beam_search", "not supported"),
    ({"skip_special_tokens": False}, "skip_special_tokens", "always left out"),
    ({"temperature": -1}, "temperature", "must be 0"),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"top_p": 0}, "top_p", "(0, 1]"),
    ({"top_k": -2}, "top_k", ">= 0"),
    ({"min_p": 2}, "min_p", "[0, 1]"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": 5000}, None, "exceeds the 1024 positions"),
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
    ({"bad_words": ["a"] * 17}, "bad_words", "at most 16"),
    ({"prompt": ""}, "prompt", "is empty"),
    ({"prompt": []}, "prompt", "is empty"),
    ({"prompt": [[1], []]}, "prompt", "is empty"),
    ({"prompt": [99999]}, "prompt", "must be in [0, 4096)"),
    ({"prompt": [4095, -1]}, "prompt", "must be in [0, 4096)"),
    ({"prompt": [2**70]}, "prompt", "must be in [0, 4096)"),
    ({"prompt": "a" * 60_000}, "prompt", "shorten it"),
    ({"speculative": {"proposer": "magic"}}, "speculative", "must be one of none, adaptive"),
    ({"speculative": {"num_tokens": 99}}, "speculative", "num_spec_tokens=99"),
    ({"speculative": {"speed": 2}}, "speculative.speed", "Extra inputs"),
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
    assert (error["param"] or "").split(".")[0] == (param or "").split(".")[0], error


CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0"),
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
        for path in ("/v1/models", "/v1/completions"):
            reply = client.request("GET" if path.endswith("models") else "POST", path)
            assert reply.status_code == 401 and reply.json()["error"]["type"] == "authentication_error"
        assert all(client.get(path).status_code == 200 for path in ("/health", "/ready", "/version", "/metrics", "/"))


def test_bodies_that_are_too_long(server: Server) -> None:
    assert server.error("/v1/completions", 413, prompt="a" * 200_000)["type"] == "invalid_request_error"

    def parts() -> Any:
        for _ in range(30):
            yield b"a" * 10_000

    reply = server.client.post("/v1/completions", content=parts(), headers={"content-type": "application/json"})
    assert reply.status_code == 413 and "at most 100000" in reply.json()["error"]["message"]


def test_unknown_paths_and_methods(server: Server) -> None:
    for method, path, status in (("GET", "/nothing", 404), ("GET", "/v1/nothing", 404), ("PUT", "/v1/models", 405)):
        reply = server.client.request(method, path)
        assert reply.status_code == status and reply.json()["error"]["message"]


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
    assert server.error("/detokenize", tokens=[9999])["param"] == "tokens"
