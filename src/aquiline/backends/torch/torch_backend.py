"""One step in torch: draft, verify, keep, each issued without reading anything that the device computes.

The order of a step is `TorchBackend.draft` and `TorchBackend.verify`, read from top to bottom.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from aquiline.backends.base import (
    HEAD_ROWS,
    Chunk,
    Decode,
    Drafts,
    Extend,
    Pending,
    RowEdits,
    Scored,
    StepInput,
    TokenMasks,
)
from aquiline.backends.torch.chains import (
    ChainGuesses,
    CutChains,
    Cuts,
    check_cut,
    check_row_costs,
    choose_nodes,
    padded_copies,
)
from aquiline.backends.torch.decoder import TargetModel
from aquiline.backends.torch.draft import Draft, Roots, groups_of
from aquiline.backends.torch.draw import draw
from aquiline.backends.torch.eagle import DraftModel
from aquiline.backends.torch.handles import DraftedTrees, IssuedStep, LogprobColumns, PrefilledRows, columns_of
from aquiline.backends.torch.logit_rules import RowChanges
from aquiline.backends.torch.slot_state import RowSampling, SlotState
from aquiline.backends.torch.torch_pages import TorchPages
from aquiline.backends.torch.torch_rows import prompt_block, tree_block
from aquiline.backends.torch.trees import Kept, Trees, accept, joined, padded
from aquiline.spec.tree import DraftTree
from aquiline.types import Int32

LOGPROB_ROWS = 64
"""Rows whose logits are computed at once."""


class TorchBackend:
    """Steps over storage on one device. See backends/base.py for what each method promises."""

    is_async = True
    pages: ClassVar[type[TorchPages]] = TorchPages

    def __init__(
        self, decoder: TargetModel, head: DraftModel | None, kv_dtype: torch.dtype, state: SlotState,
        newest: Callable[[], DraftModel | None] = lambda: None, key_shifts: Tensor | None = None,
    ) -> None:  # fmt: skip
        """newest: the draft model that the pair has now, where it may be replaced. key_shifts: see TorchPages."""
        self.decoder, self.state, self.sizes, self.device = decoder, state, state.sizes, state.device
        self._newest = newest
        self.storage = self.pages(decoder.config, self.state, kv_dtype, key_shifts)
        self._draft: Draft | None = None
        self._guesses: list[tuple[list[int], ChainGuesses]] = []  # of the step that was drafted last
        if head is not None:
            self._draft = Draft(head, self.state, self.pages(head.config.model, self.state, kv_dtype))
        self.all_ids = torch.arange(decoder.config.vocab_size, device=self.device)

    @torch.inference_mode()
    def draft(self, step: StepInput) -> DraftedTrees:  # noqa: D102
        if self._draft is not None:
            self._draft.num_rows = 0
        for decode in step.decodes:
            check_cut(decode)
        check_row_costs(step.row_costs)
        for extend in step.extends:
            self._extend(extend)
        self._tell(step)
        self.state.write_changes()
        return DraftedTrees(self._grow(step))

    def step(self, step: StepInput) -> Pending:  # noqa: D102
        return self.verify(step, self.draft(step))

    def repeat(self, step: StepInput, most: int) -> list[Pending]:  # noqa: D102
        return [self.step(step)]

    @torch.inference_mode()
    def verify(  # noqa: D102
        self, step: StepInput, drafts: Drafts | DraftTree, masks: TokenMasks | None = None, edits: RowEdits = ()
    ) -> IssuedStep:
        if isinstance(drafts, DraftTree):
            trees = padded(drafts, self.device)
        else:
            assert isinstance(drafts, DraftedTrees), "drafts of another backend"
            trees = drafts.trees
        decodes = [decode.slot for decode in step.decodes]
        slots = torch.tensor(decodes, dtype=torch.int64, device=self.device)
        base = self.state.root[slots]
        if masks is not None or edits:
            trees = trees.counted()  # whoever made them has waited for the trees
        on_path = trees.ancestors()
        blocks = [tree_block(self.state, decodes, base, trees, on_path)] if decodes else []
        blocks += [prompt_block(self.state, c.slot, c.start, c.end) for c in step.chunks]
        attention = self.storage.attention(blocks)
        tokens, positions = (torch.cat([getattr(b, n).reshape(-1) for b in blocks]) for n in ("tokens", "positions"))
        out = self.decoder(tokens, positions, attention)

        num_tree_rows = trees.tokens.numel()
        allowed = None if masks is None else torch.from_numpy(np.asarray(masks)).to(self.device)
        changes, num_nodes = RowChanges(allowed, edits), sum(trees.sizes) if decodes else 0
        kept, columns = None, list[LogprobColumns | None]()
        if decodes:
            logits = self._logits(decodes, out.hidden[:num_tree_rows], changes)
            drawn = self._draw_trees(decodes, base, trees, on_path, logits, changes.take(0, num_nodes))
            kept = accept(trees, on_path, drawn)
            columns = self._decode_logprobs(decodes, trees, kept, logits)
            self._keep(step.decodes, slots, base, trees, kept, out.features[:num_tree_rows])
        changes = changes.take(num_nodes)
        prefilled = self._prefill(step.chunks, out.hidden[num_tree_rows:], out.features[num_tree_rows:], changes)
        draft_end = self.state.draft_end[slots]
        num_draft_rows = 0 if self._draft is None else self._draft.num_rows
        hosts = [self.state.hosts[slot] for slot in decodes]
        return IssuedStep(
            trees, kept, base, draft_end, columns, prefilled, num_draft_rows, hosts, self._guesses, step.with_trees
        )

    @torch.inference_mode()
    def score(self, documents: Sequence[Int32]) -> Scored:  # noqa: D102
        page, blocks = 0, []
        for slot, (tokens, used) in enumerate(zip(documents, self.sizes.pages_of(documents), strict=True)):
            self.state.table[slot, :used] = torch.arange(page, page + used, device=self.device)
            self.state.history[slot, : len(tokens)] = torch.from_numpy(tokens).to(self.device)
            page += used
            blocks.append(prompt_block(self.state, slot, 0, len(tokens)))
        attention = self.storage.attention(blocks)
        rows, positions = (torch.cat([getattr(b, n).reshape(-1) for b in blocks]) for n in ("tokens", "positions"))
        out = self.decoder(rows, positions, attention)
        best = [torch.log_softmax(self.decoder.logits(rows), -1).max(-1) for rows in torch.split(out.hidden, HEAD_ROWS)]
        logprobs, ids = (torch.cat(parts).cpu().numpy() for parts in zip(*best, strict=True))
        return Scored(out.hidden.cpu().numpy(), out.features.cpu().numpy(), ids.astype(np.int32), logprobs)

    def renew_draft(self, first_draft_keys: Mapping[int, int]) -> None:  # noqa: D102
        head = self._newest()
        assert self._draft is not None and head is not None, "a pair without a draft model has none to replace"
        self._draft.head = head
        for slot, first in first_draft_keys.items():
            self.state.renew_draft(slot, first)

    def time_parts(self, is_wanted: bool) -> None:
        """Parts are not timed: on a device that would need a wait after each."""

    def close(self) -> None:  # noqa: D102
        for name in ("storage", "_draft", "state"):
            self.__dict__.pop(name, None)

    def _tell(self, step: StepInput) -> None:
        """Enter a step's admissions and pages among the changes of the state."""
        for admit in step.admits:
            self.state.admit(admit, self.decoder.config.vocab_size)
        for pages in step.pages:
            self.state.set_pages(pages)

    def _extend(self, extend: Extend) -> None:
        assert self._draft is not None, "only drafting sequences have draft keys to extend"
        host = self.state.hosts[extend.slot]
        slots, until = (torch.tensor([n], device=self.device) for n in (extend.slot, extend.until))
        self._draft.catch_up(slots, until, host.max_lag, extend.until)

    # Draft

    def _grow(self, step: StepInput) -> Trees:
        """A tree for every Decode, padded to the largest."""
        decodes = step.decodes
        parts: list[tuple[list[int], Trees]] = []
        self._guesses = []
        drafted = [
            i for i, d in enumerate(decodes) if d.cut is not None or (d.proposal is None and d.drafting.is_speculative)
        ]
        if drafted:
            parts += self._draft_trees(step, drafted)
        for i in sorted(set(range(len(decodes))) - set(drafted)):
            parts.append(([i], self._given_tree(decodes[i])))
        for i in drafted:
            self.state.hosts[decodes[i].slot].max_lag = 0  # its keys now reach its root
        return joined(parts, len(decodes), self.device)

    def _draft_trees(self, step: StepInput, drafted: list[int]) -> list[tuple[list[int], Trees]]:
        decodes = step.decodes
        assert self._draft is not None, "a draft model was asked for and none is loaded"
        hosts = [self.state.hosts[decodes[i].slot] for i in drafted]
        numbers = [decodes[i].slot for i in drafted]
        slots = torch.tensor(numbers, device=self.device)
        longest = 2 + max(
            host.max_root + max(1, decodes[i].drafting.draft_rows) for host, i in zip(hosts, drafted, strict=True)
        )
        root = self.state.root[slots]
        tokens = self.state.history[slots, root]
        output = self._draft.catch_up(slots, root + 1, max(host.max_lag for host in hosts), longest)
        parts, cut = list[tuple[list[int], Trees]](), list[tuple[list[int], Tensor, CutChains]]()
        for (drafting, has_cut), group in groups_of([decodes[i] for i in drafted]).items():
            roots = Roots([numbers[g] for g in group], slots[group], root[group], tokens[group], output[group])
            places = [drafted[g] for g in group]
            if has_cut:
                cuts = Cuts.of([own for i in places if (own := decodes[i].cut)], drafting.max_depth, self.device)
                chains = self._draft.grow_cut_chains(cuts, roots, longest)
                self._guesses.append((places, chains.guesses()))
                cut.append((places, roots.tokens, chains))
            else:
                parts.append((places, self._draft.grow(drafting, roots, longest)))
        if step.row_costs and cut:
            num_copied = sum(len(d.proposal.tokens) for d in decodes if d.proposal is not None)
            choose_nodes([(places, chains) for places, _, chains in cut], step.row_costs[num_copied:])
        for places, tokens, chains in cut:
            copied = padded_copies([decodes[i].proposal for i in places], self.device)
            parts.append((places, chains.trees(tokens, copied)))
        return parts

    def _given_tree(self, decode: Decode) -> Trees:
        """The root alone, or what the host proposed below it."""
        slot, proposal = decode.slot, decode.proposal
        given = () if proposal is None else proposal.tokens
        above = () if proposal is None else proposal.parents or tuple(range(-1, len(given) - 1))
        parents = (0, *(parent + 1 for parent in above))
        depths = [0]
        for parent in parents[1:]:
            depths.append(depths[parent] + 1)
        root = self.state.history[slot, self.state.root[slot]][None]
        tokens = torch.cat((root, torch.tensor(given, dtype=torch.int64, device=self.device)))
        rows = [torch.tensor([a], dtype=torch.int64, device=self.device) for a in (parents, depths)]
        is_chain = depths == list(range(len(depths)))
        return Trees(tokens[None], rows[0], rows[1], (len(parents),), max(depths), is_chain)

    # Verify

    def _logits(self, slots: list[int], hidden: Tensor, changes: RowChanges) -> Tensor:
        """Logits of rows [n, H]: of all tokens where something reads or changes them, else of this rank's."""
        is_changed = changes.masks is not None or bool(changes.edits)
        return self.decoder.logits(hidden, is_changed or any(self.state.hosts[slot].needs_logits for slot in slots))

    def _draw_trees(
        self, slots: list[int], base: Tensor, trees: Trees, on_path: Tensor, logits: Tensor, changes: RowChanges
    ) -> Tensor:
        """The target's own token at every node, [B, N], from its logits [B * N, V]."""
        B, N = trees.tokens.shape
        index = base[:, None] + trees.depths + 1
        logits = logits.view(B, N, -1)
        if any(self.state.hosts[slot].rules is not None for slot in slots):
            logits = torch.stack([
                self._by_rules(slot, base[b], Trees(trees.tokens[b : b + 1], trees.parents[b : b + 1],
                               trees.depths[b : b + 1], (trees.sizes[b],), trees.max_depth), on_path[b], logits[b])
                for b, slot in enumerate(slots)
            ])  # fmt: skip
        if changes.masks is not None or changes.edits:
            flat, nodes = logits.flatten(0, 1), [b * N + i for b, size in enumerate(trees.sizes) for i in range(size)]
            rows = torch.tensor(nodes, device=self.device)
            logits = flat.index_copy(0, rows, changes.apply(flat[rows])).view(B, N, -1)
        owner = torch.tensor(slots, device=self.device).repeat_interleave(N)
        sampling = self.state.sampling(slots, owner, index.flatten())
        return self._draw(logits.flatten(0, 1), sampling).view(B, N)

    def _draw(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        """The target's own tokens [n] by logits [n, V]."""
        return draw(logits, sampling, self.all_ids, self.decoder.ranks)

    def _by_rules(self, slot: int, base: Tensor, tree: Trees, on_path: Tensor, logits: Tensor) -> Tensor:
        """Logits [N, V] of one slot's nodes as its rules change them."""
        rules = self.state.hosts[slot].rules
        if rules is None:
            return logits
        depths, tokens = tree.depths[0], tree.tokens[0]
        below_root = on_path.clone()
        below_root[:, 0] = False
        # The tokens before the one to be drawn, the last first: from the node's path up to the root, then older text.
        back = depths[:, None] - torch.arange(rules.max_back, device=self.device)
        levels = tree.levels(on_path[None])[0]
        drafted = tokens[levels.gather(1, back.clamp(min=0))]
        known = self.state.tokens_at(torch.tensor([slot], device=self.device), (base + back).view(1, -1)).view_as(back)
        before = torch.where(back > 0, drafted, known)
        return rules.apply(logits, below_root, tokens, base + depths + 1, before)

    def _decode_logprobs(
        self, slots: list[int], trees: Trees, kept: Kept, logits: Tensor
    ) -> list[LogprobColumns | None]:
        N, found = trees.num_nodes, list[LogprobColumns | None]()
        for b, slot in enumerate(slots):
            k = self.state.hosts[slot].admit.sampling.logprobs
            found.append(None if k is None else columns_of(logits[b * N + kept.path[b]], kept.tokens[b], k))
        return found

    # Keep

    def _keep(
        self, decodes: tuple[Decode, ...], slots: Tensor, base: Tensor, trees: Trees, kept: Kept, features: Tensor
    ) -> None:
        """Make the kept paths contiguous, keep their features, and move every slot to its next root.

        Node i of level d is moved from KV index root + i to root + d; d <= i."""
        state = self.state
        level = torch.arange(trees.max_depth + 1, device=self.device)
        index = base[:, None] + level
        target = state.places(slots, index, kept.is_kept)
        if not trees.is_chain:
            self.storage.move(state.places(slots, base[:, None] + kept.path, kept.is_kept).flatten(), target.flatten())
        drafting = [b for b, d in enumerate(decodes) if state.hosts[d.slot].admit.drafts]
        if drafting:
            assert self._draft is not None
            rows = (torch.arange(len(decodes), device=self.device)[:, None] * trees.num_nodes + kept.path)[drafting]
            self._draft.keep_features(target[drafting].flatten(), features[rows.flatten()])
        state.write_tokens(slots, index + 1, kept.tokens.clamp(min=0), kept.is_kept)
        state.root[slots] = (base + kept.num_accepted + 1).int()
        for b, decode in enumerate(decodes):
            host, num_tokens = state.hosts[decode.slot], min(trees.max_depth + 1, trees.sizes[b])
            host.grow(num_tokens)
            host.max_lag += num_tokens
            if host.rules is not None:
                host.rules.count(kept.tokens[b], kept.is_kept[b])

    # Prompts

    def _prefill(
        self, chunks: tuple[Chunk, ...], hidden: Tensor, features: Tensor, changes: RowChanges
    ) -> list[PrefilledRows]:
        """Finish each chunk after the target's forward; the chunks' rows stand one after the other."""
        found, first = [], 0
        for chunk in chunks:
            rows = slice(first, first + chunk.end - chunk.start)
            first = rows.stop
            num_drawn = int(chunk.draws)
            found.append(self._finish_chunk(chunk, hidden[rows], features[rows], changes.take(0, num_drawn)))
            changes = changes.take(num_drawn)
        return found

    def _finish_chunk(self, chunk: Chunk, hidden: Tensor, features: Tensor, changes: RowChanges) -> PrefilledRows:
        state, host = self.state, self.state.hosts[chunk.slot]
        slots = torch.tensor([chunk.slot], device=self.device)
        token, columns = None, None
        if chunk.draws:
            logits = self._logits([chunk.slot], hidden[-1:], changes)
            token = self._first_token(chunk, slots, logits, changes)
            if (k := host.admit.sampling.logprobs) is not None:
                columns = columns_of(logits, token, k)
            state.history[chunk.slot, chunk.end] = token[0].clamp(min=0).int()
            if host.rules is not None:
                host.rules.count(token, token >= 0)
        if chunk.is_last:
            state.root[chunk.slot] = host.max_root = chunk.end
        prompt = self._prompt_logprobs(chunk, hidden) if host.admit.sampling.prompt_logprobs is not None else []
        if host.admit.drafts:
            self._extend_prompt(chunk, slots, features)
        return PrefilledRows(
            token, host.admit.first_draft_key, host.draft_end, chunk.end if host.admit.drafts else 0, columns, prompt
        )

    def _first_token(self, chunk: Chunk, slots: Tensor, logits: Tensor, changes: RowChanges) -> Tensor:
        """The token [1] that the chunk's last row draws. The row is treated as a tree that is a root alone."""
        zero = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        tree = Trees(self.state.history[chunk.slot, chunk.end - 1].view(1, 1), zero, zero, (1,), 0)
        base = torch.tensor(chunk.end - 1, device=self.device)
        logits = changes.apply(self._by_rules(chunk.slot, base, tree, tree.ancestors()[0], logits))
        sampling = self.state.sampling([chunk.slot], slots, base.view(1) + 1)
        return self._draw(logits, sampling)

    def _prompt_logprobs(self, chunk: Chunk, hidden: Tensor) -> list[LogprobColumns]:
        """Prompt log-probabilities from a chunk's rows: row i gives that of token i + 1. What was returned before a
        preemption is not computed again."""
        host = self.state.hosts[chunk.slot]
        k = host.admit.sampling.prompt_logprobs
        assert k is not None
        begin, end = max(host.num_prompt_logprobs, chunk.start), min(chunk.end, host.admit.num_prompt - 1)
        columns = []
        for at in range(begin, end, LOGPROB_ROWS):
            until = min(end, at + LOGPROB_ROWS)
            logits = self.decoder.logits(hidden[at - chunk.start : until - chunk.start])
            columns.append(columns_of(logits, self.state.history[chunk.slot, at + 1 : until + 1], k))
        host.num_prompt_logprobs = max(end, host.num_prompt_logprobs)
        return columns

    def _extend_prompt(self, chunk: Chunk, slots: Tensor, features: Tensor) -> None:
        """Keep a chunk's features and write the draft keys of its tokens whose next token is known."""
        assert self._draft is not None
        host = self.state.hosts[chunk.slot]
        begin = min(max(chunk.start, host.admit.first_draft_key - 1), chunk.end)
        index = torch.arange(begin, chunk.end, device=self.device)[None]
        self._draft.keep_features(self.state.places(slots, index)[0], features[begin - chunk.start :])
        until = chunk.end if chunk.is_last else chunk.end + 1
        if until > host.draft_end:
            width = until - host.draft_end
            self._draft.catch_up(slots, torch.tensor([until], device=self.device), width, until)
            host.draft_end = until
        host.max_lag = max(1, chunk.end + 1 - host.draft_end)
