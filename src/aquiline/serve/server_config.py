"""Settings of the server: where it listens, who may call, how much it takes. Names are vLLM's where it has them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from aquiline.checks import check_fields
from aquiline.config import check
from aquiline.settings import setting

SERVER, LIMITS, OUTPUT = "Server", "Limits", "What replies hold"
"""Headings under which settings are listed."""

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+")
"""What browsers send as Origin."""

Detail = Literal["none", "summary", "detailed"]


@dataclass(frozen=True)
class ServerConfig:
    """How the server is reached and what its replies hold."""

    host: str = setting("127.0.0.1", "Address to listen at; 0.0.0.0 is every one of this machine.", SERVER)
    port: int = setting(8000, "Port to listen at; 0: a free one.", SERVER)
    api_key: tuple[str, ...] = setting(
        (), "Key that clients must send; repeatable. Also: AQUILINE_API_KEY. The page, /health, /ready, /version and "
        "/metrics need none.", SERVER,
    )  # fmt: skip
    allowed_origins: tuple[str, ...] = setting(
        (), "Origin whose pages may call from a browser (CORS); repeatable. Default: none.", SERVER
    )
    served_model_name: tuple[str, ...] = setting(
        (), "Name that clients call the model by; repeatable. Default: the target as given.", SERVER
    )
    drain_s: float = setting(30.0, "Seconds that running requests have once the server is told to end.", SERVER)
    stream_interval: int | None = setting(
        None, "Least tokens of a stream's event, beside its first and last. Default: 1, and a quarter of the streams "
        "that run where these are more than 4.", SERVER,
    )  # fmt: skip
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "Least level of log lines.", SERVER)
    chat_template: str | None = setting(None, "File with the chat template. Default: the target's own.", OUTPUT)
    reasoning_parser: Literal["auto", "none", "think", "harmony"] = setting(
        "auto", "How reasoning is told from the answer; auto: by <think> tags, or Harmony's channels, if the template "
        "has them.", OUTPUT,
    )  # fmt: skip
    tool_call_parser: Literal["auto", "none", "hermes", "llama3_json", "harmony", "generic"] = setting(
        "auto", "How calls of tools are read; auto: by what the template writes, generic, which describes the tools in "
        "the system message, where it writes none.", OUTPUT,
    )  # fmt: skip
    per_request_spec_decode_metrics: Detail = setting(
        "none", "Speculation's record in replies: none, summary, or detailed, step by step.", OUTPUT
    )

    def __post_init__(self) -> None:
        check_fields(self)
        check(0 <= self.port < 65536, "port", self.port, "must be in [0, 65535]")
        ok = self.stream_interval is None or self.stream_interval >= 1
        check(ok, "stream_interval", self.stream_interval, "must be at least 1 token")
        check(self.drain_s >= 0, "drain_s", self.drain_s, "must be at least 0 seconds")
        for place, key in enumerate(self.api_key, 1):  # which one, for a key is not to be shown
            ok = key != "" and key.isascii() and key.isprintable() and key == key.strip()
            fix = "can never be sent in a header; use printable ASCII without white space at its ends"
            check(ok, "api_key", f"key {place} of {len(self.api_key)}", fix)
        for origin in self.allowed_origins:
            fix = (
                "no browser sends that; use scheme://host or scheme://host:port in small letters, without a path, or *"
            )
            check(origin == "*" or ORIGIN.fullmatch(origin) is not None, "allowed_origins", origin, fix)
        check(all(self.served_model_name), "served_model_name", "", "a name must not be empty")


@dataclass(frozen=True)
class Limits:
    """Bounds of one request and of all that wait. A request beyond a bound of its own is refused with 400 or 413, one
    beyond the queue with 429."""

    max_waiting: int = setting(256, "Choices that wait for a slot at most; more are refused with 429.", LIMITS)
    max_request_s: float = setting(600.0, "Seconds that a request may take; it then ends with what it has.", LIMITS)
    max_body_bytes: int = setting(2**20, "Bytes of a request's body at most.", LIMITS)
    max_output_tokens: int | None = setting(None, "New tokens of a choice at most. Default: the context.", LIMITS)
    default_output_tokens: int = setting(
        1024, "New tokens of a chat or response that names no number; a completion has 16, as OpenAI's.", LIMITS
    )
    max_choices: int = setting(16, "Choices of a request at most: its prompts times n.", LIMITS)
    max_stop: int = setting(16, "Stop strings, stop tokens and bad words of a request at most, each.", LIMITS)
    max_stop_length: int = setting(256, "Characters of a stop string or bad word at most.", LIMITS)
    max_logit_bias: int = setting(1024, "Entries of logit_bias at most.", LIMITS)
    max_compile_s: float = setting(10.0, "Seconds that a request may wait for its grammar to be compiled.", LIMITS)
    max_stalled_s: float = setting(30.0, "Seconds that a client may take nothing of its stream.", LIMITS)
    max_stored_bytes: int = setting(64 * 2**20, "Bytes that stored responses may take; the oldest go.", LIMITS)

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("max_body_bytes", "default_output_tokens", "max_choices", "max_stop_length"):
            check(getattr(self, name) >= 1, name, getattr(self, name), "must be at least 1")
        for name in ("max_waiting", "max_stop", "max_logit_bias", "max_stored_bytes"):
            check(getattr(self, name) >= 0, name, getattr(self, name), "must be at least 0")
        ok = self.max_output_tokens is None or self.max_output_tokens >= 1
        check(ok, "max_output_tokens", self.max_output_tokens, "must be at least 1")
        for name in ("max_request_s", "max_compile_s", "max_stalled_s"):
            value = getattr(self, name)
            check(0 < value <= 1e9, name, value, "must be above 0 and at most 1e9 seconds")
