"""A request and its life: tokens so far, what is cached, when it ends. Knows nothing of slots' neighbours or models."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from aquiline.config import SamplingParams
from aquiline.engine.detokenizer import Detokenizer
from aquiline.metrics import Counters
from aquiline.types import FinishReason, Float32, Int32


@dataclass(frozen=True)
class Request:
    """What a caller asked for; the seed is resolved."""

    id: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True)
class TokenDelta:
    """What a step added to one request: token ids, how many of them the draft wrote, and the text that is final."""

    request_id: int
    token_ids: list[int]
    num_accepted: int
    text: str
    finish_reason: FinishReason | None


@dataclass(eq=False)
class Sequence:
    """The state of one request while it runs.

    tokens holds prompt and output. num_cached counts tokens whose target KV is written; the token at num_cached is the
    next forward's first row. Once only the last token is not cached the sequence decodes, and that token is its root.
    `adjustments` is the sequence's penalties and bias, when it has any.
    """

    request: Request
    detokenizer: Detokenizer
    eos_token_ids: frozenset[int]
    tokens: list[int]
    slot: int = -1
    num_cached: int = 0
    by_draft: list[bool] = field(default_factory=list)  # per output token: written by the draft
    finish_reason: FinishReason | None = None
    counters: Counters = field(default_factory=Counters)
    adjustments: LogitAdjustments | None = None

    @property
    def num_prompt(self) -> int:
        """Prompt tokens."""
        return len(self.request.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        """Output tokens, a stop token included."""
        return self.tokens[self.num_prompt :]

    @property
    def is_decoding(self) -> bool:
        """Whether everything but the root is cached and the root was sampled."""
        return self.num_cached == len(self.tokens) - 1 and len(self.tokens) > self.num_prompt

    @property
    def max_tokens_total(self) -> int:
        """Tokens the sequence can grow to."""
        return self.num_prompt + self.request.sampling.max_tokens

    def append(self, token_ids: list[int], num_accepted: int) -> TokenDelta:
        """Add a step's tokens (accepted drafts, then the bonus), cut at the first stop, and say what was added."""
        sampling = self.request.sampling
        room = self.max_tokens_total - len(self.tokens)
        kept, reason = token_ids[:room], None
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
        num_kept_drafts = min(num_accepted, len(kept))
        self.tokens.extend(kept)
        self.by_draft.extend([True] * num_kept_drafts + [False] * (len(kept) - num_kept_drafts))
        if self.adjustments is not None:
            self.adjustments.count(kept)
        self.finish_reason = reason  # type: ignore[assignment]
        assert len(self.tokens) <= self.max_tokens_total, (len(self.tokens), self.max_tokens_total, sampling)
        return TokenDelta(self.request.id, kept, num_kept_drafts, text, self.finish_reason)


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
