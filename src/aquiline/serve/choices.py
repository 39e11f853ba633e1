"""A client's request while it runs: its choices, whose deltas become text, parts of an answer and figures.

The text is cut by the same `Detokenizer` that cuts sequences in the engine, so an answer is LLM.generate's of the same
seed, whatever a step brings. No part ever ends inside a character.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aquiline.engine.sequence import Request
from aquiline.serve.sampling import Wanted
from aquiline.serve.wire import Begin, Delta
from aquiline.text.parsers import Part
from aquiline.text.parsing import Reader
from aquiline.types import FinishReason, Source, TokenLogprobs


class Piece(NamedTuple):
    """Parts of an answer that one token made certain, and who wrote that token."""

    parts: list[Part]
    by: Source


@dataclass
class SpeculationRecord:
    """What drafting did for one answer. accepted_of[d][a]: steps that drafted d tokens and confirmed a of them; steps:
    the same pairs in order, where somebody wants them. num_steps: all decode steps, those that drafted nothing too, and
    num_committed the tokens that they added: tau is the one by the other (metrics.Counters)."""

    num_steps: int = 0
    num_committed: int = 0
    accepted_of: dict[int, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    steps: list[tuple[int, int]] | None = None

    def add(self, num_drafted: int, num_confirmed: int, num_committed: int) -> None:
        """Count a decode step."""
        self.num_steps += 1
        self.num_committed += num_committed
        if num_drafted:
            self.accepted_of[num_drafted][num_confirmed] += 1
            if self.steps is not None:
                self.steps.append((num_drafted, num_confirmed))

    @property
    def num_drafts(self) -> int:
        """Steps that drafted."""
        return sum(counts.total() for counts in self.accepted_of.values())

    @property
    def num_drafted(self) -> int:
        """Drafted tokens."""
        return sum(drafted * counts.total() for drafted, counts in self.accepted_of.items())

    @property
    def num_accepted(self) -> int:
        """Drafted tokens that the target confirmed."""
        return sum(n * count for counts in self.accepted_of.values() for n, count in counts.items())


class Gain(NamedTuple):
    """What some deltas added to an answer. pieces: one for all tokens, or one per token where `by_token` asks;
    logprobs: of each token, where asked for. Tokens after a stop string are in none of the fields."""

    pieces: list[Piece]
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason | None


class Choice:
    """The state of one answer. stop strings are looked for by its reader: `request` goes to the engine without them.

    by_token: pieces are those of single tokens, so that it can be told who wrote which."""

    def __init__(self, request: Request, reader: Reader, by_token: bool = False, is_detailed: bool = False) -> None:
        self.request, self.reader, self.by_token = request, reader, by_token
        self.speculation = SpeculationRecord(steps=[] if is_detailed else None)
        self.num_tokens = self.num_reasoning = 0
        self.finish_reason: FinishReason | None = None
        self.begin = Begin(0, None)

    def take(self, *deltas: Delta) -> Gain:
        """The next deltas of the answer, read as one. After one with a finish_reason no more may come."""
        assert self.finish_reason is None, "the answer has ended"
        ids = [token for delta in deltas for token in delta.token_ids]
        pieces, num, last = list[Piece](), 0, deltas[-1]
        authors = [author for delta in deltas for author in delta.authors] if self.by_token else []
        size = 1 if self.by_token else max(1, len(ids))
        while True:
            some = ids[num : num + size]
            is_last = num + size >= len(ids)
            read = self.reader.take(some, last.finish_reason if is_last else None)
            pieces.append(Piece(read.parts, authors[num] if num < len(authors) else last.drafter))
            num += read.num_tokens
            self.num_reasoning += read.num_reasoning
            if is_last or read.finish_reason is not None:
                break
        self.num_tokens += num
        self.finish_reason = read.finish_reason
        self._count(deltas, num)
        logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
        return Gain(pieces, ids[:num], logprobs[:num], read.finish_reason)

    def _count(self, deltas: Sequence[Delta], num_tokens: int) -> None:
        """Keep what deltas say beside their tokens, of which num_tokens belong to the answer."""
        for delta in deltas:
            self.begin = delta.begin or self.begin
            if delta.is_decoded and num_tokens > 0:
                self.speculation.add(delta.num_drafted, delta.num_confirmed, min(num_tokens, len(delta.token_ids)))
            num_tokens -= len(delta.token_ids)


@dataclass(eq=False)
class Job:
    """One request of a client. choices: n for each prompt, those of one prompt beside each other. texts: the prompts as
    clients wrote them, where echo asks for them."""

    id: str
    model: str
    wanted: Wanted
    prompts: list[list[int]]
    choices: list[Choice]
    created: int = field(default_factory=lambda: int(time.time()))
    began_s: float = field(default_factory=time.monotonic)
    first_s: float = 0.0
    last_s: float = 0.0

    @property
    def usage(self) -> dict[str, Any]:
        """OpenAI's usage; every field is there, zeros too. Drafted tokens that were kept count as accepted, the others
        as rejected, whoever drafted them."""
        n = self.wanted.n
        drafted = sum(choice.speculation.num_drafted for choice in self.choices)
        accepted = sum(choice.speculation.num_accepted for choice in self.choices)
        num_prompt, num_new = sum(map(len, self.prompts)), sum(choice.num_tokens for choice in self.choices)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": sum(choice.begin.num_cached for choice in self.choices[::n])},
            "completion_tokens_details": {
                "reasoning_tokens": sum(choice.num_reasoning for choice in self.choices),
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }
