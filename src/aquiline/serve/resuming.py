"""A client's stream that outlives its server: it goes on at another one, where the text goes on as if nothing was.

The seed decides a text, and servers of one model draw the same one. So the request is sent again as it is, and the part
of the text that has come already is dropped. Needs the standard library alone.
"""

from __future__ import annotations

import itertools
import json
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from http.client import HTTPException
from typing import Any

from aquiline.errors import AquilineError

AGAIN = (429, 502, 503, 504)
"""Statuses after which the same request may be sent again."""


class StreamLost(AquilineError):
    """No server could be brought to end the text, or another server's text is not the same."""


def resumed_text(
    urls: Sequence[str], body: dict[str, Any], *, api_key: str | None = None, max_tries: int = 8, pause_s: float = 0.5
) -> Iterator[str]:
    """The pieces of one text as they come. urls: servers of one model, each tried in turn, as http://127.0.0.1:8000;
    body: of a completion, or of a chat if it has messages, whose content the text is then. Without a seed it gets one.

    Raises ValueError for a request that a server refuses, StreamLost after max_tries, with pauses of pause_s seconds
    that double."""
    if not urls:
        raise ValueError("urls=[]: there must be at least one server")
    if body.get("n", 1) != 1:
        raise ValueError(f"n={body['n']}: must be 1; ask for each text by itself, with a seed of its own")
    request = {"seed": secrets.randbelow(2**31)} | body | {"stream": True}
    num_known, known = 0, ""
    for attempt, url in zip(range(max_tries), itertools.cycle(urls), strict=False):
        if attempt:
            time.sleep(pause_s * 2 ** (attempt - 1))
        text = ""
        try:
            for piece in _pieces(url, request, api_key):
                text += piece
                shared = min(len(text), len(known))
                if text[:shared] != known[:shared]:
                    raise StreamLost(f"{url}: its text is not that of the server before; let all serve the same model")
                if len(text) > num_known:
                    yield text[num_known:]
                    num_known, known = len(text), text
            return
        except (OSError, HTTPException) as error:
            why = error
    raise StreamLost(f"{max_tries} tries have failed, the last at {url} ({why}); see whether the servers run")


def _pieces(url: str, body: dict[str, Any], api_key: str | None) -> Iterator[str]:
    """The pieces that one server sends. Raises OSError and HTTPException where the text does not come to its end, and
    ValueError where it never will."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
    request = urllib.request.Request(url.rstrip("/") + path, json.dumps(body).encode(), headers)
    try:
        reply = urllib.request.urlopen(request)
    except urllib.error.HTTPError as error:
        if error.code in AGAIN:
            raise
        raise ValueError(f"{url} refuses the request: {error.read().decode(errors='replace')}") from None
    with reply:
        for line in reply:
            if not line.startswith(b"data: ") or not line.endswith(b"\n"):  # that one was cut
                continue
            if (told := line.removeprefix(b"data: ").strip()) == b"[DONE]":
                return
            chunk = json.loads(told)
            if (failed := chunk.get("error")) is not None:
                if failed["type"] in ("service_unavailable_error", "server_error"):
                    raise ConnectionError(failed["message"])
                raise ValueError(f"{url} ends the text: {failed['message']}")
            for choice in chunk["choices"]:
                yield choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    raise ConnectionError("the stream ended before the text")
