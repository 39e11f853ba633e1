"""What a step of each rival brings: planned drafting, no drafting, and whole chains.

Texts differ more than rivals do: what one brought in its turn would say more about the text that it met there. But a
planned step in which a sequence drafts also tells what a chain of 1 would have brought there, and a step of a chain
what all shorter ones would have. So what is learnt is how often a chain's first token is right, in the steps of all
rivals, and what each of them brings beyond it. Of plans this is learnt for each draft: how many there are changes from
plan to plan, and must be counted in the steps whose time is compared."""

from __future__ import annotations

from collections.abc import Sequence

from aquiline.engine.control.acceptance import Rates

CHAIN_LEVELS = (-1, 0, 1, 2, 3, 5)
"""The rivals by the levels of their chains: planned drafting, none, and chains, which need a draft model."""

PLANNED, NONE, FIRST_CHAIN = 0, 1, 2
"""The numbers of some rivals."""

YIELD_MEMORY, PLAN_MEMORY = 1024, 128
"""Numbers of steps at which half of what was learnt of them is forgotten; the second of what plans bring at all, and
of copies."""

MOSTLY = 0.5
"""The share of sequences that must draft in planned steps for these to tell of chains."""

_ASKED, _FURTHER, _BEYOND = range(3)
"""What is counted of planned steps, for each sequence: those that draft with the model, their further tokens, and those
of them beyond a chain of 1."""


class Yields:
    """Tokens of steps, learnt from steps."""

    def __init__(self) -> None:
        self._first = Rates((0.0,), 1.0, YIELD_MEMORY)
        self._planned = Rates((0.0, 0.0, 0.0), 1.0, YIELD_MEMORY)
        self._more = Rates((1.0,), 1.0, PLAN_MEMORY)
        self._copies = Rates((1.0,), 1.0, PLAN_MEMORY)
        # By chain, in steps that tell of it: right first tokens, and all further tokens. Easy texts have more of both.
        self._first_of, self._further = (Rates((0.0,) * len(CHAIN_LEVELS), 1.0, YIELD_MEMORY) for _ in range(2))

    def add_planned(
        self, num_sequences: int, num_tokens: int, num_asked: int, num_further: int, num_first: float
    ) -> None:
        """A step of planned drafting brought the sequences that do not copy so many tokens. num_asked: sequences that
        drafted with the model, and brought num_further tokens beside one each; num_first: how many first tokens of
        drafts were right, and should have been where there was none."""
        self._more.add(0, num_tokens / num_sequences - 1.0)
        first, asked, further = (number / num_sequences for number in (num_first, num_asked, num_further))
        self._planned.add(_ASKED, asked)
        self._planned.add(_FURTHER, further)
        self._planned.add(_BEYOND, further - first * asked)
        if self._tells_of_chains:
            self._first.add(0, first)

    def add_chain(self, rival: int, kept: Sequence[int]) -> None:
        """A step of a chain brought each sequence so many tokens."""
        count = len(kept)
        first = sum([number > 1 for number in kept]) / count
        self._first.add(0, first)
        for shorter in range(FIRST_CHAIN, rival + 1):
            most = 1 + CHAIN_LEVELS[shorter]
            self._first_of.add(shorter, first)
            self._further.add(shorter, sum([min(number, most) for number in kept]) / count - 1.0)

    def add_copies(self, num_further: float) -> None:
        """In a step of any rival a sequence copied, and that brought it so many tokens beside one."""
        self._copies.add(0, num_further)

    @property
    def of_copies(self) -> float:
        """Tokens that a copy brings beside one. Every rival copies, so they are no rival's own."""
        return self._copies.share(0)

    def further(self, rival: int) -> float:
        """Tokens that a step brings a sequence that drafts, beside one."""
        first = self._first.share(0)
        if rival == PLANNED:
            further, asked = self._planned.hits[_FURTHER], self._planned.hits[_ASKED]
            if self._tells_of_chains:
                return first + self._planned.hits[_BEYOND] / asked
            return further / asked if asked else 0.0
        seen = self._first_of.share(rival)
        return first * (self._further.share(rival) / seen if seen else 1.0)

    @property
    def of_plans(self) -> float:
        """Tokens that a planned step brings a sequence that does not copy, beside one, in the last ones; 1 before the
        first."""
        return self._more.share(0)

    def num_steps(self, rival: int) -> float:
        """The number of steps by which it is known what a rival that drafts brings beside none."""
        is_apart = rival == PLANNED and not self._tells_of_chains
        return (self._planned.trials[_ASKED] if is_apart else self._first.trials[0]) - 1.0

    @property
    def _tells_of_chains(self) -> bool:
        return self._planned.share(_ASKED) > MOSTLY
