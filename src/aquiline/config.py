"""Frozen settings beside their validation, and the only reader of environment variables.

Every constructor raises ValueError naming the field, its value and the fix. "auto" values are resolved into a new
config by whoever knows the answer; nothing here is mutated.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from aquiline.checks import check_fields, is_unicode, parse_json, shown
from aquiline.settings import about, setting

MODEL, SAMPLING, STRUCTURED, BATCH = "Model", "Sampling", "Structured output", "Batch and memory"
"""Headings under which settings are listed."""

MAX_CHAIN = 16
MAX_NODES = 256
MAX_DEPTH = 32
"""Deepest tree level, which sizes the engine's static buffers."""

LARGEST = 1e6
"""Bound of everything that scales or shifts logits, far from where float32 would overflow."""


def check(ok: bool, field_name: str, value: object, fix: str) -> None:
    """Raises ValueError naming the field, its value and the fix, unless ok."""
    if not ok:
        raise ValueError(f"{field_name}={shown(value)}: {fix}")


def parse_bias(text: str) -> tuple[int, float]:
    """An entry of logit_bias from TOKEN_ID:BIAS."""
    token, _, bias = text.partition(":")
    try:
        return int(token), float(bias)
    except ValueError:
        raise ValueError(f"logit_bias={text!r}: must be TOKEN_ID:BIAS, for example 42:-5") from None


def parse_layers(text: str) -> tuple[int, ...]:
    """The three layers of a capture, as 1,4,6."""
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"capture={text!r}: must be layer numbers separated by commas, as 1,4,6") from None
    if len(layers) != 3:
        raise ValueError(f"capture={text!r}: name three layers")
    return layers


def parse_template_options(text: str) -> dict[str, object]:
    """Options of a chat template from JSON."""
    try:
        options = parse_json(text)
    except ValueError as error:
        raise ValueError(f"template_options={text!r}: not JSON ({error})") from None
    if not isinstance(options, dict):
        raise ValueError(f"template_options={text!r}: must be a JSON object")
    return options


DraftFormat = Literal["safeailab", "specforge", "speculators", "nvidia", "aquiline", "gguf"]
"""Formats of drafts, as models/producers.py has them."""


ParallelMode = Literal["gather", "reduce"]
"""What ranks exchange: all outputs, or the sums of parts of them (models/shares.py)."""


@dataclass(frozen=True)
class ConvertConfig:
    """Which format a draft is written in, and whether it may replace what is there."""

    to: DraftFormat = field(metadata=about("Format to write."))
    force: bool = setting(False, "Replace the files of a DST that exists.")

    def __post_init__(self) -> None:
        if self.to not in get_args(DraftFormat):
            raise ValueError(f"to={self.to!r}: must be one of {', '.join(get_args(DraftFormat))}")


@dataclass(frozen=True)
class PairConfig:
    """A target and its draft, and how they are stored and multiplied; target None: the default pair."""

    target: str | None = setting(
        None, "Target checkpoint: directory, .gguf file, hub id, or the name of a known pair: smollm2 or bundled. "
        "Default: smollm2 where its weights are installed, else bundled.", MODEL,
    )  # fmt: skip
    draft: str | None = setting(
        None, "EAGLE-3 draft checkpoint: directory, .gguf file, hub id or the name of a known pair. Default: a known "
        "pair's own, else none.", MODEL,
    )  # fmt: skip
    capture: tuple[int, ...] | None = setting(
        None, "Target layers whose outputs the draft reads, as 1,4,6. Default: as its checkpoint says.", MODEL,
        parse=parse_layers,
    )  # fmt: skip
    norm_feedback: bool | None = setting(
        None, "Feed the draft's normed output back. Default: as its checkpoint says.", MODEL
    )
    dtype: str = setting(
        "auto", "Storage of weights: bfloat16, float16, float32, int8, int4, or packed, as the file has its blocks; "
        "auto: packed for .gguf files and MXFP4 experts, else bfloat16.", MODEL,
    )  # fmt: skip
    draft_dtype: str = setting(
        "auto", "Storage of the draft's weights; auto: the target's, int4 beside packed ones.", MODEL
    )
    arithmetic: str = setting(
        "auto", "float32; bfloat16, faster on AMD's CPUs with AVX512_BF16, and bfloat16_tiles, fastest on Intel's with "
        "AMX, both for bfloat16 weights; int8 for int8, int4 and packed ones, fastest; auto: by the storage and the "
        "CPU, always the same.", MODEL,
    )  # fmt: skip
    kv_dtype: str = setting(
        "auto", "Keys and values: float32, bfloat16, or int8, half the bytes of bfloat16 and multiplied as integers; "
        "auto: float32 beside float32 weights, else bfloat16.", MODEL,
    )  # fmt: skip

    device: str = setting(
        "cpu", "cpu: the native library where it runs, else torch; torch: torch on the CPU; cuda, cuda:N: a GPU.", MODEL
    )  # fmt: skip
    tensor_parallel_size: int = setting(1, "Processes that share the models, a rank each, with --device torch.", MODEL)
    parallel_mode: ParallelMode = setting(
        "gather", "What ranks exchange. gather: outputs, and the text is that of one; reduce: sums of parts, in fewer "
        "bytes and another order.", MODEL,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self.tensor_parallel_size >= 1, "tensor_parallel_size", self.tensor_parallel_size, "must be at least 1")
        modes = get_args(ParallelMode)
        check(self.parallel_mode in modes, "parallel_mode", self.parallel_mode, f"must be one of {', '.join(modes)}")
        if self.target is None and self.draft is not None:
            raise ValueError(f"draft={self.draft!r}: needs --target; the pair that runs without one has its own draft")


@dataclass(frozen=True)
class ChatConfig:
    """What the target's chat template is given beside the messages."""

    system: str | None = setting(None, "System message that a chat begins with.")
    template_options: dict[str, object] | None = setting(
        None, "JSON for the chat template, as '{\"enable_thinking\": false}'.", parse=parse_template_options
    )


def read_schema(path: str) -> str:
    """The text of a file with a JSON schema."""
    return _read("json_schema", path)


def read_grammar(text: str) -> str:
    """A grammar, or the text of the file that @FILE names."""
    return _read("grammar", text[1:]) if text.startswith("@") else text


def _read(name: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}={path!r}: cannot be read ({error})") from None


KINDS = ("json", "regex", "choice", "grammar", "structural_tag")
"""What structured output may be given as."""


class Boundary(NamedTuple):
    """Where in an answer its grammar begins: after the tokens `marker` and, if `end` is a token, the next such token;
    without a marker at once.

    opener: a token that begins what comes before, as <think>. It may be the prompt's; else the answer may begin with
    it, and if it does not, or the prompt has closed it already, the grammar holds from the answer's first token on."""

    marker: tuple[int, ...]
    end: int = -1
    opener: int = -1


@dataclass(frozen=True)
class Structured:
    """What an answer must consist of, one of: `json`, a schema as a dict or as JSON, or True for any object; `regex`;
    `choice`, one of these texts; `grammar` in xgrammar's EBNF, whose first rule is `root`; `structural_tag`, as
    xgrammar has it, a dict or JSON.

    JSON is written in one line, as json.dumps writes it. Properties come in the order of the schema, and others only
    where it describes them (`additionalProperties`). Fields are kept as texts. boundary: where the grammar begins, if
    not at once; chats of models that reason set it where it is None."""

    json: str | dict[str, object] | bool | None = setting(
        None, "File with a JSON schema that the text follows.", STRUCTURED, name="json_schema", parse=read_schema
    )
    regex: str | None = setting(None, "Regular expression that the whole text matches.", STRUCTURED)
    choice: tuple[str, ...] = setting((), "A text that may be written; repeatable.", STRUCTURED, is_option=False)
    grammar: str | None = setting(
        None, "Grammar of the text in EBNF, its first rule `root`, or @FILE.", STRUCTURED, parse=read_grammar
    )
    structural_tag: str | dict[str, object] | None = setting(None, "Structural tag.", STRUCTURED, is_option=False)
    boundary: Boundary | None = setting(None, "Where the grammar begins.", STRUCTURED, is_option=False)

    def __post_init__(self) -> None:
        if isinstance(choice := getattr(self, "choice"), list):  # noqa: B009  # as JSON has it
            object.__setattr__(self, "choice", tuple(choice))
        check_fields(self)
        check(self.json is not False, "json", False, "must be a schema as a dict or as JSON, or True for any object")
        if self.json is True:
            object.__setattr__(self, "json", {"type": "object"})
        for name in ("json", "structural_tag"):
            if isinstance(value := getattr(self, name), dict):
                object.__setattr__(self, name, json.dumps(value, ensure_ascii=False))
        named = list(self.given)
        check(len(named) == 1, "structured", named, f"give one of {', '.join(KINDS)}")
        for name, value in self.given.items():
            texts = value if isinstance(value, tuple) else (value,)
            ok = all(text and is_unicode(text) for text in texts)
            check(ok, name, value, "a text must not be empty or hold half a surrogate pair")

    @property
    def given(self) -> dict[str, Any]:
        """The field that is given."""
        return {name: value for name in KINDS if (value := getattr(self, name)) not in (None, ())}


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are drawn and when it ends. The same seed gives the same tokens, speculation or not.

    Order: repetition, presence and frequency penalties, logit bias, temperature, top-k, top-p, min-p. Penalties count
    output tokens; the repetition penalty counts prompt tokens too. A stop string is cut from the text; a stop token is
    kept in token_ids and not shown in the text.

    logprobs: with every output token its log-probability, its rank and the `logprobs` best ids beside it (0: the token
    alone, None: nothing); prompt_logprobs: the same for prompt tokens. They are the model's own: before penalties,
    bias, temperature and filters.
    """

    max_tokens: int = setting(128, "New tokens at most.", SAMPLING)
    temperature: float = setting(0.0, "0 is greedy.", SAMPLING)
    top_k: int = setting(0, "0 is off.", SAMPLING)
    top_p: float = setting(1.0, "1 is off.", SAMPLING)
    min_p: float = setting(0.0, "0 is off.", SAMPLING)
    repetition_penalty: float = setting(1.0, "1 is off.", SAMPLING)
    presence_penalty: float = setting(0.0, "0 is off.", SAMPLING)
    frequency_penalty: float = setting(0.0, "0 is off.", SAMPLING)
    logit_bias: dict[int, float] = field(
        default_factory=dict, metadata=about("TOKEN_ID:BIAS; repeatable.", SAMPLING, parse_item=parse_bias)
    )
    seed: int | None = setting(None, "Default: a fresh one.", SAMPLING)
    stop: tuple[str, ...] = setting((), "Stop string; repeatable.", SAMPLING)
    stop_token_ids: tuple[int, ...] = setting((), "Stop token id; repeatable.", SAMPLING)
    ignore_eos: bool = setting(False, "Run on past EOS.", SAMPLING)
    min_tokens: int = setting(0, "No stop token is drawn before the output has so many tokens.", SAMPLING)
    bad_words: tuple[str, ...] = setting(
        (), "Text whose last token is never drawn behind the tokens before it; repeatable.", SAMPLING
    )
    logprobs: int | None = setting(None, "In JSON: log-probability of each token and the N best.", SAMPLING)
    prompt_logprobs: int | None = setting(None, "In JSON: the same for prompt tokens.", SAMPLING)
    structured: Structured | None = setting(None, "What the text must consist of.", SAMPLING, is_option=False)

    def __post_init__(self) -> None:
        if isinstance(structured := getattr(self, "structured"), dict):  # noqa: B009  # as JSON has it
            object.__setattr__(self, "structured", structured_of(structured))
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

    def ends(self, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
        """Tokens that end a text of a model with these EOS tokens."""
        return frozenset(() if self.ignore_eos else eos_token_ids) | frozenset(self.stop_token_ids)

    def with_seed(self, seed: int) -> SamplingParams:
        """The same parameters under a resolved seed."""
        return replace(self, seed=seed)


def structured_of(fields: dict[str, Any]) -> Structured:
    """Structured output from an object of JSON. Raises ValueError for a field that it does not have."""
    unknown = sorted(fields.keys() - set(KINDS))
    check(not unknown, "structured", unknown, f"its fields are {', '.join(KINDS)}")
    return Structured(**fields)


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of the running engine. The pool has room for max_batch sequences of max_context tokens, as far as
    cache_fraction of the memory that is free at the start holds them."""

    max_batch: int = setting(8, "Requests that run at once.", BATCH)
    page_size: int = setting(64, "Tokens of a page of keys and values, a multiple of 16.", BATCH)
    num_pages: int | None = setting(None, "Pages of keys and values. Default: for every sequence its most.", BATCH)
    cache_fraction: float = setting(0.5, "Share of the free memory that keys and values may take.", BATCH)
    max_context: int | None = setting(
        None, "Tokens of a sequence, prompt and output. Default: what the model was built for.", BATCH
    )
    row_budget: int = setting(256, "Rows of one forward: decoding first, then prompts, which may end with more.", BATCH)
    prefix_cache: bool = setting(True, "Keep computed pages for prompts that begin the same.", BATCH)
    shared_lookup_bytes: int = setting(
        0, "Memory for what ended requests wrote, 20 bytes a token: lookups copy from it too. 0: each request copies "
        "from its own text alone.", BATCH,
    )  # fmt: skip
    num_continuous_decode_steps: int = setting(
        8, "Decode steps that run one after the other before the host takes part again, as far as they take 16 ms "
        "together.", BATCH,
    )  # fmt: skip
    late_reads: bool | None = setting(
        None, "Read a step's outcome when the next one is out. Default: where the backend waits less.", BATCH
    )
    calibration: bool = setting(
        True, "Measure once, for adaptive drafting, what steps cost here; else estimate it.", BATCH
    )
    check: bool = setting(False, "Check after every step that no page is lost.", BATCH)

    def __post_init__(self) -> None:
        check_fields(self)
        check(self.max_batch >= 1, "max_batch", self.max_batch, "must be at least 1")
        ok = self.page_size >= 16 and self.page_size % 16 == 0
        check(ok, "page_size", self.page_size, "must be a multiple of 16")
        ok = 0 < self.cache_fraction < 1
        check(ok, "cache_fraction", self.cache_fraction, "must be between 0 and 1")
        check(self.num_pages is None or self.num_pages >= 1, "num_pages", self.num_pages, "must be at least 1")
        check(self.max_context is None or self.max_context >= 2, "max_context", self.max_context, "must be at least 2")
        ok = self.shared_lookup_bytes == 0 or 2**16 <= self.shared_lookup_bytes <= 2**34
        fix = "must be 0, which switches it off, or between 2^16 and 2^34 bytes"
        check(ok, "shared_lookup_bytes", self.shared_lookup_bytes, fix)
        check(self.row_budget >= 1, "row_budget", self.row_budget, "must be at least 1")
        steps = self.num_continuous_decode_steps
        check(1 <= steps <= 64, "num_continuous_decode_steps", steps, "must be from 1, which lets none run on, to 64")


ISAS = ("amx", "avx512_vnni", "avx512", "avx_vnni", "avx2", "neon_dot", "neon", "portable", "amx_twin")
"""Instruction sets that the native library has kernels for, the best of each machine first. All give the same bits. The
last one runs only where it is named: AMX's slow twin, for tests."""


@dataclass(frozen=True)
class Environment:
    """Settings from the environment: AQUILINE_ISA (one of ISAS; or "off" for the torch path),
    AQUILINE_THREADS (native worker threads, the caller included; unset: one for each physical core that the process may
    use, by its affinity and its control groups' quotas), AQUILINE_LLAMA_SERVER (llama.cpp's server, for
    `aquiline compare`) and AQUILINE_API_KEY (a key that clients of `aquiline serve` must send)."""

    isa: str | None
    num_threads: int | None
    llama_server: str | None = None
    api_key: str | None = None

    @classmethod
    def read(cls) -> Environment:
        """Read and check the process environment."""
        isa = os.environ.get("AQUILINE_ISA") or None
        choices = (*ISAS, "off")
        check(isa is None or isa in choices, "AQUILINE_ISA", isa, f"choose one of {', '.join(choices)}")
        threads = os.environ.get("AQUILINE_THREADS") or None
        ok = threads is None or (threads.isdecimal() and int(threads) > 0)
        check(ok, "AQUILINE_THREADS", threads, "must be >= 1")
        llama_server, api_key = (os.environ.get(f"AQUILINE_{name}") or None for name in ("LLAMA_SERVER", "API_KEY"))
        return cls(isa, int(threads) if threads else None, llama_server, api_key)


def cache_directory() -> Path:
    """Where what was measured on this machine is kept: XDG_CACHE_HOME/aquiline, by default ~/.cache/aquiline."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return (home if home.is_absolute() else Path.home() / ".cache") / "aquiline"
