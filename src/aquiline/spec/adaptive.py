"""Adaptive drafting: at each step the engine chooses for each sequence whether to draft, from where, and how far. The
choice follows from the cost of a step and from how often drafts were right (engine/control)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from aquiline.checks import check_fields
from aquiline.config import MAX_CHAIN, check
from aquiline.settings import setting
from aquiline.spec.confidence import most_nodes
from aquiline.spec.drafting import DRAFTING, Chain, Drafting, Proposer
from aquiline.spec.lookup import Lookup, LookupProposer, LookupShared
from aquiline.spec.past_outputs import PastSpace
from aquiline.spec.text_index import NewIndex, SuffixIndex

MAX_COPY = 16
"""The greatest number of tokens that a step copies."""

COPYING = Lookup(max_draft=MAX_COPY)
"""How copies are made."""


@dataclass(frozen=True)
class Adaptive(Drafting):
    """The draft that brings the most tokens per millisecond at each step: none, a chain of the draft model that ends
    where the draft is unsure, a copy of earlier text, or both in one tree. The fields limit what a step may draft.

    max_spec_tokens: levels of the draft model's chain; each may have a runner-up beside its token. lookup: whether
    text may be copied. Without a draft model there are only copies."""

    name: ClassVar[str] = "adaptive"
    needs_draft_model: ClassVar[bool] = True
    reads_prediction: ClassVar[bool] = True
    max_spec_tokens: int = setting(8, "Adaptive: longest chain of the draft model.", DRAFTING)
    lookup: bool = setting(True, "Adaptive: copy from prompt, output and prediction too.", DRAFTING, name="use_lookup")

    def __post_init__(self) -> None:
        check_fields(self)
        check(
            1 <= self.max_spec_tokens <= MAX_CHAIN, "max_spec_tokens", self.max_spec_tokens,
            f"must be between 1 and {MAX_CHAIN}; drafter='none' switches speculation off",
        )  # fmt: skip

    @property
    def max_nodes(self) -> int:  # noqa: D102
        return max(most_nodes(self.max_spec_tokens), 1 + MAX_COPY if self.lookup else 0)

    @property
    def max_depth(self) -> int:  # noqa: D102
        return max(self.max_spec_tokens, MAX_COPY if self.lookup else 0)

    @property
    def draft_passes(self) -> tuple[int, ...]:  # noqa: D102
        return (1,) * (self.max_spec_tokens - 1)

    @property
    def width(self) -> int:  # noqa: D102
        return 2

    @property
    def is_adaptive(self) -> bool:  # noqa: D102
        return True

    @property
    def label(self) -> str:  # noqa: D102
        return f"adaptive-{self.max_spec_tokens}"

    @cached_property
    def chains(self) -> tuple[Chain, ...]:
        """The chains of one level, of two, and so on."""
        return tuple(Chain(length) for length in range(1, self.max_spec_tokens + 1))

    def shared(self, new_index: NewIndex = SuffixIndex) -> LookupShared:  # noqa: D102
        return LookupShared(new_index=new_index)

    def proposer(  # noqa: D102
        self, prompt: Sequence[int], prediction: Sequence[int], shared: LookupShared, past: PastSpace | None = None
    ) -> Proposer | None:
        if not self.lookup:
            return None
        return LookupProposer(COPYING, len(prompt), prediction, shared, past)
