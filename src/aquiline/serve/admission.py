"""How much the server takes: sizes of what a request brings, requests at a time, keys."""

from __future__ import annotations

import codecs
import hmac
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from aquiline.checks import parse_json
from aquiline.engine.sequence import Request
from aquiline.serve.api_errors import ApiError, bad_request, draining
from aquiline.serve.protocol import Sampling
from aquiline.serve.server_config import Limits

MAX_PARTS = 2**15
"""Lists, objects, fields, decimals and booleans in a client's JSON. Python takes much longer for each of them than for
the texts and token ids that long requests consist of, and for most of them up to a hundred times their bytes."""

MAX_ENTRIES = 2**15
"""Log-probabilities and sources of tokens in a reply that is sent whole: they are held up to its end, then written."""

_STRING = re.compile(rb'"[^"\\]*+(?:\\.?[^"\\]*+)*+(?:"|\Z)', re.DOTALL)


def read_json(text: bytes) -> Any:
    """What a client's JSON says. Raises ValueError for what is no JSON, and for more than MAX_PARTS parts: these are
    counted before any of them is made."""
    if _num_parts(text) > MAX_PARTS and (num_parts := _num_parts(_STRING.sub(b"", text))) > MAX_PARTS:
        raise ValueError(f"{num_parts} lists, objects, fields, decimals and booleans; at most {MAX_PARTS} are allowed")
    return parse_json(text.removeprefix(codecs.BOM_UTF8), is_strict=True)


def _num_parts(text: bytes) -> int:
    return sum(map(text.count, (b"[", b"{", b":", b".", b"e", b"E")))


def check_sizes(request: Sampling, limits: Limits) -> None:
    """Raises ApiError naming the first field of a request that is too large."""
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    for name, items in (("stop", stop), ("bad_words", request.bad_words or [])):
        _check_number(name, items, limits.max_stop)
        longest = max(map(len, items), default=0)
        if longest > limits.max_stop_length:
            raise bad_request(f"{name}: {longest} characters; at most {limits.max_stop_length} are allowed", name)
    _check_number("stop_token_ids", request.stop_token_ids or [], limits.max_stop)
    _check_number("logit_bias", list(request.logit_bias or {}), limits.max_logit_bias)


def check_choices(num_prompts: int, n: int, limits: Limits) -> None:
    """Raises ApiError where n choices for each of the prompts are too many."""
    if num_prompts * n > limits.max_choices:
        message = f"{num_prompts} prompts with n={n}: at most {limits.max_choices} choices are allowed"
        raise bad_request(message, "n")


def check_entries(choices: Iterable[Request], has_sources: bool) -> None:
    """Raises ApiError where a reply that is sent whole would hold too much beside its text."""
    num_entries = 0
    for choice in choices:
        num_prompt, sampling = len(choice.prompt_ids), choice.sampling
        each = has_sources + (0 if sampling.logprobs is None else 1 + sampling.logprobs)
        num_entries += sampling.max_tokens * each
        num_entries += num_prompt * (0 if sampling.prompt_logprobs is None else 1 + sampling.prompt_logprobs)
    if num_entries > MAX_ENTRIES:
        raise bad_request(
            f"max_tokens: the reply may need {num_entries} log-probabilities and sources of tokens, and at most "
            f"{MAX_ENTRIES} are sent in one piece; lower max_tokens, n, logprobs or prompt_logprobs, or stream",
            "max_tokens",
        )  # fmt: skip


def _check_number(name: str, items: Sequence[object], most: int) -> None:
    if len(items) > most:
        raise bad_request(f"{name}: {len(items)} entries; at most {most} are allowed", name)


class Admission:
    """Lets choices in while there is room: those that run and max_waiting more. It also guesses when room comes back
    from how long choices took of late."""

    def __init__(self, num_slots: int, max_waiting: int) -> None:
        self.num_slots, self.limit = num_slots, num_slots + max_waiting
        self.num_inside = 0
        self.is_closed = False
        self._mean_s = 1.0

    def enter(self, num_choices: int) -> None:
        """Take the room of a request. Raises ApiError: 429 while there is not enough, 503 while the server drains, 400
        where there never will be."""
        if self.is_closed:
            raise draining()
        if num_choices > self.limit:
            raise bad_request(
                f"n: {num_choices} choices never run and wait together, {self.limit} do; ask for fewer", "n"
            )
        if self.num_inside + num_choices > self.limit:
            seconds = min(60, math.ceil(self._mean_s * max(1, self.num_inside - self.num_slots) / self.num_slots))
            raise ApiError(
                429, f"{self.num_inside} choices run or wait, and {self.limit} may; send the request again later",
                code="queue_full", headers={"retry-after": str(max(1, seconds))},
            )  # fmt: skip
        self.num_inside += num_choices

    def leave(self, num_choices: int, took_s: float) -> None:
        """Give the room back."""
        self.num_inside -= num_choices
        self._mean_s += 0.1 * (took_s - self._mean_s)


def has_key(authorization: str | None, keys: tuple[str, ...]) -> bool:
    """Whether an Authorization header holds one of the keys. Takes as long whichever it is, or none."""
    scheme, _, given = (authorization or "").partition(" ")
    found = [hmac.compare_digest(given.strip().encode(), key.encode()) for key in keys]
    return scheme.lower() == "bearer" and any(found)
