"""A request and its life: tokens so far, what is cached, when it ends. Knows nothing of slots' neighbours or models."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from aquiline.config import SamplingParams, SpecConfig
from aquiline.kv.prefix import Node
from aquiline.metrics import Counters
from aquiline.spec.drafters import Drafter
from aquiline.text.detokenizer import Detokenizer
from aquiline.types import FinishReason, Float32, Int32

MAX_DEADLINE_S = 1e9
"""Thirty years: what is longer, NaN and infinity are taken for mistakes."""


@dataclass(frozen=True)
class Request:
    """What a caller asked for; the seed is resolved. prompt: the text that prompt_ids were made from, if any.

    priority: lower runs first, and takes room from higher ones. deadline_s: seconds after `arrival` (time.monotonic)
    at which it ends with what it has.

    Raises ValueError naming a field of another type or out of range, since the engine's thread, which serves everybody,
    trusts every field. Whether the request fits the models is Engine.check's to say."""

    id: int | str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    spec: SpecConfig
    priority: int = 0
    deadline_s: float | None = None
    prompt: str | None = None
    arrival: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) and not _is_whole(self.id):
            raise ValueError(f"request id {self.id!r}: must be a text or a whole number")
        sampling, spec, deadline_s = self.sampling, self.spec, self.deadline_s
        self._check(isinstance(sampling, SamplingParams), "sampling", sampling, "must be SamplingParams")
        self._check(sampling.seed is not None, "sampling.seed", None, "must be a number here; LLM.request draws one")
        self._check(isinstance(spec, SpecConfig), "spec", spec, "must be a SpecConfig")
        self._check(_is_whole(self.priority), "priority", self.priority, "must be a whole number; lower runs first")
        ok = deadline_s is None or (_is_number(deadline_s) and 0 < deadline_s <= MAX_DEADLINE_S)
        fix = f"must be above 0 and at most {MAX_DEADLINE_S:.0f} seconds; None is no deadline"
        self._check(ok, "deadline_s", deadline_s, fix)
        ok = _is_number(self.arrival) and math.isfinite(self.arrival)
        self._check(ok, "arrival", self.arrival, "must be a time of time.monotonic()")
        self._check(self.prompt is None or isinstance(self.prompt, str), "prompt", self.prompt, "must be a text")
        self._check(isinstance(self.prompt_ids, tuple | list), "prompt_ids", self.prompt_ids, "must be a tuple of ids")
        bad = [token for token in self.prompt_ids if type(token) is not int and not _is_whole(token)]
        if bad:
            raise ValueError(f"request {self.id}: prompt token {bad[0]!r}: must be a whole number")
        object.__setattr__(self, "prompt_ids", tuple(map(int, self.prompt_ids)))

    def _check(self, ok: bool, name: str, value: object, fix: str) -> None:
        if not ok:
            raise ValueError(f"request {self.id}: {name}={value!r}: {fix}")

    @cached_property
    def max_tokens_total(self) -> int:
        """Tokens it can grow to, prompt and output."""
        return len(self.prompt_ids) + self.sampling.max_tokens

    @cached_property
    def reach(self) -> int:
        """KV indices it can ever need: a step whose outcome comes late may start behind the last token."""
        return self.max_tokens_total + self.spec.max_depth + 1 + self.spec.lookahead


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


@dataclass(frozen=True)
class TokenLogprobs:
    """One token's log-probability and rank (1 is the most probable), and the best ids at its place, best first."""

    token_id: int
    logprob: float
    rank: int
    top: dict[int, float]


class TokenDelta(NamedTuple):
    """What a step added to one request: token ids, how many of them the draft wrote, and the text that is final.

    logprobs: one per token id, where asked for. error: why finish_reason is "error"."""

    request_id: int | str
    token_ids: list[int]
    num_accepted: int
    text: str
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None


@dataclass(eq=False)
class Sequence:
    """The state of one request while it waits and runs.

    tokens holds prompt and output. num_cached counts tokens whose target KV is written and committed. A sequence
    prefills tokens up to prefill_end: its prompt, or after a preemption all but the last token. From then on it
    decodes, and its first uncached token is its root. num_planned and in_flight run ahead of num_cached and tokens by
    what steps may do whose outcome has not been read yet.
    """

    request: Request
    detokenizer: Detokenizer
    eos_token_ids: frozenset[int]
    tokens: list[int]
    order: int  # of arrival
    drafter: Drafter | None = None
    adjustments: LogitAdjustments | None = None
    slot: int = -1  # -1: waits
    num_cached: int = 0
    num_hit: int = 0  # tokens that the prefix cache had when it was last admitted
    prefill_end: int = 0
    num_planned: int = 0  # tokens of the prefill that are cached or planned
    in_flight: int = 0  # tokens at most that planned steps will add
    draft_end: int = 0  # KV indices below it have their draft keys
    nodes: list[Node] = field(default_factory=list)  # its pages in the prefix cache, from the first
    is_published: bool = True  # whether further pages may follow them
    by_draft: list[bool] = field(default_factory=list)  # per output token: written by the draft
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the second prompt token and on
    num_preempted: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    counters: Counters = field(default_factory=Counters)
    first_token_s: float = 0.0  # time.monotonic of the first token and of the end
    ended_s: float = 0.0
    lookahead: int = field(init=False)  # SpecConfig's; read in every step
    max_step: int = field(init=False)  # tokens that a step adds at most

    def __post_init__(self) -> None:
        self.lookahead, self.max_step = self.request.spec.lookahead, self.request.spec.max_depth + 1

    @property
    def num_prompt(self) -> int:
        """Prompt tokens."""
        return len(self.request.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        """Output tokens, a stop token included."""
        return self.tokens[self.num_prompt :]

    @property
    def is_prefilling(self) -> bool:
        """Whether tokens of the prefill are still to be planned."""
        return self.num_planned < self.prefill_end

    @property
    def urgency(self) -> tuple[int, int]:
        """Sorts sequences: who runs first, and who gives way last."""
        return (self.request.priority, self.order)

    def append(self, token_ids: list[int], num_accepted: int, logprobs: list[TokenLogprobs] | None) -> TokenDelta:
        """Add a step's tokens (accepted drafts, then the bonus), cut at the first stop, and say what was added."""
        room = self.request.max_tokens_total - len(self.tokens)
        kept = token_ids[:room]
        reason: FinishReason | None = None
        if not self.eos_token_ids.isdisjoint(kept):
            kept = kept[: 1 + next(i for i, t in enumerate(kept) if t in self.eos_token_ids)]
            reason = "stop"
        text = self.detokenizer.add(kept, hide_last=reason is not None)
        if self.detokenizer.num_until_stop is not None:
            kept, reason = kept[: self.detokenizer.num_until_stop], "stop"
        if reason is None and len(kept) == room:
            reason = "length"
        if reason is not None:
            text += self.detokenizer.finish()
        if len(self.tokens) == self.num_prompt:
            self.first_token_s = time.monotonic()
        if reason is not None:
            self.ended_s = time.monotonic()
        num_kept_drafts = min(num_accepted, len(kept))
        self.tokens += kept
        self.by_draft += (True,) * num_kept_drafts + (False,) * (len(kept) - num_kept_drafts)
        if logprobs is not None:
            logprobs = logprobs[: len(kept)]
            self.logprobs += logprobs
        self.finish_reason = reason
        assert len(kept) <= room, (len(kept), room)
        return TokenDelta(self.request.id, kept, num_kept_drafts, text, reason, logprobs)

    def end(self, reason: FinishReason, error: str | None = None) -> TokenDelta:
        """End it where it stands."""
        self.finish_reason, self.error, self.ended_s = reason, error, time.monotonic()
        return TokenDelta(self.request.id, [], 0, self.detokenizer.finish(), reason, None, error)


class LogitAdjustments:
    """Penalties and bias of one sequence: counts of its tokens, and the change they make to a node's logits."""

    def __init__(self, sampling: SamplingParams, prompt_ids: tuple[int, ...], vocab_size: int) -> None:
        self.sampling = sampling
        self.in_prompt = np.zeros(vocab_size, np.bool_)
        self.in_prompt[list(prompt_ids)] = True
        self.counts: Int32 = np.zeros(vocab_size, np.int32)
        self.bias: Float32 = np.zeros(vocab_size, np.float32)
        for token, bias in sampling.logit_bias.items():
            self.bias[token] = bias

    def count(self, token_ids: list[int]) -> None:
        """Note output tokens."""
        np.add.at(self.counts, token_ids, 1)

    def apply(self, logits: Float32, path_tokens: list[Int32]) -> Float32:
        """Adjusted logits [n, V] of n nodes whose drafted paths (root excluded) are path_tokens[i].

        Every operation is elementwise, so a node's result depends on its own path alone."""
        counts = np.repeat(self.counts[None], len(logits), axis=0)
        for row, tokens in zip(counts, path_tokens, strict=True):
            np.add.at(row, tokens, 1)
        s = self.sampling
        if s.repetition_penalty != 1:
            penalty = np.float32(s.repetition_penalty)
            penalised = np.where(logits > 0, logits / penalty, logits * penalty)
            logits = np.where(self.in_prompt | (counts > 0), penalised, logits)
        logits = logits - np.float32(s.presence_penalty) * (counts > 0).astype(np.float32)
        logits = logits - np.float32(s.frequency_penalty) * counts.astype(np.float32)
        return (logits + self.bias).astype(np.float32)
