"""Log lines of the server: one JSON object each, on stderr. A line about a request has its id."""

from __future__ import annotations

import json
import logging
import time
from contextvars import ContextVar
from typing import Any

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the HTTP request that the current task serves."""

LOGGER = logging.getLogger("aquiline.serve")


class JsonLines(logging.Formatter):
    """A record as one line of JSON: time, level, message and the fields that its caller gave."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line: dict[str, Any] = {"time": stamp, "level": record.levelname.lower(), "message": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log(message: str, *, level: str = "info", **fields: Any) -> None:
    """Write a line."""
    if (request_id := REQUEST_ID.get()) is not None:
        fields = {"request_id": request_id} | fields
    LOGGER.log(logging.getLevelNamesMapping()[level.upper()], message, extra={"fields": fields})


def set_up(level: str) -> None:
    """Write the server's lines and uvicorn's to stderr from `level` on."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    for name in ("aquiline.serve", "uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())
    logging.getLogger("uvicorn").propagate = False
    logging.getLogger("uvicorn.error").handlers = []
    logging.getLogger("uvicorn.error").propagate = True
