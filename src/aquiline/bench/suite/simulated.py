"""A backend whose drafts are right as often as a benchmark asks. It serves random weights: their speed depends on tau
alone, not on the text.

The draft model drafts as usual. Then its tokens are replaced by the text that plain decoding wrote, up to a planned
length and a wrong token, and the target verifies the result as it always does. So drafts, verification and draws take
their real time, and the text is plain decoding's. Every result with a simulated tau must say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aquiline.backends.base import (
    Backend,
    Decode,
    Drafts,
    Pending,
    RowEdits,
    Scored,
    StepInput,
    StepOutput,
    TokenMasks,
)
from aquiline.spec.drafting import Chain
from aquiline.spec.tree import DraftTree
from aquiline.types import Int32


@dataclass
class SlotText:
    """The tokens of a slot, and how many of them are the prompt."""

    tokens: list[int]
    num_prompt: int


class SimulatedBackend:
    """Wraps a backend. Records every text by its prompt; a chain over a prompt whose text is known is simulated.

    tau: tokens of a step, on average over slots and steps, as near as whole tokens allow. vocab_size: of the target."""

    is_async = False

    def __init__(self, inner: Backend, tau: float, vocab_size: int) -> None:
        if not tau >= 1:
            raise ValueError(f"simulate_tau={tau}: must be at least 1, the token a step commits anyway")
        self.inner, self.vocab_size = inner, vocab_size
        self.texts: dict[tuple[int, ...], list[int]] = {}
        self.slots: dict[int, SlotText] = {}
        self.tau = tau
        self.owed = 0.0  # accepted tokens that rounding still owes; a run begins with none

    def planned(self, drafting: Chain) -> int:
        """How many drafts one slot accepts in its next step."""
        self.owed += min(self.tau - 1, drafting.num_spec_tokens)
        accepted = min(int(self.owed + 1e-9), drafting.num_spec_tokens)
        self.owed -= accepted
        return accepted

    def step(self, step: StepInput) -> Pending:
        """Draft, replace the drafted tokens, verify."""
        return self.verify(step, self.draft(step))

    def repeat(self, step: StepInput, most: int) -> Sequence[Pending]:
        """The step once: the tokens of the next one are not known before."""
        return [self.step(step)]

    def draft(self, step: StepInput) -> Drafts:
        """The inner backend's drafts."""
        for admit in step.admits:
            self.slots[admit.slot] = SlotText(list(admit.tokens), admit.num_prompt)
        return self.inner.draft(step)

    def verify(
        self, step: StepInput, drafts: Drafts | DraftTree, masks: TokenMasks | None = None, edits: RowEdits = ()
    ) -> Pending:
        """The inner backend's outcome of the replaced drafts."""
        tree = drafts if isinstance(drafts, DraftTree) else drafts.read()
        self._replace(step.decodes, tree)
        output = self.inner.verify(step, tree, masks, edits).read()
        self._record(step, output)
        return ReadOutcome(output)

    def _replace(self, decodes: Sequence[Decode], tree: DraftTree) -> None:
        for number, decode in enumerate(decodes):
            if not decode.drafting.is_speculative:
                continue
            if not isinstance(decode.drafting, Chain) or decode.cut is not None or decode.proposal is not None:
                raise ValueError(f"drafter={decode.drafting.name!r}: acceptance is simulated for chains; use 'chain'")
            slot = self.slots[decode.slot]
            known = self.texts.get(tuple(slot.tokens[: slot.num_prompt]), [])[len(slot.tokens) :]
            first, end = (int(place) for place in tree.topology.offsets[number : number + 2])
            right = known[: min(self.planned(decode.drafting), end - first - 1)]
            tree.tokens[first + 1 : first + 1 + len(right)] = right
            wrong = first + 1 + len(right)
            if wrong < end and len(right) < len(known):
                tree.tokens[wrong] = (known[len(right)] + 1) % self.vocab_size

    def _record(self, step: StepInput, output: StepOutput) -> None:
        added = [(decode.slot, decoded.kept) for decode, decoded in zip(step.decodes, output.decodes, strict=True)]
        for chunk, prefilled in zip(step.chunks, output.chunks, strict=True):
            added += [] if prefilled.first_token is None else [(chunk.slot, [prefilled.first_token])]
        for number, tokens in added:
            slot = self.slots[number]
            slot.tokens += tokens
            prompt = tuple(slot.tokens[: slot.num_prompt])
            if len(slot.tokens) > len(self.texts.get(prompt, ())):
                self.texts[prompt] = list(slot.tokens)

    def score(self, documents: Sequence[Int32]) -> Scored:
        """See Backend."""
        return self.inner.score(documents)

    def renew_draft(self, first_draft_keys: Mapping[int, int]) -> None:
        """See Backend."""
        self.inner.renew_draft(first_draft_keys)

    def time_parts(self, is_wanted: bool) -> None:
        """See Backend."""
        self.inner.time_parts(is_wanted)

    def close(self) -> None:
        """See Backend."""
        self.inner.close()


@dataclass(frozen=True)
class ReadOutcome:
    """An outcome that has been read."""

    output: StepOutput

    def read(self) -> StepOutput:
        """The outcome."""
        return self.output
