"""Frozen settings beside their validation, and the only reader of environment variables.

Every constructor raises ValueError naming the field, its value and the fix. "auto" values are resolved into a new
config by whoever knows the answer; nothing here is mutated.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from aquiline.checks import check_fields, is_unicode

MAX_CHAIN = 16
MAX_NODES = 256
MAX_DEPTH = 32
"""Deepest tree level, which sizes the engine's static buffers."""

LARGEST = 1e6
"""Bound of everything that scales or shifts logits, far from where float32 would overflow."""


def check(ok: bool, field_name: str, value: object, fix: str) -> None:
    """Raises ValueError naming the field, its value and the fix, unless ok."""
    if not ok:
        raise ValueError(f"{field_name}={value!r}: {fix}")


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are drawn and when it ends. The same seed gives the same tokens, speculation or not.

    Order: repetition, presence and frequency penalties, logit bias, temperature, top-k, top-p, min-p. top_k 0, top_p 1
    and min_p 0 switch a filter off; temperature 0 is greedy. Penalties count output tokens; the repetition penalty
    counts prompt tokens too. `seed` None draws a fresh one per request. A stop string is cut from the text; a stop
    token is kept in token_ids and not shown in the text.

    min_tokens: no stop token is drawn before the output has so many tokens. bad_words: texts whose last token is never
    drawn behind the tokens before it.

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
    min_tokens: int = 0
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "bad_words"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        check_fields(self)
        check(self.max_tokens >= 1, "max_tokens", self.max_tokens, "must be at least 1")
        ok = self.temperature == 0 or 1 / LARGEST <= self.temperature <= LARGEST
        check(ok, "temperature", self.temperature, f"must be 0 (greedy) or {1 / LARGEST:g} to {LARGEST:g}")
        check(0 <= self.top_k < 2**31, "top_k", self.top_k, "must be >= 0 and below 2^31; 0 switches the filter off")
        check(0 < self.top_p <= 1, "top_p", self.top_p, "must be in (0, 1]; 1 switches the filter off")
        check(0 <= self.min_p <= 1, "min_p", self.min_p, "must be in [0, 1]; 0 switches the filter off")
        ok, fix = 1 / LARGEST <= self.repetition_penalty <= LARGEST, f"must be {1 / LARGEST:g} to {LARGEST:g}"
        check(ok, "repetition_penalty", self.repetition_penalty, f"{fix}; 1 switches it off")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            check(abs(value) <= LARGEST, name, value, f"must be within +-{LARGEST:g}; 0 switches it off")
        for token, bias in self.logit_bias.items():
            ok = token >= 0 and (abs(bias) <= LARGEST or bias == -math.inf)
            check(ok, "logit_bias", {token: bias}, f"needs a token id >= 0, and -inf or a number within +-{LARGEST:g}")
        check(self.seed is None or 0 <= self.seed < 2**64, "seed", self.seed, "must be in [0, 2^64)")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            check(value is None or value >= 0, name, value, "must be at least 0; None switches them off")
        ok = 0 <= self.min_tokens <= self.max_tokens
        check(ok, "min_tokens", self.min_tokens, f"must be in [0, max_tokens={self.max_tokens}]")
        for name in ("stop", "bad_words"):
            ok = all(text and is_unicode(text) for text in getattr(self, name))
            check(ok, name, getattr(self, name), "a text must not be empty or hold half a surrogate pair")
        check(all(t >= 0 for t in self.stop_token_ids), "stop_token_ids", self.stop_token_ids, "must be ids >= 0")

    @property
    def changes_logits(self) -> bool:
        """Whether penalties, bias, min_tokens or bad words make a row's logits depend on the tokens before it."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty
        return bool(self.logit_bias or penalties or self.min_tokens or self.bad_words)

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
    late_reads: bool | None = None  # read a step's outcome when the next one is out; None: where the backend waits less
    check: bool = False  # page conservation after every step

    def __post_init__(self) -> None:
        check_fields(self)
        check(self.max_batch >= 1, "max_batch", self.max_batch, "must be at least 1")
        ok = self.page_size >= 16 and self.page_size % 16 == 0
        check(ok, "page_size", self.page_size, "must be a multiple of 16")
        ok = 0 < self.cache_fraction < 1
        check(ok, "cache_fraction", self.cache_fraction, "must be between 0 and 1")
        check(self.num_pages is None or self.num_pages >= 1, "num_pages", self.num_pages, "must be at least 1")
        check(self.max_context is None or self.max_context >= 2, "max_context", self.max_context, "must be at least 2")
        check(self.row_budget >= 1, "row_budget", self.row_budget, "must be at least 1")


@dataclass(frozen=True)
class Environment:
    """Settings from the environment: AQUILINE_ISA (avx512, avx2, portable; or "off" for the torch path),
    AQUILINE_THREADS (native worker threads, the caller included; unset: one for each physical core that the process may
    use, by its affinity and its control groups' quotas) and AQUILINE_LLAMA_SERVER (llama.cpp's server, for
    `aquiline compare`)."""

    isa: str | None
    num_threads: int | None
    llama_server: str | None = None

    @classmethod
    def read(cls) -> Environment:
        """Read and check the process environment."""
        isa = os.environ.get("AQUILINE_ISA") or None
        choices = ("avx512", "avx2", "portable", "off")
        check(isa is None or isa in choices, "AQUILINE_ISA", isa, f"choose one of {', '.join(choices)}")
        threads = os.environ.get("AQUILINE_THREADS") or None
        ok = threads is None or (threads.isdecimal() and int(threads) > 0)
        check(ok, "AQUILINE_THREADS", threads, "must be >= 1")
        return cls(isa, int(threads) if threads else None, os.environ.get("AQUILINE_LLAMA_SERVER") or None)


def cache_directory() -> Path:
    """Where what was measured on this machine is kept: XDG_CACHE_HOME/aquiline, by default ~/.cache/aquiline."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return (home if home.is_absolute() else Path.home() / ".cache") / "aquiline"
