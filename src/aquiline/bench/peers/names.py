"""Peers as they are named on the command line, `kind[:option]...`, and the peers that are compared if none is named.

A new peer is a module of this package with `open_peer`, and an entry of KINDS.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from aquiline.bench.peers.peer import Peer, PeerSetup
from aquiline.blocks import PACKED, is_packed
from aquiline.config import MAX_CHAIN, check
from aquiline.models.files import is_gguf

QUANTISED = ("int8", "int4")
"""Weights that a peer rounds when it converts the target, and aquiline when it loads it."""
DTYPES = {
    "float32": "float32", "f32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16", "int8": "int8", "q8_0": "int8",
    "int4": "int4", "q4_0": "int4", PACKED: PACKED,
}  # fmt: skip
"""Storages of weights by the options that name them. packed: the target's GGUF file as it is."""
NGRAMS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
"""llama.cpp's ways to draft from the text itself, as its server's --spec-type names them."""
SIZES = {"lookup": "K", "eagle": "K"} | dict.fromkeys(NGRAMS, "NxK") | {"ngram-cache": ""}
"""The sizes that each way to draft takes: match N tokens, propose K. ngram-cache, lookup decoding, has fixed ones."""
DEFAULT_LENGTHS = {"lookup": 4, "eagle": 3}
MAX_NGRAM = 64


class PeerKind(NamedTuple):
    """A kind of peer. packages: those it needs; rounded: the rounded weights that it can run; drafters: its ways to
    draft; flags: other ways to run it; exact_flags: the flags with which it rounds least."""

    packages: tuple[str, ...] = ()
    rounded: tuple[str, ...] = ()
    drafters: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    exact_flags: tuple[str, ...] = ()


KINDS = {
    "transformers": PeerKind(("transformers",), drafters=("lookup",), flags=("eager",)),
    "openvino": PeerKind(
        ("openvino", "openvino-genai"), ("int8",), ("lookup", "eagle"), ("sdpa", "samekv"), exact_flags=("samekv",)
    ),
    # llama.cpp's fused attention changes float32 logits by some thousandths, enough to decide a near tie.
    "llamacpp": PeerKind(
        ("llama-cpp-python",), (*QUANTISED, PACKED), ("eagle", *NGRAMS), ("noflash", "server"), exact_flags=("noflash",)
    ),
    "openai": PeerKind(),
}
"""Kinds of peers by name. Their flags: eager is transformers' plain attention; sdpa is OpenVINO without paged caches;
samekv is OpenVINO with keys and values as precise as the arithmetic, instead of its default of 8 bits; noflash is
llama.cpp without its fused attention; server is llama.cpp in its server, where all its drafting runs anyway."""

_LLAMACPP = (
    "", ":noflash", ":server", ":eagle", ":eagle:noflash", ":ngram-simple", ":ngram-simple=3x8", ":ngram-map-k=3x8",
    ":ngram-map-k4v=3x8", ":ngram-mod=3x8", ":ngram-cache",
)  # fmt: skip
ALL_PEERS = (
    "transformers", "transformers:lookup", "transformers:lookup=10",
    "openvino", "openvino:samekv", "openvino:sdpa", "openvino:int8", "openvino:lookup", "openvino:lookup=10",
    "openvino:eagle", "openvino:eagle:samekv",
    *(f"llamacpp{options}" for options in (*_LLAMACPP, ":int8", ":int8:noflash", ":int4", ":int4:noflash")),
)  # fmt: skip
"""The peers that are compared if none is named, each in its best dtype, except those that have an `obstacle`."""
PACKED_PEERS = tuple(f"llamacpp:{PACKED}{options}" for options in _LLAMACPP)
"""The peers that are compared too if the target is a GGUF file whose blocks we run as they are."""


@dataclass(frozen=True)
class PeerSpec:
    """A peer as it was named on the command line. dtype: None for the best dtype that the CPU has. drafter: its way to
    draft, of its kind's. num_spec_tokens: how many tokens a step proposes at most, match: how many tokens an n-gram
    must match; both None for the engine's defaults. where: a server's address, or a directory that already holds the
    converted target. label: the name in tables, without paths."""

    kind: str
    dtype: str | None = None
    drafter: str | None = None
    num_spec_tokens: int | None = None
    match: int | None = None
    flags: tuple[str, ...] = ()
    where: str | None = None
    label: str = field(default="", compare=False)

    @property
    def model(self) -> str:
        """A name for the converted weights. All settings with these weights share one check of outputs."""
        if self.dtype == PACKED:
            return f"{self.kind} {PACKED}"
        return self.kind if self.where is None else f"{self.kind} {Path(self.where).name}"

    @property
    def is_speculative(self) -> bool:
        """Whether the peer drafts. A server may draft without its name saying so."""
        return self.drafter is not None

    @property
    def plain(self) -> PeerSpec:
        """The setting whose outputs are checked: the same engine and model in float32, or on the packed file, without
        drafts, with the flags with which it rounds least."""
        dtype = PACKED if self.dtype == PACKED else "float32"
        return PeerSpec(self.kind, dtype, flags=KINDS[self.kind].exact_flags, where=self.where, label=self.label)

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

    def obstacle(self, has_draft: bool, batch: int) -> str:
        """Why the peer cannot run without a draft or with several prompts together; empty if it can."""
        if self.drafter == "eagle" and not has_draft and self.kind != "openai":
            return "drafts with an EAGLE-3 head and none is given; pass --draft"
        is_single = self.is_speculative if self.kind == "transformers" else self.kind == "llamacpp" and self.is_served
        return f"runs one prompt at a time here; {batch} given" if batch > 1 and is_single else ""

    def open(self, setup: PeerSetup) -> Peer:
        """Load the model into the engine, after converting it if necessary.

        Raises ValueError naming the package to install, or the setting that this CPU, engine or target does not
        have."""
        self.check_target(setup.target)
        if obstacle := self.obstacle(setup.draft is not None, setup.batch):
            raise ValueError(f"peer {self.label}: {obstacle}")
        try:
            for package in KINDS[self.kind].packages:
                version(package)
        except PackageNotFoundError as missing:
            raise ValueError(
                f"peer={self.kind!r}: needs the package {missing.name}, which is not installed; pip install "
                f"{missing.name}, or 'aquiline[peers]' for all peers"
            ) from None
        peer: Peer = importlib.import_module(f"aquiline.bench.peers.{self.kind}").open_peer(self, setup)
        return peer


def is_rounded(weights: str) -> bool:
    """Whether weights, as a result names their storage, have fewer than 16 bits each."""
    return weights in QUANTISED or is_packed(weights)


def parse_peer(text: str) -> PeerSpec:
    """A peer from its name: `openai:http://HOST:PORT/v1#MODEL`, or `transformers`, `openvino` or `llamacpp` with
    options after colons: a dtype, a way to draft with or without its SIZES, flags, and for openvino a directory.

    `openai:eagle=K:http://...` says that the server drafts K tokens a step with an EAGLE-3 head.

    Raises ValueError naming what is wrong and what is known."""
    kind, _, rest = text.partition(":")
    check(kind in KINDS, "peer", text, f"must begin with one of {', '.join(KINDS)}")
    if kind == "openai":
        address = re.fullmatch(r"(?:eagle=(\d{1,2}):)?(https?://[^#]+#.+)", rest)
        length = int(address[1]) if address and address[1] else None
        if not address or (length is not None and not 1 <= length <= MAX_CHAIN):
            form = f"openai:[eagle=K:]http://HOST:PORT/v1#MODEL, K from 1 to {MAX_CHAIN}"
            raise ValueError(f"peer={text!r}: must be {form}")
        label, drafter = f"openai {rest.replace(':', ' ', 1) if length else rest}", "eagle" if length else None
        return PeerSpec(kind, drafter=drafter, num_spec_tokens=length, where=address[2], label=label)
    options = [part for part in rest.split(":") if part]
    fields: dict[str, Any] = {}
    for option in options:
        found = _fields(text, kind, option)
        if twice := fields.keys() & found.keys():
            raise ValueError(f"peer={text!r}: says {min(twice)} twice; choose one")
        fields |= found
    flags = tuple(flag for flag in KINDS[kind].flags if fields.pop(flag, False))
    label = " ".join((kind, *(Path(option).name if "/" in option else option for option in options)))
    return PeerSpec(kind, **fields, flags=flags, label=label)


def parse_peers(texts: Iterable[str], num_spec_tokens: Iterable[int]) -> tuple[PeerSpec, ...]:
    """Peers as `parse_peer` reads them. `eagle` without a count stands for one peer at each of num_spec_tokens, so that
    every engine with the draft chooses from the same lengths.

    Raises ValueError as parse_peer does."""
    found: list[PeerSpec] = []
    for text in texts:
        spec = parse_peer(text)
        swept = [re.sub(":eagle(?=:|$)", f":eagle={k}", text) for k in num_spec_tokens]
        found += map(parse_peer, swept) if spec.drafter == "eagle" and "eagle" in text.split(":") else [spec]
    return tuple(dict.fromkeys(found))


def _fields(text: str, kind: str, option: str) -> dict[str, object]:
    """The fields of a PeerSpec that one option sets; a flag stands for itself."""
    has = KINDS[kind]
    name, _, value = option.partition("=")
    if option in DTYPES:
        dtype = DTYPES[option]
        if dtype not in ("float32", "bfloat16", *has.rounded):
            raise ValueError(f"peer={text!r}: {kind} runs no {dtype} weights here; choose float32 or bfloat16")
        return {"dtype": dtype}
    if name in has.drafters:
        return {"drafter": name, "num_spec_tokens": DEFAULT_LENGTHS.get(name)} | _sizes(text, name, value)
    if option in has.flags:
        return {option: True}
    if kind == "openvino" and "/" in option:
        return {"where": option}
    known = [*DTYPES, *(f"{name}[={SIZES[name]}]" if SIZES[name] else name for name in has.drafters)]
    known += ["DIR/", *has.flags] if kind == "openvino" else has.flags
    raise ValueError(f"peer={text!r}: unknown option {option!r}; {kind} has {', '.join(known)}")


def _sizes(text: str, name: str, value: str) -> dict[str, object]:
    """The sizes of a way to draft, as in lookup=4 or ngram-simple=3x8; empty for its defaults."""
    if not value:
        return {}
    form, most = SIZES[name], MAX_NGRAM if name in NGRAMS else MAX_CHAIN
    numbers = [int(part) if part.isdigit() else 0 for part in value.split("x")]
    if not form or len(numbers) != len(form.split("x")) or min(numbers) < 1 or max(numbers) > most:
        raise ValueError(f"peer={text!r}: {name} takes {f'{form}, of 1 to {most} each' if form else 'no sizes'}")
    return dict(zip(("num_spec_tokens", "match"), reversed(numbers), strict=False))
