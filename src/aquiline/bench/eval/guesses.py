"""Teacher-forced accuracy of a draft, measured by the engine that serves it.

Of every step the target verifies the root alone, so that it commits only the target's own next token and a chain is
drafted at every position of the target's own text. The draft then reads at every
position what it would read if a real chain began there: the target's features of all committed tokens, and nothing
else. So walking the matrix of right guesses gives the tau of a real chain, and on the native path exactly that number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from aquiline.backends.base import Backend, Drafts, Pending, RowEdits, StepInput, TokenMasks
from aquiline.bench.suite.simulated import SimulatedBackend
from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM
from aquiline.spec.drafting import Chain, NoDraft
from aquiline.spec.tree import DraftTree, Topology
from aquiline.types import Bool


@dataclass(frozen=True, eq=False)
class Guesses:
    """Which guesses of chains were right on one text of n output tokens. right bool [n - 1, K]: row i, column k is
    the guess of output token i + 1 + k by the chain below token i; False past the end of the text."""

    token_ids: list[int]
    right: Bool

    def cycles(self, num_spec_tokens: int) -> list[int]:
        """Tokens that each step with a real chain of that length would commit; the text's end cuts the last step."""
        accepted = np.cumprod(self.right[:, :num_spec_tokens], axis=1).sum(axis=1)
        committed, i, end = [], 0, len(self.right)
        while i < end:
            committed.append(min(int(accepted[i]) + 1, end - i))
            i += committed[-1]
        return committed


class ChainRecorder(SimulatedBackend):
    """A backend that keeps every drafted chain and verifies none of it, so that there is a chain below every token."""

    def __init__(self, inner: Backend, vocab_size: int) -> None:
        super().__init__(inner, 1.0, vocab_size)
        self.chains: list[list[int]] = []

    def verify(
        self, step: StepInput, drafts: Drafts | DraftTree, masks: TokenMasks | None = None, edits: RowEdits = ()
    ) -> Pending:
        """The outcome of the roots alone."""
        tree = drafts if isinstance(drafts, DraftTree) else drafts.read()
        roots = tree.topology.offsets[:-1]
        if step.decodes:
            self.chains.append(tree.tokens[1:].tolist())
        none = np.zeros(len(roots), np.int32)
        shape = Topology(none, none, np.arange(len(roots) + 1, dtype=np.int32))
        return self.inner.verify(step, DraftTree(shape, tree.tokens[roots]), masks, edits)


class ChainTeacher:
    """An LLM over the same models that accepts no draft, for one sequence of at most max_context tokens."""

    def __init__(self, llm: LLM, max_context: int) -> None:
        config = replace(
            llm.engine.config, max_batch=1, num_pages=None, max_context=max_context, prefix_cache=False,
            late_reads=False,
        )  # fmt: skip
        self.llm = LLM.from_models(llm.models, config, NoDraft())
        self.recorder = ChainRecorder(self.llm.engine.backend, llm.models.vocab_size)
        self.llm.engine.backend = self.recorder

    def guess(self, prompt_ids: list[int], sampling: SamplingParams, num_spec_tokens: int) -> Guesses:
        """Continue a prompt and compare every chain with the tokens that the target wrote."""
        chains = self.recorder.chains = list[list[int]]()
        output = self.llm.run([prompt_ids], sampling, drafting=Chain(num_spec_tokens)).outputs[0]
        written = np.array(output.token_ids)
        n, K = len(written), num_spec_tokens
        assert len(chains) == n - 1, f"{len(chains)} chains along {n} tokens"
        places = np.arange(1, n)[:, None] + np.arange(K)
        is_right = np.array(chains, np.int64).reshape(n - 1, K) == written[np.minimum(places, n - 1)]
        return Guesses(output.token_ids, (places < n) & is_right)


@dataclass(frozen=True)
class Accuracy:
    """The accuracy of a draft along several texts, for each place k = 1, 2, ... in the chain; None without guesses.

    num_guesses: guesses that lie inside their text. marginal: share of them that are right. conditional: that share
    where all earlier guesses of the chain are right. simulated_tau: tokens per step that chains of k drafts would
    commit."""

    num_guesses: list[int]
    marginal: list[float | None]
    conditional: list[float | None]
    simulated_tau: list[float | None]


@dataclass(frozen=True)
class TeacherForced:
    """The draft's accuracy along the texts of one temperature and length."""

    temperature: float
    length: int
    repeated_share: float
    accuracy: Accuracy


def accuracy(texts: Sequence[Guesses], num_spec_tokens: int) -> Accuracy:
    """The accuracy of chains over all texts."""
    found = Accuracy([], [], [], [])
    for k in range(num_spec_tokens):
        inside = np.concatenate([text.right[: max(0, len(text.right) - k)] for text in texts])
        is_led = inside[:, :k].all(axis=1)
        cycles = [num for text in texts for num in text.cycles(k + 1)]
        found.num_guesses.append(len(inside))
        found.marginal.append(_share(int(inside[:, k].sum()), len(inside)))
        found.conditional.append(_share(int(inside[is_led, k].sum()), int(is_led.sum())))
        found.simulated_tau.append(_share(sum(cycles), len(cycles)))
    return found


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
