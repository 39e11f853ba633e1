"""Frozen settings beside their validation, and the only reader of environment variables.

Every constructor raises ValueError naming the field, its value and the fix. "auto" values are resolved into a new
config by whoever knows the answer; nothing here is mutated.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from aquiline.checks import check_fields, is_unicode

DrafterKind = Literal["none", "chain", "static", "dynamic"]
DRAFTERS: tuple[DrafterKind, ...] = ("none", "chain", "static", "dynamic")

MAX_CHAIN = 16
MAX_NODES = 256
MAX_DEPTH = 32
"""Deepest tree level, which sizes the engine's static buffers."""

DEFAULT_STATIC_PATHS: tuple[tuple[int, ...], ...] = (
    (0,),
    (1,),
    (0, 0),
    (0, 1),
    (1, 0),
    (0, 0, 0),
    (0, 0, 1),
    (0, 0, 0, 0),
)
"""A node's path as child ranks from the root: (0, 1) is the second choice below the first. Deep along first choices,
with a little width near the root, where second choices are right most often."""


LARGEST = 1e6
"""Bound of everything that scales or shifts logits, far from where float32 would overflow."""


def _check(ok: bool, field_name: str, value: object, fix: str) -> None:
    if not ok:
        raise ValueError(f"{field_name}={value!r}: {fix}")


@dataclass(frozen=True)
class SpecConfig:
    """How drafts are shaped; the defaults are what measured best on CPUs (LOG.md).

    num_spec_tokens belongs to the chain, depth/top_k/num_nodes to the dynamic tree (num_nodes counts the root; its
    deepest level is depth + 1), static_paths to the static tree."""

    drafter: DrafterKind = "chain"
    num_spec_tokens: int = 3
    depth: int = 2
    top_k: int = 2
    num_nodes: int = 6
    static_paths: tuple[tuple[int, ...], ...] = DEFAULT_STATIC_PATHS

    def __post_init__(self) -> None:
        check_fields(self)
        if self.drafter == "chain":
            _check(
                1 <= self.num_spec_tokens <= MAX_CHAIN, "num_spec_tokens", self.num_spec_tokens,
                f"must be between 1 and {MAX_CHAIN}; drafter='none' switches speculation off",
            )  # fmt: skip
        if self.drafter == "dynamic":
            _check(0 <= self.depth < MAX_DEPTH, "depth", self.depth, f"must be between 0 and {MAX_DEPTH - 1}")
            _check(self.top_k >= 1, "draft_top_k", self.top_k, "must be at least 1")
            rows = self.depth * self.top_k
            _check(rows <= MAX_NODES, "depth", self.depth, f"depth * draft_top_k = {rows} must be at most {MAX_NODES}")
            limit = min(MAX_NODES, 1 + self.top_k + self.depth * self.top_k**2)
            _check(
                2 <= self.num_nodes <= limit, "num_nodes", self.num_nodes,
                f"must be between 2 and {limit}, the root included (1 + top_k + depth * top_k^2, at most {MAX_NODES})",
            )  # fmt: skip
        if self.drafter == "static":
            self._check_static()

    def _check_static(self) -> None:
        paths = set(self.static_paths)
        _check(0 < len(paths) < MAX_NODES, "static_paths", len(paths), f"needs 1 to {MAX_NODES - 1} different paths")
        _check(len(paths) == len(self.static_paths), "static_paths", self.static_paths, "a path stands twice")
        for path in self.static_paths:
            _check(
                1 <= len(path) <= MAX_DEPTH and all(0 <= rank < 64 for rank in path), "static_paths", path,
                f"a path is 1 to {MAX_DEPTH} child ranks, each 0 to 63",
            )  # fmt: skip
            _check(len(path) == 1 or path[:-1] in paths, "static_paths", path, f"its parent {path[:-1]} is missing")

    @cached_property
    def max_nodes(self) -> int:
        """Nodes of one slot's tree, the root included."""
        sizes = {
            "none": 1,
            "chain": 1 + self.num_spec_tokens,
            "static": 1 + len(self.static_paths),
            "dynamic": self.num_nodes,
        }
        return sizes[self.drafter]

    @cached_property
    def max_depth(self) -> int:
        """Deepest level of a tree; the root is level 0. A step commits at most max_depth + 1 tokens."""
        depths = {
            "none": 0,
            "chain": self.num_spec_tokens,
            "static": max((len(p) for p in self.static_paths), default=0),
            "dynamic": min(self.depth + 1, self.num_nodes - 1),
        }
        return depths[self.drafter]

    @cached_property
    def draft_rows(self) -> int:
        """Draft rows written beyond the extend rows while one slot's tree is drafted."""
        if self.drafter == "chain":
            return self.num_spec_tokens - 1
        if self.drafter == "dynamic":
            return self.depth * self.top_k
        if self.drafter == "static":
            return len({p[:-1] for p in self.static_paths if len(p) > 1})
        return 0

    @cached_property
    def lookahead(self) -> int:
        """KV indices from its last token on that a sequence may write in one step."""
        return max(self.max_nodes, self.draft_rows + 1)


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are drawn and when it ends. The same seed gives the same tokens, speculation or not.

    Order: repetition, presence and frequency penalties, logit bias, temperature, top-k, top-p, min-p. top_k 0, top_p 1
    and min_p 0 switch a filter off; temperature 0 is greedy. Penalties count output tokens; the repetition penalty
    counts prompt tokens too. `seed` None draws a fresh one per request. A stop string is cut from the text; a stop
    token is kept in token_ids and not shown in the text.

    logprobs: with every output token its log-probability, its rank and the `logprobs` best ids beside it (0: the token
    alone, None: nothing); prompt_logprobs: the same for prompt tokens. They are the model's own: before penalties,
    bias, temperature and filters.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        check_fields(self)
        _check(self.max_tokens >= 1, "max_tokens", self.max_tokens, "must be at least 1")
        ok = self.temperature == 0 or 1 / LARGEST <= self.temperature <= LARGEST
        _check(ok, "temperature", self.temperature, f"must be 0 (greedy) or {1 / LARGEST:g} to {LARGEST:g}")
        _check(0 <= self.top_k < 2**31, "top_k", self.top_k, "must be >= 0 and below 2^31; 0 switches the filter off")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "must be in (0, 1]; 1 switches the filter off")
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "must be in [0, 1]; 0 switches the filter off")
        ok, fix = 1 / LARGEST <= self.repetition_penalty <= LARGEST, f"must be {1 / LARGEST:g} to {LARGEST:g}"
        _check(ok, "repetition_penalty", self.repetition_penalty, f"{fix}; 1 switches it off")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(abs(value) <= LARGEST, name, value, f"must be within +-{LARGEST:g}; 0 switches it off")
        for token, bias in self.logit_bias.items():
            ok = token >= 0 and (abs(bias) <= LARGEST or bias == -math.inf)
            _check(ok, "logit_bias", {token: bias}, f"needs a token id >= 0, and -inf or a number within +-{LARGEST:g}")
        _check(self.seed is None or 0 <= self.seed < 2**64, "seed", self.seed, "must be in [0, 2^64)")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(value is None or value >= 0, name, value, "must be at least 0; None switches them off")
        ok = all(text and is_unicode(text) for text in self.stop)
        _check(ok, "stop", self.stop, "a stop string must not be empty or hold half a surrogate pair")
        _check(all(t >= 0 for t in self.stop_token_ids), "stop_token_ids", self.stop_token_ids, "must be ids >= 0")

    @property
    def changes_logits(self) -> bool:
        """Whether penalties or bias make a row's logits depend on the tokens before it."""
        return bool(self.logit_bias or self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    def with_seed(self, seed: int) -> SamplingParams:
        """The same parameters under a resolved seed."""
        return replace(self, seed=seed)


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of the running engine. num_pages None sizes the pool for max_batch sequences of max_context tokens, or for
    cache_fraction of the memory that is free at the start, whichever is less."""

    max_batch: int = 8
    page_size: int = 64
    num_pages: int | None = None
    cache_fraction: float = 0.5
    max_context: int | None = None  # tokens per sequence, prompt and output; None: what the model was built for
    row_budget: int = 256  # rows of one forward: decoding sequences first, then chunks of prompts
    prefix_cache: bool = True
    late_commit: bool = (
        False  # read a step's outcome when the next one is out, as a device with a queue of its own does
    )
    check: bool = False  # page conservation after every step

    def __post_init__(self) -> None:
        check_fields(self)
        _check(self.max_batch >= 1, "max_batch", self.max_batch, "must be at least 1")
        ok = self.page_size >= 16 and self.page_size % 16 == 0
        _check(ok, "page_size", self.page_size, "must be a multiple of 16")
        ok = 0 < self.cache_fraction < 1
        _check(ok, "cache_fraction", self.cache_fraction, "must be between 0 and 1")
        _check(self.num_pages is None or self.num_pages >= 1, "num_pages", self.num_pages, "must be at least 1")
        _check(self.max_context is None or self.max_context >= 2, "max_context", self.max_context, "must be at least 2")
        _check(self.row_budget >= 1, "row_budget", self.row_budget, "must be at least 1")


@dataclass(frozen=True)
class Environment:
    """Settings from the environment: AQUILINE_ISA (avx512, avx2, portable; or "off" for the torch path),
    AQUILINE_THREADS (native worker threads, the caller included) and AQUILINE_LLAMA_SERVER (llama.cpp's server, for
    `aquiline compare`)."""

    isa: str | None
    num_threads: int | None
    llama_server: str | None = None

    @classmethod
    def read(cls) -> Environment:
        """Read and check the process environment."""
        isa = os.environ.get("AQUILINE_ISA") or None
        choices = ("avx512", "avx2", "portable", "off")
        _check(isa is None or isa in choices, "AQUILINE_ISA", isa, f"choose one of {', '.join(choices)}")
        threads = os.environ.get("AQUILINE_THREADS") or None
        _check(
            threads is None or (threads.isdecimal() and int(threads) > 0), "AQUILINE_THREADS", threads, "must be >= 1"
        )
        return cls(isa, int(threads) if threads else None, os.environ.get("AQUILINE_LLAMA_SERVER") or None)


def cache_directory() -> Path:
    """Where what was measured on this machine is kept: XDG_CACHE_HOME/aquiline, by default ~/.cache/aquiline."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return (home if home.is_absolute() else Path.home() / ".cache") / "aquiline"
