"""A peer is another engine that continues the same prompts on the same weights: the protocol of every peer.

Each kind of peer is a module of this package and an optional dependency. Knows nothing of names, results and tables.
"""

from __future__ import annotations

import importlib
import platform
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from aquiline.bench.results.clock import Span, decode_tokens_per_s
from aquiline.models.load import open_tensors

BENCHMARKS = Path(__file__).parents[4] / "benchmarks"
"""The folder that holds the conversions. A source checkout has it, an installed wheel does not."""


@dataclass(frozen=True)
class PeerSetup:
    """What peers run on. target and draft: checkpoints as `resolve` finds them; threads; max_context: tokens of prompt
    and output; batch: how many prompts are continued together at most."""

    target: Path
    draft: Path | None
    threads: int
    max_context: int
    batch: int = 1

    def draft_for(self, label: str) -> Path:
        """The draft that a peer needs. Raises ValueError if there is none."""
        if self.draft is None:
            raise ValueError(f"peer {label}: drafts with an EAGLE-3 head and none is given; pass --draft")
        return self.draft


@dataclass(frozen=True)
class PeerOutput:
    """One continued prompt. num_tokens: output tokens. token_ids: empty if a server does not return ids; `text` is then
    its answer. arrivals_ms: the time from the request to each delivery of one token or more. num_steps: forwards after
    the first; num_draft_tokens: tokens proposed to them; both 0 if they are not known."""

    num_tokens: int
    token_ids: list[int]
    arrivals_ms: list[float]
    text: str | None = None
    num_steps: int = 0
    num_draft_tokens: int = 0

    @property
    def ttft_ms(self) -> float:
        """Time to the first token."""
        return self.arrivals_ms[0]

    @property
    def total_ms(self) -> float:
        """Time to the last token."""
        return self.arrivals_ms[-1]


@dataclass(frozen=True)
class PeerRun:
    """Prompts that were continued together. outputs: in the order of the prompts."""

    outputs: list[PeerOutput]

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after each prompt's first per second of decoding, by the wall clock."""
        return decode_tokens_per_s([Span(o.num_tokens, o.ttft_ms, o.total_ms) for o in self.outputs])


class Peer(Protocol):
    """An engine that holds the model. `dtype` is the arithmetic it runs in, or int8, int4 or packed for rounded
    weights."""

    dtype: str

    def generate(self, prompts: list[list[int]], new_tokens: int, temperature: float) -> PeerRun:
        """Continue prompts of one length together by exactly new_tokens each, past end tokens. Nothing is cached
        between calls.

        Raises ValueError for settings that the engine does not have."""

    def system(self) -> dict[str, object]:
        """Versions and settings that are needed to repeat the run elsewhere."""

    def close(self) -> None:
        """Free the model."""


def check_batch(label: str, prompts: list[list[int]], batch: int) -> None:
    """Raise ValueError for more prompts than a peer was opened for."""
    if len(prompts) > batch:
        room = "runs one prompt at a time" if batch == 1 else f"was opened for {batch} prompts"
        raise ValueError(f"peer {label}: {room}, {len(prompts)} given")


def require(kind: str, package: str) -> None:
    """Raise ValueError if a package that a kind of peer needs is not installed, saying how to get it."""
    try:
        version(package)
    except PackageNotFoundError:
        raise ValueError(
            f"peer={kind!r}: needs the package {package}, which is not installed; pip install {package}, or "
            "'aquiline[peers]' for all peers"
        ) from None


def library(module: str) -> Any:
    """A module of an optional package, as Any, since type checkers may run without the package."""
    return importlib.import_module(module)


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
