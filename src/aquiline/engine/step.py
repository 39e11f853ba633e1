"""A plan as the message that a backend takes, and the step's outcome beside its plan.

Knows both sides of the seam and computes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aquiline.backends.base import Admit, Chunk, Decode, Decoded, Extend, Pages, Pending, StepInput, StepOutput
from aquiline.engine.scheduler import StepPlan
from aquiline.engine.sequence import Sequence
from aquiline.spec.drafting import NoDraft


@dataclass(eq=False)
class Step:
    """A step that was issued: its plan, its message, and the handle of its outcome. `output` is None until `read` was
    called."""

    plan: StepPlan
    message: StepInput
    pending: Pending
    output: StepOutput | None = None

    def read(self) -> StepOutput:
        """Wait for the outcome."""
        if self.output is None:
            self.output = self.pending.read()
        return self.output

    @property
    def seconds(self) -> float | None:
        """How long the backend took for it; None where it does not tell."""
        seconds = self.read().seconds
        return None if seconds is None else sum(seconds.values())

    @property
    def decodes(self) -> list[Decoded]:
        """The outcome of each decoding sequence, in the order of the plan."""
        return self.read().decodes

    def by_slot(self, num_slots: int) -> dict[str, NDArray[np.signedinteger]]:
        """Per slot of the batch: accepted [S], draft tokens [S, N], ancestor masks [S, N, W]. Slots that did not decode
        hold 0, -1 and 0. Needs an engine whose `with_trees` is set."""
        trees = self.read().trees
        assert trees is not None, "Engine.with_trees asks for them"
        tree, result = trees
        shape, slots = tree.topology, np.array([s.slot for s in self.message.decodes], np.int32)
        owner, local = shape.owner, shape.local
        width = int(local.max(initial=0)) + 1
        accepted = np.zeros(num_slots, np.int32)
        draft = np.full((num_slots, width), -1, np.int32)
        mask = np.zeros((num_slots, width, shape.ancestors.shape[1]), np.int64)
        accepted[slots] = result.num_accepted
        drafted = local > 0
        draft[slots[owner[drafted]], local[drafted]] = tree.tokens[drafted]
        mask[slots[owner], local] = shape.ancestors
        return {"accepted": accepted, "draft": draft, "mask": mask}


def message_of(
    plan: StepPlan, chosen: Mapping[Sequence, Decode], pages: Iterable[tuple[int, int, int]], extends: Iterable[Extend],
    row_costs: tuple[float, ...] = (), with_trees: bool = False,
) -> StepInput:  # fmt: skip
    """The plan as a StepInput, with the changed entries of page tables and the draft keys that published pages lack.

    chosen: how the sequences draft whose way is chosen anew at each step, and row_costs what their nodes cost."""
    return StepInput(
        decodes=tuple(chosen.get(sequence) or _decode(sequence) for sequence in plan.decoding),
        chunks=tuple(Chunk(c.slot, c.start, c.end, c.is_last, c.draws) for c in plan.chunks),
        admits=tuple(_admit(sequence) for sequence in plan.admitted),
        pages=tuple(Pages(slot, index, (page,)) for slot, index, page in pages),
        extends=tuple(extends),
        row_costs=row_costs,
        with_trees=with_trees,
    )


def _decode(sequence: Sequence) -> Decode:
    drafting, proposal = sequence.request.drafting, None
    if not sequence.may_draft:
        return Decode(sequence.slot, NoDraft())
    if sequence.proposer is not None:
        proposal = sequence.proposer.propose(sequence.tokens, drafting.max_nodes - 1)
        if len(proposal.tokens) >= drafting.max_nodes or proposal.depth > drafting.max_depth:
            raise ValueError(
                f"drafter={drafting.name!r}: proposed {len(proposal.tokens)} tokens, {proposal.depth} deep; its "
                f"max_nodes={drafting.max_nodes} and max_depth={drafting.max_depth} reserve room for less"
            )
    return Decode(sequence.slot, drafting, proposal)


def _admit(sequence: Sequence) -> Admit:
    return Admit(
        slot=sequence.slot,
        tokens=tuple(sequence.tokens),
        num_prompt=sequence.num_prompt,
        sampling=sequence.request.sampling,
        end_token_ids=sequence.eos_token_ids,
        bad_words=sequence.bad_words,
        num_hit=sequence.num_hit,
        drafts=sequence.drafts,
        first_draft_key=sequence.first_draft_key,
        num_prompt_logprobs=len(sequence.prompt_logprobs),
    )
