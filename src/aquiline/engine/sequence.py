"""A request and its life: tokens so far, what is cached, when it ends. Knows nothing of other sequences or models."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from aquiline.backends.base import Chunk, Decode, Decoded, Prefilled
from aquiline.config import SamplingParams
from aquiline.engine.constraint import MAX_FORCED, Constraint
from aquiline.kv.prefix import Node
from aquiline.metrics import Counters
from aquiline.spec.drafting import Drafting, Proposer
from aquiline.text.detokenizer import Detokenizer
from aquiline.types import FinishReason, Float32, Source, TokenLogprobs

MARGIN = 2
"""Number of KV indices that every sequence must have room for after its longest text: one for a step that drafts
nothing, and one for a step that was issued before the last outcome was read. Without room for drafts nothing is
drafted."""

MAX_DEADLINE_S = 1e9
"""Thirty years. A longer deadline, an arrival so long after the machine's start, NaN and infinity are refused as
mistakes."""

TextEdit = Callable[[Items[int], Float32], None]
"""Changes the logits [V] of the next token in place, given all tokens before it."""


@dataclass(frozen=True)
class Request:
    """What a caller asked for; the seed is resolved. prompt: the text that prompt_ids were made from, if any.

    drafting: how to draft for it, and the most that a step may draft. priority: a lower number runs first and may
    preempt higher ones. deadline_s: seconds after `arrival` (time.monotonic) at which the request ends with the tokens
    it has. cache_salt: cached pages are shared only between requests of one salt. prediction: token ids of the output
    that the caller expects, which drafts may be copied from; it changes how fast the text comes and never the text.
    with_text False: deltas carry token ids alone, and the caller, who makes them text, looks for stop strings too.
    learn False: it is not stored for the draft to learn from.
    bad_word_ids: bad words as token ids, beside those of `sampling`, which are texts.
    grammar: what `sampling.structured` was compiled to, by LLM.request or by the server.
    edit: changes the logits before a token is drawn, by these and the tokens before it alone, so that drafts do not
    change the text. It runs in the engine's thread; what it raises, the step raises.

    Raises ValueError naming a field of a wrong type or out of range: the engine's thread serves all requests and checks
    no field again. Engine.check says whether a request fits the models."""

    id: int | str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    drafting: Drafting
    priority: int = 0
    deadline_s: float | None = None
    prompt: str | None = None
    cache_salt: str | None = None
    prediction: tuple[int, ...] = ()
    with_text: bool = True
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    grammar: str | None = None
    edit: TextEdit | None = None
    learn: bool = True
    arrival: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) and not _is_whole(self.id):
            raise ValueError(f"request id {self.id!r}: must be a text or a whole number")
        sampling, drafting, deadline_s = self.sampling, self.drafting, self.deadline_s
        self._check(isinstance(sampling, SamplingParams), "sampling", sampling, "must be SamplingParams")
        self._check(sampling.seed is not None, "sampling.seed", None, "must be a number here; LLM.request draws one")
        self._check(
            isinstance(drafting, Drafting), "drafting", drafting, "must be a way to draft, as Chain(3) or NoDraft()"
        )
        salt = self.cache_salt
        self._check(salt is None or isinstance(salt, str), "cache_salt", salt, "must be a text or None")
        self._check(_is_whole(self.priority), "priority", self.priority, "must be a whole number; lower runs first")
        ok = deadline_s is None or (_is_number(deadline_s) and 0 < deadline_s <= MAX_DEADLINE_S)
        fix = f"must be above 0 and at most {MAX_DEADLINE_S:.0f} seconds; None is no deadline"
        self._check(ok, "deadline_s", deadline_s, fix)
        ok = _is_number(self.arrival) and abs(self.arrival) <= MAX_DEADLINE_S
        self._check(ok, "arrival", self.arrival, "must be a time of time.monotonic()")
        self._check(self.prompt is None or isinstance(self.prompt, str), "prompt", self.prompt, "must be a text")
        for name, kind in (("prompt_ids", "prompt"), ("prediction", "prediction")):
            ids = getattr(self, name)
            self._check(isinstance(ids, tuple | list), name, ids, "must be a tuple of ids")
            if not set(map(type, ids)) <= {int}:
                bad = [token for token in ids if not _is_whole(token)]
                if bad:
                    raise ValueError(f"request {self.id}: {kind} token {bad[0]!r}: must be a whole number")
                ids = map(int, ids)
            object.__setattr__(self, name, tuple(ids))

    def _check(self, ok: bool, name: str, value: object, fix: str) -> None:
        if not ok:
            raise ValueError(f"request {self.id}: {name}={value!r}: {fix}")

    @cached_property
    def max_tokens_total(self) -> int:
        """Tokens that the sequence can grow to, prompt and output together."""
        return len(self.prompt_ids) + self.sampling.max_tokens

    @property
    def num_forced(self) -> int:
        """Tokens of forced text that a step drafts at most."""
        return MAX_FORCED if self.grammar is not None and self.drafting.is_speculative else 0

    @property
    def max_step(self) -> int:
        """Tokens that a step adds at most."""
        return max(self.drafting.max_depth, self.num_forced) + 1

    @property
    def lookahead(self) -> int:
        """Number of KV indices, from the last token on, that one step may write."""
        return max(self.drafting.lookahead, self.num_forced + 1)

    @cached_property
    def reach(self) -> int:
        """KV indices that the sequence uses at most where there are pages for them. A step issued before the last
        outcome was read may start after the last token, hence one step more than max_tokens_total."""
        return self.max_tokens_total + self.max_step + self.lookahead


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


class TokenDelta(NamedTuple):
    """What a step added to one request. num_accepted: how many of token_ids, the first ones, were drafted, and
    drafter: by whom; text: the text that became final.

    logprobs: one per token id, where asked for. error: why finish_reason is "error". num_drafted: tokens that the step
    drafted for the request; num_confirmed: how many of these the target confirmed, also of those after the text's
    end."""

    request_id: int | str
    token_ids: list[int]
    num_accepted: int
    text: str
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    drafter: Source = "draft"
    num_drafted: int = 0
    num_confirmed: int = 0

    @property
    def sources(self) -> list[Source]:
        """Who wrote each token."""
        rest = len(self.token_ids) - self.num_accepted
        return [self.drafter] * self.num_accepted + ["target"] * rest


@dataclass(eq=False)
class Sequence:
    """The state of one request while it waits and runs.

    tokens holds prompt and output. num_cached counts tokens whose target KV is written and committed. A sequence
    prefills tokens up to prefill_end: its prompt, or after a preemption all but the last token. From then on it
    decodes, and its first uncached token is its root. num_planned and in_flight count the work of steps that were
    planned and not read yet: num_planned runs ahead of num_cached, in_flight counts tokens that may come.
    """

    request: Request
    detokenizer: Detokenizer
    eos_token_ids: frozenset[int]
    tokens: list[int]
    order: int  # number of the request in order of arrival
    proposer: Proposer | None = None  # for ways to draft that run on the host
    constraint: Constraint | None = None  # of structured output
    bad_words: tuple[tuple[int, ...], ...] = ()
    slot: int = -1  # -1: waiting
    num_cached: int = 0
    num_hit: int = 0  # tokens that the prefix cache had when it was last admitted
    prefill_end: int = 0
    num_planned: int = 0  # tokens of the prefill that are cached or planned
    in_flight: int = 0  # tokens at most that planned steps will add
    first_draft_key: int = 1  # no KV index below it has a draft key that may be read
    draft_end: int = 0  # KV indices first_draft_key .. draft_end - 1 have their draft keys
    features_end: int = 0  # features of tokens below it stand in its pages if anywhere
    is_drafting: bool = True  # whether the draft model ran in its last decode step; true before the first
    nodes: list[Node] = field(default_factory=list)  # its pages in the prefix cache, from the first
    num_drafted_pages: int = 0  # pages up to where draft keys were written when its pages were last published
    is_published: bool = True  # whether further pages may be published after `nodes`
    sources: list[Source] = field(default_factory=list)  # who wrote each output token
    pieces: list[str] = field(default_factory=list)  # the text of each delta
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the second prompt token and on
    rejected: list[int] = field(default_factory=list)  # indices of tokens that the draft model had guessed wrong
    num_guessed: int = 0  # steps in which the draft model drafted
    num_missed: int = 0  # of these, the steps whose first guess was wrong
    num_preempted: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    counters: Counters = field(default_factory=Counters)
    first_token_s: float = 0.0  # time.monotonic of the first token and of the end
    ended_s: float = 0.0
    may_draft: bool = True  # in the step that was planned last: near the end of all pages there is no room for drafts
    num_rows: int = field(init=False)  # rows that its last step verified; the next step is expected to have as many
    # Of the request and its drafting, which never change:
    num_prompt: int = field(init=False)  # prompt tokens
    urgency: tuple[int, int] = field(init=False)  # a lower one is admitted earlier and preempted later
    drafts: bool = field(init=False)  # whether the draft model may ever run for it
    lookahead: int = field(init=False)
    max_step: int = field(init=False)  # tokens that a step adds at most
    is_adaptive: bool = field(init=False)
    is_guided: bool = field(init=False)  # whether the host says what a row may draw, by the tokens before it
    is_repeatable: bool = field(init=False)  # whether steps may be repeated before the host reads its tokens

    def __post_init__(self) -> None:
        request, drafting = self.request, self.request.drafting
        self.num_prompt, self.urgency = len(request.prompt_ids), (request.priority, self.order)
        self.drafts, self.lookahead = drafting.needs_draft_model, request.lookahead
        self.max_step, self.is_adaptive = request.max_step, drafting.is_adaptive
        self.is_guided = self.constraint is not None or request.edit is not None
        needs_host = request.sampling.stop or self.is_guided
        self.is_repeatable = not needs_host and (self.is_adaptive or self.proposer is None)
        self.num_rows = 1 if self.is_adaptive else drafting.max_nodes

    @property
    def output_ids(self) -> list[int]:
        """Output tokens, a stop token included."""
        return self.tokens[self.num_prompt :]

    @property
    def text(self) -> str:
        """The text that is final: the texts of all deltas so far, joined."""
        return "".join(self.pieces)

    @property
    def is_prefilling(self) -> bool:
        """Whether tokens of the prefill are still to be planned."""
        return self.num_planned < self.prefill_end

    def commit_decode(self, decode: Decode, decoded: Decoded) -> TokenDelta | None:
        """Append what a decode step decided. None for a sequence that ended after the step was issued: it ignores the
        step's tokens."""
        self.in_flight -= self.max_step
        if self.finish_reason is not None:
            return None
        num_accepted = len(decoded.kept) - 1
        num_drafted = decoded.num_drafted
        drafter = drafter_of(decode, decoded)
        delta = self._append_or_fail(decoded.kept, num_accepted, decoded.logprobs, drafter, num_drafted)
        num_kept = len(delta.token_ids)
        if num_drafted and (decode.proposal is None or decode.cut is not None):
            self._note_guesses(num_drafted, num_accepted, num_kept)
        self.counters.add(num_drafted, num_accepted, num_kept, len(decoded.kept) - num_kept)
        if self.slot == decode.slot:
            self.num_cached += num_kept
            self._note_draft(decoded)
            self.is_drafting = decode.drafting.needs_draft_model
            self.num_rows = 1 + num_drafted
        return delta

    def _note_guesses(self, num_drafted: int, num_accepted: int, num_kept: int) -> None:
        """The draft model drafted for a step of which num_kept tokens were appended: the end of the text may have cut
        the one that it missed. In a tree the path may have ended at a leaf, where nothing was guessed."""
        self.num_guessed += 1
        self.num_missed += num_accepted == 0
        if num_accepted < min(num_drafted, num_kept):
            self.rejected.append(len(self.tokens) - num_kept + num_accepted)

    def commit_chunk(self, chunk: Chunk, prefilled: Prefilled) -> TokenDelta | None:
        """Note that a chunk's keys are written, and append the token that it drew. None if it drew none, and for a
        sequence that has ended."""
        self.in_flight -= chunk.draws
        if self.finish_reason is not None:
            return None
        self.prompt_logprobs += prefilled.prompt_logprobs
        if self.slot == chunk.slot:
            self.num_cached = chunk.end
            self._note_draft(prefilled)
        if prefilled.first_token is None:
            return None
        delta = self._append_or_fail([prefilled.first_token], 0, prefilled.logprobs)
        self.counters.num_prefilled += len(delta.token_ids)
        return delta

    def _note_draft(self, outcome: Decoded | Prefilled) -> None:
        self.first_draft_key, self.draft_end = outcome.first_draft_key, outcome.draft_end
        self.features_end = outcome.features_end

    def _append_or_fail(
        self, token_ids: list[int], num_accepted: int, logprobs: list[TokenLogprobs] | None, drafter: Source = "draft",
        num_drafted: int = 0,
    ) -> TokenDelta:  # fmt: skip
        """Append a step's tokens. A last token of -1 says that the target's logits are not numbers. The sequence then
        ends with an error, unless the tokens before the last one already end it. It also does if its grammar fails."""
        if self.constraint is not None and self.constraint.failure is not None:
            end = self.end("error", f"request {self.request.id}: structured: {self.constraint.failure}")
            return end._replace(num_drafted=num_drafted, num_confirmed=num_accepted)
        if token_ids[-1] >= 0:
            delta = self._append(token_ids, num_accepted, logprobs, drafter, num_drafted)
            if self.constraint is None or delta.finish_reason is not None:
                return delta
            self.constraint.accept(delta.token_ids)
            return delta
        delta = self._append(token_ids[:-1], num_accepted, logprobs, drafter, num_drafted)
        if delta.finish_reason is not None:
            return delta
        sampling, cause = self.request.sampling, "check the checkpoint's weights and dtype"
        if sampling.logit_bias or sampling.bad_words or sampling.min_tokens or sampling.structured is not None:
            cause += ", and whether logit_bias, bad_words, min_tokens and structured leave any token"
        if self.request.edit is not None:
            cause += ", and whether the edit leaves any token"
        where = f"request {self.request.id}: the target's logits at position {len(self.tokens)}"
        end = self.end("error", f"{where} are NaN or have no finite value; {cause}")
        return delta._replace(text=delta.text + end.text, finish_reason="error", error=end.error)

    def _append(
        self, token_ids: list[int], num_accepted: int, logprobs: list[TokenLogprobs] | None, drafter: Source,
        num_drafted: int,
    ) -> TokenDelta:  # fmt: skip
        """Add a step's tokens (accepted drafts, then the bonus), cut at the first stop. Returns what was added."""
        room = self.request.max_tokens_total - len(self.tokens)
        kept = token_ids[:room]
        reason: FinishReason | None = "length" if len(kept) == room else None
        if not self.eos_token_ids.isdisjoint(kept):
            kept = kept[: 1 + next(i for i, t in enumerate(kept) if t in self.eos_token_ids)]
            reason = "stop"
        num_kept, text, reason = self.detokenizer.take(kept, reason)
        kept = kept[:num_kept]
        if len(self.tokens) == self.num_prompt:
            self.first_token_s = time.monotonic()
        if reason is not None:
            self.ended_s = time.monotonic()
        self.tokens += kept
        if logprobs is not None:
            logprobs = logprobs[: len(kept)]
            self.logprobs += logprobs
        self.finish_reason = reason
        self.pieces.append(text)
        assert len(kept) <= room, (len(kept), room)
        num_kept_drafts = min(num_accepted, len(kept))
        delta = TokenDelta(
            self.request.id, kept, num_kept_drafts, text, reason, logprobs, None, drafter, num_drafted, num_accepted
        )
        self.sources += delta.sources
        return delta

    def end(self, reason: FinishReason, error: str | None = None) -> TokenDelta:
        """End the sequence with the tokens it has."""
        self.finish_reason, self.error, self.ended_s = reason, error, time.monotonic()
        text = self.detokenizer.finish()
        self.pieces.append(text)
        return TokenDelta(self.request.id, [], 0, text, reason, None, error)


def drafter_of(decode: Decode, decoded: Decoded) -> Source:
    """Who drafted the accepted tokens. Where the draft model and the host drafted in one tree: the host, if all of them
    are its own too."""
    if decode.proposal is None:
        return "draft"
    accepted = tuple(decoded.kept[:-1])
    return "lookup" if decode.cut is None or accepted == decode.proposal.tokens[: len(accepted)] else "draft"
