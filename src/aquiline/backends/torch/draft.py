"""How trees grow below roots: one pass that brings the draft's keys up to the roots, then one pass per level.

Draft row j pairs the target's fused feature of token j with token j + 1 and has its key at KV index j + 1. Drafted
tokens have no feature yet: the draft's own output at the parent takes its place. The keys of drafted rows are scratch:
they are written behind the root one after the other, and the next step overwrites them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aquiline.backends.base import Decode
from aquiline.backends.torch.chains import CutChains, Cuts
from aquiline.backends.torch.draw import children, draw, guess
from aquiline.backends.torch.eagle import DraftModel
from aquiline.backends.torch.slot_state import SlotState
from aquiline.backends.torch.torch_pages import TorchPages
from aquiline.backends.torch.torch_rows import RowBlock
from aquiline.backends.torch.trees import Trees
from aquiline.spec.drafting import Chain, Drafting, Dynamic, Static
from aquiline.spec.tree import static_shape


@dataclass(frozen=True)
class Roots:
    """The roots of a group of b trees. numbers and slots [b]: their slots, on host and device; root [b]: KV index of
    each root; tokens [b]: root tokens; output [b, H]: the draft's output at the row whose token is the root."""

    numbers: list[int]
    slots: Tensor
    root: Tensor
    tokens: Tensor
    output: Tensor


class Draft:
    """The draft model over its storage. fused [places, H]: the target's features as the draft reads them."""

    def __init__(self, head: DraftModel, state: SlotState, storage: TorchPages) -> None:
        self.head, self.state, self.storage, self.num_rows = head, state, storage, 0
        config = head.config.model
        self.fused = torch.zeros(state.scratch + 1, config.hidden_size, device=state.device)
        self.target_ids = head.target_ids(torch.arange(head.config.draft_vocab_size, device=state.device))

    def keep_features(self, places: Tensor, features: Tensor) -> None:
        """Fuse the target's features [n, 3 Ht] and store them at `places` [n], the places of their tokens' KV
        indices."""
        self.fused[places] = self.head.fuse(features)

    def catch_up(self, slots: Tensor, until: Tensor, width: int, longest: int) -> Tensor:
        """Write the missing draft keys below KV index until [b] of each slot. Returns the output [b, H] of each slot's
        last row, whose key stands at KV index until - 1.

        `width`: the most keys that a slot may lack. `longest`: an upper bound of `until`."""
        state, width = self.state, max(1, width)  # the last row's output is needed even if its key is written
        rows = until[:, None] - 2 - torch.arange(width - 1, -1, -1, device=state.device)
        is_missing = rows >= state.draft_end[slots][:, None] - 1
        rows = torch.where(is_missing, rows, until[:, None] - 2)
        # Rows that only fill the shape repeat the last row and write no keys.
        known, keys = state.places(slots, rows), torch.where(is_missing, rows + 1, -1)
        tokens, path = state.tokens_at(slots, rows + 1), torch.zeros_like(rows)[..., None]
        block = self._block(slots, tokens, keys, rows + 1, rows + 1, path, longest)
        output = self._run(block, self.fused[known].reshape(-1, self.fused.shape[1]))
        state.draft_end[slots] = torch.maximum(state.draft_end[slots], until.int())
        return output.view(len(slots), width, -1)[:, -1]

    def grow(self, drafting: Drafting, roots: Roots, longest: int) -> Trees:
        """A tree below every root, grown as `drafting` says. `longest`: KV indices that the rows may reach at most."""
        if isinstance(drafting, Chain):
            return self._chain(drafting, roots, longest)
        if isinstance(drafting, Static):
            return self._static(drafting, roots, longest)
        assert isinstance(drafting, Dynamic), drafting
        return self._dynamic(drafting, roots, longest)

    def _chain(self, drafting: Chain, roots: Roots, longest: int) -> Trees:
        """Draw each token from the draft's logits with the noise that the target's draw will use. Such a token agrees
        with the target's more often than the draft's best guess. Source: Daliri, Musco and Suresh, arXiv 2408.07978."""
        tokens, output, K = [roots.tokens], roots.output, drafting.num_spec_tokens
        for level in range(K):
            sampling = self.state.sampling(roots.numbers, roots.slots, roots.root + level + 1)
            drawn = draw(self.head.logits(output, is_whole=False), sampling, self.target_ids, self.head.ranks)
            tokens.append(torch.where(drawn >= 0, drawn, self.target_ids[0]))  # logits are not numbers: any token
            if level + 1 < K:
                output = self._go_on(roots, level, tokens[-1], output, longest)
        node = torch.arange(K + 1, device=self.state.device).expand(len(roots.slots), -1)
        return Trees(torch.stack(tokens, 1), (node - 1).clamp(min=0), node, (K + 1,) * len(roots.slots), K, True)

    def grow_cut_chains(self, cuts: Cuts, roots: Roots, longest: int) -> CutChains:
        """A chain below every root, which ends as `cuts` says."""
        chains, output = CutChains.begin(cuts), roots.output
        for level in range(cuts.num_levels):
            sampling = self.state.sampling(roots.numbers, roots.slots, roots.root + level + 1)
            own = self.head.logits(output, is_whole=False)
            drawn, runner_up, margin = guess(own, sampling, self.target_ids, self.head.ranks)
            token = torch.where(drawn >= 0, drawn, self.target_ids[0])
            chains.add(token, runner_up, margin)
            if level + 1 < cuts.num_levels:
                output = self._go_on(roots, level, token, output, longest)
        return chains

    def _go_on(self, roots: Roots, level: int, tokens: Tensor, output: Tensor, longest: int) -> Tensor:
        """The draft's output [b, H] at the chains' tokens [b] of a level, from the output of their parents."""
        own = (roots.root + level + 1)[:, None]
        path = torch.zeros_like(own)[..., None]
        block = self._block(roots.slots, tokens[:, None], own, own, own, path, longest)
        return self._run(block, self.head.feedback(output))

    def _static(self, drafting: Static, roots: Roots, longest: int) -> Trees:
        shape, b = static_shape(drafting.static_paths), len(roots.slots)
        num = len(shape.parents)
        level_of, inner = shape.depths, set(shape.parents[1:])
        tokens = torch.zeros(b, num, dtype=torch.int64, device=self.state.device)
        tokens[:, 0] = roots.tokens
        place_in_level: dict[int, int] = {0: 0}
        scratch: dict[int, tuple[int, ...]] = {0: ()}  # the scratch rows of an inner node's path
        output, num_scratch = roots.output[:, None], 0
        best, _ = self._children(roots, output, 0, drafting.width)
        for level in range(1, max(level_of) + 1):
            nodes = [i for i in range(num) if level_of[i] == level]
            for i in nodes:
                tokens[:, i] = best[:, place_in_level[shape.parents[i]], shape.ranks[i]]
            grown = [i for i in nodes if i in inner]
            if not grown:
                break
            for number, i in enumerate(grown):
                scratch[i] = (*scratch[shape.parents[i]], num_scratch + number)
            num_scratch += len(grown)
            tails = torch.tensor([scratch[i] for i in grown], device=self.state.device)
            source = output[:, [place_in_level[shape.parents[i]] for i in grown]]
            place_in_level |= {i: number for number, i in enumerate(grown)}
            output = self._expand(roots, tokens[:, grown], source, tails.expand(b, *tails.shape), longest)
            best, _ = self._children(roots, output, level, drafting.width)
        every = [torch.tensor(a, device=self.state.device).expand(b, -1) for a in (shape.parents, shape.depths)]
        return Trees(tokens, every[0], every[1], (num,) * b, max(level_of))

    def _dynamic(self, drafting: Dynamic, roots: Roots, longest: int) -> Trees:
        """Grow EAGLE-2's dynamic tree: keep the candidates with the best cumulative log-probabilities. A child's score
        is at most its parent's, and a child that ties stands behind its parent, so a parent is chosen whenever its
        child is."""
        k, b, device = drafting.top_k, len(roots.slots), self.state.device
        every = torch.arange(b, device=device)[:, None]
        best, logprobs = self._children(roots, roots.output[:, None], 0, k)
        tokens, scores = [best[:, 0]], [logprobs[:, 0]]
        parents = [torch.full((b, k), -1, device=device)]  # candidate number; -1 is the root
        source = roots.output[:, None].expand(-1, k, -1)
        beam = torch.arange(k, device=device).expand(b, k)  # places in the last level
        paths = torch.zeros(b, k, 0, dtype=torch.int64, device=device)  # scratch rows of the beam's ancestors
        first = 0
        for level in range(1, drafting.depth + 1):
            own = (torch.arange(k, device=device) + (level - 1) * k).expand(b, k)
            tails = torch.cat((paths, own[..., None]), 2)
            output = self._expand(roots, tokens[-1].gather(1, beam), source, tails, longest)
            best, logprobs = self._children(roots, output, level, k)
            reached = scores[-1].gather(1, beam)[..., None] + logprobs.clamp(max=0)
            parents.append((first + beam).repeat_interleave(k, 1))
            first += tokens[-1].shape[1]
            tokens.append(best.reshape(b, k * k))
            scores.append(reached.reshape(b, k * k))
            beam = best_first(scores[-1], k)
            paths, source = tails[every, beam // k], output[every, beam // k]
        chosen, _ = best_first(torch.cat(scores, 1), drafting.num_nodes - 1).sort(1)
        num_candidates = first + tokens[-1].shape[1]
        number = torch.zeros(b, num_candidates + 1, dtype=torch.int64, device=device)  # the last stands for the root
        number[every, chosen] = torch.arange(1, drafting.num_nodes, device=device).expand(b, -1)
        above = number[every, torch.cat(parents, 1).gather(1, chosen)]
        root = torch.zeros(b, 1, dtype=torch.int64, device=device)
        node_parents = torch.cat((root, above), 1)
        depths = (node_parents != torch.arange(drafting.num_nodes, device=device)).long()
        jump = node_parents
        for _ in range(drafting.max_depth.bit_length()):
            depths, jump = depths + depths.gather(1, jump), jump.gather(1, jump)
        node_tokens = torch.cat((roots.tokens[:, None], torch.cat(tokens, 1).gather(1, chosen)), 1)
        return Trees(node_tokens, node_parents, depths, (drafting.num_nodes,) * b, drafting.max_depth)

    def _children(self, roots: Roots, output: Tensor, level: int, k: int) -> tuple[Tensor, Tensor]:
        """The k best children of nodes with outputs [b, m, H] at a level: tokens and log-probabilities [b, m, k]."""
        b, m, _ = output.shape
        owner, position = roots.slots.repeat_interleave(m), (roots.root + level + 1).repeat_interleave(m)
        sampling = self.state.sampling(roots.numbers, owner, position)
        found = children(self.head.logits(output.flatten(0, 1)), sampling, self.target_ids, k)
        return found[0].view(b, m, k), found[1].view(b, m, k)

    def _expand(self, roots: Roots, tokens: Tensor, source: Tensor, tails: Tensor, longest: int) -> Tensor:
        """Run m nodes of one level through the draft. Returns their outputs [b, m, H].

        tokens [b, m]; source [b, m, H]: the outputs of their parents; tails [b, m, level]: the scratch rows of each
        node's path, the node itself last."""
        root = roots.root[:, None]
        path = torch.nn.functional.pad(1 + tails, (1, 0))  # keys of drafted rows stand behind the root's
        order = (root + tails.shape[2]).expand_as(tokens)
        block = self._block(
            roots.slots, tokens, root + path[..., -1], order, root.expand_as(tokens), path, longest
        )  # fmt: skip
        return self._run(block, self.head.feedback(source.flatten(0, 1))).view(*tokens.shape, -1)

    def _block(
        self, slots: Tensor, tokens: Tensor, keys: Tensor, order: Tensor, base: Tensor, path: Tensor, longest: int
    ) -> RowBlock:
        """A block of rows [b, n], which see their slot's draft keys. A row stands one position before its key."""
        first = self.state.first_draft_key[slots]
        return RowBlock(slots, tokens, order - 1, keys, order, base, path, first, longest)

    def _run(self, block: RowBlock, g: Tensor) -> Tensor:
        self.num_rows += block.tokens.numel()
        attention = self.storage.attention([block])
        output: Tensor = self.head(g, block.tokens.reshape(-1), block.positions.reshape(-1), attention)
        return output


def best_first(scores: Tensor, count: int) -> Tensor:
    """Places [b, count] of the best scores in descending order, ties to the lowest place."""
    return torch.argsort(scores, dim=1, descending=True, stable=True)[:, :count]


def groups_of(decodes: Sequence[Decode]) -> dict[tuple[Drafting, bool], list[int]]:
    """By way to draft and by whether there is a cut, the places in `decodes`: these slots share their draft passes."""
    groups: dict[tuple[Drafting, bool], list[int]] = {}
    for place, decode in enumerate(decodes):
        groups.setdefault((decode.drafting, decode.cut is not None), []).append(place)
    return groups
