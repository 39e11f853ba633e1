"""The outcome of a step on the device, until it is read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from aquiline.backends.base import Decoded, Prefilled, StepOutput, VerifiedTrees
from aquiline.backends.torch.chains import ChainGuesses
from aquiline.backends.torch.draw import logprobs
from aquiline.backends.torch.slot_state import HostSlot
from aquiline.backends.torch.trees import Kept, Trees
from aquiline.spec.tree import DraftTree, Topology
from aquiline.types import AcceptResult, TokenLogprobs


@dataclass(frozen=True)
class LogprobColumns:
    """Log-probabilities of n tokens. chosen, logprob, rank [n]: the tokens, their log-probabilities and ranks; ids,
    best [n, k]: the k best ids at each token's place and their log-probabilities."""

    chosen: Tensor
    logprob: Tensor
    rank: Tensor
    ids: Tensor
    best: Tensor

    def read(self, count: int) -> list[TokenLogprobs]:
        """The first `count` tokens."""
        lists = [a[:count].tolist() for a in (self.chosen, self.logprob, self.rank, self.ids, self.best)]
        return [
            TokenLogprobs(token, logprob, rank, dict(zip(ids, best, strict=True)))
            for token, logprob, rank, ids, best in zip(*lists, strict=True)
        ]


def columns_of(logits: Tensor, chosen: Tensor, k: int) -> LogprobColumns:
    """Log-probabilities of tokens chosen [n] and of the k best tokens, from logits [n, V]."""
    return LogprobColumns(chosen, *logprobs(logits, chosen.clamp(min=0), min(k, logits.shape[1])))


@dataclass(frozen=True)
class DraftedTrees:
    """Drafts on the device."""

    trees: Trees

    def read(self) -> DraftTree:
        """The trees without the nodes that only fill the shape."""
        t = self.trees.counted()
        keep = t.is_node().cpu().numpy()
        tokens, parents, depths = (a.cpu().numpy()[keep].astype(np.int32) for a in (t.tokens, t.parents, t.depths))
        offsets = np.cumsum([0, *t.sizes]).astype(np.int32)
        return DraftTree(Topology(parents, depths, offsets), tokens)


@dataclass(frozen=True)
class PrefilledRows:
    """The outcome of a chunk. token [1]: what its last row drew, None if it does not draw; columns: log-probabilities
    of that token; prompt: those of the prompt's tokens."""

    token: Tensor | None
    first_draft_key: int
    draft_end: int
    features_end: int
    columns: LogprobColumns | None
    prompt: list[LogprobColumns]

    def read(self) -> Prefilled:
        """The outcome as the engine reads it."""
        token = None if self.token is None else int(self.token)
        own = None if self.columns is None else self.columns.read(1)
        prompt = [entry for columns in self.prompt for entry in columns.read(len(columns.chosen))]
        return Prefilled(token, self.draft_end, own, prompt, self.first_draft_key, self.features_end)


@dataclass(frozen=True)
class IssuedStep:
    """A step that was issued. root [B]: the roots before the step; draft_end [B]: after it; hosts: the slots that
    decode; guesses: of chains with a cut, with the places of their decodes."""

    trees: Trees
    kept: Kept | None
    root: Tensor
    draft_end: Tensor
    columns: list[LogprobColumns | None]
    prefilled: list[PrefilledRows]
    num_draft_rows: int
    hosts: list[HostSlot]
    guesses: list[tuple[list[int], ChainGuesses]]
    with_trees: bool

    def read(self) -> StepOutput:
        """Wait for the device and fetch the outcome."""
        decodes: list[Decoded] = []
        result = AcceptResult(np.zeros((0, 1), np.int32), np.zeros((0, 1), np.int32), np.zeros(0, np.int32))
        if self.kept is not None:
            path, tokens, accepted = (
                a.cpu().numpy().astype(np.int32) for a in (self.kept.path, self.kept.tokens, self.kept.num_accepted)
            )
            path = np.where(np.arange(path.shape[1]) <= accepted[:, None], path, 0).astype(np.int32)
            result = AcceptResult(path, tokens, accepted)
            roots, ends, sizes = self.root.tolist(), self.draft_end.tolist(), self.trees.counted().sizes
            guesses = {b: own for places, each in self.guesses for b, own in zip(places, each.read(), strict=True)}
            for b, host in enumerate(self.hosts):
                num_kept = int(accepted[b]) + 1
                root, first_key = roots[b] + num_kept, host.admit.first_draft_key
                host.grown(root)
                columns = self.columns[b]
                entries = None if columns is None else columns.read(num_kept)
                kept = tokens[b, :num_kept].tolist()
                own, featured = guesses.get(b, []), root if host.admit.drafts else 0
                decodes.append(Decoded(roots[b], kept, sizes[b] - 1, ends[b], entries, own, first_key, featured))
        chunks = [prefilled.read() for prefilled in self.prefilled]
        trees = VerifiedTrees(DraftedTrees(self.trees).read(), result) if self.with_trees else None
        return StepOutput(decodes, chunks, self.num_draft_rows, None, trees=trees)
