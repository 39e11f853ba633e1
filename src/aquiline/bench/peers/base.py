"""A peer is another engine that continues the same prompts on the same weights: what it is, and how it is opened.

Each kind of peer is a module of this package and an optional dependency; the module is imported when the peer is
opened. `names` reads what the command line calls them. Knows nothing of results and tables.
"""

from __future__ import annotations

import importlib
import platform
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from aquiline.bench.results.clock import Span, decode_tokens_per_s
from aquiline.blocks import PACKED, is_packed
from aquiline.models.files import is_gguf

QUANTISED = ("int8", "int4")
"""Weights that a peer rounds when it converts the target, and aquiline when it loads it."""
KINDS = {
    "transformers": ("transformers",),
    "openvino": ("openvino", "openvino-genai"),
    "llamacpp": ("llama-cpp-python",),
    "openai": (),
}
"""Kinds of peers and the packages they need."""
FLAGS = {"transformers": ("eager",), "openvino": ("sdpa", "samekv"), "llamacpp": ("noflash", "server")}
"""Other ways to run a kind of peer. eager: transformers' plain attention. sdpa: OpenVINO without paged caches. samekv:
OpenVINO with keys and values as precise as the arithmetic, instead of its default of 8 bits. noflash: llama.cpp without
its fused attention. server: llama.cpp in its server, where all its drafting runs anyway."""


@dataclass(frozen=True)
class Place:
    """What peers run on. target and draft: checkpoints as `resolve` finds them; threads; max_context: tokens of prompt
    and output; batch: how many prompts are continued together at most."""

    target: Path
    draft: Path | None
    threads: int
    max_context: int
    batch: int = 1


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


@dataclass(frozen=True)
class Ngram:
    """llama.cpp's drafting from the text itself. kind: of names.NGRAMS; match: how many tokens must match; draft: how
    many are proposed. None takes llama.cpp's defaults."""

    kind: str
    match: int | None = None
    draft: int | None = None


@dataclass(frozen=True)
class PeerSpec:
    """A peer as it was named on the command line. dtype: None for the best dtype that the CPU has. where: a server's
    address, or a directory that already holds the converted target."""

    kind: str
    dtype: str | None = None
    lookup: int | None = None
    eagle: int | None = None
    ngram: Ngram | None = None
    flags: tuple[str, ...] = ()
    where: str | None = None
    options: tuple[str, ...] = field(default=(), compare=False)

    @property
    def label(self) -> str:
        """The name in tables."""
        return " ".join((self.kind, *self.options)) if self.kind != "openai" else f"openai {self.where}"

    @property
    def model(self) -> str:
        """A name for the converted weights. Settings of one kind share them, and so share the check of outputs."""
        if self.dtype == PACKED:
            return f"{self.kind} {PACKED}"
        return self.kind if self.where is None else f"{self.kind} {Path(self.where).name}"

    @property
    def is_speculative(self) -> bool:
        """Whether the peer drafts. A server may draft without its name saying so."""
        return self.lookup is not None or self.eagle is not None or self.ngram is not None

    @property
    def num_spec_tokens(self) -> int | None:
        """Tokens that a step proposes at most; None if the name does not say."""
        return self.lookup or self.eagle or (self.ngram.draft if self.ngram is not None else None)

    @property
    def plain(self) -> PeerSpec:
        """The setting whose outputs are checked: the same engine and model in float32, or on the packed file, without
        drafts, with the attention that rounds least.

        llama.cpp's fused attention changes float32 logits by some thousandths, enough to decide a near tie."""
        flags = tuple(flag for flag in FLAGS.get(self.kind, ()) if flag in ("samekv", "noflash"))
        dtype = PACKED if self.dtype == PACKED else "float32"
        return replace(self, dtype=dtype, lookup=None, eagle=None, ngram=None, flags=flags)

    @property
    def is_served(self) -> bool:
        """Whether another process runs the peer. The memory of this process then says nothing about the peer's."""
        return self.kind == "openai" or (self.kind == "llamacpp" and (self.is_speculative or "server" in self.flags))

    def check_target(self, target: Path) -> None:
        """Raise ValueError for packed weights of a target that has none."""
        if self.dtype == PACKED and not is_gguf(target):
            raise ValueError(
                f"peer {self.label}: runs a GGUF file as it is, and the target is {target.name}; name a .gguf file by "
                f"--target, or choose one of {', '.join(QUANTISED)}, bfloat16 and float32, which are converted"
            )

    def open(self, place: Place) -> Peer:
        """Load the model into the engine, after converting it if necessary.

        Raises ValueError naming the package to install, or the setting that this CPU, engine or target does not
        have."""
        self.check_target(place.target)
        for package in KINDS[self.kind]:
            require(self.kind, package)
        module = importlib.import_module(f"aquiline.bench.peers.{self.kind}")
        factory: Callable[[PeerSpec, Place], Peer] = module.open_peer
        return factory(self, place)


def is_rounded(weights: str) -> bool:
    """Whether weights, as a result names their storage, have fewer than 16 bits each."""
    return weights in QUANTISED or is_packed(weights)


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


def versions(*packages: str) -> dict[str, object]:
    """Installed versions by package."""
    found: dict[str, object] = {package: version(package) for package in packages}
    return found | {"python": platform.python_version()}
