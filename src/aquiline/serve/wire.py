"""What the HTTP process and the engine process tell each other: plain values over one pipe, a message each way.

The HTTP process sends commands whenever it has some, those of a client's request together. The engine process sends
one `StepMessage` per step of the engine, or for steps that were computed together, whatever number of requests they
served; while no request runs it answers commands alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from aquiline.config import EngineConfig, PairConfig
from aquiline.engine.learning.learn_config import LearnConfig
from aquiline.engine.sequence import Request
from aquiline.spec.drafting import Drafting
from aquiline.types import FinishReason, Source, TokenLogprobs


@dataclass(frozen=True)
class Opening:
    """What the engine process loads: a pair, the engine's sizes, the default way to draft, and whether the draft
    learns."""

    pair: PairConfig
    engine: EngineConfig
    drafting: Drafting
    learning: LearnConfig = field(default_factory=LearnConfig)


class Submit(NamedTuple):
    """Run a request. Its id is a number that was not used before; its text is made in the HTTP process."""

    request: Request


class Abort(NamedTuple):
    """End a request where it stands. A request that has ended meanwhile is left alone."""

    request_id: int


class Prepare(NamedTuple):
    """A request with a grammar will come: load the library that reads it beside the steps."""


class TellPages(NamedTuple):
    """Tell which pages the prefix cache has, `most` of them at most."""

    most: int


class Quit(NamedTuple):
    """End the process."""


Command = Submit | Abort | Prepare | TellPages | Quit


class EngineInfo(NamedTuple):
    """The engine process is ready: what HTTP needs to know of its models. max_length: tokens of a sequence at most,
    prompt and output, by positions and by pages; num_slots: requests that run at once; learning: what is to be told of
    a draft that learns."""

    max_length: int
    vocab_size: int
    num_slots: int
    num_pages: int
    has_draft: bool
    memory: str
    system: dict[str, object]
    learning: str | None = None


class Begin(NamedTuple):
    """What is told with the first tokens of a request. num_cached: prompt tokens that the prefix cache had;
    prompt_logprobs: where asked for, of the second prompt token and on."""

    num_cached: int
    prompt_logprobs: list[TokenLogprobs] | None


class Delta(NamedTuple):
    """What a step added to one request, as in TokenDelta; begin: with its first tokens."""

    request_id: int
    token_ids: list[int]
    num_accepted: int
    drafter: Source
    num_drafted: int
    num_confirmed: int
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprobs] | None
    error: str | None
    begin: Begin | None

    @property
    def is_decoded(self) -> bool:
        """Whether a decode step wrote the tokens; the first one of a request is its prefill's."""
        return bool(self.token_ids) and self.begin is None

    @property
    def authors(self) -> list[Source]:
        """Who wrote each token."""
        return [self.drafter if place < self.num_accepted else "target" for place in range(len(self.token_ids))]


class Refused(NamedTuple):
    """The engine cannot run a request; error says why and what to change."""

    request_id: int
    error: str


class Stats(NamedTuple):
    """The engine's state after a step. Sums count from the start of the engine process: prompt tokens of requests
    that have ended and how many of these the prefix cache had, tokens that chunks of prompts computed, preemptions.

    num_active: slots that decoded in the last step; num_used_pages: pages that running requests hold."""

    num_running: int
    num_waiting: int
    num_active: int
    num_used_pages: int
    sum_prompt_tokens: int
    sum_cached_tokens: int
    sum_prefill_tokens: int
    sum_preemptions: int


class StepMessage(NamedTuple):
    """num_steps steps of the engine: the requests that joined since the last message, those that were refused, and what
    was added to each. pages: digests of cached pages (`kv/prefix.py`), where TellPages asked."""

    added: list[int]
    refused: list[Refused]
    deltas: list[Delta]
    stats: Stats
    num_steps: int
    pages: list[int] | None = None
