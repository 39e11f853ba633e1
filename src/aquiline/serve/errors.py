"""Errors as OpenAI's clients expect them: a status, and an object with message, type, param and code."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from aquiline.errors import NumericalError, OutOfPages
from aquiline.serve.client import EngineDown

TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error",
    408: "timeout_error", 413: "invalid_request_error", 429: "rate_limit_error", 500: "server_error",
    503: "service_unavailable_error",
}  # fmt: skip

MAX_MESSAGE = 1000
"""Characters of a message or a field's name at most. Many of them repeat what the client sent."""

_FIELD = re.compile(r"^(?:request \d+: )?(\w+)(?==| )")


class ApiError(Exception):
    """What is wrong with a request. param: the field that is; headers: of the reply."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.param = message[:MAX_MESSAGE], param and param[:MAX_MESSAGE]
        self.status, self.code = status, code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The JSON of the reply, and of an error inside a stream."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None) -> ApiError:
    """A request that cannot work."""
    return ApiError(400, message, param)


def as_api_error(error: Exception) -> ApiError:
    """What an error of the engine means for the client who caused or met it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDown):
        return ApiError(503, str(error), code="engine_restarting", headers={"retry-after": "2"})
    if isinstance(error, NumericalError):
        return ApiError(500, str(error), code="bad_logits")
    if isinstance(error, ValueError | OutOfPages):
        message = re.sub(r"^request \d+: ", "", str(error))
        found = _FIELD.match(message)
        return bad_request(message, found[1] if found and f"{found[1]}=" in message else None)
    raise error


def validation_error(errors: Iterable[Any]) -> ApiError:
    """What pydantic found wrong in a body, the first of it."""
    first = next(iter(errors))
    place = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return bad_request(f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    name = ".".join(place) or None
    return bad_request(f"{name or 'body'}: {first['msg']}", name)
