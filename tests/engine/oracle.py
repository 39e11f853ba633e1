"""Drafts that know the answer, or are sure not to: the two ends every acceptance lies between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from tests.spec.topologies import paths

from aquiline.backends.base import Backend, Pending, StepInput, StepOutput
from aquiline.engine.llm import LLM, Result
from aquiline.spec.drafting import Drafting, Proposal, Proposer
from aquiline.spec.past_outputs import PastSpace
from aquiline.spec.tree import DraftTree, StaticShape, Topology, static_shape


@dataclass(frozen=True)
class Known(Drafting):
    """Proposes how one of `texts` (prompt and output) goes on: num_spec_tokens of its tokens, or wrong ones. As a comb,
    each level also has a decoy before the true node, so that every accepted node has to be moved."""

    name: ClassVar[str] = "known"
    needs_draft_model: ClassVar[bool] = False
    texts: tuple[tuple[int, ...], ...]
    num_spec_tokens: int
    vocab_size: int
    is_wrong: bool = False
    is_comb: bool = False

    @property
    def max_nodes(self) -> int:
        return 1 + self.num_spec_tokens * (2 if self.is_comb else 1)

    @property
    def max_depth(self) -> int:
        return self.num_spec_tokens

    def proposer(
        self, prompt: Sequence[int], prediction: Sequence[int], shared: None, past: PastSpace | None = None
    ) -> Proposer:
        return self

    def propose(self, tokens: Sequence[int], max_tokens: int) -> Proposal:
        text = next(text for text in self.texts if list(text[: len(tokens)]) == list(tokens))
        length = self.num_spec_tokens
        ahead = (*text[len(tokens) :], *[0] * length)[:length]
        ahead = tuple((token + self.is_wrong) % self.vocab_size for token in ahead)
        if not self.is_comb:
            return Proposal(ahead)
        nodes = [node for token in ahead for node in ((token + 1) % self.vocab_size, token)]
        return Proposal(tuple(nodes), tuple(2 * level - 1 for level in range(len(ahead)) for _ in range(2)))


def known(batch: list[list[int]], truth: Result, num_spec_tokens: int, vocab_size: int, **how: bool) -> Known:
    """Proposes what the prompts of a batch were answered."""
    texts = tuple((*p, *o.token_ids) for p, o in zip(batch, truth.outputs, strict=True))
    return Known(texts, num_spec_tokens, vocab_size, **how)


def comb(depth: int) -> StaticShape:
    """Two children per level, the second carrying on."""
    return static_shape(tuple((*(1,) * level, rank) for level in range(depth) for rank in (0, 1)))


Pick = Callable[[int, int], int]


def fickle(root: int, num_nodes: int) -> int:
    """Another node with every root."""
    return (root * 40503 >> 5) % num_nodes


def deepest(root: int, num_nodes: int) -> int:
    """The last node, which in a chain is all of it."""
    return num_nodes - 1


class Taught:
    """A backend whose trees have the truth written over the path to one of their nodes, another with every root: in
    trees of any shape, paths of any length are accepted and dropped, and all of the draft's own rows run.

    truth(slot): prompt and output of the sequence there. pick(root, num_nodes): the node whose path is true. grown: the
    trees of the last step as the draft grew them."""

    def __init__(self, backend: Backend, truth: Callable[[int], Sequence[int]], pick: Pick = fickle) -> None:
        self.inner, self.truth, self.pick = backend, truth, pick
        self.roots: dict[int, int] = {}
        self.grown: DraftTree

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, step: StepInput) -> Pending:
        tree = self.grown = self.inner.draft(step).read()
        pending = Read(self.inner.verify(step, self.taught(step, tree) if step.decodes else tree).read())
        for decode, decoded in zip(step.decodes, pending.output.decodes, strict=True):
            self.roots[decode.slot] = decoded.root + len(decoded.kept)
        for chunk in step.chunks:
            self.roots[chunk.slot] = chunk.end
        return pending

    def repeat(self, step: StepInput, most: int) -> list[Pending]:
        return [self.step(step)]

    def taught(self, step: StepInput, tree: DraftTree) -> DraftTree:
        shape, tokens = tree.topology, tree.tokens.copy()
        for b, decode in enumerate(step.decodes):
            position = self.roots[decode.slot]
            first, end = shape.offsets[b], shape.offsets[b + 1]
            row = first + self.pick(position, int(end - first))
            path = paths(shape)[row, : shape.depths[row] + 1]
            ahead = self.truth(decode.slot)[position + 1 : position + 1 + int(shape.depths[row])]
            for parent, node, token in zip(path, path[1:], ahead, strict=False):
                siblings = first + np.flatnonzero(shape.parents[first:end] == parent)
                twin = siblings[(tokens[siblings] == token) & (siblings > first)]
                tokens[twin] = tokens[first + node]
                tokens[first + node] = token
        return DraftTree(Topology(shape.parents, shape.depths, shape.offsets), tokens)


def teach(llm: LLM, texts: Iterable[Sequence[int]], pick: Pick = fickle) -> Taught:
    """Let the drafts of sequences that write these texts, prompt and output, be right to varying depths."""
    known = [tuple(text) for text in texts]

    def truth(slot: int) -> Sequence[int]:
        sequence = llm.engine.scheduler.running[slot]
        assert sequence is not None
        prompt = sequence.request.prompt_ids
        return next(text for text in known if text[: len(prompt)] == prompt)

    llm.engine.backend = taught = Taught(llm.engine.backend, truth, pick)
    return taught


@dataclass(frozen=True)
class Read:
    """An outcome that is there already."""

    output: StepOutput

    def read(self) -> StepOutput:
        return self.output
