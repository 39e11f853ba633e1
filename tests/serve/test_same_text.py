"""Whatever a request asks: the text over HTTP is LLM.generate's, with speculation and without, streamed and whole."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.conftest import needs_native
from tests.serve.serving import OTHER, PROMPT, Server

from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM

pytestmark = needs_native

PLAIN = "none"
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.9},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"temperature": 0, "repetition_penalty": 1.3},
    "presence_penalty": {"temperature": 0, "presence_penalty": 1.5},
    "frequency_penalty": {"temperature": 0, "frequency_penalty": 1.5},
    "logit_bias": {"temperature": 0, "logit_bias": {"1122": 5, "1036": -100}},
    "stop": {"temperature": 0, "stop": ["eric cl", "zzz"]},
    "stop_token_ids": {"temperature": 0, "stop_token_ids": [1879]},
    "ignore_eos": {"ignore_eos": True},
    "min_tokens": {"min_tokens": 20},
    "structured": {"structured_outputs": {"regex": "[a-z]{4,12} = [0-9]+"}},
    "bad_words": {"temperature": 0, "bad_words": ["generic", "function"]},
}
"""Parameters of config.SamplingParams by the names they have in JSON."""


def expected(llm: LLM, asked: dict[str, Any], max_tokens: int = 32, seed: int = 7) -> Any:
    fields = {"temperature": 1.0} | asked | {"max_tokens": max_tokens, "seed": seed}
    if "logit_bias" in fields:
        fields["logit_bias"] = {int(token): float(bias) for token, bias in fields["logit_bias"].items()}
    if "structured_outputs" in fields:
        fields["structured"] = fields.pop("structured_outputs")
    (output,) = llm.generate(PROMPT, SamplingParams(**fields))
    return output


@pytest.mark.parametrize("name", ASKED)
def test_every_parameter(server: Server, llm: LLM, name: str) -> None:
    if name == "structured":
        pytest.importorskip("xgrammar", reason="not installed: xgrammar")
    asked = ASKED[name]
    body = asked | {"max_tokens": 32, "seed": 7}
    output = expected(llm, asked)
    drafted, plain = server.complete(**body), server.complete(**body, drafter=PLAIN)
    assert drafted["choices"] == plain["choices"]
    (choice,) = drafted["choices"]
    assert choice["text"] == output.text and choice["finish_reason"] == output.finish_reason
    assert drafted["usage"]["completion_tokens"] == len(output.token_ids)
    chunks = server.stream("/v1/completions", prompt=PROMPT, **body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == output.text
    assert chunks[-1]["choices"][0]["finish_reason"] == output.finish_reason


def test_the_parameters_matter(llm: LLM) -> None:
    greedy = expected(llm, ASKED["greedy"]).text
    for name, asked in ASKED.items():
        if asked.get("temperature") == 0 and name != "greedy":
            assert expected(llm, asked).text != greedy, name


def test_every_field_of_sampling_is_reachable() -> None:
    fields = set(SamplingParams.__dataclass_fields__)
    elsewhere = {"max_tokens", "seed", "logprobs", "prompt_logprobs"}  # other tests of this folder have these
    assert fields == set(ASKED) - {"greedy"} | elsewhere


@pytest.mark.parametrize("drafter", ["none", "adaptive", "chain", "dynamic", "static", "lookup"])
def test_every_drafter(server: Server, llm: LLM, drafter: str) -> None:
    reply = server.complete(temperature=0, max_tokens=40, drafter=drafter)
    (choice,) = reply["choices"]
    assert choice["text"] == expected(llm, {"temperature": 0}, 40).text
    record = reply["metrics"]["speculative_decoding"]
    assert (record["num_spec_steps"] > 0) == (drafter != "none") or drafter == "adaptive"  # which may see no gain


def test_a_bound_of_drafted_tokens(server: Server) -> None:
    reply = server.complete(temperature=0, max_tokens=30, num_spec_tokens=2)
    record = reply["metrics"]["speculative_decoding"]
    assert set(record["per_step_drafted"]) == {2} and record["num_spec_tokens"] == 2
    reply = server.complete(temperature=0, max_tokens=30, num_spec_tokens=0)
    assert reply["metrics"]["speculative_decoding"]["num_spec_steps"] == 0
    error = server.error("/v1/completions", prompt=PROMPT, num_spec_tokens=2, drafter="dynamic")
    assert error["param"] == "num_spec_tokens" and "tree has its own size" in error["message"]


def test_a_prediction_is_copied_from(server: Server, llm: LLM) -> None:
    text = expected(llm, {"temperature": 0}, 60).text
    predicted = {"type": "content", "content": text}
    reply = server.complete(temperature=0, max_tokens=60, prediction=predicted, return_token_sources=True)
    (choice,) = reply["choices"]
    assert choice["text"] == text and {entry["by"] for entry in choice["sources"]} == {"lookup", "target"}
    record = reply["metrics"]["speculative_decoding"]
    details = reply["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == record["num_accepted_draft_tokens"] > 30
    without = server.complete(temperature=0, max_tokens=60, drafter="lookup")
    assert without["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] < record["num_accepted_draft_tokens"]


def test_choices_are_those_of_seeds_in_a_row(server: Server, llm: LLM) -> None:
    reply = server.complete([PROMPT, OTHER], n=2, seed=3, max_tokens=16)
    texts = [choice["text"] for choice in reply["choices"]]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3] and len(set(texts)) == 4
    for place, (prompt, seed) in enumerate([(PROMPT, 3), (PROMPT, 4), (OTHER, 3), (OTHER, 4)]):
        sampling = SamplingParams(temperature=1.0, max_tokens=16, seed=seed)
        assert texts[place] == llm.generate(prompt, sampling)[0].text
    assert reply["usage"]["prompt_tokens"] == len(llm.encode(PROMPT)) + len(llm.encode(OTHER))
    assert reply["metrics"] is None
    chunks = server.stream("/v1/completions", prompt=[PROMPT, OTHER], n=2, seed=3, max_tokens=16)
    streamed = ["", "", "", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == texts


def test_sources_say_who_wrote_what(server: Server, llm: LLM) -> None:
    output = expected(llm, {"temperature": 0}, 40)
    (choice,) = server.complete(temperature=0, max_tokens=40, return_token_sources=True)["choices"]
    assert "".join(entry["text"] for entry in choice["sources"]) == choice["text"] == output.text
    by_draft = sum(entry["by"] == "draft" for entry in choice["sources"])
    assert 0 < by_draft < len(choice["sources"])
    (choice,) = server.complete(max_tokens=9, return_token_sources=True, drafter=PLAIN)["choices"]
    assert {entry["by"] for entry in choice["sources"]} == {"target"}
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 40, "return_token_sources": True}
    told = [chunk["choices"][0] for chunk in server.stream("/v1/completions", **body)]
    assert all("".join(entry["text"] for entry in each["sources"]) == each["text"] for each in told)
    final = told[-1]["drafting"]
    assert final["num_accepted"] <= final["num_drafted"] == 3 * final["num_steps"] > 0
    assert final["num_committed"] == 39, "the first token is the prompt's"


def test_logprobs_of_completions(server: Server, llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=12, logprobs=3, prompt_logprobs=2))
    assert output.logprobs is not None and output.prompt_logprobs is not None
    body = {"temperature": 0, "max_tokens": 12, "logprobs": 3}
    (choice,) = server.complete(**body, prompt_logprobs=2)["choices"]
    told = choice["logprobs"]
    assert told["token_logprobs"] == [entry.logprob for entry in output.logprobs]
    assert "".join(told["tokens"]) == choice["text"] and len(told["top_logprobs"]) == 12
    assert told["text_offset"] == [len("".join(told["tokens"][:i])) for i in range(12)]
    assert choice["prompt_logprobs"][0] is None
    for entry, said in zip(output.prompt_logprobs, choice["prompt_logprobs"][1:], strict=True):
        assert said[str(entry.token_id)]["logprob"] == entry.logprob
        assert all(said[str(token)]["logprob"] == logprob for token, logprob in entry.top.items())
    chunks = server.stream("/v1/completions", prompt=PROMPT, **body)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    for name in told:
        assert [item for part in parts for item in part[name]] == told[name], name


def test_logprobs_of_chats(server: Server, llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=12, logprobs=2))
    assert output.logprobs is not None
    (choice,) = server.chat(temperature=0, max_tokens=12, logprobs=True, top_logprobs=2)["choices"]
    entries = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in entries] == [entry.logprob for entry in output.logprobs]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == choice["message"]["content"]
    assert all(-math.inf < entry["logprob"] <= 0 for entry in entries)


def test_chat_of_a_target_without_template_continues_the_text(server: Server, llm: LLM) -> None:
    text = expected(llm, {"temperature": 0}, 24).text
    reply = server.chat(temperature=0, max_completion_tokens=24)
    (choice,) = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": text} and reply["object"] == "chat.completion"
    body = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 24}
    first, *chunks = server.stream("/v1/chat/completions", **body, stream_options={"include_usage": True})
    assert first["choices"][0]["delta"]["role"] == "assistant"
    usage = chunks.pop()
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 24
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text


def test_a_chat_in_python_is_the_server_s(server: Server, llm: LLM) -> None:
    messages = [{"role": "system", "content": "# fast"}, {"role": "user", "content": PROMPT}]
    body = {"messages": messages, "temperature": 0.9, "seed": 5, "max_tokens": 24}
    (choice,) = server.post("/v1/chat/completions", **body)["choices"]
    (output,) = llm.chat(messages, SamplingParams(max_tokens=24, temperature=0.9, seed=5))
    assert (choice["message"]["content"], choice["finish_reason"]) == (output.text, output.finish_reason)


def test_echo_and_token_ids(server: Server, llm: LLM) -> None:
    text = expected(llm, {"temperature": 0}, 8).text
    ids = llm.encode(PROMPT)
    assert server.text(ids, temperature=0, max_tokens=8) == text
    assert server.text(temperature=0, max_tokens=8, echo=True) == PROMPT + text
    assert server.text([ids], temperature=0, max_tokens=8, echo=True) == PROMPT + text
    chunks = server.stream("/v1/completions", prompt=PROMPT, temperature=0, max_tokens=8, echo=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == PROMPT + text


def test_cached_tokens_and_salts(server: Server) -> None:
    prompt = "".join(f"value_{i} = {i}\n" for i in range(40))
    body = {"temperature": 0, "max_tokens": 4}

    def cached(**more: Any) -> int:
        return int(server.complete(prompt, **body, **more)["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached(cache_salt="a") == 0
    assert cached(cache_salt="a") > 100
    assert cached(cache_salt="b") == 0
