"""Prompt lookup: drafts are copied from where the latest tokens stood before, in the prompt, the output, or the text
that the caller expects to come back. No draft model takes part.

Each sequence has a suffix automaton of its tokens, which is freed with it. The sequences of an engine share
MatchEvents: how often a match of a length and a count foretold the next token of the target. These events need no
drafts: every token that the target wrote says whether the match before it was right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from aquiline.checks import check_fields
from aquiline.config import MAX_DEPTH, check
from aquiline.settings import setting
from aquiline.spec.drafting import DRAFTING, Drafting, Match, Proposal
from aquiline.spec.suffix_automaton import SEPARATOR, SuffixAutomaton

LONGEST, OFTENEST = 64, 8
"""Lengths and counts from which on all are one bucket; below, a bucket holds those of as many bits."""

MAX_TRIALS = 1024
"""Events of a cell after which it forgets half of them: what was written long ago says less."""

CONTEXT = 32
"""Tokens of the prompt's end that stand before a prediction, so that its first tokens are found behind the prompt."""

LEAST = 0.02
"""Chance below which nothing is drafted where the engine weighs what is: no verified token is as cheap."""

NOTHING = Proposal(())


@dataclass(frozen=True)
class Lookup(Drafting):
    """Up to max_draft tokens, copied from behind the most recent place where the longest suffix of the text stood.

    Where the target wrote another token than the copied one, the next draft follows the suffix that ends with this
    token, a shorter match. min_confidence: a token is drafted if the estimated chance that it is accepted is at least
    that. None: at least what a verified token costs, as a share of the tokens that its time could bring; the engine
    measures that. window: tokens of a sequence
    and its prediction that are indexed at most, at about 150 bytes a token in ordinary text; once there are more, the
    older half of the sequence's is dropped."""

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
        check(1 <= self.min_match <= CONTEXT, "min_match", self.min_match, f"must be between 1 and {CONTEXT}")
        check(
            1 <= self.max_draft <= MAX_DEPTH, "max_draft", self.max_draft,
            f"must be between 1 and {MAX_DEPTH}; drafter='none' switches speculation off",
        )  # fmt: skip
        ok = self.min_confidence is None or 0 <= self.min_confidence < 1
        check(ok, "min_confidence", self.min_confidence, "must be in [0, 1); 0 drafts whatever is found")
        ok = 8 * CONTEXT <= self.window <= 2**24
        check(ok, "max_lookup", self.window, f"must be between {8 * CONTEXT} and 2^24 tokens")

    @property
    def max_nodes(self) -> int:  # noqa: D102
        return 1 + self.max_draft

    @property
    def is_adaptive(self) -> bool:  # noqa: D102
        return self.min_confidence is None

    @property
    def label(self) -> str:  # noqa: D102
        return f"lookup-{self.max_draft}"

    def shared(self) -> MatchEvents:  # noqa: D102
        return MatchEvents()

    def proposer(self, prompt: Sequence[int], prediction: Sequence[int], shared: MatchEvents) -> LookupProposer:  # noqa: D102
        return LookupProposer(self, len(prompt), prediction, shared)


_COUNT_CELLS = tuple(count.bit_length() for count in range(OFTENEST + 1))
_LENGTH_CELLS = tuple(length.bit_length() * (_COUNT_CELLS[-1] + 1) for length in range(LONGEST + 1))


def cell_of(length: int, count: int) -> int:
    """Where events of matches of so many tokens, which stood in the text so often, are counted together."""
    return (
        _LENGTH_CELLS[length if length < LONGEST else LONGEST] + _COUNT_CELLS[count if count < OFTENEST else OFTENEST]
    )


class MatchEvents:
    """How often matches foretold the next token, by the buckets of their length and count.

    estimates: the chance of a match in a cell to be right, (hits + 1) / (trials + 2): 1/2 before the first event."""

    def __init__(self) -> None:
        num_cells = cell_of(LONGEST, OFTENEST) + 1
        self.trials, self.hits = [0] * num_cells, [0] * num_cells
        self.estimates = [0.5] * num_cells

    def add(self, length: int, count: int, is_hit: bool) -> None:
        """Count a token that the target wrote behind a match; is_hit: it was the foretold one."""
        cell = cell_of(length, count)
        self.trials[cell] += 1
        self.hits[cell] += is_hit
        if self.trials[cell] == MAX_TRIALS:
            self.trials[cell] //= 2
            self.hits[cell] //= 2
        self.estimates[cell] = (self.hits[cell] + 1) / (self.trials[cell] + 2)


class LookupProposer:
    """Drafts for one sequence. Its automaton is built by the first call of `propose`, so that a sequence that waits for
    a slot has none, and keeps its tokens while the sequence is preempted."""

    def __init__(self, spec: Lookup, num_prompt: int, prediction: Sequence[int], events: MatchEvents) -> None:
        self.spec, self.num_prompt, self.prediction, self.events = spec, num_prompt, prediction, events
        self.index: SuffixAutomaton | None = None
        self.num_seen = 0  # tokens of the sequence that were indexed, or left out as too old

    def propose(self, tokens: Sequence[int], max_tokens: int) -> Proposal:
        """The tokens behind the longest match, as far as they are likely enough.

        A copy that reaches the text's end goes on from its own beginning: such a text repeats itself."""
        index = self._followed(tokens)
        state = index.match()
        if not state:
            return NOTHING
        estimates, text = self.events.estimates, index.text
        least = LEAST if self.spec.min_confidence is None else self.spec.min_confidence
        match = Match(index.length[state], index.count[state])
        matched, count = match
        begin = place = index.end[state] + 1
        chance = 1.0
        drafted: list[int] = []
        confidences: list[float] = []
        for _ in range(max_tokens):
            chance *= estimates[cell_of(matched, count)]
            token = text[place]
            if chance < least or token == SEPARATOR:
                break
            drafted.append(token)
            confidences.append(chance)
            # If the token is accepted, the match is a token longer, and stood in the text as often as that one did.
            matched += 1
            state = index.next(state, token) if state else 0
            count = index.count[state] if state else count
            place = place + 1 if place + 1 < len(text) else begin
        return Proposal(tuple(drafted), (), tuple(confidences), match) if drafted else NOTHING

    def _followed(self, tokens: Sequence[int]) -> SuffixAutomaton:
        """The automaton with all tokens of the sequence."""
        if self.index is None:
            self.index = self._opened(tokens, self.num_prompt)
        if len(self.index.text) + len(tokens) - self.num_seen > self.spec.window:
            self.index = self._opened(tokens, len(tokens))
        if len(tokens) > self.num_seen:
            self.index.extend(tokens[self.num_seen :], self.events)
            self.num_seen = len(tokens)
        return self.index

    def _opened(self, tokens: Sequence[int], end: int) -> SuffixAutomaton:
        """A new automaton of the prediction, which gets half of the window at most, and the latest tokens before `end`,
        which get half of the rest: the other half is for tokens to come.

        The prediction stands first: it is copied only from where prompt and output have no match as long."""
        index = SuffixAutomaton(self.spec.min_match)
        if self.prediction:
            index.extend(tokens[max(0, self.num_prompt - CONTEXT) : self.num_prompt])
            index.extend(self.prediction[: self.spec.window // 2 - CONTEXT - 1])
            index.extend((SEPARATOR,))
        index.extend(tokens[max(0, end - (self.spec.window - len(index.text)) // 2) : end])
        self.num_seen = end
        return index
