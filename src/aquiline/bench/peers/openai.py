"""Any server that speaks OpenAI's completions protocol: token ids in, a stream of chunks out, each timed as it comes.

vLLM, SGLang, TensorRT-LLM, lmdeploy and llama-server take prompts as token ids and `ignore_eos`. A server that does not
is detected by its own usage counts and refused.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from aquiline.bench.peers.names import PeerSpec
from aquiline.bench.peers.peer import PeerOutput, PeerRun, PeerSetup

TIMEOUT_S = 600
_SHOWN = 200  # characters of a server's answer in an error


def open_peer(spec: PeerSpec, setup: PeerSetup) -> OpenAiPeer:
    """Ask the server for its models.

    Raises ValueError if it cannot be reached or does not have the model."""
    peer = OpenAiPeer(spec)
    peer.check_model()
    return peer


@dataclass(eq=False)
class CompletionStream:
    """The chunks of one request so far, joined."""

    began_s: float
    arrivals_ms: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=dict)

    def take(self, chunk: dict[str, Any]) -> None:
        """One event of the stream."""
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices", ()):
            token_ids, text = choice.get("token_ids") or [], choice.get("text") or ""
            if token_ids or text:
                self.arrivals_ms.append((time.perf_counter() - self.began_s) * 1e3)
                self.token_ids += token_ids
                self.texts.append(text)


class OpenAiPeer:
    """A client of one server and model. dtype is "server", since the arithmetic of the server is not known."""

    dtype = "server"

    def __init__(self, spec: PeerSpec) -> None:
        assert spec.where is not None
        self.address, _, self.model = spec.where.partition("#")
        parts = urlsplit(self.address)
        self.is_tls, self.host, self.path = parts.scheme == "https", parts.netloc, parts.path.rstrip("/")

    def check_model(self) -> None:
        """Raise ValueError if the server cannot be reached, or if it lists its models and ours is not among them."""
        response = self._request("GET", "/models")
        try:
            names = [model["id"] for model in json.loads(response.read())["data"]]
        except (ValueError, KeyError, TypeError):
            return  # a server without a list may still have the model
        if names and self.model not in names:
            raise self._error(f"has no model {self.model!r}; it has {', '.join(map(str, names))}")

    def generate(self, prompts: list[list[int]], new_tokens: int, temperature: float) -> PeerRun:
        """Continue prompts, each by a request of its own, all at once."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            jobs = [pool.submit(self._continue, prompt, new_tokens, temperature) for prompt in prompts]
            return PeerRun([job.result() for job in jobs])

    def system(self) -> dict[str, object]:
        """The server's own header and the model's name."""
        response = self._request("GET", "/models")
        response.read()
        return {"server": response.getheader("Server", "unknown"), "model": self.model}

    def close(self) -> None:
        """Do nothing: no connection is kept open."""

    def _continue(self, prompt: list[int], new_tokens: int, temperature: float) -> PeerOutput:
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": new_tokens, "min_tokens": new_tokens,
            "ignore_eos": True, "temperature": temperature, "stream": True, "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        stream = CompletionStream(time.perf_counter())
        for chunk in self._events(self._request("POST", "/completions", body)):
            stream.take(chunk)
        if not {"prompt_tokens", "completion_tokens"} <= stream.usage.keys() or not stream.arrivals_ms:
            raise self._error("sent no usage or no text; it must honour stream_options.include_usage")
        read, made = stream.usage["prompt_tokens"], stream.usage["completion_tokens"]
        if read != len(prompt):
            raise self._error(f"read {read} prompt tokens, {len(prompt)} were sent; it must take token ids as they are")
        if made != new_tokens:
            raise self._error(f"made {made} tokens, {new_tokens} were asked for; it must honour ignore_eos")
        return PeerOutput(made, stream.token_ids, stream.arrivals_ms, text="".join(stream.texts))

    def _events(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        """The JSON objects of a stream of server-sent events, up to [DONE]."""
        try:
            for line in response:
                text = line.decode(errors="replace").strip()
                if not text.startswith("data:"):
                    continue
                data = text.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                try:
                    chunk = json.loads(data)
                except ValueError:
                    raise self._error(f"sent a chunk that is no JSON: {data[:_SHOWN]!r}") from None
                if not isinstance(chunk, dict) or chunk.get("error"):
                    raise self._error(f"sent an error in its stream: {data[:_SHOWN]}")
                yield chunk
        except (OSError, http.client.HTTPException) as error:
            raise self._error(f"broke off its stream ({error!r})") from None
        finally:
            response.close()
        raise self._error("ended its stream without [DONE]")

    def _request(self, method: str, path: str, body: dict[str, object] | None = None) -> http.client.HTTPResponse:
        kind = http.client.HTTPSConnection if self.is_tls else http.client.HTTPConnection
        headers = {"Connection": "close"} | ({"Content-Type": "application/json"} if body is not None else {})
        try:
            connection = kind(self.host, timeout=TIMEOUT_S)
            connection.request(method, self.path + path, json.dumps(body) if body is not None else None, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise self._error(f"cannot be reached ({error}); start the server or mend the address") from None
        if response.status == 404 and method == "GET":
            return response
        if response.status != 200:
            said = " ".join(response.read().decode(errors="replace").split())[:_SHOWN]
            hint = f"; is {self.model!r} the model's name and {self.address} the address up to /v1?"
            raise self._error(f"answered {response.status}: {said}{hint if response.status == 404 else ''}")
        return response

    def _error(self, what: str) -> ValueError:
        return ValueError(f"peer openai:{self.address}#{self.model}: the server {what}")
