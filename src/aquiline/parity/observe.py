"""Run a pair through the engine's own steps and record what each step computed.

A run is a prompt in two chunks, then decode steps that draft chains and trees, all greedy, so that prompts, committed
tokens and nodes of trees are seen as they are served. The backends know nothing of it: target layers are the features
of a target that captures every layer, and what else can be seen of a backend is its `BackendView`'s to find.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from aquiline.backends.base import Admit, Backend, Chunk, Decode, Pages, Pair, Sizes, StepInput
from aquiline.blocks import Parts, in_memory
from aquiline.config import SamplingParams
from aquiline.models.model_config import DraftConfig, ModelConfig, RopeConfig
from aquiline.models.model_weights import AttentionWeights, DenseWeights, DraftWeights, LayerWeights, ModelWeights
from aquiline.parity.record import Row, StageRecord
from aquiline.parity.stage_figures import TOP
from aquiline.spec.drafting import Chain, Drafting, NoDraft, Proposal, Static
from aquiline.spec.tree import DraftTree, Topology
from aquiline.types import Float32

WAYS: tuple[Drafting, ...] = (Chain(3), Static(), Chain(4), Static())
"""How the decode steps of a run draft, one after the other."""

MOST_CHUNK = 64
"""Rows of a chunk all of which have features, however short the draft's window is."""

MOST_WRITTEN = 1 + sum(way.lookahead for way in WAYS)
"""Tokens that a run may write after its prompt, and nodes behind them."""
PAGE_SIZE = 16
StepOf = Callable[[Drafting], StepInput]


class DraftRows(NamedTuple):
    """Stages of draft rows [n, W]. numbers: of known rows j, which have read token j + 1; where are_nodes, of drafted
    nodes instead, counted from 0 among those that the draft went on from."""

    numbers: Sequence[int]
    are_nodes: bool
    stages: dict[str, Float32]


class BackendView(Protocol):
    """A backend, and what can be seen of its steps. unseen: stages that cannot be, and why."""

    unseen: dict[str, str]

    @property
    def backend(self) -> Backend:
        """The backend whose steps are seen."""
        ...

    def watching(self) -> AbstractContextManager[object]:
        """Steps are seen within it."""
        ...

    def target(self, num_rows: int) -> dict[str, Float32]:
        """final_hidden, logits and features of the rows of the last step."""
        ...

    def draft(self, step_of: StepOf, way: Drafting, root: int) -> tuple[DraftTree, list[DraftRows]]:
        """Grow the tree of a step below the root at that index, and say what was seen of the draft since the last."""
        ...


def view_of(pair: Pair, sizes: Sizes) -> BackendView:
    """A view of the backend that a pair opens. Raises ValueError for one whose stages cannot be seen."""
    if pair.name == "gpu":
        raise ValueError("device='cuda': stages are seen on a CPU alone; use device='cpu' or 'torch'")
    if pair.name == "native":
        from aquiline.parity.native_view import NativeView

        return NativeView(pair, sizes)
    from aquiline.parity.torch_view import TorchView

    return TorchView(pair, sizes)


class WatchedRun:
    """One text in a backend of its own. Rows are named as `StageRecord` has them."""

    def __init__(self, pair: Pair, prompt: Sequence[int], record: StageRecord, sees_target: bool) -> None:
        self.sees_target, self.num_layers = sees_target, pair.target.num_layers
        self.pages = -(-(len(prompt) + MOST_WRITTEN) // PAGE_SIZE)
        self.view = view_of(pair, Sizes(1, self.pages, PAGE_SIZE, self.pages, len(prompt)))
        self.tokens, self.record = [*prompt], record
        record.unseen.update({} if sees_target else self.view.unseen)

    def prefill(self) -> None:
        """Compute the prompt in two chunks or more; its last row draws the first token."""
        n = len(self.tokens)
        size = min(MOST_CHUNK, -(-n // 2))
        sampling = SamplingParams(max_tokens=n + 64, temperature=0.0, seed=0)
        admits: tuple[Admit, ...] = (Admit(0, list(self.tokens), n, sampling, drafts=True),)
        pages: tuple[Pages, ...] = (Pages(0, 0, tuple(range(self.pages))),)
        for start in range(0, n, size):
            end = min(n, start + size)
            step = StepInput((), (Chunk(0, start, end, end == n, end == n),), admits, pages)
            admits, pages = (), ()
            with self.view.watching():
                [done] = self.view.backend.step(step).read().chunks
            self._see_target([Row(tuple(self.tokens[: i + 1])) for i in range(start, end)])
            self.tokens += [] if done.first_token is None else [done.first_token]

    def decode(self, way: Drafting) -> DraftTree:
        """One decode step. Returns the tree that the draft grew."""
        with self.view.watching():
            tree, seen = self.view.draft(lambda each: StepInput((Decode(0, each),)), way, len(self.tokens) - 1)
        self._see_draft(tree, seen)
        self._verify(StepInput((Decode(0, way),)), tree)
        return tree

    def decode_given(self, tree: DraftTree) -> None:
        """One decode step that verifies the tree of another run at the same text."""
        assert tree.tokens[0] == self.tokens[-1], (tree.tokens[0], self.tokens[-1])
        proposal = Proposal(tuple(tree.tokens[1:].tolist()), tuple((tree.topology.parents[1:] - 1).tolist()))
        self._verify(StepInput((Decode(0, NoDraft(), proposal),)), tree)

    def _verify(self, step: StepInput, tree: DraftTree) -> None:
        drafts = self.view.backend.draft(step)
        with self.view.watching():
            output = self.view.backend.verify(step, drafts).read()
        self._see_target([self._row(path) for path in paths_of(tree)])
        self.tokens += output.decodes[0].kept

    def _row(self, path: Sequence[int]) -> Row:
        """The row of a node, by its path below the root."""
        return Row((*self.tokens, *path), len(path))

    def _see_target(self, rows: list[Row]) -> None:
        found = self.view.target(len(rows))
        features = found.pop("features")
        if not self.sees_target:
            self.record.add("draft.features", rows, features)
            return
        for layer, values in enumerate(np.split(features, self.num_layers, axis=1)):
            self.record.add(f"target.layers.{layer}", rows, values)
        for name, values in found.items():
            self.record.add(f"target.{name}", rows, values)

    def _see_draft(self, tree: DraftTree, seen: list[DraftRows]) -> None:
        paths, parents = paths_of(tree), tree.topology.parents.tolist()
        inner = inner_nodes(tree)
        for known in seen:
            rows = [
                self._row(paths[inner[n]]) if known.are_nodes else Row(tuple(self.tokens[: n + 2]))
                for n in known.numbers
            ]
            for name, values in known.stages.items():
                self.record.add(f"draft.{name}", rows, values)
        for node in (0, *inner):
            best = [int(tree.tokens[i]) for i, parent in enumerate(parents) if i and parent == node]
            row = Row((*self.tokens, *paths[node]), len(paths[node]))
            self.record.add("draft.tokens", [row], np.array([[*best, *[-1] * TOP][:TOP]], np.float32))


def inner_nodes(tree: DraftTree) -> list[int]:
    """Nodes of the first tree that have children, without the root, in their order: that of their rows in the draft."""
    return sorted({parent for parent in tree.topology.parents.tolist() if parent})


def paths_of(tree: DraftTree) -> list[list[int]]:
    """The tokens from below the root down to each node of the first tree."""
    paths: list[list[int]] = [[]]
    for token, parent in zip(tree.tokens[1:].tolist(), tree.topology.parents[1:].tolist(), strict=True):
        paths.append([*paths[parent], token])
    return paths


def observe_draft(pair: Pair, prompt: Sequence[int], record: StageRecord) -> list[DraftTree]:
    """Record the draft of a pair and the features it reads. Returns the trees that its steps verified."""
    run = WatchedRun(pair, prompt, record, sees_target=False)
    run.prefill()
    trees = [run.decode(way) for way in WAYS]
    record.text = tuple(run.tokens)
    run.view.backend.close()
    return trees


def lens_of(target: ModelConfig) -> DraftWeights:
    """The least draft that reads every layer of a target, so that backends keep all of them as features. It is never
    asked for a token."""
    W, every = 16, tuple(range(target.num_layers))
    config = replace(
        target.draft_layer, hidden_size=W, intermediate_size=W, num_heads=1, num_kv_heads=1, head_dim=W,
        rope=RopeConfig(),
    )  # fmt: skip

    def zeros(*shape: int) -> Parts:
        return (in_memory(np.zeros(shape, np.float32)),)

    ones = np.ones(W, np.float32)
    attention, mlp = AttentionWeights(zeros(3 * W, 2 * W), zeros(W, W)), DenseWeights(zeros(2 * W, W), zeros(W, W))
    layer = LayerWeights(attention, mlp, ones, ones, hidden_norm=ones)
    model = ModelWeights(config, zeros(target.vocab_size, W), (layer,), ones, zeros(W, W), is_draft=True)
    fc = zeros(W, target.num_layers * target.hidden_size)
    return DraftWeights(DraftConfig(config, W, target.hidden_size, every), model, fc, np.zeros(W, np.int64))


def observe_target(pair: Pair, prompt: Sequence[int], record: StageRecord, trees: Sequence[DraftTree] = ()) -> None:
    """Record the target of a pair whose draft is its lens. trees: those of `observe_draft` for the same
    prompt; without them trees are made of the prompt's tokens."""
    run = WatchedRun(pair, prompt, record, sees_target=True)
    run.prefill()
    for step, way in enumerate(WAYS):
        run.decode_given(trees[step] if trees else _made_up(run.tokens, way))
    record.text = tuple(run.tokens)
    run.view.backend.close()


def _made_up(tokens: Sequence[int], way: Drafting) -> DraftTree:
    """A tree below the last token: a chain of the text's first tokens and, unless the way is a chain, another child of
    the root."""
    chain = tokens[: way.max_depth]
    others = [] if isinstance(way, Chain) else [token for token in tokens if token != chain[0]][:1]
    parents = [0, *range(len(chain)), *(0 for _ in others)]
    depths = [*range(len(chain) + 1), *(1 for _ in others)]
    columns = (np.array(each, np.int32) for each in (parents, depths, (0, len(parents))))
    return DraftTree(Topology(*columns), np.array([tokens[-1], *chain, *others], np.int32))
