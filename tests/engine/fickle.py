"""A controller that chooses at random what adaptive sequences draft, in every step anew."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from aquiline.backends.base import Decode
from aquiline.engine.control.calibrate import estimated_table
from aquiline.engine.control.controller import PLAIN, UNVERIFIED, Controller
from aquiline.engine.control.costs import StepCosts
from aquiline.engine.pipeline import StepChoice
from aquiline.engine.scheduler import StepPlan
from aquiline.engine.sequence import Sequence
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.confidence import NUM_MARGINS, Cut, most_nodes
from aquiline.spec.drafting import Chain, Proposal

VOCAB = 96


def only_planned(controller: Controller) -> None:
    """No fixed setting has a turn: made-up costs and choices are not held against the time that steps take here."""
    controller.rivals.begin_call = lambda *args: None  # type: ignore[method-assign]


class Fickle(Controller):
    """Every way a step can draft, and every change from one to another: nothing, probes, chains of any length with any
    cut, whole chains, copies, both in one tree, and trees of random tokens. It still learns from all steps, as any
    controller does.

    taken: how often each way was taken."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(StepCosts(estimated_table(10**6, True)))
        only_planned(self)
        self.rng, self.taken = np.random.default_rng(seed), Counter[str]()

    def choose(self, plan: StepPlan) -> StepChoice | None:
        choice = super().choose(plan)
        if choice is None:
            return None
        found = choice.decodes
        for sequence in found:
            way = str(self.rng.choice(("as it would", "none", "probe", "cut", "chain", "random", "copy", "both")))
            if self.rng.random() < 0.3:
                continue
            decode = self._drawn(way, sequence)
            if decode is not None:
                found[sequence] = decode
                self.taken[way] += 1
        return choice._replace(most_steps=self.most_steps(found))

    def _drawn(self, way: str, sequence: Sequence) -> Decode | None:
        slot, drafting, rng = sequence.slot, sequence.request.drafting, self.rng
        if way == "none":
            return Decode(slot, PLAIN)
        if way == "copy" and sequence.proposer is not None:
            proposal = sequence.proposer.propose(sequence.tokens, drafting.max_depth)
            return Decode(slot, PLAIN, proposal)
        if way == "random":
            count = int(rng.integers(0, drafting.max_nodes))
            parents = [int(rng.integers(max(-1, i - 3), i)) for i in range(count)]
            depths: list[int] = []
            for parent in parents:
                depths.append(1 + (depths[parent] if parent >= 0 else 0))
            if max(depths, default=0) > drafting.max_depth:
                return None
            return Decode(
                slot, PLAIN, Proposal(_unlike(rng.integers(0, VOCAB, count).tolist(), parents), tuple(parents))
            )
        if not isinstance(drafting, Adaptive):
            return None
        length = int(rng.integers(1, drafting.max_spec_tokens + 1))
        if way == "probe":
            return Decode(slot, Chain(length), cut=UNVERIFIED)
        if way == "chain":
            return Decode(slot, Chain(length))
        if way in ("cut", "both"):
            proposal = None
            if way == "both":
                proposal = self._copied(sequence, min(drafting.max_depth, drafting.max_nodes - most_nodes(length)))
                if proposal is None:
                    return None
            chances, seconds = (tuple(rng.random(NUM_MARGINS).tolist()) for _ in range(2))
            least = float(rng.choice((0.0, 0.05, 0.3, math.inf)))
            cut = Cut(chances, seconds, least, float(rng.choice((0.0, 0.2, math.inf))))
            return Decode(slot, Chain(length), proposal, cut=cut)
        return None

    def _copied(self, sequence: Sequence, room: int) -> Proposal | None:
        """A copy, or else tokens of the sequence from anywhere; None if there is no room."""
        if room < 0:
            return None
        found = sequence.proposer.propose(sequence.tokens, room) if sequence.proposer is not None else Proposal(())
        begin = int(self.rng.integers(len(sequence.tokens)))
        return found if found.tokens else Proposal(tuple(sequence.tokens[begin : begin + min(room, 9)]))


def _unlike(tokens: list[int], parents: list[int]) -> tuple[int, ...]:
    """The tokens, changed where two children of one parent are the same."""
    seen: set[tuple[int, int]] = set()
    for i, parent in enumerate(parents):
        while (parent, tokens[i]) in seen:
            tokens[i] = (tokens[i] + 1) % VOCAB
        seen.add((parent, tokens[i]))
    return tuple(tokens)
