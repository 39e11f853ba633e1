"""Chains that confidence ends (spec/confidence.py), as tensors: what ends them, their guesses, their nodes.

On a device nobody on the host knows where a chain ended. All chains of a group are drafted to the deepest level that
any of them could reach, and levels below a chain's end are masked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from aquiline.backends.base import Decode
from aquiline.backends.torch.trees import Trees
from aquiline.config import MAX_NODES
from aquiline.spec.confidence import NUM_MARGINS, Cut, Guess, most_nodes
from aquiline.spec.drafting import Chain, Proposal


def check_cut(decode: Decode) -> None:
    """Raises ValueError for a Decode whose cut cannot be heeded."""
    slot, drafting, proposal, cut = decode
    if cut is None:
        return
    if not isinstance(drafting, Chain):
        raise ValueError(f"cut of slot {slot}: only a chain that the draft model drafts has one")
    if not len(cut.chances) == len(cut.seconds) == NUM_MARGINS:
        raise ValueError(f"{cut}: must have {NUM_MARGINS} chances and {NUM_MARGINS} seconds, one a bucket of margins")
    for name, chances in (("chances", cut.chances), ("seconds", cut.seconds)):
        for i, chance in enumerate(chances):
            if not 0 <= chance <= 1:
                raise ValueError(f"cut of slot {slot}: {name}[{i}]={chance:g}: must be in [0, 1]")
    if not (cut.least_node >= 0 and cut.least_pass >= 0):
        raise ValueError(
            f"cut of slot {slot}: least_node={cut.least_node:g}, least_pass={cut.least_pass:g}: must be at least 0"
        )
    copied = () if proposal is None else proposal.tokens
    for i, parent in enumerate(() if proposal is None else proposal.parents):
        if parent != i - 1:
            raise ValueError(f"proposal: entry {i} follows entry {parent}, beside a cut it must be a chain")
    if most_nodes(drafting.num_spec_tokens) + len(copied) > MAX_NODES:
        raise ValueError(f"a proposal of {len(copied)} tokens beside a cut: trees have at most {MAX_NODES} nodes")


def check_row_costs(row_costs: Sequence[float]) -> None:
    """Raises ValueError for costs that are no numbers."""
    for i, cost in enumerate(row_costs):
        if not math.isfinite(cost):
            raise ValueError(f"row_costs[{i}]={cost:g}: must be a finite number")


@dataclass(frozen=True)
class Cuts:
    """What ends b chains. chances, seconds [b, NUM_MARGINS]; least_node, least_pass [b]; num_levels: the deepest level
    that any of the chains can reach, known to the host."""

    chances: Tensor
    seconds: Tensor
    least_node: Tensor
    least_pass: Tensor
    num_levels: int

    @staticmethod
    def of(cuts: Sequence[Cut], length: int, device: torch.device) -> Cuts:
        """The cuts of chains of `length` levels at most."""
        chances, seconds, least_node, least_pass = (
            torch.tensor(column, dtype=torch.float32, device=device) for column in zip(*cuts, strict=True)
        )
        return Cuts(chances, seconds, least_node, least_pass, max(most_levels(cut, length) for cut in cuts))


def most_levels(cut: Cut, length: int) -> int:
    """How many levels of a chain are drafted if every token is as likely to be accepted as any can be."""
    chance, best = np.float32(1), np.float32(max(cut.chances))
    for level in range(1, length):
        chance *= best
        if not chance >= np.float32(max(cut.least_node, cut.least_pass)):
            return level
    return length


@dataclass(frozen=True)
class ChainGuesses:
    """What the draft said at n levels of b chains. tokens, runners_up, margins [b, n] as in Guess; is_drafted [b, n]:
    whether the chain had not ended above the level."""

    tokens: Tensor
    runners_up: Tensor
    margins: Tensor
    is_drafted: Tensor

    def read(self) -> list[list[Guess]]:
        """Wait for the guesses of each chain."""
        levels = torch.stack((self.tokens, self.runners_up, self.margins), 2).tolist()
        counts = self.is_drafted.sum(1).tolist()
        return [[Guess(*level) for level in own[:count]] for own, count in zip(levels, counts, strict=True)]


@dataclass(eq=False)
class CutChains:
    """b chains while they grow. chance [b]: that the last node is accepted; is_drafted [b]: whether the next level is
    drafted; the lists hold a tensor [b] for each level so far."""

    cuts: Cuts
    chance: Tensor
    is_drafted: Tensor
    levels: list[tuple[Tensor, Tensor, Tensor, Tensor]]  # token, runner-up, margin, whether the level is drafted
    nodes: list[Tensor]  # whether the token is verified
    leaves: list[Tensor]  # whether the runner-up is
    chances: list[tuple[Tensor, Tensor]]  # of the token and of the runner-up

    @staticmethod
    def begin(cuts: Cuts) -> CutChains:
        """Chains of no level yet."""
        ones = torch.ones_like(cuts.least_node)
        return CutChains(cuts, ones, ones.bool(), [], [], [], [])

    def add(self, token: Tensor, runner_up: Tensor, margin: Tensor) -> None:
        """One more level, guessed by the draft; each [b]."""
        cuts, bucket = self.cuts, margin[:, None]
        self.levels.append((token, runner_up, margin, self.is_drafted))
        as_second = self.chance * cuts.seconds.gather(1, bucket)[:, 0]
        self.leaves.append(self.is_drafted & (runner_up >= 0) & (as_second >= cuts.least_node))
        self.chance = self.chance * cuts.chances.gather(1, bucket)[:, 0]
        is_node = self.is_drafted & (self.chance >= cuts.least_node)
        self.nodes.append(is_node)
        self.chances.append((self.chance, as_second))
        self.is_drafted = is_node & (self.chance >= cuts.least_pass)

    def guesses(self) -> ChainGuesses:
        """All that the draft said."""
        return ChainGuesses(*(torch.stack(column, 1) for column in zip(*self.levels, strict=True)))

    def candidates(self) -> tuple[Tensor, Tensor]:
        """The nodes that the cuts let through, and their chances; both [b, 2 n], the runner-up of a level behind its
        token."""
        let = [kind for level in zip(self.nodes, self.leaves, strict=True) for kind in level]
        return torch.stack(let, 1), torch.stack([chance for level in self.chances for chance in level], 1)

    def keep(self, is_kept: Tensor) -> None:
        """Of the nodes that the cuts let through only these, laid out as `candidates`, are verified."""
        kept = is_kept.unbind(1)
        self.nodes, self.leaves = list(kept[::2]), list(kept[1::2])

    def trees(self, roots: Tensor, copied: Tensor) -> Trees:
        """The nodes below root tokens [b]: those of the chain, which are numbered by their levels, then the leaves,
        then of what the host copied, [b, m] with -1 behind each end, the tokens that are no nodes yet."""
        b, n, m, device = len(roots), len(self.levels), copied.shape[1], roots.device
        tokens, runners_up = (torch.stack([level[i] for level in self.levels], 1) for i in (0, 1))
        place = self._places(copied, tokens, runners_up)
        is_new = (copied >= 0) & (place > 2 * n)
        is_root = torch.ones_like(self.is_drafted)
        is_node = torch.cat((torch.stack((is_root, *self.nodes, *self.leaves), 1), is_new), 1)
        N = 1 + 2 * n + m
        number = torch.where(is_node, is_node.cumsum(1) - 1, N)  # what is no node goes to a column that is dropped
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        levels = [torch.arange(1, count + 1, device=device) for count in (n, n, m)]
        depths = torch.cat((zero, *levels)).expand(b, -1)
        above = torch.cat((zero.expand(b, 1), place), 1)[:, :m]  # of the copied tokens: where the one before stands
        parents = torch.cat(((depths[:, : 1 + 2 * n] - 1).clamp(min=0), number.gather(1, above)), 1)
        every = torch.stack((torch.cat((roots[:, None], tokens, runners_up, copied), 1), parents, depths))
        columns = torch.zeros(3, b, N + 1, dtype=torch.int64, device=device)
        columns = columns.scatter(2, number.expand(3, -1, -1), every)[..., :N]
        return Trees(columns[0], columns[1], columns[2], (N,) * b, max(n, m), counts=is_node.sum(1))

    def _places(self, copied: Tensor, tokens: Tensor, runners_up: Tensor) -> Tensor:
        """Where copied tokens [b, m] stand among the root (0), the chain's tokens [b, n] (from 1), the runners-up
        [b, n] (from n + 1) and the copied tokens (from 2 n + 1)."""
        n, m = tokens.shape[1], copied.shape[1]
        both = min(n, m)
        on_chain, on_leaf = (
            pad((copied[:, :both] == guessed[:, :both]) & torch.stack(kept, 1)[:, :both], (0, m - both))
            for guessed, kept in ((tokens, self.nodes), (runners_up, self.leaves))
        )
        on_chain = on_chain.cumprod(1).bool()
        on_leaf = on_leaf & pad(on_chain, (1, 0), value=True)[:, :m]
        level = torch.arange(1, m + 1, device=copied.device)
        return torch.where(on_chain, level, torch.where(on_leaf, n + level, 2 * n + level))


def choose_nodes(groups: Sequence[tuple[Sequence[int], CutChains]], row_costs: Sequence[float]) -> None:
    """Choose among the nodes of all chains as StepInput.row_costs says. groups: chains, and the places of their decodes
    in the step; row_costs: of no node, one node and so on beside the step's proposals."""
    both = [chains.candidates() for _, chains in groups]
    widest = max(let.shape[1] for let, _ in both)
    let, chances = (
        torch.cat([pad(part, (0, widest - part.shape[1])) for part in kind]) for kind in zip(*both, strict=True)
    )
    places = torch.tensor([place for own, _ in groups for place in own], device=let.device)
    order = places.argsort()
    flat = torch.where(let, chances, -1.0)[order].flatten().double()  # no chance is below 0
    found, ranked = flat.sort(descending=True, stable=True)
    most = min(len(found), max(0, len(row_costs) - 1))
    costs = torch.tensor(row_costs[: most + 1], dtype=torch.float32, device=let.device).double()
    worth = (found[:most] * (found[:most] >= 0)).cumsum(0) - (costs[1:] - costs[:1])
    worth = torch.where(found[:most] >= 0, worth, -math.inf)
    count = torch.cat((worth.new_zeros(1), worth)).argmax()
    is_kept = torch.zeros_like(flat, dtype=torch.bool)
    is_kept[ranked] = torch.arange(len(flat), device=let.device) < count
    rows = torch.empty_like(let)
    rows[order] = is_kept.view(len(order), widest)
    for (_, chains), own in zip(groups, rows.split_with_sizes([len(own) for own, _ in groups]), strict=True):
        chains.keep(own[:, : 2 * len(chains.levels)])


def padded_copies(proposals: Sequence[Proposal | None], device: torch.device) -> Tensor:
    """The tokens [b, m] of proposals that are chains, -1 behind each end."""
    tokens = [() if proposal is None else proposal.tokens for proposal in proposals]
    m = max(len(own) for own in tokens)
    rows = [[*own, *(-1,) * (m - len(own))] for own in tokens]
    return torch.tensor(rows, dtype=torch.int64, device=device).view(len(rows), m)
