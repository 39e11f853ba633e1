"""Any server that speaks OpenAI's completions protocol: token ids in, a stream of chunks out, each timed as it comes.

vLLM, SGLang, TensorRT-LLM, lmdeploy and llama-server take prompts as token ids and `ignore_eos`. A server that does not
is detected by its own usage counts and refused.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError

from aquiline.bench.peers.names import PeerSpec
from aquiline.bench.peers.peer import PeerOutput, PeerSetup, request_json

_SHOWN = 200  # characters of a server's answer in an error


def open_peer(spec: PeerSpec, setup: PeerSetup) -> OpenAiPeer:
    """Ask the server for its models.

    Raises ValueError if it cannot be reached, or if it lists its models and ours is not among them."""
    return OpenAiPeer(spec)


class OpenAiPeer:
    """A client of one server and model. dtype is "server", since the arithmetic of the server is not known."""

    dtype = "server"

    def __init__(self, spec: PeerSpec) -> None:
        assert spec.where is not None
        self.address, _, self.model = spec.where.partition("#")
        self._wishes: dict[str, object] = {"return_token_ids": True}
        with self._request("/models") as response:
            self.server = response.headers.get("Server", "unknown")
            try:
                names = [model["id"] for model in json.load(response)["data"]]
            except (ValueError, KeyError, TypeError):
                return  # a server without a list may still have the model
        if names and self.model not in names:
            raise self._error(f"has no model {self.model!r}; it has {', '.join(map(str, names))}")

    def generate(self, prompts: list[list[int]], new_tokens: int, temperature: float) -> list[PeerOutput]:
        """Continue prompts, each by a request of its own, all at once. Steps are known where the server counts drafts
        under vLLM's names; it must then serve nobody else meanwhile."""
        before = self._counts()
        with ThreadPoolExecutor(len(prompts)) as pool:
            jobs = [pool.submit(self._continue, prompt, new_tokens, temperature) for prompt in prompts]
            outputs = [job.result() for job in jobs]
        drafts, drafted, accepted = (now - then for now, then in zip(self._counts(), before, strict=True))
        if drafts <= 0:
            return outputs
        # A step adds one token to those it accepted, and the last one may be cut; a step may also go without a draft.
        steps = max(drafts, sum(output.num_tokens - 1 for output in outputs) - accepted)
        return [
            replace(output, num_steps=_share(steps, i, len(outputs)), num_draft_tokens=_share(drafted, i, len(outputs)))
            for i, output in enumerate(outputs)
        ]

    def system(self) -> dict[str, object]:
        """The server's own header and the model's name."""
        return {"server": self.server, "model": self.model}

    def close(self) -> None:
        """Do nothing: no connection is kept open."""

    def _continue(self, prompt: list[int], new_tokens: int, temperature: float) -> PeerOutput:
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": new_tokens, "min_tokens": new_tokens,
            "ignore_eos": True, "temperature": temperature, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        arrivals_ms: list[float] = []
        token_ids: list[int] = []
        texts: list[str] = []
        usage: dict[str, int] = {}
        began = time.perf_counter()
        for chunk in self._events(self._answer(body)):
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices", ()):
                ids, text = choice.get("token_ids") or [], choice.get("text") or ""
                if ids or text:
                    arrivals_ms.append((time.perf_counter() - began) * 1e3)
                    token_ids += ids
                    texts.append(text)
        if not {"prompt_tokens", "completion_tokens"} <= usage.keys() or not arrivals_ms:
            raise self._error("sent no usage or no text; it must honour stream_options.include_usage")
        read, made = usage["prompt_tokens"], usage["completion_tokens"]
        if read != len(prompt):
            raise self._error(f"read {read} prompt tokens, {len(prompt)} were sent; it must take token ids as they are")
        if made != new_tokens:
            raise self._error(f"made {made} tokens, {new_tokens} were asked for; it must honour ignore_eos")
        return PeerOutput(made, arrivals_ms[0], arrivals_ms[-1], token_ids, text="".join(texts))

    def _answer(self, body: dict[str, object]) -> HTTPResponse | HTTPError:
        """The response to a request. TensorRT-LLM refuses fields that it does not know: it is asked again without the
        wish for token ids, now and from then on."""
        wishes = self._wishes  # another prompt's thread may drop them meanwhile
        try:
            return self._request("/completions", body | wishes)
        except ValueError as error:
            if not any(wish in str(error) for wish in wishes):
                raise
        self._wishes = {}
        return self._request("/completions", body)

    def _counts(self) -> list[int]:
        """Drafts, drafted tokens and accepted tokens so far, as the server's /metrics counts them; zeros if it does
        not."""
        try:
            with request_json(self.address.rstrip("/").removesuffix("/v1") + "/metrics") as response:
                text = response.read().decode(errors="replace")
        except (OSError, HTTPException):
            return [0, 0, 0]
        forms = [
            rf"^vllm:spec_decode_num_{name}(?:_total)?(?:\{{.*\}})? ([0-9.e+]+)$"
            for name in ("drafts", "draft_tokens", "accepted_tokens")
        ]
        return [int(sum(map(float, re.findall(form, text, re.MULTILINE)))) for form in forms]

    def _events(self, response: HTTPResponse | HTTPError) -> Iterator[dict[str, Any]]:
        """The JSON objects of a stream of server-sent events, up to [DONE]."""
        with response:
            try:
                for line in response:
                    field, _, data = line.decode(errors="replace").strip().partition(":")
                    if field == "data" and data.strip() == "[DONE]":
                        return
                    if field == "data":
                        yield self._chunk(data.strip())
            except (OSError, HTTPException) as error:
                raise self._error(f"broke off its stream ({error!r})") from None
        raise self._error("ended its stream without [DONE]")

    def _chunk(self, data: str) -> dict[str, Any]:
        try:
            chunk = json.loads(data)
        except ValueError:
            raise self._error(f"sent a chunk that is no JSON: {data[:_SHOWN]!r}") from None
        if not isinstance(chunk, dict) or chunk.get("error"):
            raise self._error(f"sent an error in its stream: {data[:_SHOWN]}")
        return chunk

    def _request(self, path: str, body: dict[str, object] | None = None) -> HTTPResponse | HTTPError:
        """The server's response, which for GET may be that there is nothing at this path."""
        try:
            return request_json(self.address.rstrip("/") + path, body)
        except HTTPError as error:
            is_missing = error.code == HTTPStatus.NOT_FOUND
            if is_missing and body is None:
                return error
            said = " ".join(error.read().decode(errors="replace").split())[:_SHOWN]
            hint = f"; is {self.model!r} the model's name and {self.address} the address up to /v1?"
            raise self._error(f"answered {error.code}: {said}{hint if is_missing else ''}") from None
        except (OSError, HTTPException) as error:
            raise self._error(
                f"cannot be reached ({getattr(error, 'reason', error)}); start the server or mend the address"
            ) from None

    def _error(self, what: str) -> ValueError:
        return ValueError(f"peer openai:{self.address}#{self.model}: the server {what}")


def _share(total: int, index: int, count: int) -> int:
    """The part of a sum that one of `count` outputs stands for; the parts add up to it."""
    return total // count + (index < total % count)
