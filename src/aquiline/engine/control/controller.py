"""The choice: for each sequence at each step, whether to draft, from where, and how far.

Every few steps the Planner says which sequences draft, and what a millisecond is worth: a node or a pass pays if the
tokens it should bring are at least rate * milliseconds. At each step a sequence takes what is worth most at this price:
a copy of earlier text, the draft model's chain, both in one tree, or nothing. The backend ends chains by the same price
where the draft itself is unsure (Cut), and then chooses among the nodes of all chains together (row_costs).

A sequence that does not draft is asked now and then what the draft would have guessed (a probe), within a budget of
time. The target draws its token anyway, so a probe verifies nothing. The text never depends on any of this.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from aquiline.backends.base import Decode, StepOutput
from aquiline.config import MAX_CHAIN
from aquiline.engine.control.acceptance import (
    NUM_POOLS,
    POOL_MEMORY,
    PRIOR,
    Pool,
    Rates,
    Record,
    pool_number,
)
from aquiline.engine.control.chosen import PLAIN, UNVERIFIED, add_choice, passes_of, source_of
from aquiline.engine.control.costs import StepCosts
from aquiline.engine.control.plan import Load, best_copies
from aquiline.engine.control.planner import LEAST_NODE, Plan, Planner, Terms
from aquiline.engine.scheduler import StepPlan
from aquiline.engine.sequence import Sequence
from aquiline.engine.step import Step
from aquiline.ledger import Ledger
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.drafting import Chain, Proposal

EVERY, LOOKED_AT = 16, 8
"""Steps for which a plan holds while the same sequences decode, and of how many steps the times of one are learnt: both
cost some tens of microseconds."""

PROBING = 0.004
"""Share of the time that probes may take."""

FIRST_PROBES = 4
"""Probes that may be taken before any time has passed."""

PATIENCE, RARELY = (1, 4, 64), (1, 2, 4, 16)
"""A sequence that copied nothing for fewer steps in a row than one of PATIENCE looks for a match in one step of that
many, as RARELY has it at the same place."""

ALIKE = 0.8
"""Share of rightly copied tokens that the draft's chain has too, before the first event."""


@dataclass(eq=False)
class _Choice:
    """What is known and chosen of one sequence. terms: on which it drafts, None while it does not; least_node: what a
    copied token must bring; last_probe: number of the step that asked the draft without need; last_look: of that which
    looked for a match; num_uncopied: steps since it copied text."""

    record: Record | None  # None without a draft model
    terms: Terms | None = None
    least_node: float = 0.0
    last_probe: int = 0
    last_look: int = -1
    num_uncopied: int = 0

    @property
    def looks_every(self) -> int:
        """Of how many steps it looks for a match in one."""
        return RARELY[bisect_right(PATIENCE, self.num_uncopied)]


@dataclass(eq=False)
class Controller:
    """Chooses for the adaptive sequences of an engine and learns from every step."""

    costs: StepCosts
    ledger: Ledger = field(default_factory=Ledger)

    def __post_init__(self) -> None:
        self._pools = [Pool() for _ in range(NUM_POOLS)]
        self._choices: dict[Sequence, _Choice] = {}
        self._alike = Rates((ALIKE,), PRIOR, POOL_MEMORY)  # of rightly copied first tokens, those that the chain had
        self._planned: tuple[Sequence, ...] = ()
        self._age = EVERY
        self._unlooked = LOOKED_AT  # steps since the times of one were learnt
        self._with_chunks = False
        self._planner = Planner(self.costs)
        self._plan = Plan(0.0, 0.0, 0, (), [])
        self._probe_cost = self.costs.drafting((1,))
        self._probe_ms = FIRST_PROBES * self._probe_cost  # time that probes may take now
        self._num_steps = 0
        self._expected_ms = 0.0  # that the last step whose times were learnt was to take
        self._inside_ms = 0.0  # that the step took inside the backend; 0: the host's time is not learnt from it

    @property
    def row_costs(self) -> tuple[float, ...]:
        """What the nodes of a step cost: see StepInput."""
        return self._plan.row_costs

    def decodes(self, plan: StepPlan) -> dict[Sequence, Decode]:
        """How each adaptive sequence that decodes in this step drafts."""
        began = time.perf_counter()
        mine = tuple([s for s in plan.decoding if s.is_adaptive and s.may_draft])
        if not mine:
            return {}
        self._num_steps += 1
        self._age += 1
        if self._age >= EVERY or mine != self._planned or self._with_chunks != bool(plan.chunks):
            self._replan(plan, mine)
        choices = self._choices
        found = {s: self._chosen(s, choices[s]) for s in mine}
        self._fit_copies(mine, found)
        self._probe_ms += PROBING * self._expected_ms
        if self._probe_ms >= self._probe_cost:
            self._probe(mine, found)
        self.ledger.num_chosen += 1
        self.ledger.choosing_ms += (time.perf_counter() - began) * 1e3
        return found

    def most_repeats(self, found: dict[Sequence, Decode]) -> int:
        """For how many steps the choice may stand: until a plan is due, and not for more than a sequence may pass
        without a look for a match. A copy or a probe is for one step."""
        most = EVERY - self._age
        for sequence, decode in found.items():
            if decode.proposal is not None or decode.cut is UNVERIFIED:
                return 1
            if sequence.proposer is not None:
                most = min(most, self._choices[sequence].looks_every)
        return max(1, most)

    def repeated(self, found: dict[Sequence, Decode], num_steps: int) -> None:
        """The choice stood for so many steps."""
        more = num_steps - 1
        self._num_steps += more
        self._age += more
        self._probe_ms += more * PROBING * self._expected_ms
        for sequence in found:
            self._choices[sequence].num_uncopied += more

    def learn(self, step: Step, output: StepOutput) -> None:
        """Take what a step showed: which guesses were right, and how long its parts took."""
        self._unlooked += 1
        is_mine, is_looked_at = False, self._unlooked >= LOOKED_AT
        for sequence, decode, decoded in zip(step.plan.decoding, step.message.decodes, output.decodes, strict=True):
            choice = self._choices.get(sequence)
            if choice is None:
                continue
            is_mine = True
            add_choice(self.ledger, decode, decoded, is_looked_at)
            first = decoded.kept[0]
            if decoded.guesses and decode.proposal is not None and decode.proposal.tokens[:1] == (first,):
                self._alike.add(0, decoded.guesses[0].token == first)
            if decoded.guesses and choice.record is not None:
                choice.record.observe(decoded.guesses, decoded.kept)
        self._inside_ms = (step.seconds or 0.0) * 1e3 if is_mine and not step.plan.chunks else 0.0
        if is_mine and is_looked_at:
            self._unlooked = 0
            self._learn_time(step, output)

    def end_step(self, seconds: float) -> None:
        """The engine's step took so long in all. Of steps that were computed together the first has the host's work."""
        if self._inside_ms > 0.0:
            self.costs.learn_host(seconds * 1e3 - self._inside_ms)
            self._inside_ms = 0.0

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._choices.pop(sequence, None)

    # Planning

    def _replan(self, plan: StepPlan, mine: tuple[Sequence, ...]) -> None:
        self._planned, self._age, self._with_chunks = mine, 0, bool(plan.chunks)
        drafting = [(s, record) for s in mine if (record := self._choice_of(s).record) is not None]
        drafting.sort(key=lambda pair: -pair[1].share(0))
        fixed_rows = sum(s.request.spec.max_nodes for s in plan.decoding if not s.is_adaptive)
        load = Load(
            rows=len(mine) + fixed_rows + plan.num_chunk_rows, chunk_rows=plan.num_chunk_rows,
            tokens=len(plan.decoding), all_keys=float(sum(len(s.tokens) for s in plan.decoding)),
            keys=tuple(float(len(s.tokens)) for s, _ in drafting),
        )  # fmt: skip
        most = max((chain_of(s).num_spec_tokens for s, _ in drafting), default=0)
        self._plan = self._planner.plan(load, [record for _, record in drafting], most)
        row_ms = self.costs.row(self._plan.num_rows, max(2, len(mine)))
        for sequence in mine:
            choice, key_ms = self._choices[sequence], self.costs.row_keys(float(len(sequence.tokens)))
            choice.least_node = max(LEAST_NODE, self._plan.rate * (row_ms + key_ms))
            choice.terms = None
        for (sequence, _), terms in zip(drafting, self._plan.terms, strict=False):
            self._choices[sequence].terms = terms

    def _choice_of(self, sequence: Sequence) -> _Choice:
        found = self._choices.get(sequence)
        if found is None:
            pool = self._pools[pool_number(sequence.request.sampling.temperature)]
            found = self._choices[sequence] = _Choice(Record(pool) if sequence.drafts else None)
        return found

    # A step

    def _chosen(self, sequence: Sequence, choice: _Choice) -> Decode:
        proposer, slot = sequence.proposer, sequence.slot
        every = choice.looks_every
        if proposer is not None and self._num_steps // every > choice.last_look // every:
            choice.last_look = self._num_steps
            proposal = proposer.propose(sequence.tokens, sequence.max_step - 1)
            worth, count = 0.0, 0
            for chance in proposal.confidences:  # they fall from token to token
                if chance < choice.least_node:
                    break
                worth += chance - choice.least_node
                count += 1
            chain_worth = 0.0 if choice.terms is None else choice.terms.worth
            found = self._beside_chain(sequence, choice, proposal, count, max(worth, chain_worth))
            if found is None and count and worth > chain_worth:
                found = Decode(slot, PLAIN, first_of(proposal, count))
            if found is not None:
                choice.num_uncopied = 0
                return found
        choice.num_uncopied += 1
        return uncopied(sequence, choice)

    def _beside_chain(
        self, sequence: Sequence, choice: _Choice, proposal: Proposal, count: int, least_worth: float
    ) -> Decode | None:
        """The first `count` tokens of a copy and the chain in one tree, if that is worth more than `least_worth`.

        A token that both have is one node, and counts once. The chain is taken to have a rightly copied token as often
        as it had the first one so far, and each further one as often as its own tokens are right at deeper levels."""
        terms = choice.terms
        if not count or terms is None or choice.record is None:
            return None
        room = sequence.request.spec.max_nodes - 1
        count = min(count, room - 2 * terms.length)
        node, deeper, alike, worth = choice.least_node, choice.record.share(1), self._alike.share(0), terms.worth
        for chance in proposal.confidences[: max(0, count)]:
            worth += chance - node - chance * alike * (1 - node)
            alike *= deeper
        if count < 1 or worth <= least_worth:
            return None
        chain = chain_of(sequence, (room - count) // 2)
        return Decode(sequence.slot, chain, first_of(proposal, count), cut=terms.cut)

    def _fit_copies(self, mine: Items[Sequence], found: dict[Sequence, Decode]) -> None:
        """Copies were chosen by a straight price of rows; of all of the step, keep the tokens that pay together."""
        copies = [(s, proposal) for s in mine if (proposal := found[s].proposal) is not None]
        if not copies:
            return
        plan, key_price = self._plan, self._plan.rate * self.costs.row_keys(1.0)
        gains = [[chance - key_price * len(s.tokens) for chance in proposal.confidences] for s, proposal in copies]
        kept = best_copies(self.costs, plan.rate, plan.num_rows, gains)
        for (sequence, proposal), count in zip(copies, kept, strict=True):
            if not count:
                found[sequence] = uncopied(sequence, self._choices[sequence])
            elif count < len(proposal.tokens):
                found[sequence] = found[sequence]._replace(proposal=first_of(proposal, count))

    def _probe(self, mine: Items[Sequence], found: dict[Sequence, Decode]) -> None:
        """Let the draft guess for one of the sequences that do not draft, if there is time for it."""
        idle = [s for s in mine if source_of(found[s]) == "none" and self._choices[s].record is not None]
        if not idle:
            return
        sequence = min(idle, key=lambda s: self._choices[s].last_probe)
        cost = self._probe_cost = self.costs.drafting((1,), float(len(sequence.tokens)))
        self._probe_ms = min(self._probe_ms, 2 * FIRST_PROBES * cost)
        if self._probe_ms >= cost:
            self._choices[sequence].last_probe = self._num_steps
            found[sequence] = Decode(sequence.slot, chain_of(sequence), cut=UNVERIFIED)
            self._probe_ms -= cost

    # Learning

    def _learn_time(self, step: Step, output: StepOutput) -> None:
        costs, plan = self.costs, step.plan
        keys = [len(s.tokens) for s in plan.decoding]
        rows = [1 + decoded.num_drafted for decoded in output.decodes]
        all_rows, all_keys = sum(rows) + plan.num_chunk_rows, float(sum(keys))
        key_rows = float(sum(k * r for k, r in zip(keys, rows, strict=True)))
        expected = costs.verify(all_rows, all_keys, key_rows)
        if plan.chunks:
            return  # what a prompt costs is not in the table
        passes, draft_keys = passes_of(step.message.decodes, output.decodes, keys)
        expected_drafting = costs.drafting(passes, draft_keys)
        self._expected_ms = expected + expected_drafting + costs.host_ms
        if output.seconds is not None:
            drafting_ms = output.seconds["draft"] * 1e3
            verify_ms = sum(output.seconds.values()) * 1e3 - drafting_ms
            self.ledger.add_time(self._expected_ms, verify_ms + drafting_ms + costs.host_ms)
            if not step.message.admits:  # these take time of their own
                costs.learn_verify(all_rows, all_keys, key_rows, verify_ms)
                if expected_drafting > 0.0 and not step.message.extends:
                    costs.learn_draft(expected_drafting, drafting_ms)
        if self._plan.planned_rate > 0.0:
            rate = sum(len(decoded.kept) for decoded in output.decodes) / self._expected_ms
            self._planner.came(rate, self._plan.planned_rate)


def chain_of(sequence: Sequence, most: int = MAX_CHAIN) -> Chain:
    """The longest chain, of `most` levels at most, that a sequence may draft."""
    spec = sequence.request.spec
    assert isinstance(spec, Adaptive)
    return spec.chains[min(most, spec.max_spec_tokens) - 1]


def uncopied(sequence: Sequence, choice: _Choice) -> Decode:
    """What a sequence takes where it copies nothing: its chain, or nothing."""
    if choice.terms is None:
        return Decode(sequence.slot, PLAIN)
    return Decode(sequence.slot, chain_of(sequence), cut=choice.terms.cut)


def first_of(proposal: Proposal, count: int) -> Proposal:
    """The first tokens of a copy."""
    return Proposal(proposal.tokens[:count], (), proposal.confidences[:count])
