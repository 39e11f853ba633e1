"""How much the server takes: sizes of what a request brings, requests at a time, keys."""

from __future__ import annotations

import hmac
import math
from collections.abc import Sequence

from aquiline.serve.config import Limits
from aquiline.serve.errors import ApiError, bad_request, draining
from aquiline.serve.protocol import Sampling


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


def _check_number(name: str, items: Sequence[object], most: int) -> None:
    if len(items) > most:
        raise bad_request(f"{name}: {len(items)} entries; at most {most} are allowed", name)


class Gate:
    """Lets choices in while there is room: those that run and max_waiting more. It also guesses when room comes back
    from how long choices took of late."""

    def __init__(self, num_slots: int, max_waiting: int) -> None:
        self.num_slots, self.limit = num_slots, num_slots + max_waiting
        self.num_inside = 0
        self.is_closed = False
        self._mean_s = 1.0

    def enter(self, num_choices: int) -> None:
        """Take the room of a request. Raises ApiError: 429 while there is not enough, 503 while the server drains."""
        if self.is_closed:
            raise draining()
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
