"""Errors as OpenAI's clients expect them: a status, and an object with message, type, param and code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from aquiline.engine.constraint import TOO_SLOW
from aquiline.errors import NumericalError, OutOfPages
from aquiline.serve.client import EngineDown, ServerEnding

TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error",
    408: "timeout_error", 413: "invalid_request_error", 429: "rate_limit_error", 500: "server_error",
    503: "service_unavailable_error",
}  # fmt: skip

_KIND = re.compile(r"(str|int|float|bool|dict|list)$|\w+\[|\w+-\w+")
"""Parts of a place in a body that pydantic adds where a field may be of several kinds."""
MAX_MESSAGE = 1000
"""Characters of a message or a field's name at most. Many of them repeat what the client sent."""

_FIELD = re.compile(r"^(?:request \d+: )?(\w+)(?==| )")


class ApiError(Exception):
    """What is wrong with a request. param: the field of the body that is, or a place inside that field; headers: of the
    reply."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message[:MAX_MESSAGE], code
        self.param = None if param is None else param.partition(".")[0][:MAX_MESSAGE]
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The JSON of the reply, and of an error inside a stream."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None) -> ApiError:
    """A request that cannot work."""
    return ApiError(400, message, param)


def draining() -> ApiError:
    """The server takes nothing new, or has no more time for what it took."""
    return ApiError(503, "the server is ending; send the request to another", code="draining")


def context_error(longest: int, num_prompt: int, num_new: int, field: str, field_of_number: str) -> ApiError:
    """A prompt and its output that are longer than the context, in the words by which clients know that: they cut the
    prompt and ask again, or go to another model. field: what holds the prompt, and field_of_number the length."""
    message = (
        f"This model's maximum context length is {longest} tokens. However, you requested {num_prompt + num_new} "
        f"tokens ({num_prompt} in the {field}, {num_new} in the completion). Please reduce the length of the {field} "
        "or completion."
    )
    param = field if num_prompt >= longest else field_of_number
    return ApiError(400, message, param, "context_length_exceeded")


@contextmanager
def in_words_of(names: Mapping[str, str]) -> Iterator[None]:
    """Errors inside, about fields as the client called them: names has what ours are there."""
    try:
        yield
    except ApiError as error:
        message, param = error.message, error.param
        for ours, theirs in names.items():
            message = re.sub(rf"\b{ours}(\.\d+)?(?=[=:.])", theirs, message)
            param = theirs if param == ours else param
        raise ApiError(error.status, message, param, error.code, error.headers) from None


def as_api_error(error: Exception) -> ApiError:
    """What an error of the engine means for the client who caused or met it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ServerEnding):
        return draining()
    if isinstance(error, EngineDown):
        return ApiError(503, str(error), code="engine_restarting", headers={"retry-after": "2"})
    message = re.sub(r"^request \d+: ", "", str(error))
    if isinstance(error, NumericalError):
        return bad_request(message) if TOO_SLOW in message else ApiError(500, str(error), code="bad_logits")
    if isinstance(error, ValueError | OutOfPages):
        found = _FIELD.match(message)
        return bad_request(message, found[1] if found and f"{found[1]}=" in message else None)
    raise error


def validation_error(errors: Iterable[Any]) -> ApiError:
    """What pydantic found wrong in a body, the first of it."""
    first = next(iter(errors))
    place = [str(part) for part in first["loc"] if part != "body" and not _KIND.match(str(part))]
    if first["type"] == "json_invalid":
        return bad_request(f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    name = ".".join(place) or None
    return bad_request(f"{name or 'body'}: {first['msg']}", name)
