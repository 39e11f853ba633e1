"""Peers as they are named on the command line: `kind[:option]...`, and the peers that are compared if none is named."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from aquiline.bench.peers.base import FLAGS, KINDS, QUANTISED, Ngram, PeerSpec
from aquiline.blocks import PACKED

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

ALL_PEERS = (
    "transformers", "transformers:lookup", "transformers:lookup=10",
    "openvino", "openvino:samekv", "openvino:sdpa", "openvino:int8", "openvino:lookup", "openvino:lookup=10",
    "openvino:eagle", "openvino:eagle:samekv",
    "llamacpp", "llamacpp:noflash", "llamacpp:server", "llamacpp:int8", "llamacpp:int8:noflash", "llamacpp:int4",
    "llamacpp:int4:noflash", "llamacpp:eagle", "llamacpp:eagle:noflash", "llamacpp:ngram-simple",
    "llamacpp:ngram-simple=3x8", "llamacpp:ngram-map-k=3x8", "llamacpp:ngram-map-k4v=3x8", "llamacpp:ngram-mod=3x8",
    "llamacpp:ngram-cache",
)  # fmt: skip
"""The peers that are compared if none is named, each in its best dtype. Without a draft, eagle is left out; if prompts
run together, the drafting of llama.cpp and transformers is left out."""
PACKED_PEERS = (
    "llamacpp:packed", "llamacpp:packed:noflash", "llamacpp:packed:server", "llamacpp:packed:eagle",
    "llamacpp:packed:eagle:noflash", "llamacpp:packed:ngram-simple", "llamacpp:packed:ngram-simple=3x8",
    "llamacpp:packed:ngram-map-k=3x8", "llamacpp:packed:ngram-map-k4v=3x8", "llamacpp:packed:ngram-mod=3x8",
    "llamacpp:packed:ngram-cache",
)  # fmt: skip
"""The peers that are compared too if the target is a GGUF file whose blocks we run as they are."""


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
