"""What a peer is: another engine that continues the same prompts on the same weights; how one is named and opened.

A peer is named on the command line as `kind[:option]...`; each kind is a module of this package and an optional
dependency, and the module is imported when the peer is opened. Knows nothing of results and tables.
"""

from __future__ import annotations

import importlib
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

DTYPES = {
    "float32": "float32", "f32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16", "int8": "int8", "q8_0": "int8",
    "int4": "int4", "q4_0": "int4",
}  # fmt: skip
QUANTISED = ("int8", "int4")
QUANTISED_BY = {"openvino": ("int8",), "llamacpp": ("int8", "int4")}
"""Rounded weights that a kind can run."""
KINDS = {
    "transformers": ("transformers",),
    "openvino": ("openvino", "openvino-genai"),
    "llamacpp": ("llama-cpp-python",),
    "openai": (),
}
"""Kinds of peers and the packages they need."""
NUMBERED = {"lookup": 4, "eagle": 3}
"""Options with a count, and its default: tokens a step proposes by prompt lookup, or with the draft."""
EAGLE = ("openvino", "llamacpp")
"""Kinds that draft with an EAGLE-3 head."""
FLAGS = {"transformers": ("eager",), "openvino": ("sdpa",), "llamacpp": ("flash",)}
"""Other ways a kind can run its attention: transformers' plain one, OpenVINO's without paged caches, llama.cpp's fused
one."""

ALL_PEERS = (
    "transformers", "transformers:lookup", "openvino", "openvino:sdpa", "openvino:lookup", "openvino:eagle",
    "openvino:int8", "llamacpp", "llamacpp:lookup", "llamacpp:eagle", "llamacpp:int8", "llamacpp:int4",
)  # fmt: skip
"""What is compared when nothing is named, in the best dtype of each; eagle is left out where there is no draft."""


@dataclass(frozen=True)
class Place:
    """What peers run on: checkpoints as `resolve` finds them (draft: None without one), threads, tokens of prompt and
    output, and how many prompts are continued together at most."""

    target: Path
    draft: Path | None
    threads: int
    max_context: int
    batch: int = 1


@dataclass(frozen=True)
class PeerOutput:
    """One continued prompt. num_tokens is what was made; token_ids is empty where a server does not tell, and `text` is
    then what it said. arrivals_ms: when tokens came, since the request: one entry per delivery of one token or more.
    num_steps and num_draft_tokens: forwards after the first and what was proposed to them; 0 where nobody knows."""

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
        """Time to the last one."""
        return self.arrivals_ms[-1]


@dataclass(frozen=True)
class PeerRun:
    """Prompts continued at once, in their order."""

    outputs: list[PeerOutput]

    @property
    def decode_s(self) -> float:
        """From the first of all tokens to the last: the prompts' time is outside, as far as they ran together."""
        return (max(o.total_ms for o in self.outputs) - min(o.ttft_ms for o in self.outputs)) / 1e3

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after each prompt's first per second of decoding."""
        return sum(o.num_tokens - 1 for o in self.outputs) / self.decode_s


class Peer(Protocol):
    """An engine that holds the model. `dtype` is the arithmetic it runs in, or int8 or int4 for rounded weights."""

    dtype: str

    def generate(self, prompts: list[list[int]], new_tokens: int, temperature: float) -> PeerRun:
        """Continue prompts of one length at once by exactly new_tokens each, past EOS; nothing is kept between calls.

        Raises ValueError for what the engine cannot do."""

    def system(self) -> dict[str, object]:
        """Versions and settings a stranger needs to repeat the run."""

    def close(self) -> None:
        """Free the model."""


@dataclass(frozen=True)
class PeerSpec:
    """A peer as it was named. dtype None: the best of what the CPU has. `where` is a server's address, or a directory
    that already holds the converted target."""

    kind: str
    dtype: str | None = None
    lookup: int | None = None
    eagle: int | None = None
    flags: tuple[str, ...] = ()
    where: str | None = None
    options: tuple[str, ...] = field(default=(), compare=False)

    @property
    def label(self) -> str:
        """The name in tables."""
        return " ".join((self.kind, *self.options)) if self.kind != "openai" else f"openai {self.where}"

    @property
    def model(self) -> str:
        """What holds the weights: settings of one kind share a conversion, and so its check."""
        return self.kind if self.where is None else f"{self.kind} {Path(self.where).name}"

    @property
    def is_speculative(self) -> bool:
        """Whether it drafts, as far as its name says."""
        return self.lookup is not None or self.eagle is not None

    @property
    def is_served(self) -> bool:
        """Whether a process of its own runs it: the memory of this one says nothing of it."""
        return self.kind == "openai" or (self.kind == "llamacpp" and self.eagle is not None)

    def open(self, place: Place) -> Peer:
        """Load the model into the engine, converted if need be.

        Raises ValueError naming the package to install, or the setting this CPU or engine does not have."""
        for package in KINDS[self.kind]:
            require(self.kind, package)
        module = importlib.import_module(f"aquiline.bench.peers.{self.kind}")
        factory: Callable[[PeerSpec, Place], Peer] = module.open_peer
        return factory(self, place)


def parse_peer(text: str) -> PeerSpec:
    """A peer from `openai:http://HOST:PORT/v1#MODEL`, or from `transformers`, `openvino` or `llamacpp` with options
    behind colons: a dtype, `lookup` or `lookup=K`, for the last two also `eagle` or `eagle=K`, a way to run attention
    (FLAGS), for openvino a directory.

    Raises ValueError naming what is wrong and what is known."""
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise ValueError(f"peer={text!r}: must begin with one of {', '.join(KINDS)}")
    if kind == "openai":
        address, _, model = rest.partition("#")
        if not address.startswith(("http://", "https://")) or not model:
            raise ValueError(f"peer={text!r}: must be openai:http://HOST:PORT/v1#MODEL")
        return PeerSpec(kind, where=rest)
    options = [part for part in rest.split(":") if part]
    fields: dict[str, Any] = {"options": tuple(Path(o).name if "/" in o else o for o in options)}
    for option in options:
        for name, value in _field(text, kind, option).items():
            if name in fields:
                raise ValueError(f"peer={text!r}: says {name} twice")
            fields[name] = value
    spec = PeerSpec(kind, **fields)
    if spec.lookup is not None and spec.eagle is not None:
        raise ValueError(f"peer={text!r}: lookup and eagle are two ways to draft; choose one")
    return spec


def _field(text: str, kind: str, option: str) -> dict[str, object]:
    """The field of a PeerSpec that one option sets."""
    name, _, value = option.partition("=")
    if option in DTYPES:
        if DTYPES[option] in QUANTISED and DTYPES[option] not in QUANTISED_BY.get(kind, ()):
            raise ValueError(f"peer={text!r}: {kind} runs no {DTYPES[option]} weights here; choose float32 or bfloat16")
        return {"dtype": DTYPES[option]}
    if name in NUMBERED and (name != "eagle" or kind in EAGLE):
        count = int(value) if value.isdigit() else 0 if value else NUMBERED[name]
        if not 1 <= count <= 16:
            raise ValueError(f"peer={text!r}: {name} must be 1 to 16 tokens")
        return {name: count}
    if option in FLAGS.get(kind, ()):
        return {"flags": (option,)}
    if kind == "openvino" and "/" in option:
        return {"where": option}
    known = [*DTYPES, "lookup", "lookup=K", *(["eagle", "eagle=K"] if kind in EAGLE else [])]
    known += ["DIR/"] if kind == "openvino" else []
    raise ValueError(
        f"peer={text!r}: unknown option {option!r}; {kind} has {', '.join([*known, *FLAGS.get(kind, ())])}"
    )


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
    """A module of an optional package, which type checkers cannot see everywhere."""
    return importlib.import_module(module)


def versions(*packages: str) -> dict[str, object]:
    """Installed versions by package."""
    found: dict[str, object] = {package: version(package) for package in packages}
    return found | {"python": platform.python_version()}
