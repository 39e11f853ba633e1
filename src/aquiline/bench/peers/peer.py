"""A peer is another engine that continues the same prompts on the same weights: the protocol of every peer.

Each kind of peer is a module of this package and an optional dependency. Knows nothing of names, results and tables.
"""

from __future__ import annotations

import importlib
import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPResponse
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol
from urllib.request import ProxyHandler, Request, build_opener

from aquiline.bench.results.intervals import Span
from aquiline.models.load import open_tensors

BENCHMARKS = Path(__file__).parents[4] / "benchmarks"
"""The folder that holds the conversions. A source checkout has it, an installed wheel does not."""
ANSWER_S = 600.0
"""The most seconds that a server may stay silent."""


@dataclass(frozen=True)
class PeerSetup:
    """What peers run on. target and draft: checkpoints as `resolve` finds them; threads; max_context: tokens of prompt
    and output; batch: how many prompts are continued together at most."""

    target: Path
    draft: Path | None
    threads: int
    max_context: int
    batch: int = 1


@dataclass(frozen=True)
class PeerOutput(Span):
    """One continued prompt, timed from its request. token_ids: empty if a server does not return ids; `text` is then
    its answer. num_steps: forwards after the first; num_draft_tokens: tokens proposed to them; both 0 if they are not
    known."""

    token_ids: list[int]
    num_steps: int = 0
    num_draft_tokens: int = 0
    text: str | None = None


class Peer(Protocol):
    """An engine that holds the model. `dtype` is the arithmetic it runs in, or int8, int4 or packed for rounded
    weights."""

    dtype: str

    def generate(self, prompts: list[list[int]], new_tokens: int, temperature: float) -> list[PeerOutput]:
        """Continue prompts of one length together by exactly new_tokens each, past end tokens; at most as many prompts
        as the peer was opened for. Nothing is cached between calls.

        Raises ValueError for settings that the engine does not have."""

    def system(self) -> dict[str, object]:
        """Versions and settings that are needed to repeat the run elsewhere."""

    def close(self) -> None:
        """Free the model."""


def request_json(url: str, body: Mapping[str, object] | None = None) -> HTTPResponse:
    """Send a body as JSON by POST, or GET without one, past all proxies. The response may be streamed.

    Raises HTTPError for an error status, and OSError or HTTPException if there is no answer."""
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data, {"Content-Type": "application/json"})
    response: HTTPResponse = build_opener(ProxyHandler({})).open(request, timeout=ANSWER_S)
    return response


def conversion(module: str, setting: str) -> Any:
    """A module of `benchmarks/conversions`, which writes checkpoints for other engines.

    setting: the field and value that need it. Raises ValueError naming them where there is no source checkout."""
    if not (BENCHMARKS / "conversions" / f"{module}.py").is_file():
        raise ValueError(
            f"{setting}: needs benchmarks/conversions/{module}.py, which only a source checkout of aquiline has; run "
            "`pip install -e .` in a checkout, or compare on a checkpoint of your own (--target) with peers that need "
            "no conversion: transformers, llamacpp:packed, openvino:DIR/ or openai:URL#MODEL"
        )
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return importlib.import_module(f"conversions.{module}")


def versions(*packages: str) -> dict[str, object]:
    """Installed versions by package."""
    found: dict[str, object] = {package: version(package) for package in packages}
    return found | {"python": platform.python_version()}


def stored_dtype(checkpoint: Path) -> str:
    """The dtype to load a checkpoint in without rounding: bfloat16 if all its weights are bfloat16, else float32."""
    tensors = open_tensors(checkpoint)
    kinds = {tensors.dtype(name) for name in tensors.names} & set(tensors.readable)
    return "bfloat16" if kinds <= {"BF16", "bfloat16"} else "float32"
