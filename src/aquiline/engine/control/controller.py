"""The controller chooses for each adaptive sequence at each step whether to draft, from where, and how far.

Every few steps the Planner decides which sequences draft, and sets the price of time: a node or a pass pays if it is
expected to bring at least rate * milliseconds tokens. At each step a sequence takes the most valuable draft at this
price: a copy of earlier text, the draft model's chain, both in one tree, or nothing. The backend ends chains at the
same price where the draft is unsure (Cut), and then chooses among the nodes of all chains together (row_costs).

A sequence that does not draft is sometimes asked what the draft would have guessed. Such a probe verifies nothing,
because the target draws its token anyway. Probes have a budget of time. The text never depends on any of this.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial

from aquiline.backends.base import Decode
from aquiline.engine.control.acceptance import POOL_MEMORY, PRIOR_EVENTS, Pool, Rates, Record, new_pools, pool_number
from aquiline.engine.control.choices import PLAIN, UNVERIFIED, add_choice, chain_of, source_of
from aquiline.engine.control.copies import beside_fixed, first_of, fitting
from aquiline.engine.control.costs import StepCosts
from aquiline.engine.control.planner import MIN_NODE_TOKENS, ChainWorth, DraftingPlan, Planner, StepLoad
from aquiline.engine.control.plans import TIMING_STEPS, PlanKey, Plans, rounded
from aquiline.engine.control.rivals import Rivals
from aquiline.engine.control.searches import Searches, SequenceSearches
from aquiline.engine.pipeline import Step, StepChoice
from aquiline.engine.scheduler import StepPlan
from aquiline.engine.sequence import Sequence
from aquiline.ledger import Ledger
from aquiline.spec.drafting import Proposal

PROBE_TIME_SHARE = 0.004
"""Share of the time that probes may take."""

INITIAL_PROBES = 4
"""Number of probes that may be taken before any time has passed."""

PAYING_STEPS, PROMPT_STEPS = 128, 8
"""Steps within which the draft keys that sequences lack must be paid for, if they are to begin to draft; and the same
beside prompts, which take only a few steps."""

INITIAL_OVERLAP = 0.8
"""Share of the rightly copied tokens that the draft's chain also has, before the first event."""

KEYS_PER_PASS = 32
"""Number of missing draft keys that take about as long to write as a pass over one row."""


@dataclass(eq=False)
class _SequenceState:
    """What the controller knows of one sequence. plan: the one that it follows; uncopied: its choice without a copy, a
    chain or nothing; worth: what that chain should bring, None until it is asked for; last_probe: number of the step
    that last probed the draft."""

    record: Record | None  # None without a draft model
    searches: SequenceSearches
    uncopied: Decode
    plan: DraftingPlan | None = None
    worth: ChainWorth | None = None
    last_probe: int = 0


@dataclass(eq=False)
class Controller:
    """Chooses for the adaptive sequences of an engine and learns from every step. draft_window: how many keys a draft
    row sees at most; 0: all. pools: by range of temperatures."""

    costs: StepCosts
    ledger: Ledger = field(default_factory=Ledger)
    draft_window: int = 0
    pools: Items[Pool] = field(default_factory=new_pools)
    rivals: Rivals = field(default_factory=Rivals)

    def __post_init__(self) -> None:
        self._states: dict[Sequence, _SequenceState] = {}
        self._overlap = Rates((INITIAL_OVERLAP,), PRIOR_EVENTS, POOL_MEMORY)  # of rightly copied first tokens
        self._steps_untimed = TIMING_STEPS
        self._drafted = False  # in the last step; a first step that drafts, or does not, pays for the change
        self._planner = Planner(self.costs)
        self._plans = Plans()
        self._planned_for: tuple[tuple[Sequence, ...], int] = ((), 0)  # a load without prompts; its decoding sequences
        self._probe_cost = self.costs.draft_ms((1,))
        self._probe_ms = INITIAL_PROBES * self._probe_cost  # time that probes may take now
        self._num_steps = 0
        self._expected_ms = 0.0  # of the last step whose times were learnt
        self._searches = Searches()
        self._inside_ms = 0.0  # time that the step took inside the backend; 0: the host's time is not learnt from it
        self._choosing_ms = 0.0  # of the call whose first step is computed now; 0 in its further steps
        self._repeats = False  # whether the last step that might be repeated was
        self._call_steps = 0  # that the call has whose first step is computed now; 0 in its further steps
        self._alone_ms = 0.0  # what it costs that the step is not repeated
        self._num_other_tokens = 0  # of the step, of sequences that do not draft adaptively

    def choose(self, plan: StepPlan) -> StepChoice | None:
        """How each adaptive sequence that decodes in this step drafts. None if there is none."""
        began = time.perf_counter()
        mine = tuple([s for s in plan.decoding if s.is_adaptive and s.may_draft])
        if not mine:
            self.rivals.pause()
            return None
        self._num_steps += 1
        self._call_steps = 1
        fixed = self.rivals.begin_call(plan, mine, self.costs, self._plan)
        choice = self._planned(plan, mine) if fixed is None else self._beside_fixed(fixed, mine)
        self._choosing_ms = (time.perf_counter() - began) * 1e3
        self.ledger.num_chosen += 1
        self.ledger.choosing_ms += self._choosing_ms
        return choice

    def _planned(self, plan: StepPlan, mine: tuple[Sequence, ...]) -> StepChoice:
        """How the sequences draft by the plan of this load."""
        self._alone_ms = self.costs.call_ms if self._repeats and not plan.chunks else 0.0
        states = [self._state_of(s) for s in mine]
        self._take_plan(plan, mine, states)
        started = time.perf_counter()
        chosen = {s: self._choose(s, state) for s, state in zip(mine, states, strict=True)}
        searching_ms = (time.perf_counter() - started) * 1e3
        self._searches.end_step(self._num_steps, searching_ms, self._alone_ms, self._expected_ms, self._plan.rate)
        kept = fitting(chosen, self.costs, self._plan.rate, self._plan.num_rows, self._alone_ms)
        chosen |= {s: found or self._states[s].uncopied for s, found in kept.items()}
        self._earn(1)
        if self._probe_ms >= self._probe_cost and not self._plans.current.is_trial:
            self._probe(mine, chosen)
        most_steps = self.most_steps(chosen)
        if most_steps > 1 and not plan.chunks:
            self._repeats = False  # until `repeated` says that it was
        return StepChoice(chosen, self._plan.row_costs, most_steps)

    def _beside_fixed(self, fixed: StepChoice, mine: tuple[Sequence, ...]) -> StepChoice:
        """A fixed setting's choice, and copies in place of its chains where they should bring more."""
        searching = [(s, self._state_of(s).searches) for s in mine if s.proposer is not None]
        rate = self.rivals.token_rate * len(mine)
        return beside_fixed(fixed, searching, self._num_steps, self.costs, rate, self.rivals.further)

    def most_steps(self, chosen: dict[Sequence, Decode]) -> int:
        """The number of steps for which the choice may stand: until a plan is due, a turn ends, or a search for a match
        is awaited. A copy or a probe holds for one step."""
        most = min(self._plans.current.until - self._num_steps, self.rivals.num_left)
        for sequence, decode in chosen.items():
            if decode.proposal is not None or decode.cut is UNVERIFIED:
                return 1
            if sequence.proposer is not None and self._states[sequence].searches.is_awaited:
                most = min(most, self._states[sequence].searches.next_step - self._num_steps)
        return max(1, most)

    def repeated(self, num_steps: int) -> None:
        """The last choice held for num_steps steps."""
        more = num_steps - 1
        self._num_steps += more
        self._call_steps = num_steps
        if not self.rivals.is_fixed:
            self._repeats = True
            self._earn(more)

    def _earn(self, num_steps: int) -> None:
        """Probes and plans may take a share of the time of these steps."""
        self._probe_ms += num_steps * PROBE_TIME_SHARE * self._expected_ms
        self._plans.earn(num_steps, self._expected_ms)

    def learn(self, step: Step) -> None:
        """Learn from a step's outcome which guesses were right, and how long its parts took."""
        output = step.output
        self._num_other_tokens = sum([len(decoded.kept) for decoded in output.decodes])
        self._steps_untimed += 1
        num_adaptive, num_tokens, num_asked, num_further, num_first, before = 0, 0, 0, 0, 0.0, self._drafted
        num_copies = num_copied = 0  # sequences that copy, and their tokens
        self._drafted = any(decode.drafting.needs_draft_model for decode in step.message.decodes)
        is_timed = self._steps_untimed >= self._timing_steps() and self._drafted == before
        if self.rivals.is_fixed:
            self._learn_fixed(step, is_timed)
            return
        for sequence, decode, decoded in zip(step.plan.decoding, step.message.decodes, output.decodes, strict=True):
            state = self._states.get(sequence)
            if state is None:
                continue
            guesses, first, record = decoded.guesses, decoded.kept[0], state.record
            num_adaptive += 1
            num_tokens += len(decoded.kept)
            is_copied = decode.proposal is not None
            if record is not None and not is_copied:
                num_first += guesses[0].token == first if guesses else record.share(0)
            if decode.cut is None and not is_copied:
                self.ledger.steps["none"] += 1
                continue
            source = add_choice(self.ledger, decode, decoded, is_timed)
            num_copies += is_copied
            num_copied += len(decoded.kept) if is_copied else 0
            if source == "draft":
                num_asked += 1
                num_further += len(decoded.kept) - 1
            if guesses and decode.proposal is not None and decode.proposal.tokens[:1] == (first,):
                self._overlap.add(0, guesses[0].token == first)
            if guesses and record is not None:
                num_seen = decoded.root + 1 - decoded.first_draft_key
                most_seen = min(self.draft_window or decoded.root, decoded.root)
                record.observe(guesses, decoded.kept, 2 * num_seen < most_seen)
        self._num_other_tokens -= num_tokens
        self.rivals.add_copies(num_copied, num_copies, is_all=num_copies == num_adaptive)
        if num_adaptive > num_copies:
            others = num_adaptive - num_copies, num_tokens - num_copied
            self.rivals.add_planned(*others, num_asked, num_further, num_first)
        is_learnt = num_adaptive > 0 and not step.plan.chunks  # the table does not have the cost of prompts
        self._inside_ms = sum(output.seconds.values()) * 1e3 if is_learnt and output.seconds is not None else 0.0
        if num_adaptive and is_timed:
            self._steps_untimed = 0
            if is_learnt:
                self._learn_time(step)

    def _learn_fixed(self, step: Step, is_timed: bool) -> None:
        """Learn from a step in a fixed setting's turn: as little as costs follow the machine by."""
        source = "draft" if self._drafted else "none"
        others, num_copies, num_copied = [], 0, 0
        outcomes = zip(step.plan.decoding, step.message.decodes, step.output.decodes, strict=True)
        for sequence, decode, decoded in outcomes:
            if sequence.is_adaptive and decode.proposal is None:
                others.append(decoded)
            elif sequence.is_adaptive:
                add_choice(self.ledger, decode, decoded, is_timed)
                num_copies += 1
                num_copied += len(decoded.kept)
        self.rivals.add_copies(num_copied, num_copies, is_all=not others)
        kept = [len(decoded.kept) for decoded in others]
        self.rivals.add_fixed(kept)
        self._num_other_tokens -= num_copied + sum(kept)
        self.ledger.steps[source] += len(others)
        if self._drafted:
            self.ledger.nodes[source] += sum([decoded.num_drafted for decoded in others])
            self.ledger.accepted[source] += sum(kept) - len(kept)
        if is_timed and not step.plan.chunks:
            self._steps_untimed = 0
            self._learn_time(step)

    def _timing_steps(self) -> int:
        """Timings are learnt from every so many steps."""
        if self.rivals.is_fixed:
            return TIMING_STEPS if self.rivals.is_trying else 4 * TIMING_STEPS
        return 1 if self._plans.current.is_trial else TIMING_STEPS

    def end_step(self, seconds: float) -> None:
        """The engine's step took so long in all. Of steps that were computed together, the first has the host's
        work."""
        self.rivals.add_step(self._num_other_tokens, seconds * 1e3)
        self._num_other_tokens = 0
        is_alone = self._repeats and self._call_steps == 1  # as few are
        if self._inside_ms > 0.0 and not is_alone:
            calls_ms = self._call_steps * self._inside_ms if self._call_steps > 1 else 0.0
            self.costs.learn_host(seconds * 1e3 - self._inside_ms, self._choosing_ms, calls_ms)
        self._inside_ms = self._choosing_ms = 0.0
        self._call_steps = 0

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._states.pop(sequence, None)

    # Planning

    @property
    def _plan(self) -> DraftingPlan:
        """The plan of this step's load."""
        return self._plans.current.plan

    def _take_plan(self, plan: StepPlan, mine: tuple[Sequence, ...], states: Items[_SequenceState]) -> None:
        """Follow the plan of this load, the last one if it is not old. Sequences come and go more often than that."""
        planned_for = (() if plan.chunks else mine, len(plan.decoding))
        if planned_for == self._planned_for and self._num_steps < self._plans.current.until:
            return
        self._planned_for = planned_for
        pools = frozenset([state.record.pool for state in states if state.record is not None])
        load = PlanKey(rounded(len(mine)), rounded(len(plan.decoding)), bool(plan.chunks), pools)
        self._plans.take(
            load, self._num_steps, len(mine), partial(self._beginning_steps, mine),
            partial(self._new_plan, plan, mine, states),
        )  # fmt: skip

    def _beginning_steps(self, mine: tuple[Sequence, ...]) -> float:
        """How many steps' time it takes the sequences to begin to draft."""
        return self._catch_up_ms(*mine) / (self._expected_ms or math.inf)

    def _catch_up_ms(self, *sequences: Sequence) -> float:
        """The time that the draft keys take which these sequences lack."""
        most = self.draft_window or math.inf
        missing = sum(max(0, min(most, s.num_cached - s.draft_end)) for s in sequences if s.drafts)
        return missing / KEYS_PER_PASS * self.costs.draft_ms((1,))

    def _new_plan(
        self, plan: StepPlan, mine: tuple[Sequence, ...], states: Items[_SequenceState], least_speedup: float
    ) -> DraftingPlan:
        drafters = [(s, state.record) for s, state in zip(mine, states, strict=True) if state.record is not None]
        drafters.sort(key=lambda pair: -pair[1].share(0))
        fixed_rows = sum(s.request.drafting.max_nodes for s in plan.decoding if not s.is_adaptive)
        chunk_rows = plan.num_chunk_rows
        load = StepLoad(
            rows=len(mine) + fixed_rows + chunk_rows, chunk_rows=chunk_rows,
            tokens=len(plan.decoding), all_keys=float(sum(len(s.tokens) for s in plan.decoding)),
            keys=tuple(float(len(s.tokens)) for s, _ in drafters),
        )  # fmt: skip
        most = max((chain_of(s).num_spec_tokens for s, _ in drafters), default=0)
        least_speedup *= 1.0 + self._beginning_steps(mine) / (PROMPT_STEPS if plan.chunks else PAYING_STEPS)
        return self._planner.plan(load, [record for _, record in drafters], most, least_speedup)

    def _follow(self, sequence: Sequence, state: _SequenceState, plan: DraftingPlan) -> None:
        """The sequence follows a plan from now on."""
        cut = None if state.record is None else self._planner.cut(plan, state.record)
        drafting = PLAIN if cut is None else chain_of(sequence, plan.levels)
        state.plan, state.uncopied, state.worth = plan, Decode(sequence.slot, drafting, cut=cut), None

    def _state_of(self, sequence: Sequence) -> _SequenceState:
        found = self._states.get(sequence)
        if found is None:
            pool = self.pools[pool_number(sequence.request.sampling.temperature)]
            searches = SequenceSearches(not sequence.drafts, self._searches.gain, self._num_steps - 1)
            record = Record(pool) if sequence.drafts else None
            found = self._states[sequence] = _SequenceState(record, searches, Decode(sequence.slot, PLAIN))
        return found

    # A step

    def _choose(self, sequence: Sequence, state: _SequenceState) -> Decode:
        if state.plan is not self._plan or state.uncopied.slot != sequence.slot:
            self._follow(sequence, state, self._plan)
        proposer = sequence.proposer
        if proposer is None or self._num_steps < state.searches.next_step:
            return state.uncopied
        proposal = proposer.propose(sequence.tokens, sequence.request.drafting.max_depth)
        key_ms = self.costs.row_keys(float(len(sequence.tokens)))
        node = max(MIN_NODE_TOKENS, self._plan.rate * (self._plan.row_ms + key_ms))  # what a copied token must bring
        worth, count = 0.0, 0
        for chance in proposal.confidences:  # they fall from token to token
            if chance < node:
                break
            worth += chance - node
            count += 1
        found = None
        if count:
            chain = self._chain_worth(sequence, state)
            found = self._beside_chain(sequence, state, proposal, count, node, max(worth, chain.worth))
            if found is None and worth > chain.worth:
                found = Decode(sequence.slot, PLAIN, first_of(proposal, count))
        gain = 0.0 if found is None else max(0.0, worth - self._plan.rate * self._alone_ms)
        self._searches.count(state.searches, self._num_steps, found is not None, gain)
        return found or state.uncopied

    def _beside_chain(
        self, sequence: Sequence, state: _SequenceState, proposal: Proposal, count: int, node: float, least_worth: float
    ) -> Decode | None:
        """The first `count` tokens of a copy and the chain in one tree, if the tree is worth more than `least_worth`.
        node: tokens that a copied token must bring.

        A token that both have is one node, and counts once. The chain is assumed to have the copy's first token as
        often as it had rightly copied first tokens before, and each further one as often as its own tokens are right at
        deeper levels."""
        cut = state.uncopied.cut
        if cut is None or state.record is None:
            return None
        chain, room = self._chain_worth(sequence, state), sequence.request.drafting.max_nodes - 1
        count = min(count, room - 2 * chain.length)
        deeper, overlap, worth = state.record.share(1), self._overlap.share(0), chain.worth
        for chance in proposal.confidences[: max(0, count)]:
            worth += chance - node - chance * overlap * (1 - node)
            overlap *= deeper
        if count < 1 or worth <= least_worth:
            return None
        drafting = chain_of(sequence, min(self._plan.levels, (room - count) // 2))
        return Decode(sequence.slot, drafting, first_of(proposal, count), cut=cut)

    def _chain_worth(self, sequence: Sequence, state: _SequenceState) -> ChainWorth:
        """What the sequence's chain should bring by its plan; nothing if it does not draft."""
        if state.worth is None:
            state.worth = ChainWorth(0, 0.0)
            if state.uncopied.cut is not None and state.record is not None:
                most = chain_of(sequence).num_spec_tokens
                state.worth = self._planner.chain_worth(self._plan, state.record, most)
        return state.worth

    def _probe(self, mine: Items[Sequence], chosen: dict[Sequence, Decode]) -> None:
        """Let the draft guess for one of the sequences that do not draft, if there is time for it."""
        idle = [s for s in mine if source_of(chosen[s]) == "none" and self._states[s].record is not None]
        if not idle:
            return
        sequence = min(idle, key=lambda s: self._states[s].last_probe)
        cost = self.costs.draft_ms((1,), float(len(sequence.tokens))) + self._catch_up_ms(sequence)
        self._probe_cost = cost
        self._probe_ms = min(self._probe_ms, 2 * INITIAL_PROBES * cost)
        if self._probe_ms >= cost:
            self._states[sequence].last_probe = self._num_steps
            chosen[sequence] = Decode(sequence.slot, chain_of(sequence), cut=UNVERIFIED)
            self._probe_ms -= cost

    def _learn_time(self, step: Step) -> None:
        output = step.output
        keys = [len(s.tokens) for s in step.plan.decoding]
        self._expected_ms, measured_ms = self.costs.learn_step(step.message, output, keys)
        if measured_ms is not None:
            self.ledger.add_time(self._expected_ms, measured_ms)
        if self._plan.planned_rate > 0.0:
            tokens = sum(len(decoded.kept) for decoded in output.decodes)
            self._planner.learn_rate(tokens, self._expected_ms, self._plan.planned_rate)
