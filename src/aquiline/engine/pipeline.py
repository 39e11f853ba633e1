"""A step from its plan to its outcome: the message that the backend gets, and the queue of steps that were issued.

A backend keeps each slot's tokens itself, so a step does not need the last outcome from the host. Two things follow.

- *Late*: on an asynchronous backend step n + 1 is issued before step n is read, so the device never waits for the host.
- *Repeated*: on a synchronous backend one call runs short decode steps several times (`Backend.repeat`), because
  the kernels of a small model leave none of Python's data in the caches. Their outcomes are committed one at a time, as
  if each had just been computed.

The rule: `lag` outcomes stay unread after a step of the engine, 1 where outcomes are read late, else 0. A step is
issued while no more than `lag` wait; the oldest is committed once more than `lag` wait, or if nothing can be issued.
A sequence that drafts on the host needs its last tokens, so a late outcome is then committed before the next issue.

- *Guided*: where a sequence follows a grammar, the host reads the drafted trees, cuts what the grammar refuses and has
  the target draw under masks. A request's own edit changes the logits of its rows. Such steps are neither late nor
  repeated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from aquiline.backends.base import Admit, Backend, Decode, Pages, Pending, RowEdits, StepInput, StepOutput
from aquiline.engine.constraint import constrain
from aquiline.engine.scheduler import StepPlan
from aquiline.engine.sequence import Sequence, TextEdit
from aquiline.spec.drafting import NoDraft, Proposal
from aquiline.spec.tree import DraftTree


class StepChoice(NamedTuple):
    """How the adaptive sequences of a step draft. row_costs: what their nodes cost, see StepInput; most_steps: the
    number of steps for which the choice may stand."""

    decodes: dict[Sequence, Decode]
    row_costs: tuple[float, ...]
    most_steps: int


@dataclass(eq=False)
class Step:
    """A step that was issued: its plan, its message, and the handle of its outcome."""

    plan: StepPlan
    message: StepInput
    pending: Pending

    @cached_property
    def output(self) -> StepOutput:
        """The outcome. Who asks first waits for it."""
        return self.pending.read()

    @cached_property
    def seconds(self) -> float | None:
        """How long the backend took for it; None where it does not tell."""
        seconds = self.output.seconds
        return None if seconds is None else sum(seconds.values())

    def by_slot(self, num_slots: int) -> dict[str, NDArray[np.signedinteger]]:
        """Per slot of the batch: accepted [S], draft tokens [S, N], ancestor masks [S, N, W]. Slots that did not decode
        hold 0, -1 and 0. Needs an engine whose `with_trees` is set."""
        trees = self.output.trees
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


class Pipeline:
    """The steps that were issued and are not committed yet, oldest first (`unread`).

    last: the step that was committed last or, where outcomes are read late, issued last."""

    def __init__(self, is_late: bool) -> None:
        self.is_late = is_late
        self.lag = int(self.is_late)
        self.unread: deque[Step] = deque()
        self.last: Step | None = None
        self.unspent_s = 0.0

    @property
    def is_ahead(self) -> bool:
        """Whether the next outcome has been computed together with an earlier one."""
        return len(self.unread) > self.lag

    def must_read_first(self, running: Iterable[Sequence | None]) -> bool:
        """Whether the next plan needs the outcome that is still unread: proposers on the host, grammars and edits read
        tokens."""
        needs = any(s is not None and (s.proposer is not None or s.is_guided) for s in running)
        return bool(self.unread) and needs

    def issue(self, backend: Backend, plan: StepPlan, message: StepInput, most: int) -> int:
        """Hand a step to the backend, which may repeat its decodes up to `most` times. Returns how often it ran.

        Admissions, pages and extends come before the decodes, so they belong to the first of repeated steps."""
        outcomes: Items[Pending]
        if any(s.is_guided for s in (*plan.decoding, *_drawing(plan))):
            outcomes = [issue_guided(backend, plan, message)]
        else:
            outcomes = backend.repeat(message, most)
        for number, outcome in enumerate(outcomes):
            if number == 1:
                plan, message = plan._replace(admitted=()), message._replace(admits=(), pages=(), extends=())
            self.unread.append(Step(plan, message, outcome))
        for sequence in plan.decoding:
            sequence.in_flight += (len(outcomes) - 1) * sequence.max_step  # the plan counts one of the steps
        if self.is_late:
            self.last = self.unread[-1]
        return len(outcomes)

    def take(self, was_issued: bool) -> Step | None:
        """The oldest step, if it is to be committed now. `unspent_s` then says by how many seconds this step of the
        engine began before its first instruction ran: those of an outcome that an earlier call computed, less those of
        outcomes that this call computed for later steps; 0 where outcomes are read late."""
        if len(self.unread) <= self.lag and (was_issued or not self.unread):
            return None
        step = self.unread.popleft()
        if not self.is_late:
            self.last = step
            later = sum(other.seconds or 0.0 for other in self.unread) if was_issued else 0.0
            self.unspent_s = -later if was_issued else step.seconds or 0.0
        return step

    def drain(self) -> None:
        """Wait for every outcome, and drop it."""
        while self.unread:
            _ = self.unread.popleft().output


def issue_guided(backend: Backend, plan: StepPlan, message: StepInput) -> Pending:
    """Issue a step some of whose sequences are guided: what their grammars refuse is cut from the drafted trees before
    the target computes a row of it."""
    tree, masks, drawing = backend.draft(message).read(), None, _drawing(plan)
    of_trees, of_chunks = ([s.constraint for s in sequences] for sequences in (plan.decoding, drawing))
    if any(constraint is not None for constraint in (*of_trees, *of_chunks)):
        tree, masks = constrain(tree, of_trees, of_chunks)
    return backend.verify(message, tree, masks, _edits(tree, plan.decoding, drawing))


def _drawing(plan: StepPlan) -> list[Sequence]:
    """The sequences that draw their first token."""
    return [s for s, chunk in zip(plan.prefilling, plan.chunks, strict=True) if chunk.draws]


def _edits(tree: DraftTree, decoding: Items[Sequence], drawing: Items[Sequence]) -> RowEdits:
    """The edit of every node, given the tokens up to the node, then that of every sequence that draws its first
    token. Empty if no request has one."""
    if all(sequence.request.edit is None for sequence in (*decoding, *drawing)):
        return ()
    offsets, tokens, parents = (a.tolist() for a in (tree.topology.offsets, tree.tokens, tree.topology.parents))
    rows = list[tuple[TextEdit | None, list[int]]]()
    for sequence, first, end in zip(decoding, offsets, offsets[1:], strict=False):
        edit = sequence.request.edit
        rows.append((edit, sequence.tokens))
        for node in range(first + 1, end):
            rows.append((edit, [] if edit is None else [*rows[first + parents[node]][1], tokens[node]]))
    rows += [(sequence.request.edit, sequence.tokens) for sequence in drawing]
    return [None if edit is None else partial(edit, before) for edit, before in rows]


def message_of(
    plan: StepPlan,
    choice: StepChoice | None,
    pages: Iterable[tuple[int, int, int]],
    with_trees: bool,
    tokenizer: Tokenizer | None,
) -> StepInput:
    """The plan as a StepInput, with the changed entries of page tables. choice: None if no sequence is adaptive.
    tokenizer: writes text that grammars force."""
    chosen = {} if choice is None else choice.decodes
    return StepInput(
        decodes=tuple(
            _forced(sequence, tokenizer) or chosen.get(sequence) or _decode(sequence) for sequence in plan.decoding
        ),
        chunks=plan.chunks,
        admits=tuple(_admit(sequence) for sequence in plan.admitted),
        pages=tuple(Pages(slot, index, (page,)) for slot, index, page in pages),
        extends=plan.extends,
        row_costs=() if choice is None else choice.row_costs,
        with_trees=with_trees,
    )


def _forced(sequence: Sequence, tokenizer: Tokenizer | None) -> Decode | None:
    """A step of a sequence whose grammar leaves no choice about the next tokens: they are its draft."""
    if sequence.constraint is None or tokenizer is None or not sequence.request.num_forced or not sequence.may_draft:
        return None
    tokens = sequence.constraint.forced(tokenizer)
    return Decode(sequence.slot, NoDraft(), Proposal(tokens)) if tokens else None


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
        draft_end=sequence.draft_end,
        num_prompt_logprobs=len(sequence.prompt_logprobs),
    )
