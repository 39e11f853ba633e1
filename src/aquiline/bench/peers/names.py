"""Peers as they are named on the command line, `kind[:option]...`, and the peers that are compared if none is named.

A new peer is a module of this package with `open_peer`, its name in KINDS, and its options here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aquiline.bench.peers.peer import Peer, PeerSetup, require
from aquiline.blocks import PACKED, is_packed
from aquiline.models.files import is_gguf

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
QUANTISED = ("int8", "int4")
"""Weights that a peer rounds when it converts the target, and aquiline when it loads it."""
DTYPES = {
    "float32": "float32", "f32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16", "int8": "int8", "q8_0": "int8",
    "int4": "int4", "q4_0": "int4", PACKED: PACKED,
}  # fmt: skip
"""Storages of weights by the options that name them. packed: the target's GGUF file as it is."""
QUANTISED_BY = {"openvino": ("int8",), "llamacpp": ("int8", "int4", PACKED)}
"""The rounded weights that a kind of peer can run."""
NUMBERED = {"lookup": (4, ("transformers", "openvino")), "eagle": (3, ("openvino", "llamacpp"))}
"""Options with a count: its default, and the kinds that have the option. The count is how many tokens a step proposes,
by prompt lookup or with the EAGLE-3 head."""
NGRAMS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
"""llama.cpp's ways to draft from the text itself, as its server's --spec-type names them. The first four take sizes;
ngram-cache, its lookup decoding, has fixed ones."""

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
"""The peers that are compared if none is named, each in its best dtype. Without a draft, eagle is left out; if prompts
run together, the drafting of llama.cpp and transformers is left out."""
PACKED_PEERS = tuple(f"llamacpp:{PACKED}{options}" for options in _LLAMACPP)
"""The peers that are compared too if the target is a GGUF file whose blocks we run as they are."""


@dataclass(frozen=True)
class Ngram:
    """llama.cpp's drafting from the text itself. kind: of NGRAMS; match: how many tokens must match; draft: how many
    are proposed. None takes llama.cpp's defaults."""

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

    def open(self, setup: PeerSetup) -> Peer:
        """Load the model into the engine, after converting it if necessary.

        Raises ValueError naming the package to install, or the setting that this CPU, engine or target does not
        have."""
        self.check_target(setup.target)
        for package in KINDS[self.kind]:
            require(self.kind, package)
        module = importlib.import_module(f"aquiline.bench.peers.{self.kind}")
        factory: Callable[[PeerSpec, PeerSetup], Peer] = module.open_peer
        return factory(self, setup)


def is_rounded(weights: str) -> bool:
    """Whether weights, as a result names their storage, have fewer than 16 bits each."""
    return weights in QUANTISED or is_packed(weights)


def parse_peer(text: str) -> PeerSpec:
    """A peer from its name: `openai:http://HOST:PORT/v1#MODEL`, or `transformers`, `openvino` or `llamacpp` with
    options behind colons. Options are a dtype, a way to draft (NUMBERED, as in `lookup=K`; llama.cpp's NGRAMS, as in
    `ngram-simple=NxK`, N tokens matched and K proposed), a way to run (FLAGS), and for openvino a directory.

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
            if name in fields and (name != "flags" or value in fields[name]):
                raise ValueError(f"peer={text!r}: says {name} twice")
            fields[name] = (*fields.get("flags", ()), value) if name == "flags" else value
    drafting = [name for name in ("lookup", "eagle", "ngram") if name in fields]
    if len(drafting) > 1:
        raise ValueError(f"peer={text!r}: {' and '.join(drafting)} are two ways to draft; choose one")
    return PeerSpec(kind, **fields)


def parse_peers(texts: Iterable[str], num_spec_tokens: Iterable[int]) -> tuple[PeerSpec, ...]:
    """Peers as `parse_peer` reads them. `eagle` without a count stands for one peer at each of num_spec_tokens, so that
    every engine with the draft chooses from the same lengths.

    Raises ValueError as parse_peer does."""
    found = []
    for text in texts:
        options = text.split(":")
        is_swept = options[0] in KINDS and options[0] != "openai" and "eagle" in options
        for k in num_spec_tokens if is_swept else (0,):
            found.append(parse_peer(":".join(f"eagle={k}" if is_swept and o == "eagle" else o for o in options)))
    return tuple(dict.fromkeys(found))


def _field(text: str, kind: str, option: str) -> dict[str, object]:
    """The field of a PeerSpec that one option sets."""
    name, _, value = option.partition("=")
    if option in DTYPES:
        if DTYPES[option] in (*QUANTISED, PACKED) and DTYPES[option] not in QUANTISED_BY.get(kind, ()):
            raise ValueError(f"peer={text!r}: {kind} runs no {DTYPES[option]} weights here; choose float32 or bfloat16")
        return {"dtype": DTYPES[option]}
    if name in NUMBERED and kind in NUMBERED[name][1]:
        count = int(value) if value.isdigit() else 0 if value else NUMBERED[name][0]
        if not 1 <= count <= 16:
            raise ValueError(f"peer={text!r}: {name} must be 1 to 16 tokens")
        return {name: count}
    if name in NGRAMS and kind == "llamacpp":
        return {"ngram": _ngram(text, name, value)}
    if option in FLAGS.get(kind, ()):
        return {"flags": option}
    if kind == "openvino" and "/" in option:
        return {"where": option}
    known = [*DTYPES, *(form for n in NUMBERED if kind in NUMBERED[n][1] for form in (n, f"{n}=K"))]
    known += [f"{n}=NxK" for n in NGRAMS[:-1]] + [NGRAMS[-1]] if kind == "llamacpp" else []
    known += ["DIR/"] if kind == "openvino" else []
    raise ValueError(
        f"peer={text!r}: unknown option {option!r}; {kind} has {', '.join([*known, *FLAGS.get(kind, ())])}"
    )


def _ngram(text: str, name: str, sizes: str) -> Ngram:
    """The Ngram of an option such as ngram-simple or ngram-simple=3x8."""
    if not sizes:
        return Ngram(name)
    match, _, draft = sizes.partition("x")
    if name == NGRAMS[-1] or not (match.isdigit() and draft.isdigit() and 1 <= int(match) <= 64 >= int(draft) >= 1):
        raise ValueError(f"peer={text!r}: {name} takes {'no sizes' if name == NGRAMS[-1] else 'NxK, of 1 to 64 each'}")
    return Ngram(name, int(match), int(draft))
