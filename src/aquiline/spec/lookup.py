"""Prompt lookup: drafts are copied from an earlier place of the latest tokens, in the prompt, the output, or a
prediction of the output. No draft model takes part.

Each sequence has an index of its tokens (text_index.py), which is freed with it. The sequences of an engine share
MatchEvents: how often a match of some length and count predicted the target's next token. If the engine keeps past
outputs, drafts are also copied from those of the sequence's space. Matches in past outputs have their own events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from aquiline.checks import check_fields
from aquiline.config import MAX_DEPTH, check
from aquiline.settings import setting
from aquiline.spec.drafting import DRAFTING, NO_PROPOSAL, Drafting, Match, Proposal
from aquiline.spec.match_events import MatchEvents, cell_of
from aquiline.spec.past_outputs import PROMPT_TAIL, PastMatch, PastSpace
from aquiline.spec.suffix_automaton import SEPARATOR
from aquiline.spec.text_index import NewIndex, SuffixIndex, TextIndex

MIN_CHANCE = 0.02
"""A proposer whose drafts the controller weighs drafts no token with a smaller chance: no verified token is as
cheap."""


@dataclass(frozen=True)
class Lookup(Drafting):
    """Up to max_draft tokens, copied from after the most recent earlier place of the longest suffix of the text.

    If the target writes another token than the copied one, the next draft follows the suffix that ends with the
    target's token, a shorter match. min_confidence: the least estimated chance to be accepted of a drafted token. None:
    the cost of a verified token, which the engine measures, as a share of the tokens that its time could bring. window:
    the greatest number of indexed tokens of a sequence and its prediction, at 140 bytes a token or less (without the
    native library about 150, in ordinary text). When there are more, the older half of the sequence's tokens is
    dropped."""

    name: ClassVar[str] = "lookup"
    needs_draft_model: ClassVar[bool] = False
    reads_prediction: ClassVar[bool] = True
    min_match: int = setting(2, "Lookup: latest tokens that must stand in the text before.", DRAFTING)
    max_draft: int = setting(8, "Lookup: tokens drafted per step at most.", DRAFTING)
    min_confidence: float | None = setting(
        None, "Lookup: a draft ends where the chance of a token to be accepted falls below. Default: by measured cost.",
        DRAFTING,
    )  # fmt: skip
    window: int = setting(32768, "Lookup: tokens of a sequence that are searched at most.", DRAFTING, name="max_lookup")

    def __post_init__(self) -> None:
        check_fields(self)
        check(1 <= self.min_match <= PROMPT_TAIL, "min_match", self.min_match, f"must be between 1 and {PROMPT_TAIL}")
        check(
            1 <= self.max_draft <= MAX_DEPTH, "max_draft", self.max_draft,
            f"must be between 1 and {MAX_DEPTH}; drafter='none' switches speculation off",
        )  # fmt: skip
        ok = self.min_confidence is None or 0 <= self.min_confidence < 1
        check(ok, "min_confidence", self.min_confidence, "must be in [0, 1); 0 drafts whatever is found")
        ok = 8 * PROMPT_TAIL <= self.window <= 2**24
        check(ok, "max_lookup", self.window, f"must be between {8 * PROMPT_TAIL} and 2^24 tokens")

    @property
    def max_nodes(self) -> int:  # noqa: D102
        return 1 + self.max_draft

    @property
    def is_adaptive(self) -> bool:  # noqa: D102
        return self.min_confidence is None

    @property
    def label(self) -> str:  # noqa: D102
        return f"lookup-{self.max_draft}"

    def shared(self, new_index: NewIndex = SuffixIndex) -> LookupShared:  # noqa: D102
        return LookupShared(new_index=new_index)

    def proposer(  # noqa: D102
        self, prompt: Sequence[int], prediction: Sequence[int], shared: LookupShared, past: PastSpace | None = None
    ) -> LookupProposer:
        return LookupProposer(self, len(prompt), prediction, shared, past)


@dataclass(frozen=True)
class LookupShared:
    """The state that the lookups of an engine share: their `events`, and the function that makes an index of a text."""

    events: MatchEvents = field(default_factory=MatchEvents)
    new_index: NewIndex = SuffixIndex


class LookupProposer:
    """Drafts for one sequence. The first call of `propose` builds the index, so a sequence that waits for a slot has
    none. The index stays while the sequence is preempted."""

    def __init__(
        self, drafting: Lookup, num_prompt: int, prediction: Sequence[int], shared: LookupShared, past: PastSpace | None
    ) -> None:
        self.drafting, self.num_prompt, self.prediction, self.shared = drafting, num_prompt, prediction, shared
        self.past = None if past is None else PastMatch(past, drafting.min_match)
        self.index: TextIndex | None = None
        self.num_seen = 0  # tokens of the sequence that were indexed, or skipped as too old
        self.window = drafting.window
        self.least = MIN_CHANCE if drafting.min_confidence is None else drafting.min_confidence

    def propose(self, tokens: Sequence[int], max_tokens: int) -> Proposal:
        """The tokens after the longer of two matches, in the sequence's own text and in past outputs, as far as they
        are likely enough. The text's own match goes first if both are as long. If no token is likely enough, the tokens
        after the other."""
        index = self.index
        if index is None:
            index = self._open(tokens, self.num_prompt)
        if index.num_tokens + len(tokens) - self.num_seen > self.window:
            index = self._open(tokens, len(tokens))
        own = index.propose(tokens[self.num_seen :], max_tokens, self.least)
        self.num_seen = len(tokens)
        past = self.past
        if past is None:
            return own
        is_longer = past.follow(tokens, self.num_prompt).length > index.match_length
        if own.tokens and not is_longer:
            return own
        found = self._from_past(past, max_tokens)
        return found if found.tokens else own

    def _from_past(self, past: PastMatch, max_tokens: int) -> Proposal:
        """A draft from past outputs, up to the end of the output that has the match."""
        outputs, (end, length, count) = past.space.outputs, past.place
        estimates, least = outputs.events.estimates, self.least
        chance = 1.0
        drafted: list[int] = []
        confidences: list[float] = []
        for i in range(max_tokens if length else 0):
            chance *= estimates[cell_of(length + i, count)]
            token = outputs.token(end + 1 + i)
            if chance < least or token == SEPARATOR:
                break
            drafted.append(token)
            confidences.append(chance)
        return Proposal(tuple(drafted), (), tuple(confidences), Match(length, count)) if drafted else NO_PROPOSAL

    def _open(self, tokens: Sequence[int], end: int) -> TextIndex:
        """Make an index of the prediction, in half of the window at most, and of the latest tokens before `end`, in
        half of the rest. The other half is left for later tokens.

        The prediction stands first, so it is copied from only if prompt and output have no match as long."""
        index = self.index = self.shared.new_index(self.drafting.min_match, self.shared.events)
        if self.prediction:
            index.extend(tokens[max(0, self.num_prompt - PROMPT_TAIL) : self.num_prompt])
            index.extend(self.prediction[: self.window // 2 - PROMPT_TAIL - 1])
            index.extend((SEPARATOR,))
        index.extend(tokens[max(0, end - (self.window - index.num_tokens) // 2) : end])
        self.num_seen = end
        return index
